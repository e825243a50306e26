"""Measure, on this machine, what packing a batch costs and gives. What is decided on the numbers is in `plans`."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from slipstream.threads import default_threads, parallel_map

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Progress = Callable[[str], None]

EPISODE_ENDS = "(where episodes ended)"
_CACHE_SHARE = 16  # as `CompressedTensorDict` has it by default
_REPEATS = 5
_LONG_S = 1.0


@dataclass(frozen=True)
class KeyNumbers:
    """What one tensor of the batch, with its ``next``, packs into.

    Attributes:
        key: Its nested key, joined by slashes.
        dtype: Its dtype.
        shape: Its shape, after environment and time.
        with_next: Whether `raw_bytes` has its ``next`` in it, which is stored once.
        raw_bytes: Its size in the batch.
        packed_bytes: Its size in a file.
        encode_cpu_s: Seconds of one core to pack it.
        decode_cpu_s: Seconds of one core to unpack it.
        packed_in_c: Whether plan C packs it; what is small or does not shrink stays as it is.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    with_next: bool
    raw_bytes: int
    packed_bytes: int
    encode_cpu_s: float
    decode_cpu_s: float
    packed_in_c: bool


@dataclass(frozen=True)
class Measured:
    """What was measured of a batch; times are seconds by the clock unless they are called ``cpu``.

    Attributes:
        batch_size: Shape of the batch.
        num_envs: How many environments it has.
        num_steps: How many steps of each.
        keys: Its tensors, one by one.
        raw_bytes: Size of all tensors, as plan A keeps them.
        distinct_bytes: The same with observations that ``next`` repeats counted once: the copy that a save makes.
        file_bytes: Size of the file that plan B writes.
        copy_s: To copy the batch, each observation once; part of every way to pack it.
        encode_s: To pack the copy with all cores.
        encode_cpu_s: The same in seconds of one core.
        decode_s: To unpack it with all cores.
        decode_cpu_s: The same in seconds of one core.
        load_s: To read it back from a file that is in memory, checksums and all.
        save_call_s: How long `RolloutStorage.save` keeps its caller.
        save_background_s: How long it goes on in the background.
        memory_packed_bytes: What plan C keeps, packed.
        memory_cache_bytes: What plan C keeps unpacked at most.
        memory_pack_s: To pack a batch in plan C, copied and checked.
        epoch_a_s: One epoch of shuffled minibatches from the batch as it is.
        epoch_c_s: One epoch of `CompressedTensorDict.minibatches`.
        epoch_c_shuffled_s: The same if all steps are shuffled: every minibatch touches every environment.
    """

    batch_size: tuple[int, ...]
    num_envs: int
    num_steps: int
    keys: tuple[KeyNumbers, ...]
    raw_bytes: int
    distinct_bytes: int
    file_bytes: int
    copy_s: float
    encode_s: float
    encode_cpu_s: float
    decode_s: float
    decode_cpu_s: float
    load_s: float
    save_call_s: float
    save_background_s: float
    memory_packed_bytes: int
    memory_cache_bytes: int
    memory_pack_s: float
    epoch_a_s: float
    epoch_c_s: float
    epoch_c_shuffled_s: float

    def scaled(self, factor: float) -> Measured:
        """Return the numbers of a batch with `factor` times as many environments."""
        size = (round(self.batch_size[0] * factor), *self.batch_size[1:])
        keys = tuple(_scaled(key, factor) for key in self.keys)
        larger: Measured = _scaled(self, factor)
        return dataclasses.replace(larger, batch_size=size, num_envs=round(self.num_envs * factor), keys=keys)


def measure(
    batch: TensorDictBase,
    *,
    minibatches: int,
    device: torch.device,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Measured:
    """Measure a batch; takes a few seconds, and a few times its memory.

    Args:
        batch: A TensorDict of shape ``[environment, time]``.
        minibatches: How many an epoch has.
        device: Where minibatches go.
        folder: Where a file may be written for a moment; by default where temporary files go.
        progress: Told in words what is being measured.
    """
    say = progress or (lambda _: None)
    say("copying the batch, each observation once")
    copy_s, rollout = _timed(lambda: split_batch(batch))
    layout = rollout.layout
    if layout.num_envs * layout.num_steps < minibatches or not layout.raw_bytes:
        raise ConfigurationError(
            f"the batch has the shape {list(batch.batch_size)} and {layout.raw_bytes} bytes, which does not make "
            f"{minibatches} minibatches; give a larger one, or fewer minibatches"
        )
    say(f"packing and unpacking {len(rollout.arrays)} arrays, on {default_threads()} threads")
    codings = {name: _code(rollout, name) for name in rollout.arrays}
    say("plan B: saving it with RolloutStorage")
    saved = _save(batch, folder)
    say("plan C: packing it in memory, and an epoch of minibatches")
    cache_bytes = layout.raw_bytes // _CACHE_SHARE
    memory_pack_s, packed = _timed(lambda: CompressedTensorDict(batch, cache_bytes=cache_bytes))
    epoch_c_s, epoch_c_shuffled_s = _epochs_c(packed.to(device), minibatches)
    say("plan A: the same epoch")
    return Measured(
        batch_size=tuple(batch.batch_size),
        num_envs=layout.num_envs,
        num_steps=layout.num_steps,
        keys=_by_key(layout, saved.stored, codings, _packed_keys(packed)),
        raw_bytes=layout.raw_bytes,
        distinct_bytes=sum(array.nbytes for array in rollout.arrays.values()),
        file_bytes=saved.file_bytes,
        copy_s=copy_s,
        encode_s=sum(coding.encode_s for coding in codings.values()),
        encode_cpu_s=sum(coding.encode_cpu_s for coding in codings.values()),
        decode_s=sum(coding.decode_s for coding in codings.values()),
        decode_cpu_s=sum(coding.decode_cpu_s for coding in codings.values()),
        load_s=saved.load_s,
        save_call_s=saved.call_s,
        save_background_s=saved.background_s,
        memory_packed_bytes=packed.nbytes,
        memory_cache_bytes=cache_bytes,
        memory_pack_s=memory_pack_s,
        epoch_a_s=_epoch_a(batch.to(device), minibatches),
        epoch_c_s=epoch_c_s,
        epoch_c_shuffled_s=epoch_c_shuffled_s,
    )


@dataclass(frozen=True)
class _Coding:
    encode_s: float
    encode_cpu_s: float
    decode_s: float
    decode_cpu_s: float


@dataclass(frozen=True)
class _Saved:
    call_s: float
    background_s: float
    load_s: float
    file_bytes: int
    stored: dict[str, int]


def _code(rollout: Rollout, name: str) -> _Coding:
    """Pack and unpack an array in pieces on all cores; the seconds of each thread are added up."""
    array = rollout.arrays[name]
    start, cpu = time.perf_counter(), time.thread_time()
    codec = codec_for(rollout, name, zstd_level(9))
    choose_s, choose_cpu_s = time.perf_counter() - start, time.thread_time() - cpu
    row_bytes = max(1, array[:1].nbytes)
    rows = max(1, DEFAULT_CHUNK_BYTES // row_bytes)
    parts = [array[first : first + rows] for first in range(0, len(array), rows)]
    start = time.perf_counter()
    encoded = list(parallel_map(lambda part: _on_this_thread(codec.encode, part), parts))
    encode_s = time.perf_counter() - start
    payloads = [(payload, part) for (payload, _), part in zip(encoded, parts, strict=True)]
    start = time.perf_counter()
    # What is decoded is dropped at once, so that a large batch is not in memory once more.
    decode_cpu_s = sum(parallel_map(lambda pair: _on_this_thread(_decode, codec, *pair)[1], payloads))
    decode_s = time.perf_counter() - start
    return _Coding(choose_s + encode_s, choose_cpu_s + sum(cpu for _, cpu in encoded), decode_s, decode_cpu_s)


def _decode(codec: Codec, payload: bytes, part: NDArray[Any]) -> None:
    codec.decode(payload, np.empty(part.shape, part.dtype))


def _on_this_thread(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    start = time.thread_time()
    return function(*arguments), time.thread_time() - start


def _save(batch: TensorDictBase, folder: Path | None) -> _Saved:
    with tempfile.TemporaryDirectory(prefix="slipstream-advise-", dir=folder) as temporary:
        with RolloutStorage(temporary) as storage:

            def save() -> float:
                start = time.perf_counter()
                storage.save(batch, 0, overwrite=True)
                call = time.perf_counter() - start
                storage.flush()
                return call

            calls = _repeat(save)
            stats = storage.get_stats()
            path = storage.path(0)
        load_s, _ = _timed(lambda: load_rollout(path))
        with RolloutFile(path) as file:
            stored = {name: entry.stored_bytes for name, entry in file.container.entries.items()}
        background = stats["write_s"] / max(1, stats["save_count"])
        return _Saved(min(calls), background, load_s, path.stat().st_size, stored)


def _packed_keys(packed: CompressedTensorDict) -> set[str]:
    """Return the arrays that were worth packing."""
    return set(packed._content.packed)


def _epochs_c(packed: CompressedTensorDict, minibatches: int) -> tuple[float, float]:
    grouped_s, _ = _timed(lambda: _read_all(packed.minibatches(minibatches), packed.device))
    some = torch.randperm(packed.numel())[: packed.numel() // minibatches]
    flat = packed.reshape(-1)
    one_s, _ = _timed(lambda: _read_all([flat[some]], packed.device))
    return grouped_s, one_s * minibatches


def _epoch_a(batch: TensorDictBase, minibatches: int) -> float:
    flat = batch.reshape(-1)
    size = flat.numel() // minibatches

    def epoch() -> None:
        order = torch.randperm(flat.numel(), device=batch.device)[: size * minibatches]
        _read_all((flat[order[first : first + size]] for first in range(0, len(order), size)), batch.device)

    return _timed(epoch)[0]


def _read_all(minibatches: Iterable[Any], device: torch.device | None) -> None:
    for _ in minibatches:
        pass
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the time of the quickest of a few calls, which others disturbed least, and what the last returned."""
    results: list[Any] = []

    def once() -> float:
        results.clear()  # or there would be two of what may be large
        start = time.perf_counter()
        results.append(function())
        return time.perf_counter() - start

    return min(_repeat(once)), results[0]


def _repeat(once: Callable[[], float]) -> list[float]:
    """Call something a few times; what takes long is measured well enough by fewer."""
    times = [once()]
    while len(times) < _REPEATS and sum(times) < _LONG_S:
        times.append(once())
    return times


def _by_key(
    layout: Layout, stored: dict[str, int], codings: dict[str, _Coding], in_c: set[str]
) -> tuple[KeyNumbers, ...]:
    """Put what belongs to a key together: its array, and the exceptions of its ``next``; masks are of several keys."""
    fields: dict[str, list[Field]] = {}
    for field in layout.fields:
        fields.setdefault(field.array, []).append(field)
    rows, left = [], dict.fromkeys(stored)
    for array, shared in fields.items():
        names = [array, *(field.rows for field in shared if field.rows is not None)]
        for name in names:
            left.pop(name, None)
        first = min(shared, key=lambda field: field.lead)
        raw = layout.bytes_of(first) * len(shared)
        rows.append(
            KeyNumbers(
                key="/".join(first.key),
                dtype=first.dtype.name,
                shape=first.shape,
                with_next=len(shared) > 1,
                raw_bytes=raw,
                packed_in_c=array in in_c,
                **_added_up(names, stored, codings),
            )
        )
    if left:
        masks = _added_up(list(left), stored, codings)
        rows.append(KeyNumbers(EPISODE_ENDS, "bool", (), with_next=False, raw_bytes=0, packed_in_c=False, **masks))
    return tuple(rows)


def _added_up(names: list[str], stored: dict[str, int], codings: dict[str, _Coding]) -> dict[str, Any]:
    return {
        "packed_bytes": sum(stored[name] for name in names),
        "encode_cpu_s": sum(codings[name].encode_cpu_s for name in names),
        "decode_cpu_s": sum(codings[name].decode_cpu_s for name in names),
    }


def _scaled(numbers: Any, factor: float) -> Any:
    """Multiply what has bytes or seconds for its unit."""
    larger: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(numbers)):
        if name.endswith("_bytes"):
            larger[name] = round(getattr(numbers, name) * factor)
        elif name.endswith("_s"):
            larger[name] = getattr(numbers, name) * factor
    return dataclasses.replace(numbers, **larger)
