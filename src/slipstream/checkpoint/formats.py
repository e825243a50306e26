"""Checkpoint formats: how to recognize them, and the protocol between the saver and the modules that write files.

Nothing here imports torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from slipstream.errors import CorruptFileError
from slipstream.store.header import MAGIC
from slipstream.store.local import open_regular

if TYPE_CHECKING:
    from slipstream.checkpoint.snapshot import Snapshot
    from slipstream.schema.flatten import Tree

FormatName = Literal["native", "lz4", "pt", "safetensors"]

LZ4_MAGIC = b"\x04\x22\x4d\x18"
ZIP_MAGIC = b"PK\x03\x04"
# Before torch 1.6, torch.save wrote bare pickles, which begin with this opcode.
_PICKLE_OPCODE = b"\x80"
# A safetensors file begins with the size of its header, which is a JSON object.
_SIZE_BYTES = 8


def find_format(path: str | os.PathLike[str]) -> FormatName:
    """Return the format of a checkpoint, recognized by its first bytes and not by its name.

    Reads a few bytes only; never blocks on a FIFO or a device, and does not import torch.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If there is no such file.
        CorruptFileError: If it is not a regular file, or has none of the known formats.
    """
    with open_regular(path) as file:
        head = file.read(16)
        file_bytes = os.fstat(file.fileno()).st_size
    if head.startswith(MAGIC):
        return "native"
    if head.startswith(LZ4_MAGIC):
        return "lz4"
    if head.startswith((ZIP_MAGIC, _PICKLE_OPCODE)):
        return "pt"
    header_bytes = int.from_bytes(head[:_SIZE_BYTES], "little")
    if head[_SIZE_BYTES:].startswith(b"{") and header_bytes < file_bytes:
        return "safetensors"
    if not head:
        raise CorruptFileError(f"{os.fspath(path)}: is empty, expected a checkpoint")
    raise CorruptFileError(
        f"{os.fspath(path)}: is not a checkpoint, it begins with {head[:_SIZE_BYTES]!r}; "
        "expected a native, .pt, .pt.lz4 or .safetensors file"
    )


@dataclass(frozen=True)
class Written:
    """A file that is complete and durable.

    Attributes:
        path: The file, which may have another suffix than was asked for.
        raw_bytes: Size of the state before packing.
        stored_bytes: Size of the file.
    """

    path: Path
    raw_bytes: int
    stored_bytes: int


class CheckpointFormat(Protocol):
    """How a snapshot becomes a file. `AsyncCheckpointSaver.save` takes any object with these members."""

    @property
    def opaque(self) -> bool:
        """Whether the state may contain objects that are not plain data; see `slipstream.schema.flatten.flatten`."""

    def check(self, tree: Tree) -> None:
        """Raise `UnsupportedStateError` if a state cannot be stored. Runs in the call that saves."""

    def write(self, path: Path, snapshot: Snapshot, metadata: Any) -> Written:
        """Write a complete snapshot, durably and atomically. Runs in the background."""
