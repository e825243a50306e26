"""The whole of a `PackedEpisodeStorage`: in a folder, and as tensors and plain values."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from slipstream.errors import CorruptFileError, SlipstreamError, StateMismatchError
from slipstream.replay.batch import Layout, stack_steps
from slipstream.replay.indexing import RingShape
from slipstream.replay.moments import writer_beside
from slipstream.replay.objects import Objects
from slipstream.replay.runs import UNUSED, Runs
from slipstream.replay.saving import MALFORMED, Belongs, Saved, from_state, load, reading, save, to_state
from slipstream.replay.steps import Snapshot, Steps

if TYPE_CHECKING:
    from slipstream.replay.contract import TorchRLContract

logger = logging.getLogger(__name__)

KIND = "replay storage"


def storage_snapshot(storage: TorchRLContract) -> Snapshot:
    """Return everything that a storage holds, as arrays and JSON.

    Raises:
        UnsupportedStateError: If there are batches or objects that JSON cannot describe.
    """
    with storage.steps.writing, storage.steps.lock:
        snapshot = packed_snapshot(storage)
        plain = snapshot.plain["storage"]
        plain["layout"] = storage.layout.to_json()
        columns, arrays = storage.objects.to_json()
        if columns:
            plain["objects"] = columns
        return replace(snapshot, arrays={**snapshot.arrays, **arrays})


def packed_snapshot(storage: TorchRLContract) -> Snapshot:
    """Return what a storage holds, except for Python objects and the layout of batches."""
    with storage.steps.writing, storage.steps.lock:
        steps = storage.steps.snapshot()
        plain = dict(steps.plain)
        plain["storage"] = {
            "ndim": storage.ndim,
            "max_size": storage.max_size,
            "len": len(storage),
            "initialized": storage.initialized,
            "streams": list(storage.ring.streams),
            "last_cursor": storage._last_cursor_index,
            "newest": storage.newest,
            "writer": storage.writer_state,
        }
        arrays = dict(steps.arrays)
        if storage.initialized:
            arrays["runs"] = storage.runs.copy()
            arrays["follows"] = storage.run_table.follows.copy()
        return Snapshot(plain, arrays, steps.segments)


def storage_state(storage: TorchRLContract) -> dict[str, Any]:
    """Return a storage as tensors and plain values."""
    return to_state(storage_snapshot(storage))


def load_state(storage: TorchRLContract, state: Mapping[str, Any]) -> None:
    """Turn a storage into what `storage_state` was taken of, or pack a state of one of TorchRL's storages.

    Raises:
        StateMismatchError: If the state is neither, or of another size.
    """
    if "_storage" in state:
        try:
            _load_torchrl(storage, state)
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            if isinstance(error, SlipstreamError):
                raise
            raise StateMismatchError(f"the state is not that of a storage of tensors ({error})") from error
        return
    try:
        load_snapshot(storage, from_state(state))
    except CorruptFileError as error:
        raise StateMismatchError(f"the state is not that of a packed storage ({error})") from error


def _load_torchrl(storage: TorchRLContract, state: Mapping[str, Any]) -> None:
    """Pack the content of a ``TensorStorage``, ``LazyTensorStorage``, ``LazyMemmapStorage`` or ``ListStorage``."""
    stored = state["_storage"]
    if isinstance(stored, list):
        content: Any = None
        if stored:
            content = stack_steps([_content_of(item, 0) for item in stored])
        num_steps = len(stored)
    else:
        content = _content_of(stored, storage.ndim)
        num_steps = int(state["_len"])
    with storage.steps.writing, storage.steps.lock:
        if not num_steps:
            storage._empty()
            return
        streams = tuple(content.shape[1 : storage.ndim])
        num_times = -(-num_steps // max(1, math.prod(streams)))
        if isinstance(stored, list):
            num_times = num_steps
        if not 0 < num_times <= RingShape.of(storage.capacity, streams).num_times:
            raise StateMismatchError(f"the state has {num_steps} steps, the storage has room for {storage.capacity}")
        with _kept_on_error(storage):
            storage._empty()
            storage.set(range(num_times), content[:num_times])


@contextlib.contextmanager
def _kept_on_error(storage: TorchRLContract) -> Iterator[None]:
    """Give a storage back what it held before the block if that raises."""
    if not storage.initialized:
        yield
        return
    rest = (storage.layout, storage.objects, storage.ring, storage.run_table, storage.newest, len(storage))
    held = Steps(0, **storage.steps.settings())
    held.become(storage.steps)
    try:
        yield
    except BaseException:
        storage.take_over(held, *rest)
        raise


def _content_of(state: Any, batch_dims: int) -> Any:
    """Return the tensor or TensorDict that TorchRL made a state of."""
    if isinstance(state, torch.Tensor):
        return state
    # A state joins nested keys with dots, and does not tell the batch size.
    content = TensorDict({}).load_state_dict(dict(state), strict=False).unflatten_keys(".")
    if batch_dims:
        content.auto_batch_size_(batch_dims=batch_dims)
    return content


def save_storage(storage: TorchRLContract, path: Path) -> None:
    """Write what is new into a folder, then the head; others may read and write the storage meanwhile."""
    key = str(path.absolute())
    with storage.steps.saving:
        with storage.steps.writing:
            snapshot = storage_snapshot(storage)
            saved = storage.saved.get(key, Saved())
            folders = storage.saved
        belongs = None
        if snapshot.plain["storage"]["writer"] is not None:
            belongs = _belongs(path)
        folders[key] = save(path, KIND, snapshot, saved, belongs=belongs)


def _belongs(path: Path) -> Belongs | None:
    """Return a function that tells which head is of the moment of the writer beside the folder, if there is one."""
    writer = writer_beside(path)
    if writer is None:
        return None

    def belongs(plain: Mapping[str, Any]) -> bool:
        # Without a writer it was saved alone.
        return plain["storage"].get("writer") in (None, writer)

    return belongs


def load_storage(storage: TorchRLContract, path: Path) -> list[int]:
    """Read a folder; returns the slots along time some of whose steps are lost.

    Raises:
        CorruptFileError: If the head is damaged, or nothing is sound.
        StateMismatchError: If it is of a storage of another size.
    """
    with reading(path):
        loaded = load(path, KIND, _belongs(path))
        lost = load_snapshot(storage, Snapshot(loaded.plain, loaded.arrays, loaded.segments))
    if not len(lost):
        storage.saved[str(path.absolute())] = loaded.saved
    times: list[int] = np.unique(lost // storage.ring.width).tolist()
    return times


def load_snapshot(storage: TorchRLContract, snapshot: Snapshot) -> NDArray[np.int64]:
    """Build everything, then take it over at once; returns the slots whose steps are lost."""
    try:
        plain = snapshot.plain["storage"]
        if not plain["initialized"]:
            _check_size(storage, plain)
            storage._empty()
            return np.empty(0, np.int64)
        layout = Layout.from_json(plain["layout"])
        columns = plain.get("objects", [])
        objects = Objects.from_json(int(snapshot.plain["num_slots"]), columns, snapshot.arrays)
    except MALFORMED as error:
        if isinstance(error, SlipstreamError):
            raise
        raise StateMismatchError(f"the state is not that of a packed storage ({error})") from error
    return load_packed(storage, snapshot, layout, objects)


def load_packed(storage: TorchRLContract, snapshot: Snapshot, layout: Layout, objects: Objects) -> NDArray[np.int64]:
    """Do the same with a snapshot of `packed_snapshot`."""
    try:
        plain = snapshot.plain["storage"]
        ring = _check_size(storage, plain)
        length = int(plain["len"])
        newest = int(plain["newest"])
        cursor = plain["last_cursor"]
        if cursor is not None:
            cursor = int(cursor)
        runs = Runs(ring.num_times, ring.width)
        runs.of[:] = snapshot.arrays["runs"].reshape(runs.of.shape)
        runs.follows[:] = snapshot.arrays["follows"].reshape(runs.of.shape)
        runs.is_stale = True
        runs.find_holes(-(-length // ring.width))
        if not 0 <= length <= ring.num_slots or not -1 <= newest < ring.num_times:
            raise StateMismatchError(f"{length} steps in {ring.num_slots} slots, the newest at {newest}")
        if int(snapshot.plain["base"]):
            raise StateMismatchError(f"the first slot is {snapshot.plain['base']}, expected 0")
        if int(snapshot.plain["num_slots"]) != ring.num_slots:
            raise StateMismatchError(f"a table of {snapshot.plain['num_slots']} slots for {ring.num_slots}")
        steps, lost, _ = storage.steps.rebuild(snapshot)
        layout.check(steps.schema.leaves)
    except MALFORMED as error:
        if isinstance(error, SlipstreamError):
            raise
        raise StateMismatchError(f"the state is not that of a packed storage ({error})") from error
    if len(lost):
        _lose(runs, lost)
    with storage.steps.writing, storage.steps.changing:
        storage.take_over(steps, layout, objects, ring, runs, newest, length)
        storage._set_last_cursor(cursor)
    return lost


def _check_size(storage: TorchRLContract, plain: Mapping[str, Any]) -> RingShape:
    ring = RingShape.of(storage.capacity, tuple(map(int, plain["streams"])))
    size = storage.capacity
    if plain["initialized"]:
        size = ring.num_slots
    if plain["ndim"] != storage.ndim or (plain["initialized"] and plain["max_size"] != size):
        raise StateMismatchError(
            f"the state is of ndim={plain['ndim']} and max_size={plain['max_size']}, the storage of "
            f"ndim={storage.ndim} and max_size={size}"
        )
    return ring


def _lose(runs: Runs, lost: NDArray[np.int64]) -> None:
    """Turn slots whose steps are lost into holes, which nothing samples and no slice crosses."""
    runs.lose(lost)
    if (runs.of == UNUSED).all():
        raise CorruptFileError("every step in the folder is lost")
    times = np.unique(lost // runs.of.shape[1]).tolist()
    shown = ", ".join(map(str, times[:8]))
    if len(times) > 8:
        shown = f"{shown} and {len(times) - 8} more"
    logger.warning("%d steps are lost, at times %s; they are not sampled until they are overwritten", len(lost), shown)
