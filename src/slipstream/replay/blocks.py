"""Many small LZ4 blocks: each compressed alone, any of them decompressed together by one call.

A call for each block would take as long as decompressing it, and would give up the interpreter lock hundreds of times
in a batch. So blocks are joined to an LZ4 frame, which is nothing but a header and independent blocks with their sizes.
What is stored are the blocks alone.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import lz4.block
import lz4.frame
import numpy as np
import xxhash
from numpy.typing import NDArray

from slipstream.errors import CodecError

# Version 1, independent blocks, with the size of the content; blocks of at most 64 kB.
_DESCRIPTOR = struct.Struct("<BBQ")
_FLAGS = 0b0110_1000
_BLOCK_SIZE = 4 << 4
_MAX_BLOCK_BYTES = 64 << 10
_MAGIC = struct.pack("<I", 0x184D2204)
_END = bytes(4)
_STORED = 1 << 31


def compress_parts(content: memoryview, begins: list[int], ends: list[int]) -> list[bytes | memoryview]:
    """Compress parts of some bytes, each into one LZ4 block; those that do not shrink stay as they are."""
    pack = functools.partial(lz4.block.compress, store_size=False)
    blocks: list[bytes | memoryview] = []
    for begin, end in zip(begins, ends, strict=True):
        part = content[begin:end]
        packed = pack(part)
        blocks.append(packed if len(packed) < end - begin else part)
    return blocks


def decompress_parts(blocks: Sequence[bytes], lengths: NDArray[np.int64]) -> bytes:
    """Decompress blocks of known content sizes, one after another. A block of that size is stored as it is.

    Allocates what they should take, and at most 64 kB for each block that lies about it.

    Raises:
        CodecError: If a block is damaged, or all together have another size.
    """
    total = int(lengths.sum())
    try:
        if int(lengths.max(initial=0)) <= _MAX_BLOCK_BYTES:
            content: bytes = lz4.frame.decompress(_frame_of(blocks, lengths, total))
        else:
            content = b"".join(map(_decompress, blocks, lengths.tolist()))
    except (RuntimeError, ValueError, lz4.block.LZ4BlockError) as error:
        raise CodecError(f"a packed unit is damaged ({error})") from error
    if len(content) != total:
        raise CodecError(f"packed units hold {len(content)} bytes, expected {total}")
    return content


def _frame_of(blocks: Sequence[bytes], lengths: NDArray[np.int64], total: int) -> bytes:
    descriptor = _DESCRIPTOR.pack(_FLAGS, _BLOCK_SIZE, total)
    checksum = (xxhash.xxh32_intdigest(descriptor) >> 8) & 0xFF
    sizes = np.fromiter(map(len, blocks), np.int64, len(blocks))
    heads = np.where(sizes == lengths, sizes | _STORED, sizes).astype("<u4").tobytes()
    parts = [b""] * (2 * len(blocks))
    parts[0::2] = [heads[place : place + 4] for place in range(0, len(heads), 4)]
    parts[1::2] = blocks
    return b"".join([_MAGIC, descriptor, bytes([checksum]), *parts, _END])


def _decompress(block: bytes, length: int) -> bytes:
    if len(block) == length:
        return block
    content: bytes = lz4.block.decompress(block, length)
    return content
