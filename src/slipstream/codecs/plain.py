"""The codecs that look at bytes only: `raw` and `zstd`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from slipstream.codecs.base import Layout, WordCodec
from slipstream.codecs.entropy import check_level, compress_zstd, decompress_zstd
from slipstream.codecs.words import Words
from slipstream.errors import CodecError


@dataclass(frozen=True)
class Raw(WordCodec):
    """The bytes as they are."""

    name: ClassVar[str] = "raw"

    def _encode(self, words: Words, layout: Layout, reference: Words | None) -> bytes:
        return words.tobytes()

    def _decode(self, payload: memoryview, out: Words, layout: Layout, reference: Words | None) -> None:
        if len(payload) != out.nbytes:
            raise CodecError(f"raw payload holds {len(payload)} bytes, expected {out.nbytes}")
        out.view(np.uint8)[:] = np.frombuffer(payload, np.uint8)


@dataclass(frozen=True)
class Zstd(WordCodec):
    """One zstd frame around the bytes: for images, text-like integers and anything with long repeats.

    Args:
        level: zstd's compression level, 1 to 22.
    """

    name: ClassVar[str] = "zstd"
    level: int = 3

    def __post_init__(self) -> None:
        check_level(self.level)

    def _encode(self, words: Words, layout: Layout, reference: Words | None) -> bytes:
        return compress_zstd(words.view(np.uint8), self.level)

    def _decode(self, payload: memoryview, out: Words, layout: Layout, reference: Words | None) -> None:
        out.view(np.uint8)[:] = np.frombuffer(decompress_zstd(payload, out.nbytes), np.uint8)
