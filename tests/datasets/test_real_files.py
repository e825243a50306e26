"""Recordings that nobody here made load with the numbers that h5py reads; damaged ones are an error that says so."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream import SlipstreamError
from slipstream.datasets.describe import describe
from tests.datasets.plain import check_against_h5py

ROOT = Path(__file__).parents[2]
REAL = Path(os.environ.get("SLIPSTREAM_REAL_DATA", ROOT.parent / "shared" / "data"))
FILES = sorted(path for path in REAL.rglob("*") if path.suffix in (".hdf5", ".h5"))

needs_recordings = pytest.mark.skipif(not FILES, reason=f"{REAL} has no recordings")


@needs_recordings
def test_every_recording_loads_with_the_numbers_that_h5py_reads_or_is_rejected_with_a_reason():
    for path in FILES:
        try:
            check_against_h5py(path)
        except SlipstreamError as error:
            assert str(error).startswith(f"{path}: "), error
            assert "HDF5 cannot read it" not in str(error), error


@needs_recordings
@pytest.mark.parametrize(
    ("name", "layout", "episodes", "steps", "joint_dim"),
    [
        ("robosuite_lift.hdf5", "robomimic", 1, 412, 0),
        ("robosuite_four_demos.hdf5", "robomimic", 4, 1950, 0),
        ("maniskill_fmb_assembly1.h5", "ManiSkill", 1, 812, 0),
        ("d4rl_hopper_medium_replay_v1.hdf5", "D4RL", 2, 49, 11),
        ("d4rl_pen_expert_v1.hdf5", "D4RL", 2, 200, 45),
        ("robomimic_lift_low_dim.hdf5", "robomimic", 2, 117, 9),
    ],
)
def test_recordings_are_recognised(name, layout, episodes, steps, joint_dim):
    if not (REAL / name).exists():
        pytest.skip(f"{REAL / name} is not here")
    found = check_against_h5py(REAL / name)
    assert (found.layout, found.num_episodes, found.num_steps, found.joint_dim) == (layout, episodes, steps, joint_dim)


@needs_recordings
def test_simulator_states_are_listed_and_never_used_as_joints():
    for path in FILES:
        try:
            found = describe(path)
        except SlipstreamError:
            continue
        assert not {"states", "env_states"}.intersection(name.rpartition("/")[2] for name in found.roles.joint)
        for one in found.observations:
            if not one.is_joint:
                assert any(note.startswith(f"not used: {one.path} {list(one.shape)}") for note in found.notes)


def fuzz(folder: Path, count: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.datasets.fuzz", str(folder), str(count), *map(str, FILES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout[-500:], done.stderr[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "count", [30, pytest.param(120, marks=pytest.mark.slow), pytest.param(3000, marks=pytest.mark.slow)]
)
def test_damaged_files_are_an_error_that_names_them_or_harmless(tmp_path, count):
    found = fuzz(tmp_path, count)
    assert len(found) == count
    bad = [one for one in found if one["result"].startswith(("unnamed", "unexpected"))]
    assert not bad, "\n".join(map(str, bad))
    # The damage is neither always fatal nor never.
    results = {one["result"] for one in found}
    assert "loaded" in results
    assert "CorruptFileError" in results
