"""Files that are open elsewhere, were left by a killed writer, or were made to do harm."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from torch.utils.data import DataLoader

from slipstream import CorruptFileError, DatasetError, Fields, SequenceDataset
from slipstream.datasets import chunks, roles
from slipstream.datasets import describe as module
from slipstream.datasets.describe import describe
from slipstream.datasets.recordings import load
from tests.datasets.conftest import write_a, write_robomimic
from tests.datasets.layouts import images, numbers

WRITER = """
import sys, h5py, numpy as np
file = h5py.File(sys.argv[1], "w", libver=sys.argv[2] or None)
file.create_dataset("observations/joint", data=np.ones((5, 3)), chunks=(1, 3), maxshape=(None, 3))
file.create_dataset("actions", data=np.ones((5, 2)), chunks=(1, 2), maxshape=(None, 2))
if sys.argv[3] == "swmr":
    file.swmr_mode = True
if sys.argv[3] != "unflushed":
    file.flush()
print("ready", flush=True)
sys.stdin.read()
"""


class Writer:
    """A process that has a file open for writing."""

    def __init__(self, path: Path, version: str = "", mode: str = "flushed") -> None:
        command = [sys.executable, "-c", WRITER, str(path), version, mode]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def writers() -> Iterator[list[Writer]]:
    started: list[Writer] = []
    yield started
    for writer in started:
        writer.kill()


@pytest.mark.parametrize("version", ["", "latest"])
def test_a_file_that_is_being_written_is_in_use(tmp_path, writers, version):
    path = tmp_path / "f.hdf5"
    writers.append(Writer(path, version))
    with pytest.raises(DatasetError, match=f"f.hdf5: is in use or not closed: .* `h5clear -s {path}`"):
        describe(path)


def test_a_file_whose_writer_was_killed_is_not_closed(tmp_path, writers):
    path = tmp_path / "f.hdf5"
    writers.append(Writer(path, "latest"))
    writers[0].kill()
    with pytest.raises(DatasetError, match="is in use or not closed: .*its writer was killed .* run `h5clear -s"):
        describe(path)


def test_a_file_that_was_never_flushed_is_damaged(tmp_path, writers):
    path = tmp_path / "f.hdf5"
    writers.append(Writer(path, "", "unflushed"))
    writers[0].kill()
    with pytest.raises(CorruptFileError, match="f.hdf5: cannot be opened as HDF5"):
        describe(path)


@pytest.mark.parametrize("killed", [False, True])
def test_a_file_of_a_writer_in_swmr_mode_is_read(tmp_path, writers, killed):
    path = tmp_path / "f.hdf5"
    writers.append(Writer(path, "latest", "swmr"))
    if killed:
        writers[0].kill()
    assert describe(path).num_steps == 5
    part = load([path])
    np.testing.assert_array_equal(part.joint[:5], np.ones((5, 3), np.float32))
    part.close()


def test_a_bug_of_this_package_is_not_called_damage(file_a, monkeypatch):
    def bug(*_: Any) -> None:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(module, "find_layout", bug)
    with pytest.raises(IndexError, match="tuple index"):
        describe(file_a)
    monkeypatch.undo()
    monkeypatch.setattr(roles, "look_at", bug)
    with pytest.raises(IndexError, match="tuple index"):
        describe(file_a)


def test_scalars_and_empty_dataspaces_are_not_damage(file_a):
    with h5py.File(file_a, "a") as file:
        file["observations/fps"], file["observations/language"] = 30, "push the block"
        file["metadata/algorithm"] = np.bytes_(b"SAC")
        file["observations/nothing"] = h5py.Empty("f4")
        file["observations/rows"] = np.zeros((0, 3), np.uint8)
    found = describe(file_a)
    assert (found.num_steps, list(found.roles.cameras)) == (30, ["left", "right", "global"])


def test_names_that_are_not_utf_8_are_read_and_shown_as_latin_1(tmp_path):
    path = write_a(tmp_path / "a.hdf5")
    with h5py.File(path, "a") as file:
        group = file["observations"]
        group.id.links.move(b"joint", group.id, "gelenk_é".encode("latin-1"))
        group.id.links.move(b"left_image", group.id, "caméra_gauche".encode("latin-1"))
    found = describe(path)
    assert any("observations/gelenk_é [31, 16]" in note for note in found.notes)
    assert "observations/caméra_gauche" in [row.path for row in found.rows]
    json.dumps(found.to_json()).encode()
    fields = Fields(joint="observations/gelenk_é", cameras={"left": "observations/caméra_gauche"})
    with SequenceDataset(path, 2, fields=fields, image_size=8, cameras=["left"]) as data:
        assert data[3]["joint"].shape == (2, 16)
        assert data[3]["images"]["left"].shape == (2, 3, 8, 8)
    with pytest.raises(KeyError, match="observations/gelenk_è is not there; it has .*gelenk_é"):
        describe(path, Fields(joint="observations/gelenk_è"))


def test_cycles_of_links_end(tmp_path):
    path = write_robomimic(tmp_path / "r.hdf5")
    with h5py.File(path, "a") as file:
        file["data/demo_0/self"] = file["data/demo_0"]
        file["data/demo_0/obs/root"] = file["/"]
        file["data/demo_1/obs/loop"] = h5py.SoftLink("/data/demo_1/obs/loop")
        file["data/demo_1/obs/above"] = h5py.SoftLink("/data")
        file["ping"], file["pong"] = h5py.SoftLink("/pong"), h5py.SoftLink("/ping")
    found = describe(path)
    assert (found.num_episodes, found.num_steps) == (3, 15)


def test_soft_links_to_groups_of_the_same_file_are_followed(tmp_path):
    path = write_robomimic(tmp_path / "r.hdf5")
    with h5py.File(path, "a") as file:
        file.move("data/demo_1/obs", "shared")
        file["data/demo_1/obs"] = h5py.SoftLink("/shared")
    assert describe(path).num_steps == 15


LIMITED = """
import resource, sys
from slipstream import DatasetError
from slipstream.datasets.describe import describe
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), used + (300 << 20)))
try:
    describe(sys.argv[1])
except DatasetError as error:
    print(error)
"""


@pytest.mark.parametrize("stored", [False, True])
def test_a_claim_of_billions_of_rows_is_refused_within_little_memory(tmp_path, stored):
    path = tmp_path / "f.hdf5"
    with h5py.File(path, "w") as file:
        for name, width in (("observations/joint", 3), ("actions", 2)):
            shape = (2_000_000_000, width)
            data = file.create_dataset(name, shape, "f4", chunks=(1000, width), compression="gzip")
            if stored:
                data[:1000] = 1
        file.create_dataset("terminals", (2_000_000_000,), bool, chunks=(1000,))
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=True)
    assert "/actions claims 2000000000 rows of 16000000000 bytes in total" in done.stdout


def test_the_chunks_of_all_datasets_are_found_once_before_workers_start(tmp_path, monkeypatch):
    path = tmp_path / "r.hdf5"
    with h5py.File(path, "w") as file:
        for number in range(3):
            pictures = images(6, 8, 8, 3, seed=number)
            file.create_dataset(f"data/demo_{number}/obs/front_image", data=pictures, chunks=(1, 8, 8, 3))
            file[f"data/demo_{number}/actions"] = numbers(6, 2)
    log = tmp_path / "log"

    class Counted(chunks.ChunkTable):
        def __init__(self, data: h5py.Dataset) -> None:
            with log.open("a") as file:
                file.write(f"{data.name}\n")
            super().__init__(data)

    monkeypatch.setattr("slipstream.datasets.frames.ChunkTable", Counted)
    with SequenceDataset(path, 2, image_size=8) as data:
        assert not log.exists()
        loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
        assert sum(len(batch["action"]) for batch in loader) == 18
    assert sorted(log.read_text().split()) == [f"/data/demo_{number}/obs/front_image" for number in range(3)]
