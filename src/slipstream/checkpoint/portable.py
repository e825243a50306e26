"""Portable checkpoints: what ``torch.save`` writes, plain (``.pt``) or inside standard LZ4 frames (``.pt.lz4``).

Both are read without Slipstream: by ``torch.load``, after ``lz4 -d`` if need be.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import lz4.frame
import numpy as np
import torch

from slipstream.codecs.bytes import (
    FRAME_BYTES,
    compress_frames,
    content_bytes,
    content_limit,
    decompress_frames,
    find_frames,
    ratio_padding,
)
from slipstream.errors import CodecError, CorruptFileError, WriteError
from slipstream.memory import machine_bytes
from slipstream.store.local import atomic_write, open_regular

_SAMPLE_BYTES = 64 << 10
_WORTHWHILE = 0.98


# What pickled NumPy arrays and scalars, such as random states, are made with: it builds arrays and runs nothing.
_HARMLESS = [
    np.ndarray,
    np.dtype,
    np.array(0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    *(
        getattr(np.dtypes, name)
        for name in np.dtypes.__all__
        if name not in ("ObjectDType", "StringDType", "VoidDType")
    ),
]


class _FrameWriter(io.RawIOBase):
    """A file that packs what is written to it into LZ4 frames; counts the bytes that came in."""

    def __init__(self, file: BinaryIO, level: int, threads: int | None) -> None:
        self._file = file
        self._level = level
        self._threads = threads
        self._pending = bytearray()
        self._packed_bytes = 0
        self.raw_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.raw_bytes += len(view)
        self._pending += view
        if len(self._pending) >= 4 * FRAME_BYTES:
            self._pack(len(self._pending) // FRAME_BYTES * FRAME_BYTES)
        return len(view)

    def finish(self) -> None:
        """Pack what is left."""
        self._pack(len(self._pending))
        for padding in ratio_padding(self.raw_bytes, self._packed_bytes):
            self._file.write(padding)

    def _pack(self, count: int) -> None:
        block = bytes(self._pending[:count])
        del self._pending[:count]
        for frame in compress_frames(block, self._useful_level(block), self._threads):
            self._file.write(frame)
            self._packed_bytes += len(frame)

    def _useful_level(self, block: bytes) -> int:
        """Return the level asked for, or 0 where the slow search would find nothing: it cannot shrink floats."""
        sample = block[len(block) // 2 :][:_SAMPLE_BYTES]
        packed = lz4.frame.compress(sample, compression_level=self._level)
        return self._level if len(packed) < _WORTHWHILE * len(sample) else 0


def write_portable(
    path: str | os.PathLike[str], state: Any, *, compress: bool, level: int = 9, threads: int | None = None
) -> tuple[Path, int, int]:
    """Write a state with ``torch.save``, durably and atomically; blocks until it is done.

    Args:
        path: The file; ``.lz4`` is added if `compress`.
        state: Anything that can be pickled.
        compress: Whether to put it into LZ4 frames.
        level: LZ4 level, 0 to 12; blocks that do not shrink are stored whatever the level.
        threads: How many threads compress; by default one per core.

    Returns:
        The path written, the bytes that ``torch.save`` produced, and the bytes in the file.
    """
    target = Path(f"{os.fspath(path)}.lz4" if compress else path)
    with atomic_write(target) as file:
        if compress:
            writer = _FrameWriter(file, level, threads)
            _torch_save(state, cast("BinaryIO", writer))
            writer.finish()
            raw = writer.raw_bytes
        else:
            _torch_save(state, file)
            raw = file.tell()
    return target, raw, target.stat().st_size


def _torch_save(state: Any, file: BinaryIO) -> None:
    """Save with torch, and raise why a write failed: torch hides it behind another error on the way out."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, WriteError):
            reason = reason.__context__
        if reason is None:
            raise
        raise reason from None


def read_portable(path: Path, *, compressed: bool, device: Any, weights_only: bool) -> Any:
    """Read what ``torch.save`` wrote; checks every byte of tensors against its checksum first.

    Raises:
        CorruptFileError: If the file is damaged, expands beyond `content_limit`, or holds what only running its code
            could load.
    """
    with open_regular(path) as file:
        content = io.BytesIO(file.read())
    if compressed:
        content = _decompress(path, content)
    _check_zip(path, content)
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            return torch.load(content, map_location=device, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if weights_only and "weights_only" in str(error).lower().replace("weights only", "weights_only"):
            raise CorruptFileError(
                f"{path}: holds objects that only running code from the file could load, which is refused; "
                "load_checkpoint(..., weights_only=False) allows it if you trust the author of the file"
            ) from error
        raise CorruptFileError(f"{path}: is not a checkpoint that torch can load ({_first_line(error)})") from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, IndexError, ImportError) as error:
        raise CorruptFileError(f"{path}: is not a checkpoint that torch can load ({_first_line(error)})") from error


def _decompress(path: Path, packed: io.BytesIO) -> io.BytesIO:
    """Return the content of LZ4 frames. A small file that claims a lot of content is refused before it is allocated."""
    data = packed.getbuffer()
    limit = content_limit(len(data))
    try:
        # Counting takes no memory, so count everything that could fit: the error can then say how much there is.
        frames = find_frames(data, max_bytes=machine_bytes())
        size = content_bytes(frames)
        if size > limit:
            raise CorruptFileError(
                f"{path}: {len(data)} bytes of LZ4 data hold {size} bytes, more than the limit of {limit}; "
                "if you trust the file, decompress it with `lz4 -d` and load the result"
            )
        # Decompress into the memory of the stream itself: joining pieces would take the size twice.
        content = io.BytesIO(bytes(size))
        decompress_frames(data, frames, content.getbuffer())
    except CodecError as error:
        raise CorruptFileError(f"{path}: {error}") from error
    return content


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def _check_zip(path: Path, content: io.BytesIO) -> None:
    """Compare the checksums that torch wrote: torch itself does not look at them."""
    magic = content.read(2)
    content.seek(0)
    if magic != b"PK":
        return  # the format of torch before 1.6 has none
    limit = content_limit(content.getbuffer().nbytes)
    try:
        with zipfile.ZipFile(content) as archive:
            size = sum(member.file_size for member in archive.infolist())
            # torch.save does not compress, but torch.load would expand an archive that is.
            damaged = archive.testzip() if size <= limit else None
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, OSError, zlib.error, struct.error) as error:
        raise CorruptFileError(f"{path}: is damaged or cut off ({_first_line(error)})") from error
    if size > limit:
        raise CorruptFileError(f"{path}: its members claim {size} bytes, more than the limit of {limit}")
    if damaged is not None:
        raise CorruptFileError(f"{path}: is damaged: {damaged} does not match its checksum")
    content.seek(0)
