"""Read checkpoints of any format, which is detected by content and not by name."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoint.finding import is_run, newest_first, open_checkpoint, open_pieces
from slipstream.checkpoint.formats import find_format
from slipstream.checkpoint.native import NativeFile
from slipstream.checkpoint.portable.format import packed_path, read_portable
from slipstream.checkpoint.portable.torch_file import first_line, require_device
from slipstream.errors import CorruptFileError, FormatVersionError, naming
from slipstream.schema.flatten import flatten
from slipstream.schema.keys import Keys
from slipstream.schema.unflatten import unflatten
from slipstream.store.urls import ObjectPath, as_path
from slipstream.tensors import TORCH
from slipstream.text import install_hint

logger = logging.getLogger(__name__)

__all__ = ["find_format", "load_checkpoint", "move"]

# A save replaces a file by one with another suffix. A load that falls in between looks again.
_ATTEMPTS = 5


def load_checkpoint(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    keys: Keys | None = None,
    weights_only: bool = True,
) -> Any:
    """Load a checkpoint that any of our savers, or ``torch.save``, wrote; compares it with its checksums.

    Never runs code from the file unless `weights_only` is False. Thread-safe: nothing that threads share is changed.
    Decompression is parallel. A delta reads its parents as well.

    Memory is bounded. LZ4 data may expand to 1 GiB, or to 32 times the size of the file if that is more; Python objects
    of a ``.pt`` file may take 1.75 GiB, and three times the size of its content. What exceeds these limits is refused
    before it is allocated, and every file that we write stays below.

    Args:
        path: The file. If ``<path>.lz4`` exists as well, the newer of the two is loaded: a crash during a save may
            leave both. Or a URL: that of a run in an object store, of which the newest intact checkpoint is loaded; of
            one of its checkpoints, such as ``s3://bucket/run/checkpoint_iter_100.slip``; or of a native file.
        device: Where tensors go.
        keys: Load only what is under these keys: one name or pattern such as ``"policy"`` or ``"policy/actor.*"``, or
            a collection of names, patterns and tuples such as ``("optimizer", "state", 0)``. Native files read only the
            tensors that this takes.
        weights_only: Whether to refuse ``.pt`` files that need to run code to be loaded.

    Raises:
        FileNotFoundError: If there is neither file.
        CorruptFileError: If the file is damaged, cut off, or refused.
        FormatVersionError: If a newer release wrote it.
        KeyError: If one of the `keys` matches nothing; names all that do not.
        ConfigurationError: If the device is not available.
        ImportError: If it is a safetensors file, or in an object store, and the package for that is not installed.
        StoreError: If an object store cannot be read.

    Example:
        >>> import torch
        >>> from slipstream import AsyncCheckpointSaver
        >>> with AsyncCheckpointSaver() as saver:
        ...     _ = saver.save_async({"weight": torch.ones(3)}, "/tmp/slipstream-doc/model.pt")
        >>> load_checkpoint("/tmp/slipstream-doc/model.pt")
        {'weight': tensor([1., 1., 1.])}
    """
    require_device(device)
    path = as_path(path)
    if isinstance(path, ObjectPath):
        return _load_object(path, device, keys)
    for _ in range(_ATTEMPTS - 1):
        try:
            return load_file(newest_file(path), device, keys=keys, weights_only=weights_only)
        except FileNotFoundError:
            # Deleted after it was chosen. If there is no other file, the last attempt raises.
            continue
    return load_file(newest_file(path), device, keys=keys, weights_only=weights_only)


def _load_object(url: ObjectPath, device: str | torch.device, keys: Keys | None) -> Any:
    """Load a checkpoint from an object store. Fetches only what `keys` takes."""
    if not is_run(url):
        with NativeFile(open_checkpoint(url)) as file:
            return move(file.load(keys), device)
    failure: Exception | None = None
    for committed in newest_first(url):
        try:
            with NativeFile(open_pieces(committed)) as file:
                return move(file.load(keys), device)
        except (CorruptFileError, FormatVersionError) as error:
            logger.warning("skipping a checkpoint: %s", error)
            failure = error
    raise CorruptFileError(f"{url}: none of its checkpoints is intact") from failure


def move(state: Any, device: str | torch.device) -> Any:
    """Move every tensor of a nested state to a device; tied tensors stay tied, and TensorDicts get the device."""
    if torch.device(device).type == "cpu":
        return state
    tree = flatten(state, opaque=True)
    # Whole storages move, each once: tensors that share memory still do so afterwards.
    moved: dict[int, torch.UntypedStorage] = {}
    leaves = []
    for leaf in tree.leaves:
        if isinstance(leaf, torch.Tensor):
            leaves.append(_transfer(leaf, device, moved))
        else:
            leaves.append(leaf)
    return unflatten(tree.structure, leaves, tree.objects, TORCH)


def newest_file(path: Path) -> Path:
    """Return the file to load for a path: the newer one of the file itself and the compressed one."""
    packed = packed_path(path)
    if packed == path or not packed.is_file():
        return path
    if not path.exists() or packed.stat().st_mtime_ns > path.stat().st_mtime_ns:
        return packed
    return path


def load_file(
    path: Path, device: str | torch.device = "cpu", *, keys: Keys | None = None, weights_only: bool = True
) -> Any:
    """Load exactly this file, without looking for a newer ``<path>.lz4``; otherwise as `load_checkpoint`."""
    # By content: files get renamed.
    kind = find_format(path)
    if kind == "native":
        with NativeFile(path) as file:
            return move(file.load(keys), device)
    if kind == "safetensors":
        # Not by safetensors itself: it knows few devices, and an unknown one would look like damage.
        state = move(_load_safetensors(path), device)
    else:
        state = read_portable(path, compressed=kind == "lz4", device=device, weights_only=weights_only)
    if keys is None:
        return state
    with naming(path):
        tree = flatten(state, opaque=True).select_keys(keys)
    return unflatten(tree.structure, tree.leaves, tree.objects, TORCH)


def _transfer(tensor: torch.Tensor, device: str | torch.device, moved: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Move a tensor with its whole storage; `moved` has the storages that were moved before, by address."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    if address not in moved:
        flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        moved[address] = flat.to(device).untyped_storage()
    # See the moved memory as the tensor saw the old one, so that slices and transposed tensors stay what they were.
    target = torch.empty(0, dtype=tensor.dtype, device=device)
    target.set_(moved[address], tensor.storage_offset(), tensor.shape, tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(target, requires_grad=tensor.requires_grad)
    return target.requires_grad_(tensor.requires_grad)


def _load_safetensors(path: Path) -> Any:
    try:
        from safetensors.torch import load_file as load_tensors  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(
            f"{path}: is a safetensors file, and that package is not installed: {install_hint('safetensors')}"
        ) from error
    try:
        return load_tensors(path)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise CorruptFileError(f"{path}: is not a sound safetensors file ({first_line(error)})") from error
