"""Gradients of a minibatch, computed in parts on several threads.

Torch divides single operations between its threads. For minibatches of a thousand samples, an operation takes less time
than waking the threads up. Here each thread computes all operations for its share of the samples instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from slipstream.dist.threads import on_one_thread_each

if TYPE_CHECKING:
    from tensordict import TensorDictBase

R = TypeVar("R")

CHUNK = 4096  # samples at a time where no gradient is needed: enough to be fast, few enough to need little memory

Metrics = dict[str, torch.Tensor]
Losses = Callable[["TensorDictBase"], tuple[Metrics, torch.Tensor]]
"""Returns the metrics of some samples, and their loss; all of them means over samples."""


def sum_gradients(
    losses: Losses, minibatch: TensorDictBase, parameters: Sequence[torch.Tensor], threads: int
) -> tuple[Metrics, list[torch.Tensor]]:
    """Return the metrics of a minibatch and the gradients of its loss, in the order of the parameters.

    Parts are summed up in a fixed order, and each is computed by a single thread. So with two parts or more, the result
    depends on the number of parts in its last bits, but not on the number of torch's threads.

    Args:
        losses: Computes the loss of some samples. Called on several threads at once.
        minibatch: The samples.
        parameters: What to differentiate by.
        threads: Number of parts. With 1, torch decides how many threads to use.

    Raises:
        Exception: The first exception of `losses`, in the order of the parts.
    """
    parts = minibatch.split(math.ceil(len(minibatch) / threads))
    if len(parts) == 1:
        return gradients_of(losses, minibatch, parameters, 1.0)
    done: dict[int, tuple[Metrics, list[torch.Tensor]]] = {}

    def compute(number: int) -> None:
        share = len(parts[number]) / len(minibatch)
        done[number] = gradients_of(losses, parts[number], parameters, share)

    on_one_thread_each(compute, range(len(parts)), len(parts))
    metrics, gradients = done[0]
    for number in range(1, len(parts)):
        other_metrics, other_gradients = done[number]
        for name, value in other_metrics.items():
            metrics[name] += value
        for gradient, other in zip(gradients, other_gradients, strict=True):
            gradient.add_(other)
    return metrics, gradients


def gradients_of(
    losses: Losses, samples: TensorDictBase, parameters: Sequence[torch.Tensor], share: float
) -> tuple[Metrics, list[torch.Tensor]]:
    """Return metrics and gradients of some samples, times their share of the minibatch.

    Args:
        losses: Computes the loss of some samples.
        samples: The samples.
        parameters: What to differentiate by.
        share: Share of these samples in the minibatch.
    """
    metrics, loss = losses(samples)
    gradients = torch.autograd.grad(share * loss, parameters)
    return {name: share * value.detach() for name, value in metrics.items()}, list(gradients)


def in_chunks(index: torch.Tensor, size: int = CHUNK) -> Iterator[torch.Tensor]:
    """Yield consecutive parts of an index, of up to `size` and up to `CHUNK` numbers each; none if it is empty."""
    size = min(size, CHUNK)
    for start in range(0, len(index), size):
        yield index[start : start + size]


def map_chunks(function: Callable[[torch.Tensor], R], index: torch.Tensor, threads: int) -> list[R]:
    """Return the results of a function for consecutive parts of an index, computed on several threads.

    The parts depend on the number of threads, but not on the number of cores.

    Args:
        function: Called on several threads at once, with up to `CHUNK` numbers of samples.
        index: Numbers of samples; at least one.
        threads: Number of threads.

    Raises:
        Exception: The first exception of `function`, in the order of the parts.
    """
    chunks = list(in_chunks(index, math.ceil(len(index) / threads)))
    results: dict[int, R] = {}

    def compute(number: int) -> None:
        results[number] = function(chunks[number])

    _on_threads(compute, range(len(chunks)), threads)
    return [results[number] for number in range(len(chunks))]


def _on_threads(function: Callable[[int], None], items: Sequence[int], threads: int) -> None:
    """Call a function for every item. With one thread, torch decides how many threads an operation uses."""
    if threads > 1:
        on_one_thread_each(function, items, threads)
        return
    for item in items:
        function(item)
