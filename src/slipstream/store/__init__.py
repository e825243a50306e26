"""Files that are whole or absent, checked on every read, and written in the background."""

from __future__ import annotations

from slipstream.store.atomic import atomic_write, sweep
from slipstream.store.container import Container, ContainerWriter, Reference, write_container
from slipstream.store.index import Chunk, Entry
from slipstream.store.worker import Handle, Worker

__all__ = [
    "Chunk",
    "Container",
    "ContainerWriter",
    "Entry",
    "Handle",
    "Reference",
    "Worker",
    "atomic_write",
    "sweep",
    "write_container",
]
