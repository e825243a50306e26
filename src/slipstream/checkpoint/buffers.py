"""States as bytes: the native checkpoint format in memory, for sockets, queues, Ray and object stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.checkpoint.layout import TABLE
from slipstream.checkpoint.native import NativeFile, encode_native
from slipstream.errors import naming
from slipstream.schema.structure import Leaf, leaves_of
from slipstream.schema.values import Json
from slipstream.store.base import Buffer
from slipstream.store.container import Container
from slipstream.store.packed import check_claim, open_packed, unpacked_limit

_NAME = "packed state"


def pack_state(state: Any, *, compress: bool = True, threads: int | None = None) -> bytes:
    """Pack a state into bytes: exactly those of a native checkpoint file of it, without metadata.

    Deterministic: equal states, with dicts in the same order and memory shared in the same way, give the same bytes.
    Two things are exceptions: Python may order equal sets differently, and tensors that overlap are stored with what
    lies between their elements. The state may change as soon as this returns.

    Args:
        state: Nested dicts, lists, tuples and TensorDicts of tensors, arrays and plain values: what a native checkpoint
            can store. Tensors on other devices are copied to the host.
        compress: Whether to pack the content. Checksums are there in any case.
        threads: Number of threads that encode; one per core by default. A small state needs only the caller's.

    Returns:
        The bytes. They contain no pickle; `unpack_state` reads them, and so does `load_checkpoint` from a file.

    Raises:
        UnsupportedStateError: If the state contains anything that cannot be stored as data. Names its key.

    Example:
        >>> import torch
        >>> message = pack_state({"step": 3, "position": torch.zeros(128, 3)})
        >>> unpack_state(message)["position"].shape
        torch.Size([128, 3])
    """
    return encode_native(state, threads=threads, compress=compress)


def unpack_state(buffer: Buffer, *, max_bytes: int | None = None) -> Any:
    """Unpack the bytes that `pack_state` returned, or the content of a native checkpoint file, bit for bit.

    Safe for bytes from an untrusted source: nothing is unpickled or imported by name, every checksum and digest is
    verified, and sizes are checked before memory is allocated. No file is read.

    Args:
        buffer: The bytes, in contiguous memory. They are not copied, and must not change during the call.
        max_bytes: Refuse states whose tensors and arrays are larger than this in total; by default the memory of this
            machine. Tensors that share memory, and elements that do, count each. The call may take twice as much for
            a moment. Set it for untrusted sources: a few kilobytes can hold gigabytes of zeros.

    Returns:
        The state in new memory, with tensors on the CPU.

    Raises:
        CorruptFileError: If it is damaged, truncated, too large, not a state, or stored against another checkpoint.
        FormatVersionError: If a newer release packed it.
        TypeError: If it is not bytes, a bytearray or a contiguous memoryview.
    """
    limit = unpacked_limit(max_bytes)
    container = open_packed(buffer, _NAME)
    with NativeFile(container) as file, naming(_NAME):
        leaves = list(leaves_of(file.structure))
        _check_claims(container, leaves, limit)
        return file.build(file.structure, leaves)


def _check_claims(container: Container, leaves: Sequence[tuple[Leaf, Json]], limit: int) -> None:
    """Raise `CorruptFileError` if a state claims more memory than allowed, before anything is decoded."""
    stored_bytes = 0
    for name, entry in container.entries.items():
        # The table is not part of the state. The reader checks that it is smaller than the buffer.
        if name != TABLE:
            stored_bytes += entry.nbytes
    built_bytes = sum(leaf.nbytes for leaf, _ in leaves)
    # Leaves may share memory, and so may the elements of one. A copy of such a leaf, or an operation, takes all of it.
    check_claim(_NAME, max(stored_bytes, built_bytes), limit)
