"""Containers in memory that came from anyone: open them, and refuse those that claim more than allowed."""

from __future__ import annotations

from slipstream.checks import require_count
from slipstream.errors import CorruptFileError
from slipstream.memory import machine_bytes
from slipstream.store.base import Buffer
from slipstream.store.container import Container


def unpacked_limit(max_bytes: int | None) -> int:
    """Return how large something may be when it is unpacked: `max_bytes`, or the memory of this machine."""
    if max_bytes is None:
        return machine_bytes()
    return require_count("max_bytes", max_bytes)


def open_packed(buffer: Buffer, name: str, *, max_entry_bytes: int | None = None) -> Container:
    """Open a container in memory.

    Args:
        buffer: The bytes, in contiguous memory.
        name: What it is, for messages.
        max_entry_bytes: Refuse to decode more than this at once; by default the memory of this machine.

    Raises:
        CorruptFileError: If it is damaged, truncated, or not a container.
        FormatVersionError: If a newer release wrote it.
        TypeError: If the buffer is not bytes, a bytearray or a contiguous memoryview.
    """
    # Without this check, None would mean that the container is a file.
    if buffer is None:
        raise TypeError("the buffer is None, expected bytes, a bytearray or a memoryview")
    return Container(name, buffer=buffer, max_entry_bytes=max_entry_bytes)


def check_claim(name: str, needed_bytes: int, limit: int) -> None:
    """Raise `CorruptFileError` if something claims to be larger than allowed when it is unpacked."""
    if needed_bytes > limit:
        raise CorruptFileError(f"{name}: claims {needed_bytes} bytes when unpacked, expected at most max_bytes={limit}")
