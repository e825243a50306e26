"""Codecs that store differences: `timewise` between neighbours in time, `difference` to a reference array.

Differences of floats are counted in representable numbers: float bits are mapped to integers in the order of the floats
and subtracted. Small changes then give small integers whatever the magnitude, also across zero.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.codecs.base import (
    Layout,
    Words,
    as_words,
    check_reference,
    flip_negative,
    is_float,
    middle_part,
    unzigzag,
    zigzag,
)
from slipstream.codecs.planes import BLOCK_BYTES, BlockReader, PlaneCodec, WordKind, encode_words, word_kind
from slipstream.errors import CodecError
from slipstream.memory import scratch

_MODES = ("plain", "xor", "ordered", "linear")
_PLAIN = 0
_XOR = 1
_ORDERED = 2
_LINEAR = 3
# Flags in the first byte of a payload, added to the mode.
_FLOATING = 4
# Plain mode with the first and the later steps encoded as one array. Always set now; older files may lack it.
_WHOLE = 8

_SAMPLE_BYTES = 64 << 10
# From this many words per step, a Python loop over steps is faster than a cumulative sum along them.
_WIDE_STEP = 64


@dataclass(frozen=True)
class Difference(PlaneCodec):
    """Difference to a reference array in ordered integers, then byte planes.

    Set the reference with `against`, for encoding and for decoding.

    Args:
        level: zstd level for planes with repeats, 1 to 22.
        floating: Whether words are floats; by default derived from the dtype. True for bfloat16 kept as uint16.

    Example:
        >>> import numpy as np
        >>> parent = np.linspace(0, 1, 10_000, dtype=np.float32)
        >>> child = parent + np.float32(1e-4)
        >>> codec = Difference().against(parent)
        >>> payload = codec.encode(child)
        >>> decoded = np.empty_like(child)
        >>> codec.decode(payload, decoded)
        >>> bool((decoded == child).all())
        True
    """

    name: ClassVar[str] = "difference"
    needs_reference: ClassVar[bool] = True
    _reference: NDArray[Any] | None = field(default=None, init=False, repr=False, compare=False)

    def against(self, reference: NDArray[Any]) -> Difference:
        """Return this codec with a reference; see `Codec.against`."""
        bound = dataclasses.replace(self)
        object.__setattr__(bound, "_reference", np.asarray(reference))
        return bound

    def _check(self, array: NDArray[Any]) -> None:
        """Raise `CodecError` unless there is a reference of the dtype and shape of `array`."""
        if self._reference is None:
            raise CodecError("codec 'difference' needs a reference array, set it with against(reference)")
        check_reference(self._reference, array.dtype, array.shape)

    def _reference_words(self) -> Words:
        assert self._reference is not None, "_check has run"  # noqa: S101
        return as_words(self._reference)

    def _encode(self, words: Words, layout: Layout) -> bytes:
        reference = self._reference_words()
        floating = self._is_floating(layout)
        parts = [bytes([floating])]
        for block in _blocks(words):
            mine = scratch("mine", words[block].size, words.dtype)
            other = scratch("other", words[block].size, words.dtype)
            _to_ordered(words[block], mine, floating)
            _to_ordered(reference[block], other, floating)
            np.subtract(mine, other, out=mine)
            zigzag(mine, mine)
            parts += encode_words(mine, WordKind.DIFFERENCES, self.level)
        return b"".join(parts)

    def _decode(self, payload: memoryview, out: Words, layout: Layout) -> None:
        if not payload or payload[0] > 1:
            raise CodecError("difference payload starts with an invalid flag, expected 0 or 1")
        reference = self._reference_words()
        floating = bool(payload[0])
        reader = BlockReader(payload, start=1)
        for block in _blocks(out):
            mine = scratch("mine", out[block].size, out.dtype)
            other = scratch("other", out[block].size, out.dtype)
            reader.read_words(mine)
            unzigzag(mine, mine)
            # Read the reference before writing `out`: it may be the same memory.
            _to_ordered(reference[block], other, floating)
            np.add(mine, other, out=mine)
            _from_ordered(mine, out[block], floating)
        reader.expect_end()


def _blocks(words: Words) -> Iterator[slice]:
    """Yield slices of about 1 MiB."""
    step = BLOCK_BYTES // words.dtype.itemsize
    for start in range(0, words.size, step):
        yield slice(start, start + step)


def _to_ordered(words: Words, out: Words, floating: bool) -> None:
    """Map floats to integers in the same order; copy integers."""
    if floating:
        flip_negative(words, out)
    else:
        np.copyto(out, words)


# The map is its own inverse.
_from_ordered = _to_ordered


@dataclass(frozen=True)
class Timewise(PlaneCodec):
    """Differences between neighbours in time, with time as the innermost axis, then byte planes.

    For arrays ``[environment, time, ...]`` that change slowly in time; an array of fewer axes is one environment. With
    time innermost, channels that do not change become runs. Work proceeds in tiles of about 1 MiB: several whole
    environments, or a range of steps of one environment.

    Args:
        level: zstd level for planes with repeats, 1 to 22.
        floating: Whether words are floats; by default derived from the dtype. True for bfloat16 kept as uint16.
        mode: How neighbours are differenced: ``plain`` (not at all), ``xor``, ``ordered`` (as integers in the order of
            the floats) or ``linear`` (the same, twice, for values with constant velocity). By default every call of
            `encode` tries all of them on a sample, which takes a third of its time; `settle` does that once.
    """

    mode: str | None = None
    name: ClassVar[str] = "timewise"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode is not None and self.mode not in _MODES:
            raise CodecError(f"timewise mode is {self.mode!r}, expected one of {', '.join(_MODES)}")

    def to_header(self) -> dict[str, Any]:
        """Return this codec as a JSON object: its name and settings; the mode only if it is set."""
        header = super().to_header()
        if self.mode is None:
            del header["mode"]
        return header

    def settle(self, array: NDArray[Any]) -> Timewise:
        """Return the codec with the mode that compresses a sample of `array` best, for encoding many parts of it."""
        if not array.size or self.mode is not None:
            return self
        # Flags rarely change from one step to the next.
        if array.dtype == np.bool_:
            return dataclasses.replace(self, mode="xor")
        # All zeros: every mode compresses them equally well, and this one is the fastest. Arrays that are not
        # contiguous would have to be copied for this test.
        if array.flags.c_contiguous and not np.count_nonzero(as_words(array)):
            return dataclasses.replace(self, mode="plain")
        # A sample is encoded four times, so a small array gets a smaller one: 16 to 64 KiB.
        sample_bytes = min(_SAMPLE_BYTES, max(_SAMPLE_BYTES // 4, array.nbytes // 16))
        sample = middle_part(array, sample_bytes)
        words = as_words(sample)
        series = words.reshape(_series_shape(sample.shape, words.size))
        floating = self._is_floating(Layout(sample.shape, is_float(sample.dtype)))
        return dataclasses.replace(self, mode=_MODES[_best_mode(series, floating, self.level)])

    def _mode_for(self, series: Words, floating: bool) -> int:
        """Return the mode to encode a series with."""
        if self.mode is not None:
            return _MODES.index(self.mode)
        return _best_mode(series, floating, self.level)

    def _encode(self, words: Words, layout: Layout) -> bytes:
        if not words.size:
            return b""
        series = words.reshape(_series_shape(layout.shape, words.size))
        floating = self._is_floating(layout)
        mode = self._mode_for(series, floating)
        head = mode
        if floating:
            head |= _FLOATING
        if mode == _PLAIN:
            head |= _WHOLE
        parts = [bytes([head])]
        for tile in _tiles(series.shape, BLOCK_BYTES // words.dtype.itemsize):
            parts += _encode_tile(series[tile], mode, floating, self.level)
        return b"".join(parts)

    def _decode(self, payload: memoryview, out: Words, layout: Layout) -> None:
        if not out.size:
            BlockReader(payload).expect_end()
            return
        if not payload:
            raise CodecError("timewise payload is empty, but the array is not")
        mode = payload[0] & ~_FLOATING
        if mode not in (_PLAIN | _WHOLE, _PLAIN, _XOR, _ORDERED, _LINEAR):
            raise CodecError(f"timewise payload starts with {payload[0]}, which is not a valid mode")
        floating = bool(payload[0] & _FLOATING)
        series = out.reshape(_series_shape(layout.shape, out.size))
        reader = BlockReader(payload, start=1)
        for tile in _tiles(series.shape, BLOCK_BYTES // out.dtype.itemsize):
            _decode_tile(reader, series[tile], mode, floating)
        reader.expect_end()


def _series_shape(shape: tuple[int, ...], num_words: int) -> tuple[int, int, int]:
    """Fold a shape into (environments, steps, words per step); a complex number is two words."""
    if len(shape) > 1:
        environments, steps = shape[:2]
    else:
        environments = 1
        steps = math.prod(shape)
    return environments, steps, num_words // (environments * steps)


def _tiles(shape: tuple[int, ...], max_words: int) -> Iterator[tuple[slice, slice]]:
    """Split a series into contiguous tiles of at most `max_words` words, or of one step if a step is larger."""
    environments, steps, width = shape
    whole_environments = max_words // (steps * width)
    if whole_environments >= 1:
        for start in range(0, environments, whole_environments):
            yield slice(start, start + whole_environments), slice(0, steps)
        return
    steps_per_tile = max(1, max_words // width)
    for environment in range(environments):
        for start in range(0, steps, steps_per_tile):
            yield slice(environment, environment + 1), slice(start, start + steps_per_tile)


def _best_mode(series: Words, floating: bool, level: int) -> int:
    """Return the mode that compresses a tile from the middle best."""
    tiles = list(_tiles(series.shape, _SAMPLE_BYTES // series.dtype.itemsize))
    sample = series[tiles[len(tiles) // 2]]
    # A single step has no neighbour to compare with.
    if sample.shape[1] == 1:
        return _PLAIN
    sizes = {}
    for mode in (_XOR, _ORDERED, _LINEAR, _PLAIN):
        sizes[mode] = sum(map(len, _encode_tile(sample, mode, floating, level)))
    return min(sizes, key=sizes.__getitem__)


def _encode_tile(tile: Words, mode: int, floating: bool, level: int) -> list[bytes]:
    """Encode a contiguous tile: its first step, then the later ones with time innermost."""
    moved, first, later = _memory_for(tile)
    first[:] = tile[:, 0]
    if mode == _PLAIN:
        # First and later steps are alike, so they are encoded as one array.
        later[:] = tile[:, 1:].transpose(0, 2, 1)
        return encode_words(moved, word_kind(floating), level)
    parts = encode_words(moved[: first.size], word_kind(floating), level)
    if later.size:
        steps = scratch("mine", later.size, tile.dtype).reshape(tile[:, 1:].shape)
        _subtract_neighbours(tile, mode, floating, steps)
        later[:] = steps.transpose(0, 2, 1)
        # Bits that changed are not small numbers, so they are encoded as integers.
        kind = WordKind.INTEGERS if mode == _XOR else WordKind.DIFFERENCES
        parts += encode_words(moved[first.size :], kind, level)
    return parts


def _memory_for(tile: Words) -> tuple[Words, Words, Words]:
    """Return memory for the words of a tile, and two views of it: the first step; the later ones, time innermost."""
    environments, steps, width = tile.shape
    moved = scratch("moved", tile.size, tile.dtype)
    count = environments * width
    first = moved[:count].reshape(environments, width)
    later = moved[count:].reshape(environments, width, steps - 1)
    return moved, first, later


def _subtract_neighbours(tile: Words, mode: int, floating: bool, out: Words) -> None:
    """Fill `out` with the difference of every step but the first to the one before it."""
    if mode == _XOR:
        np.bitwise_xor(tile[:, 1:], tile[:, :-1], out=out)
        return
    if floating:
        ordered = scratch("other", tile.size, tile.dtype)
        flip_negative(tile.reshape(-1), ordered)
        tile = ordered.reshape(tile.shape)
    np.subtract(tile[:, 1:], tile[:, :-1], out=out)
    if mode == _LINEAR:
        # The first difference stays. NumPy copies an operand that overlaps the result, so this is safe in place.
        np.subtract(out[:, 1:], out[:, :-1], out=out[:, 1:])
    flat = out.reshape(-1)
    zigzag(flat, flat)


def _decode_tile(reader: BlockReader, tile: Words, mode: int, floating: bool) -> None:
    """Fill a tile from the next blocks."""
    moved, first, later = _memory_for(tile)
    if mode == _PLAIN | _WHOLE:
        reader.read_words(moved)
    else:
        reader.read_words(moved[: first.size])
        reader.read_words(moved[first.size :])
    if mode in (_XOR, _ORDERED, _LINEAR) and later.size:
        _add_neighbours(tile, first, later, mode, floating)
    else:
        tile[:, 0] = first
        tile[:, 1:] = later.transpose(0, 2, 1)


def _add_neighbours(tile: Words, first: Words, later: Words, mode: int, floating: bool) -> None:
    """Undo `_subtract_neighbours`: fill a tile from its first step and the differences; overwrites both."""
    ordered = mode != _XOR
    combine: np.ufunc = np.bitwise_xor
    if ordered:
        combine = np.add
        differences = later.reshape(-1)
        unzigzag(differences, differences)
    if ordered and floating:
        start = first.reshape(-1)
        flip_negative(start, start)
    if mode == _LINEAR:
        # From differences of differences to differences.
        np.add.accumulate(later, axis=2, dtype=later.dtype, out=later)
    if tile.shape[2] >= _WIDE_STEP:
        # A step is wide enough to hide the cost of the loop, which is then faster than accumulating.
        tile[:, 0] = first
        tile[:, 1:] = later.transpose(0, 2, 1)
        for step in range(1, tile.shape[1]):
            combine(tile[:, step - 1], tile[:, step], out=tile[:, step])
    else:
        combine(later[:, :, 0], first, out=later[:, :, 0])
        combine.accumulate(later, axis=2, dtype=later.dtype, out=later)
        tile[:, 0] = first
        tile[:, 1:] = later.transpose(0, 2, 1)
    if ordered and floating:
        flat = tile.reshape(-1)
        flip_negative(flat, flat)
