"""Small helpers around models and the names of their checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape


def format_checkpoint_name(
    base_path: str | os.PathLike[str],
    iteration: int,
    metric_name: str | None = None,
    metric_value: float | None = None,
) -> str:
    """Return ``<base>/checkpoint_iter_1000_reward_123.45.pt``, or without the metric if there is none.

    Example:
        >>> format_checkpoint_name("runs/a", 1000, "reward", 123.454)
        'runs/a/checkpoint_iter_1000_reward_123.45.pt'
    """
    name = f"checkpoint_iter_{iteration}"
    if metric_name is not None and metric_value is not None:
        name += f"_{metric_name.replace('/', '_')}_{metric_value:.2f}"
    return str(Path(base_path) / f"{name}.pt")


def get_model_size(model: torch.nn.Module) -> dict[str, float]:
    """Return ``total_params``, ``trainable_params`` and ``size_mb``: true dtypes, buffers, shared memory once.

    Example:
        >>> get_model_size(torch.nn.Linear(10, 10))
        {'total_params': 110, 'trainable_params': 110, 'size_mb': 0.000419...}
    """
    parameters = list(model.parameters())
    storages = {tensor.data_ptr(): tensor.numel() * tensor.itemsize for tensor in (*parameters, *model.buffers())}
    return {
        "total_params": sum(parameter.numel() for parameter in parameters),
        "trainable_params": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "size_mb": sum(storages.values()) / 2**20,
    }


def print_model_info(model: torch.nn.Module, name: str = "Model") -> None:
    """Print the size of a model in one line."""
    size = get_model_size(model)
    Console().print(
        f"{escape(name)}: {size['total_params']:,} parameters, {size['trainable_params']:,} trainable, "
        f"{size['size_mb']:.2f} MB"
    )
