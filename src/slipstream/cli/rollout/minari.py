"""A folder that Minari opens as a dataset: the episodes, and what it wants to know of their spaces."""
# ruff: noqa: PLC0415

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import SlipstreamError, WriteError
from slipstream.store.local import atomic_write, make_folder, sync_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slipstream.cli.rollout.episodes import Episodes, Nested

_DATA, _METADATA, _EPISODES = "data", "metadata.json", "main_data.hdf5"
_VERSION = "0.5.0"  # the oldest Minari whose layout this is; later ones read it
_ID = re.compile(r"[-\w]+(/[-\w]+)*-v\d+")


def is_dataset(folder: Path) -> bool:
    """Tell whether there is a Minari dataset in a folder."""
    return (folder / _DATA / _METADATA).is_file()


def write_dataset(target: Path, episodes: Episodes) -> None:
    """Write a dataset's folder: complete under another name first, and then under its own."""
    from slipstream.cli.rollout.episodes import write_hdf5

    target = Path(os.path.realpath(target))
    first = next(iter(episodes))
    metadata = {
        "total_episodes": len(episodes.stretches),
        "total_steps": episodes.num_steps,
        "data_format": "hdf5",
        "jpeg_encoding": False,  # else images would be taken for JPEGs
        "observation_space": json.dumps(_space(first["observations"])),
        "action_space": json.dumps(_space(first["actions"])),
        "dataset_id": dataset_id(target),
        "minari_version": _VERSION,
        "description": "Exported by slipstream rollout export.",
    }
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(prefix=".slipstream-", dir=target.parent) as name:
        staged = Path(name) / "dataset"
        (staged / _DATA).mkdir(parents=True)
        try:
            write_hdf5(staged / _DATA / _EPISODES, episodes)
            metadata["dataset_size"] = round((staged / _DATA / _EPISODES).stat().st_size / 1e6, 1)
            with atomic_write(staged / _DATA / _METADATA) as file:
                file.write(json.dumps(metadata).encode())
        except WriteError as error:  # name what the user knows, not the folder that is gone
            raise type(error)(error.errno, str(error).replace(str(staged), str(target))) from error
        _replace(staged, target, Path(name) / "old")
    sync_folder(target.parent)


def _replace(staged: Path, target: Path, old: Path) -> None:
    """Give a folder its name; what had it goes to `old`, or stays if that fails."""
    if not target.exists():
        staged.rename(target)
        return
    target.rename(old)
    try:
        staged.rename(target)
    except OSError:
        old.rename(target)
        raise


def dataset_id(target: Path) -> str:
    """Return the id of a dataset in a folder: its path below Minari's own folder, or its name, with a version."""
    root = Path(os.path.realpath(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets"))
    name = target.relative_to(root).as_posix() if target.is_relative_to(root) and target != root else target.name
    if _ID.fullmatch(name):
        return name
    return re.sub(r"[^-\w]", "_", name.rpartition("/")[2]) + "-v0"


def _space(value: Nested | NDArray[Any]) -> dict[str, Any]:
    """Describe the space of an episode's observations or actions as Minari writes it; bounds are those of the dtype."""
    import numpy as np

    if isinstance(value, dict):
        return {"type": "Dict", "subspaces": {name: _space(part) for name, part in value.items()}}
    shape = value.shape[1:]
    if value.dtype == np.bool_:
        flag = {"type": "Discrete", "dtype": "int64", "start": 0, "n": 2}
        return {"type": "MultiBinary", "n": list(shape)} if shape else flag
    low, high = _bounds(value.dtype)
    return {
        "type": "Box",
        "dtype": str(value.dtype),
        "shape": list(shape),
        "low": np.full(shape, low, value.dtype).tolist(),
        "high": np.full(shape, high, value.dtype).tolist(),
    }


def _bounds(dtype: np.dtype[Any]) -> tuple[float, float]:
    import numpy as np

    if dtype.kind == "f":
        return -np.inf, np.inf
    if dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    raise SlipstreamError(f"Minari has no space of {dtype}; export to hdf5 or npz instead")
