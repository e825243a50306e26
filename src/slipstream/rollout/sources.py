"""Find the batch that `slipstream.advise` measures: in memory, in a ``.slip`` or ``.pt`` file, or in a run folder."""

from __future__ import annotations

import copyreg
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.errors import ConfigurationError, CorruptFileError, RolloutError, SlipstreamError
from slipstream.rollout.batch import BatchFile
from slipstream.rollout.compressed import CompressedTensorDict
from slipstream.run.metrics import find_newest
from slipstream.store.header import MAGIC
from slipstream.store.local import open_regular
from slipstream.tensors import import_tensordict

if TYPE_CHECKING:
    from tensordict import TensorDictBase

# A larger batch may not fit in memory several times, so only some of its environments are measured.
MAX_MEASURED_BYTES = 256 << 20

_ITERATION_KEYS = ("perf/iteration_mean", "perf/iteration", "iteration_mean", "iteration_s")
_MOST_ITERATION_S = 1e9


@dataclass(frozen=True)
class Source:
    """A batch to measure."""

    batch: TensorDictBase  # of shape [environment, time], or some environments of it
    name: str  # its path, or "the batch"
    scale: float = 1.0  # how many times as many environments the whole batch has
    iteration_s: float | None = None  # how long an iteration takes, if a run folder says so


def find_batch(batch: Any) -> Source:
    """Return the batch that a TensorDict, a dict of tensors, or the path of a file or run folder stands for."""
    if isinstance(batch, CompressedTensorDict):
        batch = batch.to_tensordict()
    if isinstance(batch, str | os.PathLike):
        path = Path(batch)
        if path.is_dir():
            return _from_run(path)
        return _from_file(path)
    if not _is_tensordict(batch) and not isinstance(batch, Mapping):
        raise ConfigurationError(
            f"the batch is a {type(batch).__name__}, expected a TensorDict, a dict of tensors, or the path of a .slip "
            "file, a .pt file or a run folder"
        )
    return _from_memory(batch, "the batch")


def _from_memory(content: Any, name: str) -> Source:
    """Keep environment and time as the only batch axes, and no more environments than are measured."""
    batch = content
    if not _is_tensordict(content):
        batch = _from_dict(content, name)
    if not batch.batch_size:
        raise RolloutError(f"{name}: no batch size, expected a rollout of shape [environment, time, ...]")
    time_dim = min(1, batch.ndim - 1)
    if "time" in (batch.names or ()):
        time_dim = batch.names.index("time")
    if batch.ndim > time_dim + 1:
        batch = batch.copy().auto_batch_size_(time_dim + 1)
    if batch.ndim < 2:
        return Source(batch, name)
    leaves = batch.values(include_nested=True, leaves_only=True)
    num_envs = batch.batch_size[0]
    num_measured = _num_measured(num_envs, sum(leaf.numel() * leaf.element_size() for leaf in leaves))
    if num_measured < num_envs:
        batch = batch[:num_measured]
    return Source(batch, name, num_envs / max(1, num_measured))


def _num_measured(num_envs: int, batch_bytes: int) -> int:
    if batch_bytes <= MAX_MEASURED_BYTES:
        return num_envs
    return max(1, num_envs * MAX_MEASURED_BYTES // batch_bytes)


def _is_tensordict(value: Any) -> bool:
    return bool(import_tensordict().is_tensor_collection(value))


def _from_dict(content: Any, name: str) -> TensorDictBase:
    if not _has_only_tensors(content):
        kind = type(content).__name__
        raise RolloutError(f"{name}: contains a {kind}, expected a TensorDict or a dict that maps names to tensors")
    batch: TensorDictBase = import_tensordict().TensorDict(content).auto_batch_size_(2)
    if batch.ndim < 2:
        raise RolloutError(f"{name}: the tensors do not begin with the same two axes, environment and time")
    return batch


def _has_only_tensors(node: Any) -> bool:
    if not isinstance(node, Mapping) or not node:
        return False
    for key, value in node.items():
        if not isinstance(key, str) or not (isinstance(value, torch.Tensor) or _has_only_tensors(value)):
            return False
    return True


def _from_file(path: Path) -> Source:
    """Read a saved batch. Its content tells the format, not its name."""
    with open_regular(path) as file:
        head = file.read(8)
    if head == MAGIC:
        return _from_slip(path)
    # torch.save writes a zip archive; before version 1.6 it wrote a pickle.
    is_zip = head.startswith(b"PK\x03\x04")
    if is_zip or head.startswith(b"\x80"):
        return _from_pt(path, is_zip=is_zip)
    raise CorruptFileError(
        f"{path}: neither a rollout written by Slipstream nor a batch written by torch.save; "
        "expected a .slip or .pt file"
    )


def _from_slip(path: Path) -> Source:
    with BatchFile(path) as file:
        layout = file.layout
        num_measured = _num_measured(layout.num_envs, layout.raw_bytes)
        if num_measured == layout.num_envs or not layout.time_dim:
            return _from_memory(file.load(), str(path))
        return Source(file.load(envs=slice(0, num_measured)), str(path), layout.num_envs / num_measured)


def _from_pt(path: Path, *, is_zip: bool) -> Source:
    """Load a TensorDict or a dict of tensors without running code from the file."""
    try:
        with torch.serialization.safe_globals(_tensordict_globals()):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        source = _from_memory(content, str(path))
        # Read memory-mapped tensors now. Otherwise the first measurement would include the disk.
        return replace(source, batch=source.batch.to("cpu").clone())
    except (SlipstreamError, OSError):
        raise
    except pickle.UnpicklingError as error:
        raise RolloutError(
            f"{path}: contains more than tensors, and loading that would run code from the file; if you trust it, "
            f"convert it first: slipstream.save_rollout_compressed(torch.load({str(path)!r}, weights_only=False), "
            "'batch.slip')"
        ) from error
    except Exception as error:
        # A damaged file can raise almost anything.
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise CorruptFileError(f"{path}: torch cannot load it ({reason})") from error


def _tensordict_globals() -> list[Any]:
    """Return what a pickled TensorDict refers to: its class, and the function that fills an empty one."""
    kind = import_tensordict().TensorDict
    allowed = [kind]
    reduce = copyreg.dispatch_table.get(kind)
    if reduce is not None:
        allowed.append(reduce(kind({}))[0])
    return allowed


def _from_run(folder: Path) -> Source:
    """Take the newest rollout of a run folder, and how long an iteration of the run took."""
    rollouts = [*folder.glob("rollouts/rollout_*.slip"), *folder.glob("rollout_*.slip")]
    if not rollouts:
        raise RolloutError(
            f"{folder}: no rollout_*.slip in this folder or in its subfolder rollouts; train with "
            "rollout_save_interval=N to save some, or give the file of a batch"
        )
    source = _from_file(max(rollouts, key=_iteration_and_path))
    return replace(source, iteration_s=find_newest(folder / "metrics.jsonl", _ITERATION_KEYS, _MOST_ITERATION_S))


def _iteration_and_path(path: Path) -> tuple[int, Path]:
    match = re.fullmatch(r"rollout_(\d+)\.slip", path.name)
    if match is None:
        return -1, path
    return int(match[1]), path
