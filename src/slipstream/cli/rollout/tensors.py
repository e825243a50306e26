"""Rollouts as the files that torch and NumPy read."""
# ruff: noqa: PLC0415 - only callers that have tensors import torch

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import SlipstreamError
from slipstream.store.local import atomic_write


def write_pt(target: Path, batch: Any) -> list[str]:
    """Write a batch with ``torch.save`` as a nested dict of tensors, durably and atomically.

    A pickled TensorDict would need tensordict, of a release that fits, and ``weights_only=False``.
    """
    from slipstream.checkpoint.portable.format import write_portable

    write_portable(target, nested(batch), compress=False)
    return []


def write_npz(target: Path, batch: Any) -> list[str]:
    """Write a batch as named arrays, durably and atomically; returns notes about those that changed their dtype."""
    arrays: dict[str, NDArray[Any]] = {}
    notes: list[str] = []
    for key, tensor in leaves(batch):
        name = "/".join(key)
        if name in arrays:
            raise SlipstreamError(f"two tensors would be called {name!r}, and npz files have no nesting")
        arrays[name], note = array_of(name, tensor)
        notes += note
    # np.savez would take a tensor called "file" for its own argument.
    with atomic_write(target) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return notes


def nested(batch: Any) -> dict[str, Any]:
    """Return a TensorDict as plain dicts of tensors."""
    from tensordict import is_tensor_collection

    return {str(key): nested(value) if is_tensor_collection(value) else value for key, value in batch.items()}


def leaves(batch: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the tensors of a TensorDict by nested key, in order."""
    for key, value in nested(batch).items() if not isinstance(batch, dict) else batch.items():
        if isinstance(value, dict):
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


def array_of(name: str, tensor: Any) -> tuple[NDArray[Any], list[str]]:
    """Return a tensor as an array, and a note if NumPy lacks its dtype: then it is a wider one, of equal values."""
    try:
        return tensor.numpy(), []
    except TypeError:
        array: NDArray[Any] = (tensor.cfloat() if tensor.is_complex() else tensor.float()).numpy()
        dtype = str(tensor.dtype).removeprefix("torch.")
        return array, [f"{name} is {dtype}, which NumPy lacks, and was written as {array.dtype}, without loss"]
