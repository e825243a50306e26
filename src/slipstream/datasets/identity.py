"""Which file is meant, so that one that changed under us is noticed and a cache of another one is not believed."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import xxhash

from slipstream.errors import CorruptFileError, DatasetError
from slipstream.store.local import open_regular

_EDGE_BYTES = 64 << 10
_SAMPLE_BYTES = 4 << 10
_NUM_SAMPLES = 16


@dataclass(frozen=True)
class Identity:
    """Size, time of the last change, and inode of a file as it was at some moment."""

    size_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Identity:
        """Look at a file.

        Raises:
            FileNotFoundError: If there is none.
            CorruptFileError: If it is not a regular file.
        """
        return cls._from(path, path.stat())

    @classmethod
    def of_descriptor(cls, path: Path, descriptor: int) -> Identity:
        """Look at an open file."""
        return cls._from(path, os.fstat(descriptor))

    @classmethod
    def _from(cls, path: Path, status: os.stat_result) -> Identity:
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise CorruptFileError(f"{path}: is {kind}, expected an HDF5 file")
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)

    def check(self, path: Path, descriptor: int | None = None) -> None:
        """Raise `DatasetError` if the file is not what it was."""
        now = Identity.of(path) if descriptor is None else Identity.of_descriptor(path, descriptor)
        if now != self:
            what = (
                f"it was {self.size_bytes} bytes and is {now.size_bytes}"
                if now.size_bytes != self.size_bytes
                else "it was written to or replaced"
            )
            raise DatasetError(f"{path}: changed since it was opened ({what}); open it again")


def fingerprint(path: Path) -> str:
    """Return a checksum of a file's first and last 64 KiB and of 16 places between them, whatever its size."""
    size = path.stat().st_size
    digest = xxhash.xxh3_64()
    with open_regular(path) as file:
        digest.update(file.read(_EDGE_BYTES))
        for number in range(1, _NUM_SAMPLES + 1):
            file.seek(size * number // (_NUM_SAMPLES + 1))
            digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, size - _EDGE_BYTES))
        digest.update(file.read(_EDGE_BYTES))
    return str(digest.hexdigest())
