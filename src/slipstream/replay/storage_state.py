"""The whole of a `PackedEpisodeStorage`: in a folder, and as tensors and plain values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import CorruptFileError, SlipstreamError, StateMismatchError
from slipstream.replay.batch import Layout
from slipstream.replay.indexing import RingShape
from slipstream.replay.moments import writer_beside
from slipstream.replay.runs import UNUSED, Runs
from slipstream.replay.saving import MALFORMED, Belongs, Saved, from_state, load, reading, save, to_state
from slipstream.replay.steps import Snapshot

if TYPE_CHECKING:
    from slipstream.replay.storage import PackedEpisodeStorage

logger = logging.getLogger(__name__)

KIND = "replay storage"


def storage_snapshot(storage: PackedEpisodeStorage) -> Snapshot:
    """Return everything that a storage holds."""
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
            "layout": storage.layout.to_json(),
        }
        arrays = dict(steps.arrays)
        if storage.initialized:
            arrays["runs"] = storage.runs.copy()
            arrays["follows"] = storage.run_table.follows.copy()
        return Snapshot(plain, arrays, steps.segments)


def storage_state(storage: PackedEpisodeStorage) -> dict[str, Any]:
    """Return a storage as tensors and plain values."""
    return to_state(storage_snapshot(storage))


def load_state(storage: PackedEpisodeStorage, state: Mapping[str, Any]) -> None:
    """Turn a storage into what `storage_state` was taken of, or pack a state of one of TorchRL's storages.

    Raises:
        StateMismatchError: If the state is neither, or of another size.
    """
    if "_storage" in state and "_len" in state:
        _load_torchrl(storage, state)
        return
    try:
        load_snapshot(storage, from_state(state))
    except CorruptFileError as error:
        raise StateMismatchError(f"the state is not that of a packed storage ({error})") from error


def _load_torchrl(storage: PackedEpisodeStorage, state: Mapping[str, Any]) -> None:
    """Pack the content of a ``TensorStorage``, ``LazyTensorStorage`` or ``LazyMemmapStorage``."""
    from tensordict import TensorDict  # noqa: PLC0415 - only this needs it

    content = state["_storage"]
    if not isinstance(content, torch.Tensor):
        # A state joins nested keys with dots.
        content = TensorDict({}).load_state_dict(dict(content), strict=False).unflatten_keys(".")
        content.auto_batch_size_(batch_dims=storage.ndim)
    num_steps = int(state["_len"])
    with storage.steps.writing, storage.steps.lock:
        storage._empty()
        if not num_steps:
            return
        streams = tuple(content.shape[1 : storage.ndim])
        num_times = -(-num_steps // max(1, int(np.prod(streams, dtype=np.int64))))
        if num_times > RingShape.of(storage.capacity, streams).num_times:
            raise StateMismatchError(f"the state has {num_steps} steps, the storage has room for {storage.capacity}")
        storage.set(range(num_times), content[:num_times])


def save_storage(storage: PackedEpisodeStorage, path: Path) -> None:
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


def load_storage(storage: PackedEpisodeStorage, path: Path) -> list[int]:
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


def load_snapshot(storage: PackedEpisodeStorage, snapshot: Snapshot) -> NDArray[np.int64]:
    """Build everything, then take it over at once; returns the slots whose steps are lost."""
    try:
        plain = snapshot.plain["storage"]
        ring = _check_size(storage, plain)
        if not plain["initialized"]:
            storage._empty()
            return np.empty(0, np.int64)
        layout = Layout.from_json(plain["layout"])
        length = int(plain["len"])
        newest = int(plain["newest"])
        cursor = plain["last_cursor"]
        runs = Runs(ring.num_times, ring.width)
        runs.of[:] = snapshot.arrays["runs"].reshape(runs.of.shape)
        runs.follows[:] = snapshot.arrays["follows"].reshape(runs.of.shape)
        runs.is_stale = True
        runs.find_holes(-(-length // ring.width))
        if not 0 <= length <= ring.num_slots or not -1 <= newest < ring.num_times:
            raise StateMismatchError(f"{length} steps in {ring.num_slots} slots, the newest at {newest}")
        if int(snapshot.plain["num_slots"]) != ring.num_slots or int(snapshot.plain["base"]) != 0:
            raise StateMismatchError(f"a table of {snapshot.plain['num_slots']} slots for {ring.num_slots}")
        steps, lost, _ = storage.steps.rebuild(snapshot)
    except MALFORMED as error:
        if isinstance(error, SlipstreamError):
            raise
        raise StateMismatchError(f"the state is not that of a packed storage ({error})") from error
    if len(lost):
        _lose(runs, lost)
    with storage.steps.writing, storage.steps.lock:
        storage._empty()
        storage.steps.become(steps)
        storage.layout = layout
        storage.ring = ring
        storage.restore_runs(runs)
        storage.max_size = ring.num_slots
        storage.initialized = True
        storage._len = length
        storage.newest = newest
        storage._set_last_cursor(cursor)
    return lost


def _check_size(storage: PackedEpisodeStorage, plain: Mapping[str, Any]) -> RingShape:
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
