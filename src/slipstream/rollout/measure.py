"""Measure on this machine what packing a batch costs and saves. `advise` decides by these numbers."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.codecs import Codec
from slipstream.errors import ConfigurationError
from slipstream.rollout.batch import load_rollout, split_batch
from slipstream.rollout.compressed import CompressedTensorDict
from slipstream.rollout.files import RolloutFile, codec_for, zstd_level
from slipstream.rollout.layout import Field, Layout, Rollout
from slipstream.rollout.storage import RolloutStorage
from slipstream.store.writer import DEFAULT_CHUNK_BYTES
from slipstream.text import plural
from slipstream.threads import default_threads, parallel_map

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Progress = Callable[[str], None]

EPISODE_ENDS = "(episode ends)"
# The default of `CompressedTensorDict`: its cache takes this fraction of the batch.
_CACHE_FRACTION = 16
# Repeat a measurement up to this often, until it has taken this long in total.
_MAX_REPEATS = 5
_LONG_S = 1.0


@dataclass(frozen=True)
class KeyNumbers:
    """What one tensor of the batch packs into, together with its copy under ``next``."""

    key: str  # nested key, joined by slashes
    dtype: str
    shape: tuple[int, ...]  # without environment and time
    with_next: bool  # whether `raw_bytes` includes the copy under ``next``, which is stored once
    raw_bytes: int  # size in the batch
    packed_bytes: int  # size in a file
    encode_cpu_s: float
    decode_cpu_s: float
    packed_in_c: bool  # keys that are small or incompressible stay raw in plan C


@dataclass(frozen=True)
class Measured:
    """What was measured. Times are wall time with all threads unless their name contains ``cpu``."""

    batch_size: tuple[int, ...]
    num_envs: int
    num_steps: int  # per environment
    keys: tuple[KeyNumbers, ...]
    raw_bytes: int  # all tensors, as plan A keeps them
    distinct_bytes: int  # without the observations that ``next`` repeats: what a save copies
    file_bytes: int  # the file that plan B writes
    copy_s: float  # copying the batch, shared observations once; every way of packing starts with it
    encode_s: float  # packing the copy
    encode_cpu_s: float
    decode_s: float  # unpacking it
    decode_cpu_s: float
    load_s: float  # loading a file that the system has cached, including checksums
    save_call_s: float  # how long `RolloutStorage.save` blocks its caller
    save_background_s: float  # how long the write then takes in the background
    memory_packed_bytes: int  # packed size in plan C
    memory_cache_bytes: int  # plan C's cache of decoded data
    memory_pack_s: float  # packing in plan C, including the copy and the check
    epoch_a_s: float  # reading an epoch of shuffled minibatches from the raw batch
    epoch_c_s: float  # reading an epoch of `CompressedTensorDict.minibatches`
    epoch_c_shuffled_s: float  # the same if all steps are shuffled: each minibatch decodes every environment

    def scaled(self, factor: float) -> Measured:
        """Return the numbers of a batch with `factor` times as many environments."""
        num_envs = round(self.num_envs * factor)
        batch_size = (round(self.batch_size[0] * factor), *self.batch_size[1:])
        keys = tuple(_scale(key, factor) for key in self.keys)
        larger: Measured = _scale(self, factor)
        return dataclasses.replace(larger, batch_size=batch_size, num_envs=num_envs, keys=keys)


def measure(
    batch: TensorDictBase,
    minibatches: int,
    device: torch.device,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Measured:
    """Measure a batch of shape ``[environment, time]``; `slipstream.advise` explains the arguments."""
    report = progress or _ignore
    report("copying the batch, shared observations once")
    copy_s, rollout = _time(split_batch, batch)
    layout: Layout = rollout.layout
    if layout.num_envs * layout.num_steps < minibatches or not layout.raw_bytes:
        raise ConfigurationError(
            f"shape {list(batch.batch_size)} with {layout.raw_bytes} bytes cannot be split into {minibatches} "
            "minibatches; use a larger batch or fewer minibatches"
        )
    report(f"packing and unpacking {plural(len(rollout.arrays), 'array')} with {plural(default_threads(), 'thread')}")
    codec_times = {name: _time_codec(rollout, name) for name in rollout.arrays}
    total = _add_times(codec_times.values())
    report("plan B: saving with RolloutStorage")
    saved, stored_bytes = _measure_saving(batch, folder)
    report("plan C: packing in memory and reading an epoch of minibatches")
    cache_bytes = layout.raw_bytes // _CACHE_FRACTION
    memory_pack_s, packed = _time(CompressedTensorDict, batch, cache_bytes=cache_bytes)
    on_device = packed.to(device)
    epoch_c_s, _ = _time(_read_packed, on_device, minibatches)
    # Every shuffled minibatch takes the same time, so one is enough.
    shuffled_minibatch_s, _ = _time(_read_shuffled_minibatch, on_device, minibatches)
    report("plan A: reading the same epoch")
    epoch_a_s, _ = _time(_read_raw, batch.to(device), minibatches)
    return Measured(
        batch_size=tuple(batch.batch_size),
        num_envs=layout.num_envs,
        num_steps=layout.num_steps,
        keys=_numbers_by_key(layout, stored_bytes, codec_times, _packed_arrays(packed)),
        raw_bytes=layout.raw_bytes,
        distinct_bytes=sum(array.nbytes for array in rollout.arrays.values()),
        copy_s=copy_s,
        encode_s=total.encode_s,
        encode_cpu_s=total.encode_cpu_s,
        decode_s=total.decode_s,
        decode_cpu_s=total.decode_cpu_s,
        **saved,
        memory_packed_bytes=packed.nbytes,
        memory_cache_bytes=cache_bytes,
        memory_pack_s=memory_pack_s,
        epoch_a_s=epoch_a_s,
        epoch_c_s=epoch_c_s,
        epoch_c_shuffled_s=minibatches * shuffled_minibatch_s,
    )


class _CodecTimes(NamedTuple):
    encode_s: float
    encode_cpu_s: float
    decode_s: float
    decode_cpu_s: float


def _packed_arrays(packed: CompressedTensorDict) -> set[str]:
    """Return the names of the arrays that plan C packed."""
    return set(packed.content.packed)


def _time_codec(rollout: Rollout, name: str) -> _CodecTimes:
    """Pack and unpack an array in chunks on all threads, as a file is written and read."""
    array = rollout.arrays[name]
    start_s = time.perf_counter()
    codec, choose_cpu_s = _cpu_time(codec_for, rollout, name, zstd_level(9))
    num_rows = max(1, DEFAULT_CHUNK_BYTES // max(1, array[:1].nbytes))
    chunks = [array[first : first + num_rows] for first in range(0, len(array), num_rows)]
    encoded = list(parallel_map(functools.partial(_cpu_time, codec.encode), chunks))
    encode_s = time.perf_counter() - start_s

    start_s = time.perf_counter()
    pairs = [(payload, chunk) for (payload, _), chunk in zip(encoded, chunks, strict=True)]
    decode_cpu_s = sum(parallel_map(functools.partial(_decode_cpu_time, codec), pairs))
    decode_s = time.perf_counter() - start_s
    return _CodecTimes(encode_s, choose_cpu_s + sum(cpu_s for _, cpu_s in encoded), decode_s, decode_cpu_s)


def _cpu_time(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Return the result of a function and the CPU time it took on this thread."""
    start_s = time.thread_time()
    return function(*arguments), time.thread_time() - start_s


def _decode_cpu_time(codec: Codec, pair: tuple[bytes, NDArray[Any]]) -> float:
    # The result is dropped immediately, so that a large batch is not in memory twice.
    payload, chunk = pair
    return _cpu_time(codec.decode, payload, np.empty(chunk.shape, chunk.dtype))[1]


def _measure_saving(
    batch: TensorDictBase, folder: str | os.PathLike[str] | None
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return fields of `Measured`, and the stored size of each array."""
    with tempfile.TemporaryDirectory(prefix="slipstream-advise-", dir=folder) as temporary:
        with RolloutStorage(temporary) as storage:

            def save() -> float:
                start_s = time.perf_counter()
                storage.save(batch, 0, overwrite=True)
                call_s = time.perf_counter() - start_s
                # The next call must not wait for this one.
                storage.flush()
                return call_s

            save_call_s = min(_repeat(save))
            stats = storage.get_stats()
            path = storage.path(0)
        saved = {
            "file_bytes": path.stat().st_size,
            "load_s": _time(load_rollout, path)[0],
            "save_call_s": save_call_s,
            "save_background_s": stats["write_s"] / max(1, stats["save_count"]),
        }
        with RolloutFile(path) as file:
            stored_bytes = {name: entry.stored_bytes for name, entry in file.container.entries.items()}
        return saved, stored_bytes


def _read_packed(packed: CompressedTensorDict, minibatches: int) -> None:
    _read_all(packed.minibatches(minibatches), packed.device)


def _read_shuffled_minibatch(packed: CompressedTensorDict, minibatches: int) -> None:
    steps = torch.randperm(packed.numel())[: packed.numel() // minibatches]
    _read_all([packed.reshape(-1)[steps]], packed.device)


def _read_raw(batch: TensorDictBase, minibatches: int) -> None:
    flat = batch.reshape(-1)
    size = flat.numel() // minibatches
    order = torch.randperm(flat.numel(), device=batch.device)
    starts = range(0, size * minibatches, size)
    _read_all((flat[order[start : start + size]] for start in starts), batch.device)


def _read_all(minibatches: Iterable[Any], device: torch.device | None) -> None:
    for _ in minibatches:
        pass
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def _time(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[float, Any]:
    """Return the shortest time of several calls, which other processes disturbed least, and the last result."""
    results: list[Any] = []

    def call() -> float:
        # Free the previous result, which may be large.
        results.clear()
        start_s = time.perf_counter()
        results.append(function(*arguments, **options))
        return time.perf_counter() - start_s

    return min(_repeat(call)), results[0]


def _repeat(call: Callable[[], float]) -> Iterator[float]:
    """Yield the times of several calls, fewer if they take long."""
    total_s = 0.0
    for _ in range(_MAX_REPEATS):
        call_s = call()
        yield call_s
        total_s += call_s
        if total_s >= _LONG_S:
            return


def _numbers_by_key(
    layout: Layout, stored_bytes: dict[str, int], codec_times: dict[str, _CodecTimes], in_c: set[str]
) -> tuple[KeyNumbers, ...]:
    # A key and its copy under ``next`` share one array.
    fields_by_array: dict[str, list[Field]] = {}
    for field in layout.fields:
        fields_by_array.setdefault(field.array, []).append(field)
    keys = []
    rest = dict(stored_bytes)
    for array, fields in fields_by_array.items():
        # The steps where ``next`` differs are stored separately.
        names = [array, *(field.rows for field in fields if field.rows is not None)]
        packed_bytes = sum(rest.pop(name) for name in names)
        times = _add_times(codec_times[name] for name in names)
        root = min(fields, key=operator.attrgetter("lead"))
        keys.append(
            KeyNumbers(
                key="/".join(root.key),
                dtype=root.dtype.name,
                shape=root.shape,
                with_next=len(fields) > 1,
                raw_bytes=layout.bytes_of(root) * len(fields),
                packed_bytes=packed_bytes,
                encode_cpu_s=times.encode_cpu_s,
                decode_cpu_s=times.decode_cpu_s,
                packed_in_c=array in in_c,
            )
        )
    # What is left are masks of episode ends, which several keys share.
    if rest:
        times = _add_times(codec_times[name] for name in rest)
        cpu_s = (times.encode_cpu_s, times.decode_cpu_s)
        keys.append(KeyNumbers(EPISODE_ENDS, "bool", (), False, 0, sum(rest.values()), *cpu_s, False))  # noqa: FBT003
    return tuple(keys)


def _add_times(times: Iterable[_CodecTimes]) -> _CodecTimes:
    return _CodecTimes(*map(sum, zip(*times, strict=True)))


def _scale(numbers: Any, factor: float) -> Any:
    """Multiply the fields that count bytes or seconds."""
    larger: dict[str, Any] = {}
    for name, value in vars(numbers).items():
        if name.endswith("_bytes"):
            larger[name] = round(value * factor)
        elif name.endswith("_s"):
            larger[name] = value * factor
    return dataclasses.replace(numbers, **larger)


def _ignore(_phrase: str) -> None:
    pass
