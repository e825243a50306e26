"""`CompressedDataCollector`: batches that stay packed in memory while they are trained on (plan C)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from slipstream.rollout.compressed import CompressedTensorDict


class CompressedDataCollector:
    """Wraps a collector, and packs each batch that it yields.

    What is yielded is a `CompressedTensorDict` in memory of its own: the base collector may reuse its batch
    (``return_same_td=True``) at once. Everything else (``shutdown``, ``set_seed``, ``state_dict``,
    ``update_policy_weights_`` and so on) is the base collector's.

    Args:
        base_collector: TorchRL's ``Collector``, or anything that yields TensorDicts of shape ``[environment, time]``.
        compression_level: 0 to 12; up to 9 is fast.
        compress_keys: What to pack; by default what is worth it. See `CompressedTensorDict`, also for the others.
        cache_bytes: How much decoded data a batch keeps for the next minibatch.
        group_envs: How many environments are packed together.
        verify: Whether to decode every batch once and compare.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> batches = [TensorDict({"observation": torch.zeros(64, 32, 30)}, batch_size=[64, 32])]
        >>> with CompressedDataCollector(batches) as collector:
        ...     for batch in collector:
        ...         for minibatch in batch.minibatches(4):
        ...             print(minibatch.batch_size)
        torch.Size([512])
        torch.Size([512])
        torch.Size([512])
        torch.Size([512])
    """

    def __init__(
        self,
        base_collector: Iterable[Any],
        compression_level: int = 1,
        *,
        compress_keys: Sequence[str | tuple[str, ...]] | None = None,
        cache_bytes: int | None = None,
        group_envs: int | None = None,
        verify: bool = True,
    ) -> None:
        self.base_collector = base_collector
        self._options: dict[str, Any] = {
            "compression_level": compression_level,
            "compress_keys": compress_keys,
            "cache_bytes": cache_bytes,
            "group_envs": group_envs,
            "verify": verify,
        }
        self._stats = {"batch_count": 0, "raw_bytes": 0.0, "packed_bytes": 0.0, "pack_s": 0.0}

    def __iter__(self) -> Iterator[CompressedTensorDict]:
        """Yield the batches of the base collector, packed."""
        for batch in self.base_collector:
            start = time.perf_counter()
            packed = CompressedTensorDict(batch, **self._options)
            sizes = packed.get_stats()
            self._stats["batch_count"] += 1
            self._stats["raw_bytes"] += sizes["raw_bytes"]
            self._stats["packed_bytes"] += sizes["packed_bytes"]
            self._stats["pack_s"] += time.perf_counter() - start
            del batch
            yield packed

    def get_stats(self) -> dict[str, float]:
        """Return ``batch_count, raw_bytes, packed_bytes, compression_ratio`` and the seconds spent packing."""
        ratio = self._stats["raw_bytes"] / self._stats["packed_bytes"] if self._stats["packed_bytes"] else 1.0
        return {**self._stats, "compression_ratio": ratio}

    def __getattr__(self, name: str) -> Any:
        """Return what the base collector has under this name."""
        if name == "base_collector":  # not there yet: this one is being unpickled
            raise AttributeError(name)
        return getattr(self.base_collector, name)

    def __len__(self) -> int:
        """Return how many batches there will be, if the base collector knows."""
        return len(self.base_collector)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        """Be true, though the base collector may not know how many batches there will be."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self.base_collector, "shutdown"):
            self.base_collector.shutdown()
