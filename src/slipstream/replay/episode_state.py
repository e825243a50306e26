"""The whole of an `EpisodeStore` as tensors and plain values, and in a folder."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import CorruptFileError, SlipstreamError, StateMismatchError
from slipstream.replay import folder as files
from slipstream.replay.fields import RowLayout
from slipstream.replay.frames import FrameLog
from slipstream.replay.log_state import load_log_state, log_state
from slipstream.replay.prefix_sum import PrefixSum
from slipstream.replay.tail import Tail
from slipstream.schema.dtypes import parse_numpy_dtype
from slipstream.store.container import Container
from slipstream.store.local import make_folder
from slipstream.store.writer import write_container

if TYPE_CHECKING:
    from slipstream.replay.episodes import EpisodeStore

logger = logging.getLogger(__name__)

VERSION = 1


@dataclass(frozen=True)
class RestoredEpisodes:
    """What became of a folder: how many episodes were read, and the numbers of those that were lost."""

    num_episodes: int
    lost: tuple[int, ...]


def head_of(store: EpisodeStore) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return all but the packed frames: plain values, and arrays."""
    tails = {stream: tail.values() for stream, tail in store._tails.items() if tail.length}
    plain = {
        "version": VERSION,
        "layout": None if store._layout is None else store._layout.to_json(),
        "counts": dict(store._counts),
        "generator": copy.deepcopy(_plain_state(store.generator.bit_generator.state)),
        "tails": [[stream, list(values)] for stream, values in tails.items()],
    }
    arrays = {"frames": store._frames.lengths}
    for number, values in enumerate(tails.values()):
        arrays |= {f"tail/{number}/{place}": np.array(rows) for place, rows in enumerate(values.values())}
    return plain, arrays


def _plain_state(state: Any) -> Any:
    """Write the large numbers of a generator as text, and its arrays as lists: JSON keeps both."""
    if isinstance(state, Mapping):
        return {key: _plain_state(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return {"array": state.tolist(), "dtype": state.dtype.str}
    return str(state) if isinstance(state, int) and abs(state) >= 1 << 53 else state


def _generator_state(plain: Any) -> Any:
    if isinstance(plain, Mapping) and set(plain) == {"array", "dtype"}:
        return np.array(plain["array"], parse_numpy_dtype(plain["dtype"]))
    if isinstance(plain, Mapping):
        return {key: _generator_state(value) for key, value in plain.items()}
    return int(plain) if isinstance(plain, str) and plain.lstrip("-").isdigit() else plain


def episode_state(store: EpisodeStore) -> dict[str, Any]:
    """Return a store as tensors and plain values, in memory of their own."""
    plain, arrays = head_of(store)
    return {
        "plain": plain,
        "arrays": {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()},
        "frames": None if store._layout is None else log_state(store._log),
    }


def load_episode_state(store: EpisodeStore, state: Mapping[str, Any]) -> None:
    """Turn a store into what `episode_state` was taken of; nothing changes unless all of it fits."""
    try:
        plain = state["plain"]
        arrays = {name: tensor.cpu().numpy() for name, tensor in state["arrays"].items()}
        _check_version(plain)
        layout = None if plain["layout"] is None else RowLayout.from_json(plain["layout"])
        log = (
            FrameLog([], **store._options)
            if layout is None
            else load_log_state(state["frames"], layout, store._options)
        )
        lengths = np.array(arrays["frames"], np.int64)
        _become(store, plain, arrays, layout, log, lengths)
    except StateMismatchError:
        raise
    except files.MALFORMED as error:
        raise StateMismatchError(f"the state is not that of an episode store ({error})") from error


def _check_version(plain: Mapping[str, Any]) -> None:
    if plain.get("version") != VERSION:
        raise StateMismatchError(f"the state has version {plain.get('version')!r}, this release reads {VERSION}")


def _become(
    store: EpisodeStore,
    plain: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    layout: RowLayout | None,
    log: FrameLog,
    lengths: NDArray[np.int64],
) -> None:
    if int(lengths.sum()) != log.end - log.first or (lengths < 2).any():
        raise StateMismatchError(f"episodes of {int(lengths.sum())} frames, there are {log.end - log.first}")
    tails = {}
    for number, (stream, names) in enumerate(plain["tails"]):
        tails[stream] = Tail()
        tails[stream].append({name: np.array(arrays[f"tail/{number}/{place}"]) for place, name in enumerate(names)})
    generator = copy.deepcopy(store.generator)
    generator.bit_generator.state = _generator_state(plain["generator"])
    counts = {name: int(plain["counts"][name]) for name in store._counts}
    steps, frames = PrefixSum(), PrefixSum()
    steps.extend(lengths - 1)
    frames.extend(lengths)
    store.generator = generator
    store._layout, store._log, store._steps, store._frames, store._tails = layout, log, steps, frames, tails
    store._counts = counts
    store._saved = {}
    store._evict()


def save_episodes(store: EpisodeStore, path: Path) -> None:
    """Write the episodes that are new into a folder, then the head; others may use the store meanwhile."""
    folder = Path(path)
    make_folder(folder)
    with store._saving:
        with store._lock:
            plain, arrays = head_of(store)
            log, lengths = copy.copy(store._log), store._frames.lengths
            folders = store._saved  # of this log: another one brings its own
        key = str(folder.absolute())
        saved = folders.get(key, [])
        parts = files.choose_parts(saved if files.still_there(folder, saved) else [], log)
        start = max(parts[-1].stop if parts else log.first, log.first)
        if log.end > start:
            new = lengths[log.first + np.cumsum(lengths) > start]
            number = plain["counts"]["episodes_added"] - len(new)
            values = {"layout": plain["layout"], "first_episode": number, "episodes": new.tolist()}
            parts.append(files.write_part(folder, log, start, log.end, values))
        with write_container(folder / files.HEAD, kind="replay episodes") as writer:
            writer.set("plain", plain)
            writer.set("log", [log.first, log.end])
            writer.set("parts", files.parts_to_json(parts))
            for name, array in arrays.items():
                writer.add(name, array)
        folders[key] = parts
        files.delete_others(folder, parts)


def restore_episodes(store: EpisodeStore, path: Path) -> RestoredEpisodes:
    """Read a folder; keeps the sound episodes and says which are lost."""
    with files.reading(path):
        return _restore(store, Path(path))


def _restore(store: EpisodeStore, folder: Path) -> RestoredEpisodes:
    if not folder.is_dir():
        raise FileNotFoundError(2, "no folder of episodes", str(folder))
    try:
        plain, arrays, parts, first, end = _read_head(folder)
        lengths, number = arrays["frames"], plain["counts"]["episodes_added"] - len(arrays["frames"])
    except CorruptFileError as error:
        logger.warning("%s: %s; what the parts hold is restored", folder / files.HEAD, error)
        plain, arrays, parts, first, end, lengths, number = _rebuild_head(store, folder)
    if not parts:
        _become(store, plain, arrays, None, FrameLog([], **store._options), np.empty(0, np.int64))
        return RestoredEpisodes(0, ())
    layout = RowLayout.from_json(plain["layout"])
    loaded = files.read_parts(folder, parts, len(layout.packers))
    old = FrameLog.restore(layout.packers, loaded.columns, first, end, **store._options)
    starts = first + np.cumsum(lengths) - lengths
    damaged = np.array(
        [
            bool(loaded.lost[s - parts[0].start : s - parts[0].start + n].any())
            for s, n in zip(starts, lengths, strict=True)
        ],
        np.bool_,
    )
    log = old
    if damaged.any():
        log = FrameLog(layout.packers, **store._options)
        for start, length in zip(starts[~damaged].tolist(), lengths[~damaged].tolist(), strict=True):
            log.append_packed(old.segments(start, start + length), length)
    _become(store, plain, arrays, layout, log, lengths[~damaged])
    lost = tuple((number + np.flatnonzero(damaged)).tolist())
    store._saved[str(folder.absolute())] = [] if lost else parts
    if lost:
        logger.warning("%s: episodes %s are lost", folder, ", ".join(map(str, lost)))
    return RestoredEpisodes(int((~damaged).sum()), lost)


def _read_head(folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]], list[files.Part], int, int]:
    try:
        with Container(folder / files.HEAD) as container:
            if container.kind != "replay episodes":
                raise CorruptFileError(f"it is a {container.kind!r}, expected 'replay episodes'")
            plain, (first, end) = container.values["plain"], map(int, container.values["log"])
            _check_version(plain)
            parts = files.parts_from_json(container.values["parts"])
            arrays = {name: container.read(name) for name in container.entries}
            fits = not parts or parts[0].start <= first <= end == parts[-1].stop
            fits &= arrays["frames"].dtype == np.int64 and int(arrays["frames"].sum()) == end - first
            int(plain["counts"]["episodes_added"])
    except files.MALFORMED as error:
        if isinstance(error, StateMismatchError):
            raise
        raise CorruptFileError(f"it is not as a writer writes it ({error})") from error
    except FileNotFoundError:
        if not files.find_parts(folder):
            raise
        raise CorruptFileError("it is missing") from None
    if not fits:
        raise CorruptFileError("it does not fit its parts")
    return plain, arrays, parts, first, end


def _rebuild_head(store: EpisodeStore, folder: Path) -> Any:
    """Make up a head from what the parts say of themselves; unfinished episodes and the generator are lost with it."""
    found: list[files.Part] = []
    lengths: list[int] = []
    plain, number = None, 0
    for part in files.find_parts(folder):
        try:
            with Container(folder / part.name) as container:
                values = container.values
                episodes, layout, first = values["episodes"], values["layout"], int(values["first_episode"])
                RowLayout.from_json(layout)
                if sum(episodes) != part.stop - part.start:
                    raise CorruptFileError("its episodes do not add up")
        except (SlipstreamError, OSError, KeyError, TypeError) as error:
            logger.warning("%s: cannot be read (%s)", folder / part.name, error)
            found, lengths = [], []  # frames are numbered through: those after a gap stand alone
            continue
        number = number if found else first
        found.append(part)
        lengths += episodes
        plain = layout
    if plain is None or not found:
        raise CorruptFileError(f"{folder} holds nothing that is sound")
    counts = dict.fromkeys(store._counts, 0)
    counts |= {"episodes_added": number + len(lengths), "frames_added": found[-1].stop}
    head = {
        "version": VERSION,
        "layout": plain,
        "counts": counts,
        "generator": _plain_state(store.generator.bit_generator.state),
        "tails": [],
    }
    return head, {}, found, found[0].start, found[-1].stop, np.array(lengths, np.int64), number
