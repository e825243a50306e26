"""Rollouts as bytes: the file format in memory, for sockets, queues, Ray and object stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from slipstream.codecs import Codec
from slipstream.rollout.batch import BatchFile, split_batch
from slipstream.rollout.files import encode_rollout, zstd_level
from slipstream.store.base import Buffer
from slipstream.store.packed import check_claim, open_packed, unpacked_limit

if TYPE_CHECKING:
    from tensordict import TensorDictBase

_NAME = "packed rollout"


def pack_rollout(
    data: TensorDictBase,
    compression_level: int = 9,
    *,
    metadata: Any = None,
    threads: int | None = None,
    codecs: dict[str, Codec] | None = None,
) -> bytes:
    """Pack a rollout into bytes: exactly those that `save_rollout_compressed` writes to a file.

    Every chunk is decoded and compared, bit for bit. The batch may be reused as soon as this returns.

    Args:
        data: A TensorDict of shape ``[environment, time, ...]``.
        compression_level: 0 to 12; up to 9 is fast.
        metadata: A JSON value to store with it.
        threads: Number of threads that encode; one per core by default.
        codecs: How an earlier, similar rollout was packed. Choices made here are added, so pass the same dict, empty at
            first, for every rollout of a stream to save the time of choosing. Clear it from time to time, because
            rollouts change as the policy learns.

    Returns:
        The bytes. They contain no pickle; `unpack_rollout` reads them, and so does `load_rollout` from a file.

    Raises:
        RolloutError: If `data` is not a rollout.
        UnsupportedStateError: If it holds something other than dense tensors.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"observation": torch.zeros(8, 32, 3)}, batch_size=[8, 32])
        >>> message = pack_rollout(batch)
        >>> unpack_rollout(message).batch_size
        torch.Size([8, 32])
    """
    level = zstd_level(compression_level)
    return encode_rollout(split_batch(data), level, {"metadata": metadata}, threads, codecs=codecs)


def unpack_rollout(
    buffer: Buffer, device: str | torch.device | None = None, *, max_bytes: int | None = None
) -> TensorDictBase:
    """Unpack the bytes that `pack_rollout` returned, or the content of a rollout file, bit for bit.

    Safe for bytes from an untrusted source: nothing is unpickled or imported, every checksum is verified, and sizes are
    checked before memory is allocated.

    Args:
        buffer: The bytes, in contiguous memory. They are not copied, and must not change during the call.
        device: Where the tensors go; by default the CPU, and the TensorDict has no device.
        max_bytes: Refuse rollouts that are larger than this when unpacked; by default the memory of this machine. Set
            it for untrusted sources: a few kilobytes can hold gigabytes of zeros.

    Returns:
        A TensorDict in new memory.

    Raises:
        CorruptFileError: If it is damaged, truncated, too large, or not a rollout.
        FormatVersionError: If a newer release packed it.
        TypeError: If it is not bytes, a bytearray or a contiguous memoryview.
    """
    limit = unpacked_limit(max_bytes)
    container = open_packed(buffer, _NAME, max_entry_bytes=limit)
    with BatchFile(container) as file:
        stored_bytes = 0
        for entry in container.entries.values():
            stored_bytes += entry.nbytes
        # The arrays of a valid rollout are about as large as its tensors, or smaller. Forged ones may claim anything.
        needed_bytes = max(file.layout.raw_bytes, stored_bytes // 2)
        check_claim(_NAME, needed_bytes, limit)
        return file.load(device)
