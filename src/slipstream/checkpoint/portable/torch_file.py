"""Read and write what ``torch.save`` writes; the file may be anything that is open and seekable.

`load_untrusted` never runs code from the file and uses nothing that threads share. It reads the archive itself
(`slipstream.checkpoint.portable.archive`) and runs the pickle on a machine that can only build data
(`slipstream.checkpoint.portable.unpickle`). `load_trusted` calls ``torch.load``, which runs what the file says.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

from slipstream.checkpoint.formats import ZIP_MAGIC
from slipstream.checkpoint.portable.archive import Archive
from slipstream.checkpoint.portable.inert import BASE_ALLOWANCE_BYTES, CONTENT_FACTOR, RefusedNameError
from slipstream.checkpoint.portable.unpickle import Unpickler
from slipstream.errors import ConfigurationError, CorruptFileError, SlipstreamError, WriteError

# How files of torch before version 1.6 begin: with the pickle of a number.
_LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."


def save_torch(state: Any, file: BinaryIO) -> None:
    """Save with torch, and raise why a write failed: torch hides it behind another error."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # The archive writer of torch fails again when it is closed, so the first error is the context of another one.
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, WriteError):
            reason = reason.__context__
        if reason is None:
            raise
        raise reason from None


def load_untrusted(file: BinaryIO, device: Any) -> Any:
    """Load a checkpoint without running code from it, and compare what is loaded with its checksums.

    Classes that a program allows with ``torch.serialization.add_safe_globals`` are refused as well: torch and other
    libraries add to that list, too, so it does not say what the user trusts.

    Args:
        file: The file.
        device: Where tensors go: anything that ``torch.load`` takes as ``map_location``.

    Raises:
        CorruptFileError: If it is damaged, or holds anything but data.
        ConfigurationError: If the device is not available.
    """
    archive = _open_archive(file)
    if archive is None:
        raise CorruptFileError(
            "is in the format of torch before 1.6, which has no checksums; if you trust its author, convert it: "
            "torch.save(torch.load(path, weights_only=True), path)"
        )
    # Old versions of torch do not record it, and torch takes their files for little-endian.
    order = b"little"
    if "byteorder" in archive:
        order = archive.read("byteorder")
    if order != b"little":
        raise CorruptFileError(f"has byte order {order[:20]!r}, expected b'little'; load it with weights_only=False")
    allowance = BASE_ALLOWANCE_BYTES + CONTENT_FACTOR * archive.nbytes
    unpickler = Unpickler(archive.read("data.pkl"), _storages(archive, device), allowance)
    try:
        return unpickler.load()
    except RefusedNameError as error:
        raise CorruptFileError(
            f"holds objects that only running code from the file could load, which is refused ({str(error)[:200]}); "
            "load_checkpoint(..., weights_only=False) allows it if you trust the author of the file"
        ) from error
    except pickle.UnpicklingError as error:
        raise CorruptFileError(
            f"is not a checkpoint that torch.save writes by default ({first_line(error)})"
        ) from error


def load_trusted(file: BinaryIO, device: Any) -> Any:
    """Load a checkpoint with ``torch.load``, which runs what the file says, after comparing it with its checksums.

    Args:
        file: The file.
        device: Where tensors go: anything that ``torch.load`` takes as ``map_location``.

    Raises:
        CorruptFileError: If it is damaged, or not a checkpoint of torch.
    """
    archive = _open_archive(file)
    if archive is not None:
        archive.verify()
    file.seek(0)
    try:
        # Torch cannot map a file object into memory, so its default for that must not apply.
        return torch.load(file, map_location=device, weights_only=False, mmap=False)
    except (SlipstreamError, MemoryError):
        raise
    except Exception as error:
        # The content matches its checksums, so that the error comes from a device, or from a class that it needs. But
        # torch compares more fields of the archive than `Archive`.
        is_damaged = isinstance(error, pickle.UnpicklingError) or "PytorchStreamReader" in str(error)
        if archive is not None and archive.has_checksums and not is_damaged:
            raise
        raise CorruptFileError(f"is not a checkpoint that torch can load ({first_line(error)})") from error


def is_trusted(weights_only: bool | None) -> bool:
    """Return whether code from a file may run. The environment can forbid it, and change what None means."""
    if _is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        return False
    if weights_only is None:
        return _is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    return not weights_only


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "y", "yes", "true")


def require_device(device: str | torch.device) -> None:
    """Raise `ConfigurationError` unless tensors can be put on a device."""
    try:
        torch.empty(0, device=device)
    # Torch without CUDA raises an AssertionError, and an unknown name a RuntimeError.
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigurationError(f"device {str(device)!r} is not available ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """Return the message of an error without the advice that torch appends to it."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def _open_archive(file: BinaryIO) -> Archive | None:
    """Return the archive in a file, or None if it has the format of torch before version 1.6."""
    file.seek(0)
    head = file.read(len(_LEGACY_MAGIC))
    if head == _LEGACY_MAGIC:
        return None
    if not head.startswith(ZIP_MAGIC):
        raise CorruptFileError("is not a checkpoint that torch can load (neither an archive nor a legacy file)")
    archive = Archive(file)
    if "constants.pkl" in archive:
        raise CorruptFileError("is a TorchScript archive, expected a checkpoint; load it with torch.jit.load")
    # Other libraries write archives, too. This raises if it is one of theirs.
    archive.size("data.pkl")
    return archive


def _storages(archive: Archive, device: Any) -> Callable[[str, str], torch.UntypedStorage]:
    """Return a function that loads the memory of tensors by key, each once, so that tied tensors stay tied."""
    loaded: dict[str, torch.UntypedStorage] = {}

    def load(key: str, location: str) -> torch.UntypedStorage:
        # The name is looked up in the archive, so that a key cannot reach other files.
        if key not in loaded:
            name = f"data/{key}"
            memory = torch.empty(archive.size(name), dtype=torch.uint8, device="cpu")
            archive.read_into(name, memory.numpy())
            loaded[key] = _put_on_device(memory.untyped_storage(), location, device)
        return loaded[key]

    return load


def _put_on_device(storage: torch.UntypedStorage, location: str, device: Any) -> torch.UntypedStorage:
    """Move a storage to where ``map_location`` says; `location` is the device that it was saved from."""
    # The kinds of values that `torch.load` accepts.
    if callable(device):
        moved: torch.UntypedStorage | None = device(storage, location)
        if moved is not None:
            return moved
    elif isinstance(device, dict):
        location = str(device.get(location, location))
    elif device is not None:
        location = str(device)
    # Not `storage.to`: this function knows the devices of other vendors.
    restore: Callable[..., torch.UntypedStorage] = torch.serialization.default_restore_location
    try:
        return restore(storage, location)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"device {location[:40]!r} is not available ({first_line(error)})") from error
