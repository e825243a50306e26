"""Undo what HDF5's filters did to a chunk, outside HDF5 and its lock.

Every decoder here knows how long its result must be and makes no more than that, whatever a damaged or hostile chunk
says; and releases the interpreter's lock while it works.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import zstandard
from numpy.typing import NDArray

from slipstream.errors import CodecError

Bytes = NDArray[np.uint8]

_NAMES = {
    1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 307: "bzip2", 32000: "lzf",
    32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32013: "zfp", 32015: "zstd", 32017: "sz", 32026: "blosc2",
}  # fmt: skip


@dataclass(frozen=True)
class Filter:
    """One step of a chunk's way into the file: HDF5's number of it, and its settings."""

    number: int
    settings: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What people call it."""
        return _NAMES.get(self.number, f"filter {self.number}")


def can_decode(filter_: Filter) -> bool:
    """Tell whether chunks that went through a filter can be decoded here."""
    if filter_.number == 32000:
        return _lzf() is not None
    if filter_.number == 32001:
        return _blosc() is not None
    return filter_.number in _DECODERS


def decode_chunk(payload: Bytes, filters: tuple[Filter, ...], mask: int, nbytes: int) -> Bytes:
    """Return the bytes of a chunk as they were before its filters.

    Args:
        payload: What is in the file.
        filters: In the order of writing.
        mask: Filters that this chunk was spared, by bit.
        nbytes: How many bytes must come out.

    Raises:
        CodecError: If they do not.
    """
    for number in reversed(range(len(filters))):
        if not mask >> number & 1:
            payload = _DECODERS[filters[number].number](payload, filters[number], nbytes)
    if len(payload) != nbytes:
        raise CodecError(f"decodes to {len(payload)} bytes, expected {nbytes}")
    return payload


def _gzip(payload: Bytes, nbytes: int) -> Bytes:
    fast = _libdeflate()
    try:
        if fast is not None:
            return np.frombuffer(fast.zlib_decompress(payload, nbytes + 4), np.uint8)  # 4: a checksum may be inside
        return np.frombuffer(zlib.decompressobj().decompress(payload.data, nbytes + 4), np.uint8)
    except Exception as error:  # libdeflate's own kind of error is not importable where it is absent
        raise CodecError(f"is not what gzip wrote ({error})") from error


def _shuffle(payload: Bytes, filter_: Filter) -> Bytes:
    size = filter_.settings[0] if filter_.settings else 1
    if size <= 1 or len(payload) < size:
        return payload
    whole = len(payload) // size * size
    rows = payload[:whole].reshape(size, -1).T.reshape(-1)
    return np.concatenate([rows, payload[whole:]])


def _fletcher32(payload: Bytes) -> Bytes:
    if len(payload) < 4:
        raise CodecError("is shorter than its checksum")
    data, stored = payload[:-4], int.from_bytes(payload[-4:].tobytes(), "little")
    if stored != _fletcher32_of(data):
        raise CodecError("does not match its checksum")
    return data


def _fletcher32_of(data: Bytes) -> int:
    words = np.concatenate([data, np.zeros(len(data) % 2, np.uint8)]).view(">u2").astype(np.uint64)
    first = second = np.uint64(0)
    for start in range(0, len(words), 1 << 20):  # sums of this many products stay below 2**64
        block = words[start : start + (1 << 20)]
        weights = np.arange(len(block), 0, -1, dtype=np.uint64)
        second = (second + first * np.uint64(len(block)) + (block * weights).sum()) % np.uint64(65535)
        first = (first + block.sum()) % np.uint64(65535)
    # HDF5 folds carries instead of dividing, and so ends with 65535 where a remainder would be 0, unless all is 0.
    low = int(first) or (65535 if words.any() else 0)
    high = int(second) or (65535 if words.any() else 0)
    return high << 16 | low


def _lz4(payload: Bytes, nbytes: int) -> Bytes:
    if len(payload) < 12:
        raise CodecError("is shorter than the head that LZ4 wrote")
    data = payload.tobytes()
    total, block = struct.unpack(">qi", data[:12])
    if not 0 <= total <= nbytes + 4 or block <= 0:
        raise CodecError(f"says that it has {total} bytes in blocks of {block}, expected {nbytes}")
    parts, position, left = [], 12, total
    while left > 0:
        if position + 4 > len(data):
            raise CodecError("ends in the middle of a block")
        (length,) = struct.unpack(">i", data[position : position + 4])
        position += 4
        want = min(block, left)
        part = data[position : position + length] if length > 0 else b""
        if len(part) != length:
            raise CodecError("ends in the middle of a block")
        try:
            parts.append(part if length == want else lz4.block.decompress(part, uncompressed_size=want))
        except (lz4.block.LZ4BlockError, ValueError) as error:
            raise CodecError(f"is not what LZ4 wrote ({error})") from error
        position += length
        left -= want
    return np.frombuffer(b"".join(parts), np.uint8)


def _zstd(payload: Bytes, nbytes: int) -> Bytes:
    try:
        size = zstandard.frame_content_size(payload[:18].tobytes())
        if size > nbytes + 4:
            raise CodecError(f"says that it has {size} bytes, expected {nbytes}")
        whole = zstandard.ZstdDecompressor().decompress(payload.data, max_output_size=nbytes + 4)
        return np.frombuffer(whole, np.uint8)
    except zstandard.ZstdError as error:
        raise CodecError(f"is not what zstd wrote ({error})") from error


def _lzf_decode(payload: Bytes, nbytes: int) -> Bytes:
    decompress = _lzf()
    out = np.empty(nbytes + 4, np.uint8)
    payload = np.ascontiguousarray(payload)
    size = decompress(payload.ctypes.data, len(payload), out.ctypes.data, len(out)) if decompress else 0
    if size == 0:
        raise CodecError("is not what LZF wrote")
    return out[:size]


def _blosc_decode(payload: Bytes, nbytes: int) -> Bytes:
    library = _blosc()
    payload = np.ascontiguousarray(payload)
    sizes = [ctypes.c_size_t() for _ in range(3)]
    if library is None or len(payload) < 16:
        raise CodecError("is shorter than the head that Blosc wrote")
    library.blosc_cbuffer_sizes(payload.ctypes.data, *map(ctypes.byref, sizes))
    if sizes[1].value != len(payload) or not 0 < sizes[0].value <= nbytes + 4:
        raise CodecError(f"says that it has {sizes[0].value} bytes in {sizes[1].value}, expected {nbytes}")
    out = np.empty(nbytes + 4, np.uint8)
    size = library.blosc_decompress_ctx(payload.ctypes.data, out.ctypes.data, len(out), 1)
    if size <= 0:
        raise CodecError(f"is not what Blosc wrote (code {size})")
    return out[:size]


@functools.cache
def _libdeflate() -> Any:
    """Return the binding of libdeflate, which takes two thirds of zlib's time, if it is installed."""
    try:
        return importlib.import_module("deflate")
    except ImportError:
        return None


@functools.cache
def _lzf() -> Callable[..., int] | None:
    """Return the decoder of h5py's own LZF filter, which is a plain function of one of its libraries."""
    try:
        import h5py  # noqa: PLC0415

        function = ctypes.CDLL(h5py.h5z.__file__).lzf_decompress
    except (ImportError, OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    function.restype = ctypes.c_uint
    return function


@functools.cache
def _blosc() -> Any:
    """Return the Blosc library that hdf5plugin brings along, if it is installed."""
    try:
        folder = Path(importlib.import_module("hdf5plugin").PLUGINS_PATH)
        library = ctypes.CDLL(str(next(folder.glob("libh5blosc.*"))))
        library.blosc_cbuffer_sizes.argtypes = [ctypes.c_void_p] * 4
        library.blosc_cbuffer_sizes.restype = None
        library.blosc_decompress_ctx.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        library.blosc_decompress_ctx.restype = ctypes.c_int
    except (ImportError, OSError, AttributeError, StopIteration):
        return None
    return library


_DECODERS: dict[int, Callable[[Bytes, Filter, int], Bytes]] = {
    1: lambda payload, _, nbytes: _gzip(payload, nbytes),
    2: lambda payload, filter_, _: _shuffle(payload, filter_),
    3: lambda payload, *_: _fletcher32(payload),
    32000: lambda payload, _, nbytes: _lzf_decode(payload, nbytes),
    32001: lambda payload, _, nbytes: _blosc_decode(payload, nbytes),
    32004: lambda payload, _, nbytes: _lz4(payload, nbytes),
    32015: lambda payload, _, nbytes: _zstd(payload, nbytes),
}

for _load in (_libdeflate, _lzf, _blosc):
    _load()  # now: a fork during an import in a thread leaves the child waiting for it
