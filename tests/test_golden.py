"""Files of a released format version load for ever, and today's code still writes the same bytes.

`tests/golden.py` says what is in them.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from slipstream import CheckpointManager, EpisodeStore, PackedEpisodeStorage, compress_image, decompress_image
from slipstream.checkpoint.native import NativeFile
from slipstream.run.evaluation import read_evaluation
from slipstream.store.container import Container
from slipstream.train.evaluation.results import save_evaluation
from tests import golden
from tests.replay.samples import assert_same

DATA = Path(__file__).parent / "data"


def content_of(path: Path) -> dict[str, Any]:
    """Return everything in a container but the release that wrote it and the identities that depend on that."""
    with Container(path) as container:
        return {"kind": container.kind, "entries": container.entries, "state": container.values.get("state")}


def assert_identical(one: Any, other: Any, where: str = "state") -> None:
    """Compare nested state: types, keys in order, and every bit."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), where
        mine = one.detach().contiguous().reshape(-1).view(torch.uint8)
        theirs = other.detach().contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(mine, theirs), where
    elif isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), where
    elif isinstance(one, TensorDict):
        assert one.batch_size == other.batch_size, where
        assert_identical(dict(one.items()), dict(other.items()), where)
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_identical(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_identical(mine, theirs, f"{where}/{number}")
    else:
        assert repr(one) == repr(other), where


@pytest.mark.parametrize("step", golden.STEPS)
def test_checkpoints_of_version_1_load_whole_and_as_deltas(tmp_path, step):
    folder = shutil.copytree(DATA / "checkpoints_v1", tmp_path / "run")
    with CheckpointManager(folder) as manager:
        restored = manager.restore(step)
    assert restored.step == step
    assert restored.metrics == {"reward": step / 4}
    # The third is stored against the second.
    with NativeFile(folder / f"checkpoint_iter_{step}.slip") as file:
        assert [parent.file for parent in file.header.parents] == ["checkpoint_iter_2.slip"] * (step == 3)
    expected = golden.checkpoint(step)
    assert_identical(restored.state, expected)
    model = restored.state["model"]
    assert model._metadata == expected["model"]._metadata
    assert model["actor.weight"].data_ptr() == model["actor.tied"].data_ptr()
    channels_last = restored.state["views"]["channels last"]
    assert channels_last.stride() == expected["views"]["channels last"].stride()
    assert restored.state["parameter"].requires_grad
    assert isinstance(restored.state["parameter"], torch.nn.Parameter)


def test_checkpoints_are_still_written_with_the_bytes_of_version_1(tmp_path):
    golden.write_checkpoints(tmp_path)
    for step in golden.STEPS:
        name = f"checkpoint_iter_{step}.slip"
        with Container(tmp_path / name) as new, Container(DATA / "checkpoints_v1" / name) as old:
            assert new.entries == old.entries
            assert new.values == old.values


def test_episodes_of_version_2_load_and_are_still_written_with_the_same_bytes(tmp_path):
    folder = shutil.copytree(DATA / "replay_episodes_v2", tmp_path / "old")
    expected = golden.episodes()
    store = EpisodeStore()
    assert store.restore(folder).num_episodes == 3
    assert_same(store.get(np.arange(len(store))), expected.get(np.arange(len(expected))))
    assert_same(store.sample(16), expected.sample(16))
    golden.episodes().save(tmp_path / "new")
    assert_same_folders(tmp_path / "new", DATA / "replay_episodes_v2")


def test_a_storage_of_version_2_loads_and_is_still_written_with_the_same_bytes(tmp_path):
    folder = shutil.copytree(DATA / "replay_storage_v2", tmp_path / "old")
    expected = golden.replay_buffer()
    storage = PackedEpisodeStorage(64, ndim=2)
    storage.loads(folder)
    assert len(storage) == len(expected.storage)
    assert_same(storage[:].to_tensordict(), expected.storage[:].to_tensordict())
    expected.storage.dumps(tmp_path / "new")
    assert_same_folders(tmp_path / "new", DATA / "replay_storage_v2")


def assert_same_folders(one: Path, other: Path) -> None:
    """Compare two replay folders; the names of parts end in random digits."""
    mine = sorted(one.glob("*.slip"))
    theirs = sorted(other.glob("*.slip"))
    assert [path.name.rpartition("-")[0] for path in mine] == [path.name.rpartition("-")[0] for path in theirs]
    for new, old in zip(mine, theirs, strict=True):
        assert content_of(new) == content_of(old)


def test_images_of_version_1_load():
    packed = json.loads((DATA / "images_v1.json").read_text())
    expected = golden.images()
    assert list(packed) == list(expected)
    for name, image in expected.items():
        assert_identical(decompress_image(bytes.fromhex(packed[name])), image, name)


def test_images_of_version_2_load_and_are_still_packed_into_the_same_bytes():
    packed = json.loads((DATA / "images_v2.json").read_text())
    expected = golden.images() | golden.single_values()
    assert list(packed) == [*expected, "jpeg"]
    for name, image in expected.items():
        assert_identical(decompress_image(bytes.fromhex(packed[name])), image, name)
        assert compress_image(image).hex() == packed[name], name
    # Which bytes a JPEG has depends on the library that wrote it; and it is not exact.
    difference = decompress_image(bytes.fromhex(packed["jpeg"])).astype(int) - expected["colours"]
    assert np.abs(difference).mean() < 16


def test_evaluations_of_version_1_load():
    evaluation = read_evaluation(DATA / "evaluation_v1.json")
    assert (evaluation.iteration, evaluation.env_frames) == (120, 2_000_000)
    assert [(item.name, item.episodes) for item in evaluation.scenarios] == [("unseen", 16), ("empty", 4)]
    assert evaluation.main == evaluation.scenarios[0]
    assert evaluation.scenarios[0].quantities["success"].mean == 0.75
    assert evaluation.scenarios[0].quantities["path_length_m"].high == 31.5
    assert "time_to_goal_s" not in evaluation.scenarios[1].quantities


def test_evaluations_of_version_2_load_and_are_still_written_alike(tmp_path):
    evaluation = read_evaluation(DATA / "evaluation_v2.json")
    assert (evaluation.iteration, evaluation.env_frames) == (120, 2_000_000)
    found = [(item.name, item.candidate, item.has_faults, item.episodes) for item in evaluation.scenarios]
    assert found == [("through", "policy", False, 16), ("empty", "planner", True, 4)]
    assert evaluation.scenarios[0].quantities["inside_share"].high == 0.875
    assert evaluation.scenarios[0].quantities["path_length_m"].low == -math.inf
    assert "time_to_goal_s" not in evaluation.scenarios[1].quantities
    _, document = save_evaluation(golden.evaluation(), tmp_path, "evaluation_v2", golden.ABOUT_EVALUATION)
    written = json.loads((DATA / "evaluation_v2.json").read_text())
    for each in (document, written):
        del each["time"]
        for result in each["results"]:
            # It has a value for each setting of the simulation, and there may be more of them by now.
            assert result.pop("simulation")["num_envs"] == result["episodes"]
    assert document == written
