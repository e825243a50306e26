"""Which file is meant, so that a change while it is in use is noticed."""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import xxhash

from slipstream.errors import CorruptFileError, DatasetError
from slipstream.store.local import open_regular

logger = logging.getLogger(__name__)

_EDGE_BYTES = 64 << 10
_SAMPLE_BYTES = 4 << 10
_NUM_SAMPLES = 16


@dataclass(frozen=True)
class Identity:
    """A file at some moment.

    Attributes:
        size_bytes: Its size.
        mtime_ns: When its contents changed.
        ctime_ns: When it changed in any way.
        inode: The file in its file system.
        device: The file system.
        sample: Checksum of a sample of its contents, see `fingerprint`.
    """

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int
    sample: str = ""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Look at a file.

        Raises:
            FileNotFoundError: If there is none.
            CorruptFileError: If it is not a regular file.
        """
        return replace(cls._from(path, path.stat()), sample=fingerprint(path))

    @classmethod
    def _from(cls, path: Path, status: os.stat_result) -> Self:
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise CorruptFileError(f"{path}: is {kind}, expected an HDF5 file")
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)

    def check(self, path: Path, descriptor: int | None = None) -> Identity:
        """Return the identity of the file now, and raise if it is not what it was.

        A file whose times changed, but not its size, its place or the sample of its contents, was touched: that is
        logged.

        Args:
            path: The file.
            descriptor: Look at this open file instead of the one that has the name now.

        Raises:
            DatasetError: If it was written to or replaced.
            FileNotFoundError: If it was deleted.
        """
        status = path.stat() if descriptor is None else os.fstat(descriptor)
        now = replace(self._from(path, status), sample=self.sample)
        if now == self:
            return self
        touched = replace(now, mtime_ns=self.mtime_ns, ctime_ns=self.ctime_ns) == self
        if touched and fingerprint(path) == self.sample:
            logger.warning("%s: its times changed while it is in use, its size and a sample of it did not", path)
            return now
        what = "it was written to or replaced"
        if now.size_bytes != self.size_bytes:
            what = f"it was {self.size_bytes} bytes and is {now.size_bytes}"
        raise DatasetError(f"{path}: changed since it was opened ({what}); open it again")


def fingerprint(path: Path) -> str:
    """Return a checksum of a file's first and last 64 KiB and of 16 places between them, whatever its size."""
    digest = xxhash.xxh3_64()
    with open_regular(path) as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        digest.update(os.pread(descriptor, _EDGE_BYTES, 0))
        for number in range(1, _NUM_SAMPLES + 1):
            digest.update(os.pread(descriptor, _SAMPLE_BYTES, size * number // (_NUM_SAMPLES + 1)))
        digest.update(os.pread(descriptor, _EDGE_BYTES, max(0, size - _EDGE_BYTES)))
    return str(digest.hexdigest())
