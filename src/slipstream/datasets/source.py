"""Which recorded file a cache was made of: decided by the contents, and remembered by place and times.

Times alone cannot decide it. A copy of a file has other times and the same contents, and a program that writes to a
file may set its time back. So a cache holds a digest of the whole file. It also holds a stamp of the file whose
contents were compared last: as long as device, inode and both times are those, nothing needs to be read.
"""

from __future__ import annotations

import functools
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from slipstream.store.local import open_regular
from slipstream.threads import parallel_map

STAMP_BYTES = 40

_STAMP = struct.Struct("<QQqq")
_CHECKSUM = struct.Struct("<Q")
_BLOCK_BYTES = 16 << 20
# Local file systems round times to some milliseconds, so a file that is written to twice within that has the same times
# after both. A stamp of a file that changed so recently proves nothing.
_RESOLUTION_NS = 100_000_000


@dataclass(frozen=True)
class Stamp:
    """Place and times of a file.

    Attributes:
        device: The file system.
        inode: The file in it.
        mtime_ns: When the contents changed, which programs can set.
        ctime_ns: When the file changed in any way, which only the system sets.
    """

    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the stamp of a file as it is now."""
        status = path.stat()
        return cls(status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def is_settled(self) -> bool:
        """Whether the next change of the file will change its times."""
        return time.time_ns() - self.ctime_ns > _RESOLUTION_NS

    def to_bytes(self) -> bytes:
        """Return it as bytes that end with a checksum."""
        values = _STAMP.pack(self.device, self.inode, self.mtime_ns, self.ctime_ns)
        return values + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(values))

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """Return the stamp in these bytes, or None if there is none."""
        values = data[: _STAMP.size]
        if data[_STAMP.size :] != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(values)):
            return None
        return cls(*_STAMP.unpack(values))


class Source:
    """A recorded file, whose contents are read at most once to compute their digest.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamp = Stamp.of(path)
        self.size_bytes = path.stat().st_size

    @functools.cached_property
    def digest(self) -> str:
        """A digest of all contents, 32 hexadecimal digits."""
        return compute_digest(self.path)

    def settle(self) -> None:
        """Wait until the next change of the file will change its times, for at most a tenth of a second."""
        remaining_ns = self.stamp.ctime_ns + _RESOLUTION_NS - time.time_ns()
        # With a wrong clock, waiting would not help.
        if 0 < remaining_ns <= _RESOLUTION_NS:
            time.sleep(remaining_ns / 1e9)

    def is_unchanged(self) -> bool:
        """Return whether the contents are still the same; reads them again only if the times changed."""
        now = Source(self.path)
        if now.size_bytes != self.size_bytes:
            return False
        if now.stamp == self.stamp:
            return True
        unchanged = now.digest == self.digest
        self.stamp = now.stamp
        return unchanged


def compute_digest(path: Path, threads: int | None = None) -> str:
    """Return a digest of a whole file, read in parallel: XXH3 of the XXH3 of every 16 MiB, 128 bits each."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size

        def digest_block(offset: int) -> bytes:
            return xxhash.xxh3_128_digest(os.pread(file.fileno(), _BLOCK_BYTES, offset))

        whole = xxhash.xxh3_128()
        for digest in parallel_map(digest_block, range(0, size, _BLOCK_BYTES), threads):
            whole.update(digest)
    return whole.hexdigest()
