"""What a container is read from: an open file, or memory."""

from __future__ import annotations

import os

from slipstream.store.base import Buffer


class OpenFile:
    """A file whose descriptor is closed when the last reference to this object is gone.

    A container may be closed while another thread reads: the descriptor stays valid until that read is done. Counting
    readers under a lock would do the same, but a child that is forked at the wrong moment would find the lock taken.
    """

    __slots__ = ("_close", "descriptor")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        # Kept here, because modules may be gone when the interpreter shuts down.
        self._close = os.close

    def size_bytes(self) -> int:
        """Return the size of the file."""
        return os.fstat(self.descriptor).st_size

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fill `target` from a position; returns how many bytes there were."""
        done = 0
        # The kernel may return less than it was asked for.
        while done < len(target):
            count = os.preadv(self.descriptor, [target[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def __del__(self) -> None:
        self._close(self.descriptor)


class OpenBuffer:
    """Memory that is read as a file."""

    def __init__(self, buffer: Buffer) -> None:
        if not isinstance(buffer, (bytes, bytearray, memoryview)):
            raise TypeError(f"the buffer is a {type(buffer).__qualname__}, expected bytes, a bytearray or a memoryview")
        view = memoryview(buffer)
        if not view.contiguous:
            raise TypeError("the buffer is a memoryview with gaps, expected contiguous memory")
        # A view of zero bytes cannot be cast.
        if not view.nbytes:
            view = memoryview(b"")
        self._bytes = view.cast("B")

    def size_bytes(self) -> int:
        """Return the size of the memory."""
        return len(self._bytes)

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fill `target` from a position; returns how many bytes there were."""
        part = self._bytes[offset : offset + len(target)]
        target[: len(part)] = part
        return len(part)
