"""A repacked file holds the same, and is read in parallel."""

import os

import h5py
import numpy as np
import pytest

from slipstream import ConfigurationError, DatasetError, Fields, SequenceDataset, describe, repack
from tests.datasets.conftest import write_a, write_aloha, write_minari, write_robomimic


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd", "gzip"])
@pytest.mark.parametrize("chw", [False, True])
def test_images_are_the_same_and_everything_else_is_there(tmp_path, compression, chw):
    source = write_a(tmp_path / "a.hdf5", ends=(9,), chunks=(16, 3, 20, 24) if chw else (16, 7, 9, 2), chw=chw)
    with h5py.File(source, "a") as file:
        file.attrs["who"], file["observations/left_image"].attrs["fps"] = "me", 30
        file["extra/names"] = np.array([b"a", b"bc"])
        file["extra/link"] = h5py.SoftLink("/actions")
    done = repack(source, tmp_path / "b.hdf5", compression=compression)
    assert done.num_frames == 93
    with h5py.File(source) as before, h5py.File(tmp_path / "b.hdf5") as after:
        names: list[str] = []
        before.visit(names.append)
        copied: list[str] = []
        after.visit(copied.append)
        assert sorted(names) == sorted(copied)
        for name in names:
            if isinstance(before[name], h5py.Dataset):
                np.testing.assert_array_equal(before[name][()], after[name][()])
        assert after.attrs["who"] == "me"
        assert after["observations/left_image"].attrs["fps"] == 30
        assert after["extra/link"].shape == (30, 7)
    reading = {row.reading for row in describe(tmp_path / "b.hdf5").rows if row.role in ("left", "right", "global")}
    assert reading == {"contiguous" if compression == "none" else "chunks"}
    assert not any("repack" in note for note in describe(tmp_path / "b.hdf5").notes)


@pytest.mark.parametrize(
    "write", [lambda path: write_minari(path, jpeg=True), lambda path: write_aloha(path, jpeg=True)]
)
def test_pictures_stay_pictures_in_rows_of_one_length(tmp_path, write):
    source = write(tmp_path / "m.hdf5")
    repack(source, tmp_path / "b.hdf5")
    assert all(row.reading in ("contiguous", "memory") for row in describe(tmp_path / "b.hdf5").rows)
    with SequenceDataset(source, image_size=16) as before, SequenceDataset(tmp_path / "b.hdf5", image_size=16) as after:
        for number in range(len(before)):
            for camera, images in before[number]["images"].items():
                np.testing.assert_array_equal(images, after[number]["images"][camera])


def test_next_observations_are_repacked_too(tmp_path):
    source = write_robomimic(tmp_path / "r.hdf5")
    assert repack(source, tmp_path / "b.hdf5").num_frames == 2 * 2 * 15


def test_nothing_is_replaced_unless_that_is_asked_for(file_a, tmp_path):
    target = tmp_path / "b.hdf5"
    target.write_bytes(b"precious")
    with pytest.raises(DatasetError, match="b.hdf5: is there already, and was not to be replaced"):
        repack(file_a, target)
    assert target.read_bytes() == b"precious"
    repack(file_a, target, overwrite=True)
    assert describe(target).num_steps == 30
    with pytest.raises(DatasetError, match="a.hdf5: is the source itself"):
        repack(file_a, file_a, overwrite=True)


def test_what_goes_wrong_leaves_nothing_behind(tmp_path):
    source = write_a(tmp_path / "a.hdf5", chunks=(1, 20, 24, 3), compression="gzip")
    with h5py.File(source) as file:
        info = file["observations/left_image"].id.get_chunk_info(5)
    content = bytearray(source.read_bytes())
    content[info.byte_offset : info.byte_offset + info.size] = bytes(info.size)
    source.write_bytes(content)
    with pytest.raises(ValueError, match="row 5 of observations/left_image cannot be read"):
        repack(source, tmp_path / "b.hdf5")
    assert [path.name for path in tmp_path.iterdir()] == ["a.hdf5"]


def test_what_cannot_be_repacked_is_said(file_a, tmp_path):
    with pytest.raises(ConfigurationError, match="compression is 'rar', expected one of 'none', 'lz4', 'zstd', 'gzip'"):
        repack(file_a, tmp_path / "b.hdf5", compression="rar")  # type: ignore[arg-type]
    with h5py.File(file_a, "a") as file:
        for camera in ("left", "right", "global"):
            del file[f"observations/{camera}_image"]
    with pytest.raises(DatasetError, match="has no images, so there is nothing to repack"):
        repack(file_a, tmp_path / "b.hdf5")


def test_names_that_lead_to_the_same_thing_still_do(file_a, tmp_path):
    with h5py.File(file_a, "a") as file:
        file.move("observations/left_image", "raw/left")
        file["observations/left_image"] = h5py.SoftLink("/raw/left")
        file["again/left"] = file["raw/left"]
        file["again/root"] = file["/"]
        file["again/actions"] = file["actions"]
    done = repack(file_a, tmp_path / "b.hdf5")
    assert done.num_frames == 93
    with h5py.File(file_a) as old, h5py.File(done.path) as new:
        assert isinstance(new.get("observations/left_image", getlink=True), h5py.SoftLink)
        assert new["again/left"] == new["raw/left"] == new["observations/left_image"]
        assert new["again/actions"] == new["actions"]
        assert new["again/root/again/root"] == new["/"]
        assert (new["raw/left"][()] == old["raw/left"][()]).all()


def test_images_may_be_named_with_a_slash_before_their_path(tmp_path):
    source = write_robomimic(tmp_path / "r.hdf5")
    repack(source, tmp_path / "b.hdf5", fields=Fields({"global": "/obs/agentview_image"}))
    with h5py.File(source) as old, h5py.File(tmp_path / "b.hdf5") as new:
        name = "data/demo_1/obs/agentview_image"
        assert (new[name][()] == old[name][()]).all()


def test_a_source_that_changes_meanwhile_leaves_nothing_behind(file_a, tmp_path):
    def touch(done: int, total: int) -> None:
        if done == total:
            os.utime(file_a, ns=(1, 1))

    with pytest.raises(DatasetError, match="a.hdf5: changed since it was opened"):
        repack(file_a, tmp_path / "b.hdf5", progress=touch)
    assert [path.name for path in tmp_path.iterdir()] == ["a.hdf5"]
