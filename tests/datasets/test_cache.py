"""Frames that were resized once: found, trusted only while fresh, and complete after any interruption."""

import contextlib
import json
import logging
import os
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream import (
    ConfigurationError,
    CorruptFileError,
    DatasetError,
    DiskFullError,
    Fields,
    FormatVersionError,
    MissingEntryError,
    MultimodalReplayBuffer,
    SequenceDataset,
    describe,
    ingest,
)
from slipstream.datasets.cache import FrameCache, cache_path, describe_pixels
from slipstream.datasets.cached import RegisteredCache
from slipstream.datasets.files import Files
from slipstream.datasets.source import Stamp
from tests.datasets.conftest import row_of, write_a, write_aloha, write_robomimic

SIZE = 16


def batch_of(path: Path, cache=True):
    with MultimodalReplayBuffer(7, image_size=SIZE) as buffer:
        buffer.load_from_hdf5(path, cache=cache)
        return buffer.image_metadata["left"]["reading"], buffer.sample(buffer.size, np.arange(buffer.size))


def assert_same(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("compress", [False, True])
def test_a_cache_is_used_without_being_asked_for_and_gives_the_same_batches(file_a, compress):
    reading, plain = batch_of(file_a)
    assert reading == ["contiguous"]
    done = ingest(file_a, SIZE, compress=compress)
    assert (done.num_frames, done.new_frames) == (93, 93)
    assert done.path == file_a.with_name("a.hdf5.16px.frames")
    assert (done.stored_bytes < done.raw_bytes) == compress
    reading, cached = batch_of(file_a)
    assert reading == ["cache"]
    assert_same(plain, cached)
    assert batch_of(file_a, cache=False)[0] == ["contiguous"]


GOLDEN = Path(__file__).parents[1] / "data" / "frame_cache"


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("version", [1, 2])
def test_caches_of_every_version_are_read(tmp_path, version, codec):
    path = tmp_path / "a.hdf5"
    path.write_bytes((GOLDEN / "recording.hdf5").read_bytes())
    os.utime(path, ns=(1_800_000_000 * 10**9,) * 2)  # which is all that version 1 knows of changes
    cache = cache_path(path, 8)
    cache.write_bytes((GOLDEN / f"frames_v{version}_{codec}.bin").read_bytes())
    assert FrameCache(cache).header.version == version
    with MultimodalReplayBuffer(7, image_size=8) as buffer:
        buffer.load_from_hdf5(path)
        assert buffer.image_metadata["left"]["reading"] == ["cache"]
        cached = buffer.sample(3, np.arange(3))
    with MultimodalReplayBuffer(7, image_size=8) as buffer:
        buffer.load_from_hdf5(path, cache=False)
        assert_same(cached, buffer.sample(3, np.arange(3)))
    assert [row_of(image) for image in cached.next_global] == [1, 2, 3]
    done = ingest(path, 8, compress=codec == "zstd")
    assert done.new_frames == 0
    assert FrameCache(cache).header.version == 2
    with MultimodalReplayBuffer(7, image_size=8) as buffer:
        buffer.load_from_hdf5(path)
        assert_same(cached, buffer.sample(3, np.arange(3)))


def test_a_fresh_cache_is_not_made_again_unless_that_is_asked_for(file_a):
    first = ingest(file_a, SIZE)
    stamp = first.path.stat().st_mtime_ns
    assert ingest(file_a, SIZE).new_frames == 0
    assert first.path.stat().st_mtime_ns == stamp
    assert ingest(file_a, SIZE, overwrite=True).new_frames == 93
    assert ingest(file_a, SIZE, compress=True).new_frames == 93


def test_caches_of_other_sizes_live_beside_each_other(file_a):
    ingest(file_a, SIZE)
    ingest(file_a, 8)
    with SequenceDataset(file_a, image_size=8) as data:
        assert data[3]["images"]["left"].shape == (1, 3, 8, 8)
        assert row_of(data[3]["images"]["left"][0]) == 3


def test_robomimic_frames_of_what_follows_are_cached_too(tmp_path):
    path = write_robomimic(tmp_path / "r.hdf5", (4, 5))
    assert ingest(path, SIZE).num_frames == 2 * 2 * 9
    with SequenceDataset(path, 2, image_size=SIZE) as data:
        assert data._data.readings["global"] == {"cache"}
        assert [row_of(image) for image in data[4]["images"]["global"]] == [100, 101]


def test_some_cameras_may_be_cached_and_the_others_read_from_the_file(file_a):
    _, plain = batch_of(file_a)
    assert ingest(file_a, SIZE, cameras=["left"]).num_frames == 31
    with MultimodalReplayBuffer(7, image_size=SIZE) as buffer:
        buffer.load_from_hdf5(file_a)
        assert buffer.image_metadata["left"]["reading"] == ["cache"]
        assert buffer.image_metadata["right"]["reading"] == ["contiguous"]
        assert_same(plain, buffer.sample(30, np.arange(30)))


def test_caches_may_live_in_a_folder_of_their_own(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_a(tmp_path / name / "a.hdf5", 5)
        ingest(tmp_path / name / "a.hdf5", SIZE, folder=tmp_path / "caches")
    assert len(list((tmp_path / "caches").iterdir())) == 2
    assert batch_of(tmp_path / "one" / "a.hdf5", tmp_path / "caches")[0] == ["cache"]
    assert batch_of(tmp_path / "one" / "a.hdf5")[0] == ["contiguous"]


def test_a_file_and_its_cache_may_be_moved_together(file_a, tmp_path):
    cache = ingest(file_a, SIZE).path
    (tmp_path / "there").mkdir()
    file_a.rename(tmp_path / "there" / file_a.name)
    cache.rename(tmp_path / "there" / cache.name)
    assert batch_of(tmp_path / "there" / file_a.name)[0] == ["cache"]


def test_a_cache_of_a_file_that_changed_is_not_used_and_made_again(file_a, caplog):
    ingest(file_a, SIZE)
    with h5py.File(file_a, "a") as file:
        file["observations/left_image"][3] = 99
    with caplog.at_level(logging.WARNING):
        reading, batch = batch_of(file_a)
    assert reading == ["contiguous"]
    assert (batch.left[3] == 99).all()
    assert f"{file_a} has changed since this cache was made; it is not used; ingest again" in caplog.text
    assert ingest(file_a, SIZE).new_frames == 93
    assert batch_of(file_a)[0] == ["cache"]


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        value = file.read(1)[0]
        file.seek(position)
        file.write(bytes([value ^ 1]))


@pytest.mark.parametrize("compress", [False, True])
def test_a_damaged_frame_is_read_from_the_source_and_that_is_logged_once(file_a, caplog, compress):
    _, plain = batch_of(file_a)
    path = ingest(file_a, SIZE, compress=compress).path
    flip(path, FrameCache(path).data_offset + (40 if compress else 3 * 832 + 100))
    with MultimodalReplayBuffer(7, image_size=SIZE) as buffer, caplog.at_level(logging.WARNING):
        buffer.load_from_hdf5(file_a)
        for _ in range(2):
            assert_same(plain, buffer.sample(30, np.arange(30)))
    assert len(caplog.records) == 1
    row = 1 if compress else 3
    assert f"a.hdf5.16px.frames: frame {row} of observations/left_image does not match its checksum" in caplog.text
    assert "is read from" in caplog.text


@pytest.mark.parametrize("what", ["deleted", "replaced", "truncated"])
def test_a_job_continues_when_its_cache_is_lost(file_a, caplog, what):
    _, plain = batch_of(file_a)
    path = ingest(file_a, SIZE).path
    with MultimodalReplayBuffer(7, image_size=SIZE) as buffer, caplog.at_level(logging.WARNING):
        buffer.load_from_hdf5(file_a)
        if what == "deleted":
            path.unlink()
        elif what == "replaced":
            ingest(file_a, SIZE, compress=True)
        else:
            os.truncate(path, 10_000)
        assert_same(plain, buffer.sample(30, np.arange(30)))
        assert_same(plain, buffer.sample(30, np.arange(30)))
    assert len(caplog.records) == 1
    assert "a.hdf5.16px.frames" in caplog.text


def test_a_plain_copy_of_a_file_and_its_cache_keeps_the_cache(file_a, tmp_path, caplog):
    """Copies have times, inodes and perhaps a device of their own: the contents are compared, once."""
    cache = ingest(file_a, SIZE).path
    there = tmp_path / "there"
    there.mkdir()
    for path in (file_a, cache):
        (there / path.name).write_bytes(path.read_bytes())
    os.utime(there / file_a.name, ns=(10**18, 10**18))
    time.sleep(0.2)  # the resolution of the file system's times
    with caplog.at_level(logging.WARNING):
        assert batch_of(there / file_a.name)[0] == ["cache"]
    assert "comparing all of it" in caplog.text
    caplog.clear()
    assert batch_of(there / file_a.name)[0] == ["cache"]
    assert ingest(there / file_a.name, SIZE).new_frames == 0
    assert caplog.text == ""


def test_a_file_that_was_changed_and_got_its_old_time_back_is_noticed(file_a):
    ingest(file_a, SIZE)
    before = file_a.stat()
    with h5py.File(file_a, "a") as file:
        file["observations/left_image"][3] = 99
    os.utime(file_a, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file_a.stat().st_size == before.st_size
    reading, batch = batch_of(file_a)
    assert reading == ["contiguous"]
    assert (batch.left[3] == 99).all()


def test_touch_does_not_stop_a_running_job_nor_cost_it_its_cache(file_a, caplog):
    ingest(file_a, SIZE)
    for setting in (True, False):
        with MultimodalReplayBuffer(7, image_size=SIZE) as buffer, caplog.at_level(logging.WARNING):
            buffer.load_from_hdf5(file_a, cache=setting)
            first = buffer.sample(30, np.arange(30))
            caplog.clear()
            file_a.touch()
            for _ in range(2):
                assert_same(first, buffer.sample(30, np.arange(30)))
            assert len(caplog.records) == 1
            assert "its times changed while it is in use, its size and a sample of it did not" in caplog.text
    assert batch_of(file_a)[0] == ["cache"]


def test_a_second_camera_is_added_and_the_first_is_kept(file_a):
    _, plain = batch_of(file_a)
    assert ingest(file_a, SIZE, cameras=["left"]).num_frames == 31
    done = ingest(file_a, SIZE, cameras=["right"])
    assert (done.num_frames, done.new_frames) == (62, 31)
    done = ingest(file_a, SIZE, cameras=["left"])
    assert (done.num_frames, done.new_frames) == (62, 0)
    done = ingest(file_a, SIZE)
    assert (done.num_frames, done.new_frames) == (93, 31)
    reading, cached = batch_of(file_a)
    assert reading == ["cache"]
    assert_same(plain, cached)
    done = ingest(file_a, SIZE, cameras=["left"], overwrite=True)
    assert (done.num_frames, done.new_frames) == (93, 31)
    assert_same(plain, batch_of(file_a)[1])


def test_a_camera_with_a_name_of_its_own_is_kept_too(file_a):
    """The names given when it was ingested are unknown when the next camera is."""
    with h5py.File(file_a, "a") as file:
        file["extra/eye"] = file["observations/left_image"][()]
    ingest(file_a, SIZE, fields=Fields(cameras={"eye": "extra/eye"}), cameras=["eye"])
    ingest(file_a, SIZE, cameras=["left"], compress=True)
    with SequenceDataset(file_a, image_size=SIZE, cameras={"eye": "extra/eye"}) as data:
        assert row_of(data[7]["images"]["eye"][0]) == 7
    datasets = FrameCache(cache_path(file_a, SIZE)).header.datasets
    assert [data.path for data in datasets] == ["extra/eye", "observations/left_image"]


def test_verify_reads_everything_and_repairs_what_is_damaged(file_a, caplog):
    path = ingest(file_a, SIZE).path
    assert ingest(file_a, SIZE, verify=True).new_frames == 0
    flip(path, FrameCache(path).data_offset + 5 * 832)
    assert ingest(file_a, SIZE).new_frames == 0
    with caplog.at_level(logging.WARNING):
        assert ingest(file_a, SIZE, verify=True).new_frames == 93
    assert "frame 5 of observations/left_image does not match its checksum" in caplog.text
    assert ingest(file_a, SIZE, verify=True).new_frames == 0


def test_verify_notices_a_change_that_left_no_trace_in_the_times(file_a, monkeypatch):
    """As on a file system that does not keep the time of the last change."""
    ingest(file_a, SIZE)
    stamp = Stamp.of(file_a)
    with h5py.File(file_a, "a") as file:
        file["observations/left_image"][3] = 99
    monkeypatch.setattr(Stamp, "of", lambda path: stamp)
    assert ingest(file_a, SIZE).new_frames == 0
    assert ingest(file_a, SIZE, verify=True).new_frames == 93


def test_reading_of_compressed_pictures_is_part_of_what_a_cache_is_of(tmp_path):
    """A cache of pictures whose red and blue were exchanged is none of the same pictures as they are."""
    path = write_aloha(tmp_path / "a.hdf5", jpeg=True)
    done = ingest(path, SIZE)
    cache = FrameCache(done.path)
    assert {data.pixels for data in cache.header.datasets} == {
        describe_pixels(describe(path).stretches[0].cameras["left"].kind)
    }
    with contextlib.closing(Files()) as files:
        registered = RegisteredCache(cache, files, 0)
        images = describe(path).stretches[0].cameras["left"]
        where = describe(path).roles.cameras["left"]
        assert registered.source(where, images) is not None
        other = replace(images, kind=replace(images.kind, encoding="rgb"))
        assert registered.source(where, other) is None


def test_a_cache_that_is_truncated_or_not_a_cache_is_not_used(file_a, caplog):
    path = ingest(file_a, SIZE).path
    whole = path.read_bytes()
    for content, sentence in (
        (whole[:-1], "is truncated"),
        (whole[:100], "header does not match its checksum"),
        (b"", "is not a cache of frames"),
        (whole[:5000] + whole[6000:], "its size does not fit its header"),
        (whole[:8] + struct.pack("<I", 9) + whole[12:], "has format version 9, this release reads versions 1 to 2"),
    ):
        path.write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert batch_of(file_a)[0] == ["contiguous"]
        assert sentence in caplog.text
        with pytest.raises((CorruptFileError, FormatVersionError), match=sentence):
            FrameCache(path)


def test_a_header_that_lies_is_refused(file_a):
    path = ingest(file_a, SIZE).path
    whole = path.read_bytes()
    length = struct.unpack_from("<I", whole, 12)[0]
    header = json.loads(whole[128 : 128 + length])
    for change in (
        {"image_size": -1},
        {"codec": "pickle"},
        {"datasets": [["x", 1 << 50, 3, "raw"]]},
        {"datasets": [["x", 5, 3, "raw", "more"]]},
        {"datasets": 7},
        {"source": 1},
    ):
        text = json.dumps(header | change).encode()
        head = struct.pack("<8sIIQ", whole[:8], 2, len(text), xxhash.xxh3_64_intdigest(text))
        start = head.ljust(128, b"\0") + text
        path.write_bytes(start + bytes(-len(start) % 4096) + whole[4096:])
        with pytest.raises(CorruptFileError, match="invalid header"):
            FrameCache(path)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1), compress=st.booleans(), spoil=st.booleans())
def test_an_interrupted_ingest_goes_on_from_whatever_was_written(tmp_path, cut, compress, spoil):
    path = tmp_path / "a.hdf5"
    if not path.exists():
        write_a(path, 20)
    done = ingest(path, SIZE, compress=compress, overwrite=True)
    whole = done.path.read_bytes()
    part = done.path.with_name(f".{done.path.name}.part")
    content = bytearray(whole[: int(cut * len(whole))])
    content[24:40] = bytes(16)  # no mark yet
    if spoil and len(content) > 4200:
        content[-40:] = bytes(40)  # as a power cut leaves it: the length is there, the bytes are not
    part.write_bytes(content)
    done.path.unlink()
    again = ingest(path, SIZE, compress=compress)
    assert again.path.read_bytes() == whole
    assert not part.exists()
    if cut < 0.5:
        assert again.new_frames > 0


def test_an_unfinished_cache_of_a_file_that_changed_is_begun_anew(file_a):
    done = ingest(file_a, SIZE)
    part = done.path.with_name(f".{done.path.name}.part")
    done.path.rename(part)
    with h5py.File(file_a, "a") as file:
        file["observations/left_image"][0] = 77
    assert ingest(file_a, SIZE).new_frames == 93
    assert (batch_of(file_a)[1].left[0] == 77).all()


KILLED = """
import sys
from slipstream import ingest
import slipstream.datasets.ingest as inner
inner._BATCH_BYTES = 20_000
import slipstream.datasets.cache_writer as writer
writer._MARK_BYTES = 100_000
def wait_to_be_killed(done, total):
    print(done, flush=True)
    if done > 400:
        sys.stdin.read()
ingest(sys.argv[1], 16, progress=wait_to_be_killed)
"""


def test_an_ingest_that_is_killed_goes_on_where_it_was(tmp_path):
    path = write_a(tmp_path / "a.hdf5", 300)
    command = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        for line in program.stdout:
            if int(line) > 400:
                break
        program.kill()
    cache = cache_path(path, SIZE)
    assert not cache.exists()
    done = ingest(path, SIZE)
    assert 0 < done.new_frames < 903 - 400 + 50
    assert_same(batch_of(path)[1], batch_of(path, cache=False)[1])


def test_two_processes_do_not_write_the_same_cache(file_a):
    script = (
        "import sys; from slipstream import ingest\n"
        "ingest(sys.argv[1], 16, progress=lambda *_: (print('at it', flush=True), sys.stdin.read()))\n"
    )
    command = [sys.executable, "-c", script, file_a]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        assert program.stdout.readline() == "at it\n"
        with pytest.raises(DatasetError, match="a.hdf5.16px.frames: another process is writing it"):
            ingest(file_a, SIZE)
        program.kill()
    assert ingest(file_a, SIZE).num_frames == 93


def test_a_full_disk_leaves_what_can_be_gone_on_from(tmp_path):
    path = write_a(tmp_path / "a.hdf5", 100)
    script = (
        "import resource, signal, sys\n"
        "from slipstream import ingest, DiskFullError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: ingest(sys.argv[1], 16)\n"
        "except DiskFullError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout
    assert "run ingest again to continue where it stopped" in done.stdout
    assert not cache_path(path, SIZE).exists()
    assert ingest(path, SIZE).new_frames < 303
    assert issubclass(DiskFullError, OSError)


def test_the_source_may_not_change_while_it_is_ingested(file_a):
    def meddle(done, total):
        with h5py.File(file_a, "a") as file:
            file["rewards"][5] += 1

    with pytest.raises(DatasetError, match="a.hdf5: changed"):
        ingest(file_a, SIZE, progress=meddle)
    assert not cache_path(file_a, SIZE).exists()


def test_the_source_may_be_touched_while_it_is_ingested(file_a):
    ingest(file_a, SIZE, progress=lambda *_: file_a.touch())
    assert batch_of(file_a)[0] == ["cache"]


def test_what_cannot_be_ingested_is_said(file_a, tmp_path):
    with pytest.raises(MissingEntryError, match="there is no camera wrist; those found are left"):
        ingest(file_a, SIZE, cameras=["wrist"])
    with pytest.raises(ConfigurationError, match="image_size is 0"):
        ingest(file_a, 0)
    blind = tmp_path / "blind.hdf5"
    with h5py.File(blind, "w") as file:
        file["observations/joint"], file["actions"] = np.zeros((5, 2)), np.zeros((4, 2))
    with pytest.raises(DatasetError, match="has no images, so there is nothing to ingest"):
        ingest(blind, SIZE)


def test_a_source_that_is_deleted_while_it_is_ingested_is_named_and_not_the_cache(tmp_path):
    source = write_a(tmp_path / "a.hdf5")
    with pytest.raises(FileNotFoundError) as caught:
        ingest(source, 16, progress=lambda *_: source.unlink(missing_ok=True))
    assert caught.value.filename == str(source)
