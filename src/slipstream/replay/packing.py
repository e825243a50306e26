"""Rows of bytes, packed in small segments that can be read without their neighbours.

A replay buffer is read a step here and a step there, so the unit of packing is small and decoding one must cost
microseconds. Two ways to pack, chosen by what a row is:

- `VectorRows`: four rows that follow each other in time, one after another, in one LZ4 block. All vectors of a step
  share the row, so that one call decodes them all.
- `ImageRows`: every image alone, each line as its difference to the line above, Huffman-coded; or whatever of a few
  variants packs it better. Of stacks of frames that repeat from step to step, every frame once (see `stacks`).

Both store what does not shrink as it is, and both return every bit as it was.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.codecs.entropy import HUFFMAN_LEVEL, compress_zstd, decompress_into, decompress_zstd
from slipstream.errors import CodecError
from slipstream.memory import scratch, scratch_scope
from slipstream.replay.blocks import compress_parts, decompress_parts
from slipstream.replay.scaled import BYTES, NOT_SCALED, WAYS, from_pixels, to_pixels
from slipstream.replay.stacks import (
    STACK_ROWS,
    Pieces,
    distinct_frames,
    find_step,
    frames_of_stack,
    join_stacks,
    split_stacks,
)
from slipstream.threads import default_threads, parallel_each, parallel_map

Rows = NDArray[np.uint8]
"""``[rows, bytes of a row]``."""
Payload = bytes | memoryview
"""The bytes of one unit."""

UNIT_ROWS = 4
_UNIT_BYTES = 64 << 10
_LEVEL = 1
_BLOCK_BYTES = 2 << 20
_CACHED_BYTES = 1 << 20
_SCRATCH_BYTES = 16 << 20
_PARALLEL_IMAGE_BYTES = 64 << 10
_LINES_BYTES = 16 << 10


@dataclass(frozen=True)
class Units:
    """What rows were packed into.

    Attributes:
        sizes: How many rows each unit has.
        lengths: How many bytes each unit has.
        content: The bytes of all units, one after another.
    """

    sizes: NDArray[np.int64]
    lengths: NDArray[np.int64]
    content: bytes

    @classmethod
    def join(cls, sizes: NDArray[np.int64], payloads: Sequence[Payload]) -> Units:
        """Join the bytes of units. One object for all of them takes a third of the memory of one for each."""
        lengths = np.array([len(payload) for payload in payloads], np.int64)
        return cls(np.asarray(sizes, np.int64), lengths, b"".join(payloads))

    @property
    def payloads(self) -> list[bytes]:
        """The bytes of each unit."""
        ends = np.cumsum(self.lengths)
        begins = ends - self.lengths
        return [self.content[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


@dataclass(frozen=True)
class Where:
    """Which rows are wanted: of which of the units, and where in it."""

    segment: NDArray[np.int64]
    row: NDArray[np.int64]


def split_evenly(lengths: NDArray[np.int64], target: int) -> NDArray[np.int64]:
    """Cut runs of the given lengths into segments of about `target` rows that never cross from one run to the next."""
    lengths = lengths[lengths > 0]
    pieces = np.maximum(1, (lengths + target // 2) // target)
    small, larger = lengths // pieces, lengths % pieces
    within = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    sizes: NDArray[np.int64] = np.repeat(small, pieces) + (within < np.repeat(larger, pieces))
    return sizes


@dataclass(frozen=True)
class VectorRows:
    """Rows of numbers, four to a unit."""

    row_bytes: int
    kind: ClassVar[str] = "vectors"

    @property
    def unit_rows(self) -> int:
        """Four, or fewer if rows are large: a unit is decoded whole for one row of it."""
        return max(1, min(UNIT_ROWS, _UNIT_BYTES // max(1, self.row_bytes)))

    def pack(self, rows: Rows, runs: NDArray[np.int64], threads: int) -> Units:
        """Pack runs of rows, some megabytes at a time."""
        sizes = split_evenly(runs, self.unit_rows)
        ends = np.cumsum(sizes) * self.row_bytes
        begins = ends - sizes * self.row_bytes
        content = rows.reshape(-1).data
        step = max(1, _BLOCK_BYTES // max(1, self.unit_rows * self.row_bytes))

        def run(first: int) -> list[Payload]:
            part = slice(first, first + step)
            return compress_parts(content, begins[part].tolist(), ends[part].tolist())

        payloads: list[Payload] = []
        for block in parallel_map(run, range(0, len(sizes), step), threads):
            payloads += block
        return Units.join(sizes, payloads)

    def decode(self, payloads: Sequence[bytes], sizes: NDArray[np.int64]) -> bytes:
        """Unpack units, one after another.

        Raises:
            CodecError: If a unit is damaged.
        """
        return decompress_parts(payloads, sizes * self.row_bytes)

    def check(self, lengths: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Raise `CodecError` if a unit that comes from elsewhere has more bytes than its rows take unpacked."""
        if (lengths > sizes * self.row_bytes).any():
            place = int(np.argmax(lengths > sizes * self.row_bytes))
            raise CodecError(
                f"a packed unit of {sizes[place]} rows has {lengths[place]} bytes, expected at most "
                f"{sizes[place] * self.row_bytes}"
            )

    def gather(self, content: bytes, sizes: NDArray[np.int64], where: Where, out: Rows) -> None:
        """Copy rows out of decoded units."""
        if not self.row_bytes:
            return
        first = np.cumsum(sizes) - sizes
        rows = np.frombuffer(content, np.uint8).reshape(-1, self.row_bytes)
        # `locate` checked the numbers. NumPy would check them again through a copy of `out`.
        np.take(rows, first[where.segment] + where.row, axis=0, out=out, mode="clip")


@dataclass(frozen=True)
class ImageRows:
    """Images of bytes, each packed alone; of stacks of frames, each frame.

    Args:
        row_bytes: Of one image.
        line_bytes: Of one line of it.
        jpeg: Quality from 1 to 100 if losses are wanted; without loss by default.
        shape: Of one image; needed for JPEG, and to find stacks.
        stored: Whether to leave images as they are.
        dtype: Of one pixel, as NumPy writes it. If it is not that of bytes, images are packed as bytes where that is
            exact; see `scaled`.
    """

    row_bytes: int
    line_bytes: int
    jpeg: int | None = None
    shape: tuple[int, ...] = ()
    stored: bool = False
    dtype: str = BYTES
    kind: ClassVar[str] = "images"

    def pack(self, rows: Rows, runs: NDArray[np.int64], threads: int) -> Units:
        """Pack runs of images: a unit each, or, if they are stacks that repeat frames, some together."""
        follows = _follows(runs)
        step = find_step(rows, follows, self.shape) if self.jpeg is None else 0
        if not step:
            return Units.join(np.ones(len(rows), np.int64), self.pack_images(rows, threads))
        sizes = split_evenly(runs, STACK_ROWS)
        count = self.shape[0] // step
        frames, new = distinct_frames(rows, _follows(sizes), count)
        return Units.join(sizes, join_stacks(self.pack_images(frames, threads), new, sizes, count))

    def pack_images(self, rows: Rows, threads: int) -> list[bytes]:
        """Pack images, some megabytes at a time."""
        if self.stored:
            return [bytes(1) + row.tobytes() for row in rows]
        if self.jpeg is not None:
            from slipstream.replay.jpeg import encode_jpeg  # noqa: PLC0415 - Pillow only for those who ask for it

            encode = functools.partial(encode_jpeg, quality=self.jpeg)
            return list(parallel_map(encode, [row.reshape(self.shape) for row in rows], threads))
        if not len(rows):
            return []
        if self.dtype != BYTES:
            return self._pack_scaled(rows, threads)
        filtering, level = _best_way(rows[len(rows) // 2].reshape(-1, self.line_bytes))
        step = max(1, _BLOCK_BYTES // rows.shape[1])

        def run(first: int) -> list[bytes]:
            block = rows[first : first + step].reshape(-1, rows.shape[1] // self.line_bytes, self.line_bytes)
            if filtering:
                block = _subtract_lines(block)
            return [_tagged(filtering, image.reshape(-1), level) for image in block]

        blocks = parallel_map(run, range(0, len(rows), step), threads)
        return [payload for block in blocks for payload in block]

    def gather(self, segments: Sequence[Payload], where: Where, outs: Sequence[Rows]) -> None:
        """Unpack images into the rows of several contiguous arrays, one after another.

        Raises:
            CodecError: If a segment is damaged.
        """
        kinds = np.array([frames_of_stack(segment) if self.jpeg is None else 0 for segment in segments])
        distinct = np.unique(kinds).tolist()
        if distinct == [0]:
            self._unpack(Pieces(segments, where.segment[:, None]), outs)
            return
        if len(distinct) == 1:
            self._unpack(split_stacks(segments, where.segment, where.row), outs)
            return
        starts = np.cumsum([0, *(len(out) for out in outs)])
        for kind in distinct:  # what was packed together was looked at on its own, and other frames may repeat in it
            chosen = np.flatnonzero(kinds == kind)
            mine = np.flatnonzero(kinds[where.segment] == kind)
            part = Where(np.searchsorted(chosen, where.segment[mine]), where.row[mine])
            some = np.empty((len(mine), self.row_bytes), np.uint8)
            self.gather([segments[number] for number in chosen.tolist()], part, [some])
            cuts = np.searchsorted(mine, starts).tolist()
            for out, start, (low, high) in zip(outs, starts.tolist(), itertools.pairwise(cuts), strict=False):
                out[mine[low:high] - start] = some[low:high]

    def _unpack(self, pieces: Pieces, outs: Sequence[Rows]) -> None:
        """Unpack every image once: straight into place, or, if many are wanted twice, aside and copied from there."""
        index, count = pieces.index, pieces.index.shape[1]
        if self.row_bytes % (count * self.line_bytes):
            raise CodecError(f"a segment has stacks of {count} frames, which images of {self.row_bytes} bytes are not")
        ends = np.cumsum([len(out) for out in outs]).tolist()
        parts = [index[end - len(out) : end].reshape(-1) for end, out in zip(ends, outs, strict=True)]
        if count == 1 and len(pieces.images) > 0.75 * len(index):
            for part, out in zip(parts, outs, strict=True):
                self._decode([pieces.images[number] for number in part.tolist()], out)
            return
        size = self.row_bytes // count
        with scratch_scope():  # new pages would take a fifth of a batch's time
            memory = scratch("images", len(pieces.images) * size, np.dtype(np.uint8), limit_bytes=_SCRATCH_BYTES)
            distinct = memory.reshape(-1, size)
            self._decode(pieces.images, distinct)
            for part, out in zip(parts, outs, strict=True):
                np.take(distinct, part, axis=0, out=out.reshape(len(part), -1), mode="clip")

    def _decode(self, images: Sequence[bytes | memoryview], out: Rows) -> None:
        """Unpack images into the rows of `out`, on several threads.

        Lines are added up for many images at once: that takes a call a line however many there are, and while one
        thread calls, the others wait for the interpreter. Hence few large parts, and no threads for small images.
        """
        threads = default_threads() if out.shape[1] >= _PARALLEL_IMAGE_BYTES else 1
        most = max(_LINES_BYTES // self.line_bytes, _CACHED_BYTES // out.shape[1], 1)
        step = -(-len(out) // (-(-len(out) // (most * threads)) * threads))

        def run(first: int) -> None:
            self.unpack_images(images[first : first + step], out[first : first + step])

        parallel_each(run, range(0, len(out), step), threads)

    def unpack_images(self, payloads: Sequence[bytes | memoryview], out: Rows) -> None:
        """Unpack images, each alone, into the rows of `out`.

        Raises:
            CodecError: If an image is damaged.
        """
        if self.jpeg is not None:
            from slipstream.replay.jpeg import decode_jpeg  # noqa: PLC0415 - Pillow only for those who ask for it

            for row, payload in zip(out, payloads, strict=True):
                row[:] = decode_jpeg(payload, self.shape).reshape(-1)
            return
        if self.dtype != BYTES:
            self._fill_scaled(payloads, out)
            return
        tags = np.array([payload[0] if payload else 255 for payload in payloads], np.uint8)
        if (tags > (_FRAME | _LINES)).any():
            raise CodecError(f"a packed image starts with {tags.max()}, which is not a way this release packs images")
        size, pixels = out.shape[1], out.reshape(-1).data
        if (tags & _FRAME).all():
            decompress_into(pixels, payloads, size, skip=1)
        else:
            for place, tag, payload in zip(range(0, out.size, size), tags.tolist(), payloads, strict=True):
                pixels[place : place + size] = _untagged(tag, memoryview(payload)[1:], size)
        lines = out.reshape(len(out), -1, self.line_bytes)
        filtered = (tags & _LINES) != 0
        if filtered.all():
            _add_lines(lines)
        elif filtered.any():
            some = lines[filtered]
            _add_lines(some)
            lines[filtered] = some

    def _pack_scaled(self, rows: Rows, threads: int) -> list[bytes]:
        """Pack images of numbers: as images of bytes, with the way they were scaled in front, where that is exact."""
        pixels, ways = to_pixels(rows, self.dtype)
        payloads = [_tagged(0, row, _LEVEL) if way == NOT_SCALED else b"" for row, way in zip(rows, ways, strict=True)]
        fits = np.flatnonzero(ways != NOT_SCALED)
        packed = ImageRows(pixels.shape[1], self.line_bytes).pack_images(pixels[fits], threads)
        for number, image in zip(fits.tolist(), packed, strict=True):
            payloads[number] = bytes([ways[number]]) + image
        return payloads

    def _fill_scaled(self, payloads: Sequence[bytes | memoryview], out: Rows) -> None:
        """Unpack what `_pack_scaled` packed."""
        ways = np.array([payload[0] if payload else 255 for payload in payloads], np.uint8)
        plain = ways <= _FRAME
        known = plain | np.isin(ways, WAYS)
        if not known.all():
            raise CodecError(f"a packed image starts with {ways.max()}, which is not a way this release packs images")
        size = out.shape[1]
        for number in np.flatnonzero(plain).tolist():
            body = _untagged(int(ways[number]), memoryview(payloads[number])[1:], size)
            out[number] = np.frombuffer(body, np.uint8)
        images = [memoryview(payloads[number])[1:] for number in np.flatnonzero(~plain).tolist()]
        if not images:
            return
        pixels = np.empty((len(images), size // np.dtype(self.dtype).itemsize), np.uint8)
        ImageRows(pixels.shape[1], self.line_bytes).unpack_images(images, pixels)
        from_pixels(pixels, ways, out, self.dtype)


RowPacker = VectorRows | ImageRows
"""How the rows of one column are packed and read."""

_FRAME, _LINES = 1, 2


def _follows(runs: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell of each row whether it comes after the one before it, in the same run."""
    follows = np.ones(int(runs.sum()), np.bool_)
    follows[(np.cumsum(runs) - runs)[runs > 0]] = False
    return follows


def _best_way(image: NDArray[np.uint8]) -> tuple[int, int]:
    """Return the filter and the zstd level that pack an image best; Huffman codes alone unless matches pay."""
    variants = ((0, image), (_LINES, _subtract_lines(image[None])[0]))
    sizes = {
        (lines, level): len(compress_zstd(pixels.reshape(-1), level)) * penalty
        for lines, pixels in variants
        for level, penalty in ((HUFFMAN_LEVEL, 1.0), (_LEVEL, 1.1))
    }
    return min(sizes, key=sizes.__getitem__)


def _subtract_lines(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    difference = np.ascontiguousarray(images).copy()
    difference[:, 1:] -= images[:, :-1]
    return difference


def _add_lines(images: NDArray[np.uint8]) -> None:
    """Undo `_subtract_lines` in place.

    The first lines of all images are put side by side, then the second ones, and so on: adding up is one long addition
    a line then, and pays for both copies.
    """
    turned = np.ascontiguousarray(images.transpose(1, 0, 2))
    for above, line in itertools.pairwise(turned):
        np.add(above, line, out=line)
    images[:] = turned.transpose(1, 0, 2)


def _tagged(lines: int, pixels: NDArray[np.uint8], level: int) -> bytes:
    frame = compress_zstd(pixels, level)
    if len(frame) < pixels.size:
        return bytes([lines | _FRAME]) + frame
    return bytes([lines]) + pixels.tobytes()


def _untagged(tag: int, body: memoryview, size: int) -> bytes | memoryview:
    if tag & _FRAME:
        return decompress_zstd(body, size)
    if len(body) != size:
        raise CodecError(f"a stored image holds {len(body)} bytes, expected {size}")
    return body
