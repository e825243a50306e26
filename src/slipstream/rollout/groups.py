"""Arrays that are encoded in groups of environments, and a bounded cache of decoded groups. No torch."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.codecs import Codec
from slipstream.store.writer import check_payload
from slipstream.threads import parallel_map


@dataclass(frozen=True)
class PackedArray:
    """An array ``[environment, step, ...]``, encoded in groups of environments."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    group: int
    codec: Codec
    payloads: tuple[bytes, ...]

    @classmethod
    def of(cls, name: str, array: NDArray[Any], codec: Codec, group: int, *, verify: bool) -> PackedArray:
        """Encode an array; `verify` decodes every group again and raises `CodecError` if a bit differs."""

        def encode(start: int) -> bytes:
            part = array[start : start + group]
            payload = codec.encode(part)
            if verify:
                check_payload(name, codec, payload, part)
            return payload

        starts = range(0, len(array), group)
        return cls(array.dtype, array.shape, group, codec, tuple(parallel_map(encode, starts)))

    @property
    def nbytes(self) -> int:
        """Size of the encoded groups."""
        return sum(map(len, self.payloads))

    @property
    def group_bytes(self) -> int:
        """Size of a decoded group; the last one may be smaller."""
        return self.group * math.prod(self.shape[1:]) * self.dtype.itemsize

    def shape_of(self, number: int) -> tuple[int, ...]:
        """Return the shape of a decoded group."""
        num_envs = min(self.group, self.shape[0] - number * self.group)
        return (num_envs, *self.shape[1:])

    def decode(self, number: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the environments of a group: in `out`, or else in new memory."""
        if out is None:
            out = np.empty(self.shape_of(number), self.dtype)
        self.codec.decode(self.payloads[number], out)
        return out


class GroupCache:
    """An LRU cache of decoded groups, bounded in bytes. Thread-safe; a pickled cache is loaded empty."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.hits = 0
        self.misses = 0
        self._groups: OrderedDict[tuple[str, int], NDArray[Any]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def find(self, name: str, number: int) -> NDArray[Any] | None:
        """Return a group of an array if it is here. The caller must not change it."""
        with self._lock:
            found = self._groups.get((name, number))
            if found is None:
                self.misses += 1
                return None
            self._groups.move_to_end((name, number))
            self.hits += 1
            return found

    def get(self, name: str, packed: PackedArray, number: int) -> NDArray[Any]:
        """Return a group of an array, decoded now or earlier. The caller must not change it."""
        found = self.find(name, number)
        if found is not None:
            return found
        # Decode without the lock. Two threads may decode the same group; the first result is kept.
        array = packed.decode(number)
        with self._lock:
            if array.nbytes <= self.max_bytes and (name, number) not in self._groups:
                self._groups[name, number] = array
                self._bytes += array.nbytes
                while self._bytes > self.max_bytes:
                    self._bytes -= self._groups.popitem(last=False)[1].nbytes
        return array

    @property
    def nbytes(self) -> int:
        """Size of the decoded groups."""
        return self._bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupCache, (self.max_bytes,)
