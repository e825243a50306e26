"""Codecs: frozen values that turn NumPy arrays into bytes and back, bit for bit.

======================  ==============================================================================================
`Planes`                byte planes of floats, each entropy-coded or stored: weights, optimizer state
`Timewise`              ``[environment, time, ...]`` arrays differenced in time: rollouts
`Difference`            an array against a reference: a checkpoint against its parent
`Zstd`, `Lz4`, `Raw`    plain bytes
======================  ==============================================================================================

`choose_codec` returns the one that compresses a sample of an array best.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.codecs.base import Buffer, Codec, middle_part
from slipstream.codecs.bytes import Lz4, Raw, Zstd
from slipstream.codecs.deltas import Difference, Timewise
from slipstream.codecs.planes import Planes
from slipstream.errors import CodecError, FormatVersionError

__all__ = [
    "CODECS",
    "Buffer",
    "Codec",
    "Difference",
    "Lz4",
    "Planes",
    "Raw",
    "Timewise",
    "Zstd",
    "choose_codec",
    "codec_from_header",
]

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Raw, Zstd, Lz4, Planes, Timewise, Difference)}
"""Every codec by its name in files."""

_SAMPLE_BYTES = 128 << 10
# A codec that gains less than a thousandth over a simpler one is not worth its time.
_MIN_GAIN = 0.999


def codec_from_header(header: Mapping[str, Any]) -> Codec:
    """Create the codec that a header describes; the inverse of `Codec.to_header`.

    Raises:
        FormatVersionError: If the codec is unknown, because a newer release wrote it.
        CodecError: If the header is invalid.
    """
    if not isinstance(header, Mapping) or not isinstance(header.get("name"), str):
        raise CodecError(f"codec header is {header!r}, expected an object with a name")
    settings = dict(header)
    name = settings.pop("name")
    if name not in CODECS:
        raise FormatVersionError(f"codec {name!r} is unknown to this release, which has {', '.join(CODECS)}")
    return CODECS[name].from_settings(settings)


def choose_codec(
    array: NDArray[Any],
    reference: NDArray[Any] | None = None,
    *,
    level: int = 1,
    floating: bool | None = None,
) -> Codec:
    """Return the codec that compresses a sample of `array` best. Of nearly equal ones, the simplest.

    Encodes about 128 KiB of the array with each candidate.

    Args:
        array: The array to encode.
        reference: An array of the same dtype and shape. If given, `Difference` competes too; if it is returned, it has
            no reference yet: use ``codec.against(reference)``.
        level: zstd level, 1 to 22.
        floating: Whether words are floats; by default derived from the dtype. True for bfloat16 kept as uint16.

    Example:
        >>> import numpy as np
        >>> choose_codec(np.zeros((8, 16, 100), np.float32)).name
        'zstd'
    """
    array = np.asarray(array)
    sample = middle_part(array, _SAMPLE_BYTES)
    best: Codec = Raw()
    best_bytes = sample.nbytes

    # From simple to complex: a later one has to be better, not just as good.
    candidates: list[Codec] = [Zstd(level), Planes(level, floating)]
    if array.ndim > 1:
        candidates.append(Timewise(level, floating))
    for codec in candidates:
        size = len(codec.encode(sample))
        if size < _MIN_GAIN * best_bytes:
            best = codec
            best_bytes = size

    if reference is not None:
        difference = Difference(level, floating)
        other_sample = middle_part(np.asarray(reference), _SAMPLE_BYTES)
        if len(difference.against(other_sample).encode(sample)) < _MIN_GAIN * best_bytes:
            return difference
    return best
