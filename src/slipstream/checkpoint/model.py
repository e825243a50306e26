"""Sizes of models and names of their checkpoints."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from rich.console import Console
from torch.nn.parameter import is_lazy

from slipstream.checks import require_count

# File systems allow 255 bytes for a name; this leaves room for the rest of it and for suffixes such as .lz4.
_MAX_METRIC_BYTES = 100


def format_checkpoint_name(
    base_path: str | os.PathLike[str],
    iteration: int,
    metric_name: str | None = None,
    metric_value: float | None = None,
) -> str:
    """Return ``<base>/checkpoint_iter_1000_reward_123.45.pt``, or without the metric if there is none.

    The result is always a file in `base_path`: in the name of the metric, anything but letters, digits and ``.=+-``
    becomes ``_``, and long names are cut.

    Args:
        base_path: The folder.
        iteration: A whole number.
        metric_name: Name of the metric.
        metric_value: Its value: a number, a NumPy scalar or a tensor with one element.

    Raises:
        ConfigurationError: If `iteration` is not a whole number of at least 0.

    Example:
        >>> format_checkpoint_name("runs/a", 1000, "reward", 123.454)
        'runs/a/checkpoint_iter_1000_reward_123.45.pt'
        >>> format_checkpoint_name("runs/a", 1000, "eval/success rate", 0.5)
        'runs/a/checkpoint_iter_1000_eval_success_rate_0.50.pt'
    """
    name = f"checkpoint_iter_{require_count('iteration', iteration, least=0)}"
    if metric_name is not None and metric_value is not None:
        metric = re.sub(r"[^\w.=+-]", "_", metric_name).encode()[:_MAX_METRIC_BYTES].decode(errors="ignore")
        name += f"_{metric}_{_format_value(float(metric_value))}"
    return str(Path(base_path) / f"{name}.pt")


def _format_value(value: float) -> str:
    # All digits of 1e300 would not fit into the name of a file.
    if abs(value) >= 1e15:
        return f"{value:.2e}"
    return f"{value:.2f}"


def get_model_size(model: torch.nn.Module) -> dict[str, float]:
    """Return ``total_params``, ``trainable_params`` and ``size_mb`` of a model.

    A parameter that is used in several places counts once. `size_mb` is the memory of parameters and buffers in their
    dtypes, in units of 2**20 bytes; memory that several of them share counts once. On the meta device it is the memory
    that they would take. Parameters of lazy modules count 0 until their first forward pass. Of sharded parameters
    (DTensor, FSDP), all elements count as parameters, and the local shard counts as memory.

    Example:
        >>> get_model_size(torch.nn.Linear(10, 10))
        {'total_params': 110, 'trainable_params': 110, 'size_mb': 0.000419...}
    """
    parameters = [parameter for parameter in model.parameters() if not is_lazy(parameter)]
    buffers = [buffer for buffer in model.buffers() if not is_lazy(buffer)]
    return {
        "total_params": sum(parameter.numel() for parameter in parameters),
        "trainable_params": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "size_mb": _memory_bytes([*parameters, *buffers]) / 2**20,
    }


def print_model_info(model: torch.nn.Module, name: str = "Model") -> None:
    """Print the size of a model in one line; see `get_model_size`."""
    size = get_model_size(model)
    # `out` prints the text as it is: a name is neither markup nor wrapped.
    Console().out(
        f"{name}: {size['total_params']:,} parameters, {size['trainable_params']:,} trainable, "
        f"{size['size_mb']:.2f} MB",
        highlight=False,
    )


def _memory_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the memory that tensors cover, where they overlap once."""
    # Group by the identity of the storage: on the meta device, all addresses are 0. The list keeps the storages alive.
    spans: dict[int, list[tuple[int, int]]] = {}
    storages = []
    for tensor in tensors:
        for piece in _dense_pieces(tensor.detach()):
            if piece.numel():
                storage = piece.untyped_storage()
                storages.append(storage)
                spans.setdefault(id(storage), []).append(_span(piece))
    return sum(map(_union, spans.values()))


def _dense_pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with memory that a tensor consists of."""
    # A sharded tensor knows its part of the whole.
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    # Others, such as those of oneDNN, do not say how large they are: count what their elements take.
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.itemsize, (start + last + 1) * tensor.itemsize


def _union(spans: list[tuple[int, int]]) -> int:
    """Return how many bytes spans cover."""
    covered = 0
    reached = 0
    for start, stop in sorted(spans):
        covered += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered
