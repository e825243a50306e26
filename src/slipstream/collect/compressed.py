"""`CompressedDataCollector`: batches that stay packed in memory while they are trained on (plan C)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from slipstream.rollout.compressed import CompressedTensorDict
from slipstream.rollout.packed import Codecs

# Number of batches that are packed with the same codecs.
_SETTLED_FOR = 16


class CompressedDataCollector:
    """Wraps a collector, and packs each batch that it yields.

    Each batch is a `CompressedTensorDict` that shares no memory with the base collector, which may reuse its batch
    (``return_same_td=True``). All other attributes (``shutdown``, ``set_seed``, ``state_dict``,
    ``update_policy_weights_`` and so on) are those of the base collector.

    Which codec suits a key is measured on the first batch and again every 16 batches.

    Args:
        base_collector: TorchRL's ``Collector``, or anything that yields TensorDicts of shape ``[environment, time]``.
        compression_level: 0 to 12; up to 9 is fast.
        compress: Whether to pack batches. If False, the batches of the base collector are yielded unchanged.
        compress_keys: Keys to pack; by default those that are worth it. See `CompressedTensorDict`.
        cache_bytes: Bytes of decoded data that a batch keeps for the next minibatch.
        group_envs: Number of environments that are packed together.
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
        compress: bool = True,
        compress_keys: Sequence[str | tuple[str, ...]] | None = None,
        cache_bytes: int | None = None,
        group_envs: int | None = None,
        verify: bool = True,
    ) -> None:
        # `compression_level` was the second argument before `compress` was, so a bool there is a mistake.
        if isinstance(compression_level, bool) or not isinstance(compress, bool):
            raise TypeError("compress is a bool and compression_level a whole number; pass both by name")
        self.base_collector = base_collector
        self.compress = compress
        self._codecs: Codecs = {}
        self._options: dict[str, Any] = {
            "compression_level": compression_level,
            "compress_keys": compress_keys,
            "cache_bytes": cache_bytes,
            "group_envs": group_envs,
            "verify": verify,
        }
        self._stats = {"batch_count": 0, "raw_bytes": 0.0, "packed_bytes": 0.0, "pack_s": 0.0}

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the base collector, packed unless `compress` is False."""
        if not self.compress:
            yield from self.base_collector
            return
        for batch in self.base_collector:
            start = time.perf_counter()
            # Codecs chosen for one batch serve the next ones, but batches change as the policy learns.
            if self._stats["batch_count"] % _SETTLED_FOR == 0:
                self._codecs = {}
            packed = CompressedTensorDict(batch, codecs=self._codecs, **self._options)
            sizes = packed.get_stats()
            self._stats["batch_count"] += 1
            self._stats["raw_bytes"] += sizes["raw_bytes"]
            self._stats["packed_bytes"] += sizes["packed_bytes"]
            self._stats["pack_s"] += time.perf_counter() - start
            del batch
            yield packed

    def get_stats(self) -> dict[str, float]:
        """Return ``batch_count, raw_bytes, packed_bytes, compression_ratio`` and the seconds spent packing."""
        ratio = 1.0
        if self._stats["packed_bytes"]:
            ratio = self._stats["raw_bytes"] / self._stats["packed_bytes"]
        return {**self._stats, "compression_ratio": ratio}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the base collector."""
        # While this object is unpickled, it has no base collector yet.
        if name == "base_collector":
            raise AttributeError(name)
        return getattr(self.base_collector, name)

    def __len__(self) -> int:
        """Return the number of batches, if the base collector has a length."""
        return len(self.base_collector)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        """Return True, also if the base collector has no length."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self.base_collector, "shutdown"):
            self.base_collector.shutdown()
