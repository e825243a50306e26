"""The whole of a `PackedEpisodeStorage` as tensors and plain values, and in a folder."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import CorruptFileError, StateMismatchError
from slipstream.replay import folder as files
from slipstream.replay.fields import RowLayout
from slipstream.replay.frames import FrameLog
from slipstream.replay.leaves import leaves_from_json, leaves_to_json
from slipstream.replay.log_state import load_log_state, log_state
from slipstream.replay.runs import Runs
from slipstream.replay.tail import Tail
from slipstream.store.container import Container
from slipstream.store.local import make_folder
from slipstream.store.writer import write_container
from slipstream.trajectory import NEXT

if TYPE_CHECKING:
    from slipstream.replay.storage import PackedEpisodeStorage

logger = logging.getLogger(__name__)

VERSION = 1


def head_of(storage: PackedEpisodeStorage) -> dict[str, Any]:
    """Return all but the packed frames: plain values under ``plain``, arrays under ``arrays``."""
    plain: dict[str, Any] = {
        "version": VERSION,
        "ndim": storage.ndim,
        "max_size": storage.max_size,
        "len": len(storage),
        "initialized": storage.initialized,
        "last_cursor": storage._last_cursor_index,
        "newest": storage._newest,
    }
    if not storage.initialized:
        return {"plain": plain, "arrays": {}}
    keys = list(storage._columns)
    plain |= {
        "streams": list(storage._streams),
        "bare": storage._bare,
        "leaves": leaves_to_json(storage._leaves),
        "nodes": [[list(key), list(extra)] for key, extra in storage._nodes.items()],
        "layout": None if storage._layout is None else storage._layout.to_json(),
        "tail": list(storage._tail.values()),
    }
    arrays = {"frame_of": storage._frame_of, "runs": storage.runs.of}
    arrays |= {f"column/{number}": storage._columns[key].numpy() for number, key in enumerate(keys)}
    arrays |= {f"tail/{number}": values for number, values in enumerate(storage._tail.values().values())}
    if storage._tail_slots:
        arrays["tail_slots"] = np.concatenate(storage._tail_slots)
    return {"plain": plain, "arrays": arrays}


def storage_state(storage: PackedEpisodeStorage) -> dict[str, Any]:
    """Return a storage as tensors and plain values."""
    head = head_of(storage)
    arrays = {name: torch.from_numpy(np.array(array)) for name, array in head["arrays"].items()}
    frames = log_state(storage._log) if storage._layout is not None else None
    return {"plain": head["plain"], "arrays": arrays, "frames": frames}


def load_storage_state(storage: PackedEpisodeStorage, state: Mapping[str, Any]) -> None:
    """Turn a storage into what `storage_state` was taken of."""
    try:
        plain = dict(state["plain"])
        arrays = {name: tensor.cpu().numpy() for name, tensor in state["arrays"].items()}
        frames = state["frames"]
    except (KeyError, TypeError, AttributeError) as error:
        raise StateMismatchError(f"the state is not that of a packed storage ({error})") from error
    _check(storage, plain)

    def make_log(layout: RowLayout) -> FrameLog:
        return load_log_state(frames, layout, storage._options)

    _become(storage, plain, arrays, make_log)


def _check(storage: PackedEpisodeStorage, plain: Mapping[str, Any]) -> None:
    if plain.get("version") != VERSION:
        raise StateMismatchError(f"the state has version {plain.get('version')!r}, this release reads {VERSION}")
    streams = int(np.prod(plain.get("streams", [1]), dtype=np.int64))
    size = -(-storage._capacity // max(1, streams)) * streams if plain.get("initialized") else storage._capacity
    if plain.get("ndim") != storage.ndim or (plain.get("initialized") and plain.get("max_size") != size):
        raise StateMismatchError(
            f"the state is of ndim={plain.get('ndim')} and max_size={plain.get('max_size')}, the storage of "
            f"ndim={storage.ndim} and max_size={size}"
        )


def _become(
    storage: PackedEpisodeStorage, plain: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], make_log: Any
) -> None:
    """Build everything aside, then take it over at once."""
    if not plain.get("initialized"):
        storage._forget()
        return
    try:
        leaves = leaves_from_json(plain["leaves"])
        layout = None if plain["layout"] is None else RowLayout.from_json(plain["layout"])
        streams = tuple(map(int, plain["streams"]))
        width = int(np.prod(streams, dtype=np.int64))
        times = int(plain["max_size"]) // width
        shape = (times, *streams)
        frame_of = np.array(arrays["frame_of"], np.int64).reshape(shape)
        columns = {}
        for number, leaf in enumerate(leaf for leaf in leaves if leaf.kind == "column"):
            values = np.array(arrays[f"column/{number}"])
            columns[leaf.key] = leaf.tensor(values).reshape((*shape, *leaf.shape))
        runs = Runs(times, width)
        runs.of[:] = arrays["runs"].reshape(times, width)
        runs.stale = True  # what is open is told from the flags, once it is needed
        tail = Tail()
        names = [str(name) for name in plain["tail"]]
        if names and len(arrays["tail/0"]):
            tail.append({name: np.array(arrays[f"tail/{number}"]) for number, name in enumerate(names)})
        slots = [np.array(arrays["tail_slots"], np.int64)] if "tail_slots" in arrays else []
        log = FrameLog([], **storage._options) if layout is None else make_log(layout)
        nodes = {tuple(key): tuple(map(int, extra)) for key, extra in plain["nodes"]}
        length, newest, bare = int(plain["len"]), int(plain["newest"]), bool(plain["bare"])
        cursor = plain["last_cursor"]
        used = frame_of.reshape(times, width)[: -(-length // width)]
        if int(used.max(initial=-1)) >= max(log.end, 1) or (layout and ((used >= 0) & (used < log.first)).any()):
            raise CorruptFileError("slots point at frames that do not exist")
        if not 0 <= length <= times * width:
            raise CorruptFileError(f"{length} steps in {times * width} slots")
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, StateMismatchError):
            raise
        raise StateMismatchError(f"the state is not that of a packed storage ({error})") from error
    storage._forget()
    storage._leaves, storage._layout, storage._log, storage._nodes = leaves, layout, log, nodes
    storage._streams, storage._bare = streams, bare
    storage._frame_of, storage._columns, storage._runs = frame_of, columns, runs
    storage._tail, storage._tail_slots = tail, slots
    storage.max_size, storage.initialized = times * width, True
    storage._len, storage._newest = length, newest
    storage._set_last_cursor(cursor)


def save_storage(storage: PackedEpisodeStorage, path: Path) -> None:
    """Write what is new into a folder, then the head; others may read and write the storage meanwhile."""
    folder = Path(path)
    make_folder(folder)
    with storage._saving:
        with storage._lock:
            head, log = copy.deepcopy(head_of(storage)), copy.copy(storage._log)
            folders = storage._saved  # of this log: another one brings its own
        saved = folders.get(str(folder.absolute()), [])
        parts = files.choose_parts(saved if files.still_there(folder, saved) else [], log)
        start = max(parts[-1].stop if parts else log.first, log.first)
        if log.end > start:
            parts.append(files.write_part(folder, log, start, log.end, {}))
        with write_container(folder / files.HEAD, kind="replay storage") as writer:
            writer.set("plain", head["plain"])
            writer.set("frames", [log.first, log.end])
            writer.set("parts", files.parts_to_json(parts))
            for name, array in head["arrays"].items():
                writer.add(name, array)
        folders[str(folder.absolute())] = parts
        files.delete_others(folder, parts)


def load_storage(storage: PackedEpisodeStorage, path: Path) -> list[int]:
    """Read a folder; returns the slots along time whose steps are lost, each of which holds a copy of a sound one.

    Raises:
        CorruptFileError: If the head is damaged, or nothing is sound.
        StateMismatchError: If it is of a storage of another size.
    """
    with files.reading(path):
        return _load(storage, Path(path))


def _load(storage: PackedEpisodeStorage, folder: Path) -> list[int]:
    with Container(folder / files.HEAD) as container:
        if container.kind != "replay storage":
            raise CorruptFileError(f"{folder / files.HEAD} is a {container.kind!r}, expected 'replay storage'")
        plain, (first, end) = dict(container.values["plain"]), map(int, container.values["frames"])
        parts = files.parts_from_json(container.values["parts"])
        arrays = {name: container.read(name) for name in container.entries}
    _check(storage, plain)
    lost: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def make_log(layout: RowLayout) -> FrameLog:
        nonlocal lost
        if not parts:
            return FrameLog.restore(
                layout.packers, [(np.empty(0, np.int64), [])] * len(layout.packers), end, end, **storage._options
            )
        loaded = files.read_parts(folder, parts, len(layout.packers))
        lost = loaded.lost
        return FrameLog.restore(layout.packers, loaded.columns, first, end, **storage._options)

    with storage._lock:
        _become(storage, plain, arrays, make_log)
        storage._saved[str(folder.absolute())] = [] if lost.any() else parts
        return _patch(storage, lost, parts[0].start if parts else 0) if lost.any() else []


def _patch(storage: PackedEpisodeStorage, lost: NDArray[np.bool_], first: int) -> list[int]:
    """Let slots whose frames are lost hold what a sound slot holds, so that lengths and priorities still fit."""
    storage._pack_tail()  # what stands in for others must have a frame
    bad_frame = np.zeros(storage._log.end - first + 1, np.bool_)
    bad_frame[: len(lost)] = lost
    if any(leaf.kind == NEXT for leaf in storage._leaves):
        bad_frame[:-1] |= bad_frame[1:]
    frames = storage._frame_of
    length = storage._len_along_dim0
    used = np.zeros(frames.shape, np.bool_)
    used[:length] = frames[:length] >= 0
    bad = np.zeros_like(used)
    place = frames[used] - first
    bad[used] = bad_frame[place]
    flat_bad, flat = bad.reshape(-1), frames.reshape(-1)
    sound = np.flatnonzero((flat != -1) & ~flat_bad)
    if not len(sound):
        storage._forget()
        raise CorruptFileError("every step in the folder is lost")
    holes = np.flatnonzero(flat_bad)
    copies = sound[np.minimum(np.searchsorted(sound, holes), len(sound) - 1)]
    flat[holes] = flat[copies]
    for column in storage._columns.values():
        values = column.flatten(0, len(storage._streams))
        values[torch.from_numpy(holes)] = values[torch.from_numpy(copies)]
    width = int(np.prod(storage._streams, dtype=np.int64))
    times = sorted({int(hole) // width for hole in holes})
    logger.warning(
        "%d steps are lost, at times %s; copies of sound steps stand in for them", len(holes), _listed(times)
    )
    return times


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"
