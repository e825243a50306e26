"""The `timewise` codec: arrays of shape ``[environment, time, ...]`` that change slowly in time.

Each step is differenced with the one before it (XOR of bits, or difference of ordered integers, or that to the line
through the two before it, or not at all: what packs a sample best), time is made the innermost axis so that quiet
channels become runs, and the result goes to byte planes. Work proceeds in tiles of about 1 MiB: several whole
environments, or a stretch of time of a single one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.codecs.base import Layout, part_shape
from slipstream.codecs.planes import BLOCK_BYTES, PlaneCodec, expect_end, pack_words, unpack_words
from slipstream.codecs.words import Words, as_words, flip_negative, is_float, scratch, unzigzag, zigzag
from slipstream.errors import CodecError

_PLAIN, _XOR, _ORDERED, _LINEAR = 0, 1, 2, 3
_MODES = ("plain", "xor", "ordered", "linear")
_FLOATING, _WHOLE = 4, 8
_SAMPLE_BYTES = 64 << 10
_WIDE_STEP = 64  # words


@dataclass(frozen=True)
class Timewise(PlaneCodec):
    """Differences between neighbours in time, time innermost, then byte planes.

    The first axis is the environment, the second is time; an array of fewer axes is one environment.

    Args:
        level: zstd level for planes in which matches pay, 1 to 22.
        floating: Whether words are floats; by default told from the dtype.
        mode: How neighbours are differenced: ``plain`` (not at all), ``xor``, ``ordered`` (as integers in the order of
            the floats) or ``linear`` (the same, twice: for what moves steadily); by default what packs a sample best,
            found anew for every array that is encoded, which takes a third of the time.
    """

    mode: str | None = None
    name: ClassVar[str] = "timewise"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode is not None and self.mode not in _MODES:
            raise CodecError(f"timewise mode is {self.mode!r}, expected one of {', '.join(_MODES)}")

    def to_header(self) -> dict[str, Any]:
        """Return this codec as a JSON object: its name and settings, the mode only if it is set."""
        header = super().to_header()
        return header if self.mode is not None else {key: value for key, value in header.items() if key != "mode"}

    def settle(self, array: NDArray[Any]) -> Timewise:
        """Return the codec with the mode that packs a sample of `array` best, to encode many parts of it with."""
        if not array.size or self.mode is not None:
            return self
        if array.dtype == np.bool_:  # flags stay as they are for a while
            return dataclasses.replace(self, mode="xor")
        if array.flags.c_contiguous and not np.count_nonzero(as_words(array)):
            return dataclasses.replace(self, mode="plain")
        sample_bytes = min(_SAMPLE_BYTES, max(_SAMPLE_BYTES // 4, array.nbytes // 16))
        shape = part_shape(array.shape, array.dtype.itemsize, sample_bytes)
        middle = tuple(slice((n - k) // 2, (n - k) // 2 + k) for n, k in zip(array.shape, shape, strict=True))
        words = as_words(array[middle])
        floating = is_float(array.dtype) if self.floating is None else self.floating
        mode = _best_mode(words.reshape(_series_shape(shape, words.size)), floating, self.level)
        return dataclasses.replace(self, mode=_MODES[mode])

    def _encode(self, words: Words, layout: Layout, reference: Words | None) -> bytes:
        if not words.size:
            return b""
        series = words.reshape(_series_shape(layout.shape, words.size))
        floating = self._is_floating(layout)
        mode = _best_mode(series, floating, self.level) if self.mode is None else _MODES.index(self.mode)
        pieces = [bytes([mode | (_FLOATING if floating else 0) | (_WHOLE if mode == _PLAIN else 0)])]
        for tile in _tiles(series.shape, BLOCK_BYTES // words.dtype.itemsize):
            pieces += _pack_tile(series[tile], mode, floating, self.level)
        return b"".join(pieces)

    def _decode(self, payload: memoryview, out: Words, layout: Layout, reference: Words | None) -> None:
        used = 0
        if out.size:
            mode = payload[0] & ~_FLOATING if payload else -1
            if mode not in (_PLAIN | _WHOLE, *range(_LINEAR + 1)):
                raise CodecError("timewise payload starts with a mode that this codec does not write")
            floating = bool(payload[0] & _FLOATING)
            used = 1
            series = out.reshape(_series_shape(layout.shape, out.size))
            for tile in _tiles(series.shape, BLOCK_BYTES // out.dtype.itemsize):
                used += _unpack_tile(payload[used:], series[tile], mode, floating)
        expect_end(payload, used)


def _series_shape(shape: tuple[int, ...], words: int) -> tuple[int, int, int]:
    """Fold a shape into (environments, steps, words per step); a complex number is two words."""
    environments, steps = shape[:2] if len(shape) > 1 else (1, math.prod(shape))
    return environments, steps, words // (environments * steps)


def _tiles(shape: tuple[int, ...], words: int) -> Iterator[tuple[slice, slice]]:
    """Cut a series into contiguous tiles of at most `words` words, or of one step where a step is larger."""
    environments, steps, width = shape
    group = words // (steps * width)
    if group >= 1:
        for start in range(0, environments, group):
            yield slice(start, start + group), slice(0, steps)
        return
    stretch = max(1, words // width)
    for environment in range(environments):
        for start in range(0, steps, stretch):
            yield slice(environment, environment + 1), slice(start, start + stretch)


def _best_mode(series: Words, floating: bool, level: int) -> int:
    tiles = list(_tiles(series.shape, _SAMPLE_BYTES // series.dtype.itemsize))
    sample = series[tiles[len(tiles) // 2]]
    if sample.shape[1] == 1:
        return _PLAIN
    sizes = {
        mode: sum(map(len, _pack_tile(sample, mode, floating, level))) for mode in (_XOR, _ORDERED, _LINEAR, _PLAIN)
    }
    return min(sizes, key=sizes.__getitem__)


def _pack_tile(tile: Words, mode: int, floating: bool, level: int) -> list[bytes]:
    """Pack a contiguous tile: its first step, then all later ones with time innermost, together if they are alike."""
    moved, first, later = _memory_for(tile)
    first[:] = tile[:, 0]
    if mode == _PLAIN:
        later[:] = tile[:, 1:].transpose(0, 2, 1)
        return pack_words(moved, rotate=floating, squeeze=floating, level=level)
    pieces = pack_words(moved[: first.size], rotate=floating, squeeze=floating, level=level)
    if later.size:
        apart = scratch("mine", later.size, tile.dtype).reshape(tile[:, 1:].shape)
        _differences(tile, mode, floating, apart)
        later[:] = apart.transpose(0, 2, 1)
        pieces += pack_words(moved[first.size :], rotate=False, squeeze=mode >= _ORDERED, level=level)
    return pieces


def _memory_for(tile: Words) -> tuple[Words, Words, Words]:
    """Return memory for the words of a tile, and views of it: the first step, and the later ones, time innermost."""
    environments, steps, width = tile.shape
    moved = scratch("moved", tile.size, tile.dtype)
    count = environments * width
    return moved, moved[:count].reshape(environments, width), moved[count:].reshape(environments, width, steps - 1)


def _differences(tile: Words, mode: int, floating: bool, out: Words) -> None:
    if mode == _XOR:
        np.bitwise_xor(tile[:, 1:], tile[:, :-1], out=out)
        return
    if floating:
        ordered = scratch("other", tile.size, tile.dtype)
        flip_negative(tile.reshape(-1), ordered)
        tile = ordered.reshape(tile.shape)
    np.subtract(tile[:, 1:], tile[:, :-1], out=out)
    if mode == _LINEAR:
        np.subtract(out[:, 1:], out[:, :-1], out=out[:, 1:])
    zigzag(out.reshape(-1), out.reshape(-1))


def _unpack_tile(payload: memoryview, tile: Words, mode: int, floating: bool) -> int:
    moved, first, later = _memory_for(tile)
    if mode == _PLAIN | _WHOLE:
        used = unpack_words(payload, moved)
    else:
        used = unpack_words(payload, moved[: first.size])
        used += unpack_words(payload[used:], moved[first.size :])
    differences = mode in (_XOR, _ORDERED, _LINEAR) and later.size > 0
    ordered_floats = differences and mode != _XOR and floating
    combine = np.bitwise_xor if mode == _XOR else np.add
    is_wide = tile.shape[2] >= _WIDE_STEP
    if differences:
        if mode != _XOR:
            unzigzag(moved[first.size :], moved[first.size :])
        if mode == _LINEAR:
            np.add.accumulate(later, axis=2, dtype=later.dtype, out=later)
        if ordered_floats:
            flip_negative(moved[: first.size], moved[: first.size])
        if not is_wide:
            combine(later[:, :, 0], first, out=later[:, :, 0])
            combine.accumulate(later, axis=2, dtype=later.dtype, out=later)
    tile[:, 0] = first
    tile[:, 1:] = later.transpose(0, 2, 1)
    if differences and is_wide:  # step by step, which is faster where a step is wide enough to hide the loop
        for step in range(1, tile.shape[1]):
            combine(tile[:, step - 1], tile[:, step], out=tile[:, step])
    if ordered_floats:
        flat = tile.reshape(-1)
        flip_negative(flat, flat)
    return used
