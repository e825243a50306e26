"""`slipstream data`, as a person or a script meets it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.cli.conftest import Server, serve
from tests.datasets.conftest import write_a, write_robomimic

COMMANDS = ["inspect", "ingest"]


@pytest.fixture(scope="module")
def data() -> Iterator[Server]:
    yield from serve("data")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_a(tmp_path / "a.hdf5", ends=(9, 19), chunks=(16, 20, 24, 3), compression="gzip")


@pytest.mark.parametrize("command", [[], *[[name] for name in COMMANDS]])
def test_help_has_an_example_and_imports_nothing_heavy(command):
    script = (
        "import sys, slipstream.cli\n"
        f"sys.argv = ['slipstream', 'data', *{command!r}, '--help']\n"
        "try: slipstream.cli.main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'h5py', 'cv2'} & set(sys.modules), 'heavy'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert f"Example: slipstream data {' '.join(command)}" in done.stdout


def test_inspect_shows_what_a_file_holds_as_a_table(data, file):
    result = data("inspect", file)
    assert result.code == 0
    assert "layout A (/observations)" in result.out
    assert "3 episodes of 10 steps, 30 transitions; joint_dim 16, action_dim 7" in result.out
    line = next(line for line in result.out.splitlines() if "left_image" in line)
    assert line.split() == [
        "left", "observations/left_image", "uint8", "31x20x24x3", "chunks", "16x20x24x3", "gzip", "chunks",
    ]  # fmt: skip
    assert "note: reading a frame of the camera left decodes 16 times its size; `slipstream data ingest`" in result.out


def test_inspect_prints_json(data, file):
    found = data.json("inspect", file)
    assert (found["layout"], found["episodes"], found["transitions"]) == ("A (/observations)", 3, 30)
    assert found["datasets"][0]["role"] == "left"
    assert found["caches"] == []


def test_inspect_selects_episodes_and_lists_what_is_not_used(data, tmp_path):
    path = write_robomimic(tmp_path / "r.hdf5")
    with h5py.File(path, "a") as root:
        for number in range(3):
            root[f"data/demo_{number}/obs/object"] = np.zeros((4 + number, 10))
        del root["data/demo_2/actions"]
    assert "demo_2/actions is not there" in data("inspect", path).err
    result = data("inspect", path, "--skip-bad-episodes")
    assert "2 episodes of 4 to 5 steps" in result.out
    assert "note: skipped 1 episode that cannot be used: " in result.out
    assert "note: not used: obs/object [4, 10]; select with joint='obs/object'" in result.out
    assert "note: guessed: joint is obs/robot0_joint_pos [4, 7], obs/robot0_gripper_qpos [4, 2]" in result.out
    assert data.json("inspect", path, "--filter-key", "train")["episodes"] == 1
    assert "there is no filter key 'test'" in data("inspect", path, "--filter-key", "test").err


def test_inspect_takes_names_for_what_is_not_recognised(data, tmp_path):
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w") as root:
        root["eye"], root["arm"] = np.zeros((5, 8, 8, 3), np.uint8), np.zeros((5, 3))
        root["cmd"] = np.zeros((4, 2))
    refused = data("inspect", path)
    assert refused.code == 2
    assert refused.err.count("\n") == 1
    assert "x.hdf5: none of the layouts that are known" in refused.err
    assert "cmd [4, 2]" in refused.err
    found = data.json("inspect", path, "--camera", "left=eye", "--joint", "arm", "--action", "cmd")
    assert (found["layout"], found["transitions"], found["cameras"]) == ("explicit", 4, ["left"])
    assert "expected a name and a path" in data("inspect", path, "--camera", "eye").err


def test_ingest_makes_a_cache_that_inspect_shows(data, file):
    result = data("ingest", file, "--image-size", 16)
    assert result.code == 0
    assert "a.hdf5.16px.frames: 93 of 93 frames are new" in result.out
    assert "was fresh already" in data("ingest", file, "--image-size", 16).out
    assert "cache: a.hdf5.16px.frames, 93 frames, fresh" in data("inspect", file).out
    with h5py.File(file, "a") as root:
        root["rewards"][0] = 5
    assert "93 frames, to be compared with the file when it is loaded" in data("inspect", file).out
    with h5py.File(file, "a") as root:
        root["note"] = np.zeros(1000)
    assert "93 frames, stale" in data("inspect", file).out
    assert "93 of 93 frames are new" in data("ingest", file, "--image-size", 16).out


def test_ingest_adds_cameras_and_verifies(data, file):
    assert "31 of 31 frames" in data("ingest", file, "--image-size", 16, "--camera", "left=observations/left_image").out
    assert "62 of 93 frames are new" in data("ingest", file, "--image-size", 16).out
    assert "was fresh already" in data("ingest", file, "--image-size", 16, "--verify").out
    cache = file.with_name("a.hdf5.16px.frames")
    content = bytearray(cache.read_bytes())
    content[4100] ^= 1
    cache.write_bytes(content)
    assert "was fresh already" in data("ingest", file, "--image-size", 16).out
    assert "93 of 93 frames are new" in data("ingest", file, "--image-size", 16, "--verify").out


def test_ingest_takes_several_files_and_folders_and_another_place(data, tmp_path):
    (tmp_path / "demos").mkdir()
    write_robomimic(tmp_path / "demos" / "one.hdf5")
    write_robomimic(tmp_path / "demos" / "two.h5")
    other = write_a(tmp_path / "a.hdf5")
    place = tmp_path / "caches"
    result = data("ingest", tmp_path / "demos", other, "--image-size", 8, "--folder", place, "--compress")
    assert result.code == 0
    assert len(result.out.splitlines()) == 3
    assert len(list(place.glob("*.8px.frames"))) == 3


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("what", ["nothing", "garbage", "cut off", "a folder"])
def test_what_is_wrong_is_one_line_and_leaves_nothing_behind(data, file, tmp_path, command, what):
    if what == "nothing":
        file.unlink()
    elif what == "garbage":
        file.write_bytes(b"\x1b[31mno" * 999)
    elif what == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        file.unlink()
        file.mkdir()
    before = sorted(tmp_path.iterdir())
    result = data(command, file)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("slipstream: ")
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err
    assert sorted(tmp_path.iterdir()) == before


def test_names_from_a_file_do_not_steer_the_terminal(data, tmp_path):
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w") as root:
        root["observations/\x1b[31mcam_image"] = np.zeros((5, 8, 8, 3), np.uint8)
        root["actions"] = np.zeros((4, 2))
    result = data("inspect", path)
    assert "\x1b" not in result.out
    assert "\\x1b[31mcam" in result.out
