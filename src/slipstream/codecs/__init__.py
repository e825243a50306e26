"""Codecs for arrays: frozen values that pack NumPy arrays into bytes and back, bit for bit.

======================  ==============================================================================================
`Planes`                byte planes of floats, each entropy-coded or stored: weights, optimizer state
`Timewise`              ``[environment, time, ...]`` arrays differenced in time: rollouts
`Difference`            an array against a reference: a checkpoint against its parent
`Zstd`, `Lz4`, `Raw`    plain bytes
`Auto`                  the best of these, found on a sample
======================  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.codecs.auto import Auto
from slipstream.codecs.base import Buffer, Codec, part_shape
from slipstream.codecs.difference import Difference
from slipstream.codecs.lz4 import Lz4, compress_frames, decompress_frames
from slipstream.codecs.parallel import background_threads, default_threads, parallel_map, usable_cores
from slipstream.codecs.plain import Raw, Zstd
from slipstream.codecs.planes import Planes
from slipstream.codecs.timewise import Timewise
from slipstream.errors import CodecError, FormatVersionError

__all__ = [
    "CODECS",
    "Auto",
    "Buffer",
    "Codec",
    "Difference",
    "Lz4",
    "Planes",
    "Raw",
    "Timewise",
    "Zstd",
    "background_threads",
    "codec_from_header",
    "compress_frames",
    "decompress_frames",
    "default_threads",
    "parallel_map",
    "part_shape",
    "usable_cores",
]

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Raw, Zstd, Lz4, Planes, Timewise, Difference, Auto)}
"""Every codec by the name that files use for it."""


def codec_from_header(header: Mapping[str, Any]) -> Codec:
    """Make the codec that a header describes; the inverse of `Codec.to_header`.

    Raises:
        FormatVersionError: If no codec of that name is known: a newer release wrote it.
        CodecError: If the header is not one that a codec writes.
    """
    if not isinstance(header, Mapping) or not isinstance(name := header.get("name"), str):
        raise CodecError(f"codec header is {header!r}, expected an object with a name")
    if name not in CODECS:
        raise FormatVersionError(f"codec {name!r} is not known to this release, which has {', '.join(CODECS)}")
    return CODECS[name].from_settings({key: value for key, value in header.items() if key != "name"})
