"""Find the batch to measure: given, saved, the newest of a run, or made up of shapes."""

from __future__ import annotations

import copyreg
import json
import math
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.checks import require_count
from slipstream.errors import ConfigurationError, CorruptFileError, RolloutError, SlipstreamError
from slipstream.rollout.batch import BatchFile
from slipstream.rollout.compressed import CompressedTensorDict
from slipstream.rollout.layout import Key
from slipstream.schema.dtypes import DTYPES, dtype_name
from slipstream.store.header import MAGIC
from slipstream.store.local import open_regular
from slipstream.tensors import TORCH, import_tensordict
from slipstream.trajectory import NEXT

if TYPE_CHECKING:
    from tensordict import TensorDictBase

MEASURED_BYTES = 256 << 20
"""Of a larger batch only so much is measured, whole environments of it: it may be larger than memory."""

NAVRL: dict[str, tuple[tuple[int, ...], str]] = {
    "agents/observation/lidar": ((1, 36, 4), "float32"),
    "agents/observation/state": ((8,), "float32"),
    "agents/observation/direction": ((1, 3), "float32"),
    "agents/observation/dynamic_obstacle": ((1, 5, 10), "float32"),
    "next/agents/observation/lidar": ((1, 36, 4), "float32"),
    "next/agents/observation/state": ((8,), "float32"),
    "next/agents/observation/direction": ((1, 3), "float32"),
    "next/agents/observation/dynamic_obstacle": ((1, 5, 10), "float32"),
    "agents/action": ((3,), "float32"),
    "next/agents/reward": ((1,), "float32"),
    "next/done": ((1,), "bool"),
}
"""What a batch of NavRL's has, for those who have none at hand."""

_ITERATION_KEYS = ("perf/iteration_mean", "perf/iteration", "iteration_mean", "iteration_s")
_TAIL_BYTES = 256 << 10
_EPISODE_STEPS = 100


@dataclass(frozen=True)
class Source:
    """A batch to measure.

    Attributes:
        batch: A TensorDict of shape ``[environment, time]``, or some environments of one.
        name: Where it is from, in words.
        scale: How many times as many environments the whole has.
        made_up: Whether its content is invented.
        iteration_s: How long an iteration took, if the run tells.
    """

    batch: TensorDictBase
    name: str
    scale: float = 1.0
    made_up: bool = False
    iteration_s: float | None = None


def find_batch(batch: Any, num_envs: int, num_steps: int) -> Source:
    """Find the batch that is meant: None, a TensorDict, tensors or shapes by key, a file, or a run folder."""
    if isinstance(batch, CompressedTensorDict):
        batch = batch.to_tensordict()
    if _is_batch(batch):
        return _part(batch, "the batch given")
    if batch is None:
        return _make_up(NAVRL, num_envs, num_steps, "a batch made up in the shapes of NavRL")
    if isinstance(batch, Mapping):
        if _holds_tensors(batch):
            return _part(_from_dict(batch, "the batch"), "the batch given")
        return _make_up(batch, num_envs, num_steps, "a batch made up of the shapes given")
    if isinstance(batch, (str, os.PathLike)):
        path = Path(batch)
        return _from_run(path) if path.is_dir() else _from_file(path)
    raise ConfigurationError(
        f"the batch is a {type(batch).__name__}, expected a TensorDict, a path, or shapes such as "
        '{"lidar": ((36, 4), "float32")}'
    )


def _is_batch(node: Any) -> bool:
    return bool(import_tensordict().is_tensor_collection(node))


def _part(batch: TensorDictBase, name: str) -> Source:
    """Take whole environments of a batch, and only environments and time for its axes."""
    if not batch.batch_size:
        raise RolloutError(f"{name} has no batch size: a rollout has the shape [environment, time, ...]")
    time_dim = batch.names.index("time") if "time" in (batch.names or ()) else min(1, batch.ndim - 1)
    if batch.ndim > time_dim + 1:
        batch = batch.copy().auto_batch_size_(time_dim + 1)
    if batch.ndim < 2:
        return Source(batch, name)
    size = sum(value.numel() * value.element_size() for value in batch.values(include_nested=True, leaves_only=True))
    kept = _kept(batch.batch_size[0], size)
    return Source(batch if kept == batch.batch_size[0] else batch[:kept], name, batch.batch_size[0] / max(1, kept))


def _kept(num_envs: int, size: int) -> int:
    """Return how many environments to measure."""
    return num_envs if size <= MEASURED_BYTES else max(1, num_envs * MEASURED_BYTES // size)


def _from_file(path: Path) -> Source:
    """Read a saved batch; which format it has is told by its content."""
    with open_regular(path) as file:
        head = file.read(8)
    if head == MAGIC:
        return _from_rollout(path)
    if head.startswith(b"PK\x03\x04") or head[:1] == b"\x80":
        return _from_pt(path, zipped=head.startswith(b"PK"))
    raise CorruptFileError(
        f"{path}: is neither a rollout that Slipstream wrote nor a batch that torch.save wrote; "
        "expected a .slip or a .pt file"
    )


def _from_rollout(path: Path) -> Source:
    with BatchFile(path) as file:
        layout = file.layout
        kept = _kept(layout.num_envs, layout.raw_bytes)
        if kept == layout.num_envs or not layout.time_dim:
            return _part(file.load(), str(path))
        return Source(file.load(envs=slice(0, kept)), str(path), layout.num_envs / kept)


def _from_pt(path: Path, *, zipped: bool) -> Source:
    """Load a TensorDict, or a dict of tensors, without running code from the file."""
    try:
        with torch.serialization.safe_globals(_harmless()):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        if isinstance(content, Mapping) and not _is_batch(content) and _holds_tensors(content):
            content = _from_dict(content, str(path))
        if not _is_batch(content):
            raise RolloutError(f"{path}: holds a {type(content).__name__}, expected a TensorDict or a dict of tensors")
        source = _part(content.to("cpu"), str(path))
        # What is mapped is read now, or reading the disk would be measured.
        return replace(source, batch=source.batch.clone())
    except SlipstreamError:
        raise
    except pickle.UnpicklingError as error:
        raise RolloutError(
            f"{path}: holds more than tensors, which only running code from the file could load, and that is refused; "
            f"if you trust it, pack it first: slipstream.save_rollout_compressed(torch.load({str(path)!r}, "
            "weights_only=False), 'batch.slip')"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, IndexError, ImportError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise CorruptFileError(f"{path}: is not a batch that torch can load ({reason})") from error


def _harmless() -> list[Any]:
    """Return what a pickled TensorDict is made with: it makes an empty one and fills it, and runs nothing else."""
    kind = import_tensordict().TensorDict
    reduce = copyreg.dispatch_table.get(kind)
    return [kind, *([reduce(kind({}))[0]] if reduce else [])]


def _holds_tensors(node: Mapping[Any, Any]) -> bool:
    return bool(node) and all(
        isinstance(value, torch.Tensor) or (isinstance(value, Mapping) and _holds_tensors(value))
        for value in node.values()
    )


def _from_dict(node: Mapping[Any, Any], name: str) -> TensorDictBase:
    """Make a TensorDict of nested tensors whose first two axes are environment and time."""
    made: TensorDictBase = import_tensordict().TensorDict(node).auto_batch_size_(2)
    if made.ndim < 2:
        raise RolloutError(f"{name}: its tensors do not begin with the same two axes, environment and time")
    return made


def _from_run(folder: Path) -> Source:
    """Take the newest rollout of a run folder, and how long its iterations took."""
    places = (folder / "rollouts", folder)
    numbered = [(_number(path), path) for place in places for path in place.glob("rollout_*.slip")]
    found = max(numbered, default=None)
    if found is None:
        raise RolloutError(
            f"{folder}: there is no rollout_*.slip in it or in its folder rollouts; run with rollout_save_interval set "
            "to keep some, or give a saved batch"
        )
    source = _from_file(found[1])
    iteration_s = iteration_time(folder / "metrics.jsonl")
    name = source.name + ("" if iteration_s is None else " (iteration time from metrics.jsonl)")
    return replace(source, name=name, iteration_s=iteration_s)


def _number(path: Path) -> int:
    match = re.fullmatch(r"rollout_(\d+)\.slip", path.name)
    return int(match[1]) if match else -1


def iteration_time(path: Path) -> float | None:
    """Return how many seconds an iteration took by the newest line that tells; None if there is none, or no file."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except (OSError, CorruptFileError):
        return None
    for line in reversed(lines):
        try:
            values = json.loads(line)
        except ValueError:
            continue  # cut off, by us or by a crash
        for key in _ITERATION_KEYS:
            value = values.get(key) if isinstance(values, dict) else None
            if isinstance(value, (int, float)) and math.isfinite(value) and value > 0:
                return float(value)
    return None


def _make_up(shapes: Mapping[Any, Any], num_envs: int, num_steps: int, name: str) -> Source:
    """Invent a batch: smooth signals with plateaus, as sensors give them, and ``next`` that follows."""
    require_count("num_envs", num_envs)
    require_count("num_steps", num_steps)
    if not shapes:
        raise ConfigurationError('no shapes were given, expected some such as {"lidar": ((36, 4), "float32")}')
    wanted = {_key(key): _shape(key, value) for key, value in shapes.items()}
    row = sum(num_steps * math.prod(shape) * dtype.itemsize for shape, dtype in wanted.values())
    kept = _kept(num_envs, num_envs * row)
    generator = torch.Generator().manual_seed(0)
    ends = torch.rand((kept, num_steps), generator=generator) < 1 / _EPISODE_STEPS
    batch: TensorDictBase = import_tensordict().TensorDict({}, batch_size=[kept, num_steps], names=[None, "time"])
    for key in sorted(wanted, key=lambda key: key[0] == NEXT):
        shape, dtype = wanted[key]
        twin = key[1:] if key[0] == NEXT else None
        if twin is not None and wanted.get(twin) == (shape, dtype):
            batch.set(key, _following(batch.get(twin), ends))
        else:
            batch.set(key, _signal((kept, num_steps, *shape), dtype, generator))
    return Source(batch, name, num_envs / kept, made_up=True)


def _key(key: Any) -> Key:
    parts = tuple(key.split("/")) if isinstance(key, str) else tuple(key) if isinstance(key, tuple) else ()
    if not parts or not all(isinstance(part, str) and part for part in parts):
        raise ConfigurationError(f"the key {key!r} is not a name, or names joined by slashes")
    return parts


def _shape(key: Any, value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Read ``(36, 4)`` or ``((36, 4), "float32")``."""
    pair = isinstance(value, Sequence) and len(value) == 2 and isinstance(value[1], (str, torch.dtype))
    shape, name = (value[0], value[1]) if pair else (value, "float32")
    if dtype_name(name) not in DTYPES:
        raise ConfigurationError(f"the dtype of {key} is {name!r}, expected one of torch such as float32 or uint8")
    dtype = TORCH.dtype(dtype_name(name))
    sizes = (shape,) if isinstance(shape, int) else shape
    if isinstance(sizes, str) or not isinstance(sizes, Sequence) or any(type(n) is not int or n < 1 for n in sizes):
        raise ConfigurationError(f"the shape of {key} is {shape!r}, expected whole numbers from 1 up such as (36, 4)")
    return tuple(sizes), dtype


def _signal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Invent what changes slowly along the second axis, and is at an end of its range for a third of the time."""
    walk = torch.randn(shape, generator=generator).mul_(0.02)
    walk[:, 0] = torch.randn((shape[0], *shape[2:]), generator=generator)
    walk = walk.cumsum(1).clamp_(-1, 1)
    if dtype == torch.bool:
        return walk >= 1
    if dtype.is_floating_point or dtype.is_complex:
        return walk.to(dtype)
    return walk.add_(1).mul_(100).to(dtype)


def _following(root: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return what each step led to: the next one, but where an episode ended, which is where it had been going."""
    after = torch.cat((root[:, 1:], root[:, -1:]), dim=1)
    after[ends] = root[ends]
    return after
