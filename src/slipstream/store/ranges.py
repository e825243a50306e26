"""Read parts of objects with few requests; and containers from a store: their ends first, then the chunks needed."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import CorruptFileError, OutOfRangeError
from slipstream.store.base import FileInfo, Range, Store
from slipstream.threads import parallel_map

# Ranges with less than this in between are fetched by one request. It takes about as long as waiting for another reply.
_MAX_GAP_BYTES = 128 << 10
_MAX_REQUEST_BYTES = 32 << 20
# Fetched when a container is opened: the header; and the footer with, in most files, all of the index.
_HEAD_BYTES = 16
_TAIL_BYTES = 64 << 10
# How much is fetched at a time, and how many of these at once: 64 MiB in memory keep a fast connection busy.
_BATCH_BYTES = 8 << 20
_PARALLEL_BATCHES = 4


def merge_ranges(ranges: Sequence[Range]) -> list[Range]:
    """Return what to fetch so that it contains all ranges: few requests, little that nobody asked for.

    Returns:
        Ranges in order, that do not overlap; nothing if a range is impossible, or if all are empty.
    """
    merged: list[Range] = []
    for part in sorted(ranges, key=operator.attrgetter("offset")):
        if part.offset < 0 or part.length < 0 or part.offset + part.length >= 1 << 63:
            return []
        if not part.length:
            continue
        if merged:
            last = merged[-1]
            stop = max(last.offset + last.length, part.offset + part.length)
            is_near = part.offset - (last.offset + last.length) <= _MAX_GAP_BYTES
            overlaps = part.offset < last.offset + last.length
            if overlaps or (is_near and stop - last.offset <= _MAX_REQUEST_BYTES):
                merged[-1] = Range(last.offset, stop - last.offset)
                continue
        merged.append(part)
    return merged


def cut(merged: Sequence[Range], blocks: Sequence[bytes], part: Range) -> bytes:
    """Return a range from the blocks that were fetched for `merged`."""
    if not part.length:
        return b""
    # Few: one per request.
    for range_, block in zip(merged, blocks, strict=True):
        start = part.offset - range_.offset
        if start >= 0 and start + part.length <= len(block):
            return block[start : start + part.length]
    raise AssertionError("merge_ranges covers all ranges")


@dataclass(frozen=True, eq=False)
class _Block:
    """Bytes of an object that are in memory."""

    offset: int
    content: bytes


class OpenObject:
    """One object of a store, or several that follow each other, read as a file. Thread-safe.

    `parts` fetches ahead what will be read, and `read_into` finds it in memory. What it does not find there is fetched
    by a separate request.

    Args:
        store: Where the objects are.
        pieces: Their names and sizes, in order.

    Raises:
        CorruptFileError: If an object is missing or shorter than that; and so do all methods.
        StoreError: If the store cannot be read; and so do all methods.
    """

    def __init__(self, store: Store, pieces: Sequence[FileInfo]) -> None:
        self._store = store
        self._pieces = tuple(pieces)
        # Where each piece begins. The last number is the size of the whole.
        self._starts = [0, *itertools.accumulate(piece.size_bytes for piece in pieces)]
        # Appending and removing are atomic: several threads may read different chunks.
        self._blocks: deque[_Block] = deque()
        self._fetch_ends()

    def size_bytes(self) -> int:
        """Return the size of all pieces together."""
        return self._starts[-1]

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fill `target` from a position; returns how many bytes there were."""
        length = max(0, min(len(target), self.size_bytes() - offset))
        if not length:
            return 0
        content = self._find(Range(offset, length))
        if content is None:
            content = memoryview(self._fetch([Range(offset, length)])[0].content)
        target[:length] = content
        return length

    def parts(self, ranges: Sequence[Range]) -> Iterator[slice]:
        """Yield slices of `ranges`, in order. Inside the loop, `read_into` finds the ranges of that slice in memory.

        What comes next is fetched meanwhile.
        """
        batches = _batches(ranges)

        # Runs on other threads, a few batches ahead of the caller.
        def fetch(batch: slice) -> list[_Block]:
            missing = []
            for part in ranges[batch]:
                # The end of the object is in memory since it was opened.
                if self._find(part) is None:
                    missing.append(part)  # noqa: PERF401 - a loop is easier to read
            return self._fetch(missing)

        for batch, blocks in zip(batches, parallel_map(fetch, batches, _PARALLEL_BATCHES), strict=True):
            self._blocks.extend(blocks)
            try:
                yield batch
            finally:
                for block in blocks:
                    self._blocks.remove(block)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._store, self._pieces)

    def _fetch_ends(self) -> None:
        """Fetch what opening a container reads, by one request if the object is small."""
        size = self.size_bytes()
        head = Range(0, min(size, _HEAD_BYTES))
        tail = Range(max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES))
        self._blocks.extend(self._fetch([head, tail]))

    def _find(self, wanted: Range) -> memoryview | None:
        """Return a range if it is in memory."""
        for block in self._blocks.copy():
            start = wanted.offset - block.offset
            if start >= 0 and start + wanted.length <= len(block.content):
                return memoryview(block.content)[start : start + wanted.length]
        return None

    def _fetch(self, ranges: Sequence[Range]) -> list[_Block]:
        """Fetch ranges, together with what lies between those that are close to each other."""
        merged = merge_ranges(ranges)
        contents: dict[int, list[bytes]] = defaultdict(list)
        # A range may go across pieces, and a piece may contain several ranges.
        of_piece: dict[int, list[Range]] = defaultdict(list)
        owners: dict[int, list[int]] = defaultdict(list)
        for number, part in enumerate(merged):
            for piece, inner in self._split(part):
                of_piece[piece].append(inner)
                owners[piece].append(number)

        def get(piece: int) -> list[bytes]:
            return self._get(piece, of_piece[piece])

        # The ends of an object may be in different pieces: nobody should wait for one after the other.
        pieces = sorted(of_piece)
        for piece, found in zip(pieces, parallel_map(get, pieces, _PARALLEL_BATCHES), strict=True):
            for number, content in zip(owners[piece], found, strict=True):
                contents[number].append(content)
        blocks = []
        for number, part in enumerate(merged):
            # Of a single part, this is the part itself and no copy.
            blocks.append(_Block(part.offset, b"".join(contents[number])))
        return blocks

    def _split(self, part: Range) -> Iterator[tuple[int, Range]]:
        """Yield the pieces that a range lies in, and what part of each."""
        stop = part.offset + part.length
        for number, start in enumerate(self._starts[:-1]):
            first = max(part.offset, start)
            last = min(stop, self._starts[number + 1])
            if first < last:
                yield number, Range(first - start, last - first)

    def _get(self, piece: int, ranges: Sequence[Range]) -> list[bytes]:
        name = self._pieces[piece].name
        try:
            return self._store.get_ranges(name, ranges)
        except FileNotFoundError:
            raise CorruptFileError(f"refers to {name}, which is missing") from None
        except OutOfRangeError as error:
            raise CorruptFileError(f"is truncated: {error}, expected {self._pieces[piece].size_bytes}") from None


def _batches(ranges: Sequence[Range]) -> list[slice]:
    """Divide ranges into slices of about `_BATCH_BYTES`."""
    batches = []
    first = 0
    size = 0
    for number, part in enumerate(ranges):
        if size + part.length > _BATCH_BYTES and number > first:
            batches.append(slice(first, number))
            first = number
            size = 0
        size += part.length
    if first < len(ranges):
        batches.append(slice(first, len(ranges)))
    return batches
