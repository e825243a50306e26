"""Reading checkpoints of any format, found by content and not by name."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import torch

from slipstream.checkpoint.native import NativeFile
from slipstream.checkpoint.portable import read_portable
from slipstream.errors import CorruptFileError
from slipstream.schema.flatten import flatten
from slipstream.schema.structure import matching
from slipstream.schema.unflatten import unflatten
from slipstream.store.header import MAGIC
from slipstream.store.local import open_regular
from slipstream.tensors import TORCH
from slipstream.text import install_hint

Format = Literal["native", "lz4", "pt", "safetensors"]

_LZ4 = b"\x04\x22\x4d\x18"
_ZIP = b"PK\x03\x04"


def find_format(path: Path) -> Format:
    """Tell the format of a checkpoint from its first bytes.

    Raises:
        CorruptFileError: If it is none that we read.
    """
    with open_regular(path) as file:
        head = file.read(16)
    if head.startswith(MAGIC):
        return "native"
    if head.startswith(_LZ4):
        return "lz4"
    if head.startswith(_ZIP) or head[:1] == b"\x80":  # a zip, or a bare pickle as torch wrote before 1.6
        return "pt"
    if len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return "safetensors"
    raise CorruptFileError(f"{path}: is {'empty' if not head else 'not a checkpoint of any format that is known'}")


def load_checkpoint(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    keys: Collection[str] | None = None,
    weights_only: bool = True,
) -> Any:
    """Load a checkpoint that any of our savers, or ``torch.save``, wrote; checks every checksum on the way.

    Never runs code from the file unless `weights_only` is False. Decompression is parallel. A delta reads its parents
    as well. Memory is bounded: LZ4 data may expand to 1 GiB, or to 32 times the size of the file if that is more, and
    what exceeds that is refused before it is allocated (every file that we write stays below).

    Args:
        path: The file; if it is absent, ``<path>.lz4`` is tried.
        device: Where tensors go.
        keys: Load only what is under these paths, such as ``"policy"`` or ``"policy/actor.*"``; native files read only
            the tensors that takes.
        weights_only: Whether to refuse ``.pt`` files that need to run code to be loaded.

    Raises:
        FileNotFoundError: If there is neither file.
        CorruptFileError: If the file is damaged, cut off, or refused.
        FormatVersionError: If a newer release wrote it.
        KeyError: If nothing in it matches `keys`.
        ImportError: If it is a safetensors file, and that package is not installed.

    Example:
        >>> import torch
        >>> from slipstream import AsyncCheckpointSaver
        >>> with AsyncCheckpointSaver() as saver:
        ...     _ = saver.save_async({"weight": torch.ones(3)}, "/tmp/slipstream-doc/model.pt")
        >>> load_checkpoint("/tmp/slipstream-doc/model.pt")
        {'weight': tensor([1., 1., 1.])}
    """
    path = Path(path)
    packed = path.with_name(path.name + ".lz4")
    if not path.exists() and packed.exists():
        path = packed
    kind = find_format(path)
    if kind == "native":
        with NativeFile(path) as file:
            return move(file.load(keys), device)
    if kind == "safetensors":
        state = _load_safetensors(path, device)
    else:
        state = read_portable(path, compressed=kind == "lz4", device=device, weights_only=weights_only)
    return state if keys is None else _select(path, state, tuple(keys))


def move(state: Any, device: str | torch.device) -> Any:
    """Move every tensor of a nested state to a device; tied tensors stay tied."""
    if torch.device(device).type == "cpu":
        return state
    tree = flatten(state, opaque=True)
    moved: dict[int, torch.Tensor] = {}
    leaves = []
    for leaf in tree.leaves:
        if isinstance(leaf, torch.Tensor):
            leaves.append(_transfer(leaf, device, moved))
        else:
            leaves.append(leaf)
    return unflatten(tree.structure, leaves, tree.objects, TORCH)


def _transfer(tensor: torch.Tensor, device: str | torch.device, moved: dict[int, torch.Tensor]) -> torch.Tensor:
    """Move a tensor with its whole storage; `moved` has the storages that were moved before, by address."""
    key = tensor.untyped_storage().data_ptr()
    if key not in moved:
        flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
        moved[key] = flat.to(device)
    target = torch.empty(0, dtype=tensor.dtype, device=device)
    target.set_(moved[key].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(target, requires_grad=tensor.requires_grad)
    return target.requires_grad_(tensor.requires_grad)


def _load_safetensors(path: Path, device: str | torch.device) -> Any:
    try:
        from safetensors.torch import load_file  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(
            f"{path}: is a safetensors file, and that package is not installed: {install_hint('safetensors')}"
        ) from error
    try:
        return load_file(path, device=str(device))
    except Exception as error:
        raise CorruptFileError(f"{path}: is not a sound safetensors file ({error})") from error


def _select(path: Path, state: Any, keys: tuple[str, ...]) -> Any:
    selected = flatten(state, opaque=True).select(matching(keys))
    if selected is None:
        raise KeyError(f"{path}: nothing in it matches {', '.join(map(repr, keys))}")
    return unflatten(selected.structure, selected.leaves, selected.objects, TORCH)
