"""The `difference` codec: an array as its distance from another one, such as a checkpoint from its parent.

Float bits are mapped to integers in the order of the floats, so that the difference counts representable numbers
between the two values: small changes give small integers whatever the magnitude, across zero included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from slipstream.codecs.base import Layout
from slipstream.codecs.planes import BLOCK_BYTES, PlaneCodec, expect_end, pack_words, unpack_words
from slipstream.codecs.words import Words, flip_negative, scratch, unzigzag, zigzag
from slipstream.errors import CodecError


@dataclass(frozen=True)
class Difference(PlaneCodec):
    """Difference to a reference array in ordered integers, then byte planes."""

    name: ClassVar[str] = "difference"
    needs_reference: ClassVar[bool] = True

    def _encode(self, words: Words, layout: Layout, reference: Words | None) -> bytes:
        floating = self._is_floating(layout)
        pieces = [bytes([floating])]
        for block in _blocks(words):
            mine, other = (scratch(slot, words[block].size, words.dtype) for slot in ("mine", "other"))
            _to_integers(words[block], mine, floating)
            _to_integers(_given(reference)[block], other, floating)
            np.subtract(mine, other, out=mine)
            zigzag(mine, mine)
            pieces += pack_words(mine, rotate=False, squeeze=True, level=self.level)
        return b"".join(pieces)

    def _decode(self, payload: memoryview, out: Words, layout: Layout, reference: Words | None) -> None:
        if not payload or payload[0] > 1:
            raise CodecError("difference payload starts with a flag that this codec does not write")
        floating = bool(payload[0])
        used = 1
        for block in _blocks(out):
            mine, other = (scratch(slot, out[block].size, out.dtype) for slot in ("mine", "other"))
            used += unpack_words(payload[used:], mine)
            unzigzag(mine, mine)
            _to_integers(_given(reference)[block], other, floating)  # before `out`, which may be the same memory
            np.add(mine, other, out=mine)
            if floating:
                flip_negative(mine, out[block])
            else:
                np.copyto(out[block], mine)
        expect_end(payload, used)


def _given(reference: Words | None) -> Words:
    assert reference is not None, "the base class checks this"  # noqa: S101
    return reference


def _blocks(words: Words) -> Iterator[slice]:
    step = BLOCK_BYTES // words.dtype.itemsize
    return (slice(start, start + step) for start in range(0, words.size, step))


def _to_integers(words: Words, out: Words, floating: bool) -> None:
    if floating:
        flip_negative(words, out)
    else:
        np.copyto(out, words)
