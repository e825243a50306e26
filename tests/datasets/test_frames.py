"""Frames come out the same, however they are stored."""

from pathlib import Path
from typing import Any

import cv2
import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream import CorruptFileError, DatasetError
from slipstream.datasets.chunks import frame_kind
from slipstream.datasets.files import Files
from slipstream.datasets.filters import Filter, decode_chunk
from slipstream.datasets.frames import DatasetSource, FrameReader, Request
from slipstream.datasets.identity import Identity
from slipstream.errors import CodecError

ROWS, HEIGHT, WIDTH = 11, 30, 40


def pictures(rows: int = ROWS, height: int = HEIGHT, width: int = WIDTH, channels: int = 3) -> Any:
    generator = np.random.default_rng(5)
    smooth = np.add.outer(np.arange(height) * 3, np.arange(width) * 2)[..., None] + np.arange(channels) * 40
    noise = generator.integers(0, 20, (rows, height, width, channels))
    return ((smooth + noise + 7 * np.arange(rows)[:, None, None, None]) % 256).astype(np.uint8)


def open_reader(path: Path, name: str = "x", **options: Any) -> FrameReader:
    reader = FrameReader(Files())
    number = reader.files.add(path, Identity.of(path))
    with h5py.File(path) as file:
        kind, offset = frame_kind(file[name], **options)
    reader.add(DatasetSource(number, name, kind, offset))
    return reader


def read(reader: FrameReader, rows: list[int], size: tuple[int, int], channels: int = 3) -> Any:
    out = np.full((len(rows), channels, *size), 77, np.uint8)
    reader.read([Request(np.zeros(len(rows), np.int64), np.array(rows), out)])
    return out


def resized(images: Any, size: tuple[int, int]) -> Any:
    """What OpenCV makes of images, channels first."""
    parts = []
    for image in images:
        small = cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR)
        parts.append(small.reshape(*size, -1).transpose(2, 0, 1))
    return np.stack(parts)


STORAGE: dict[str, tuple[dict[str, Any], str]] = {
    "in one piece": ({}, "contiguous"),
    "plain chunks": ({"chunks": (1, HEIGHT, WIDTH, 3)}, "chunks"),
    "chunks of several frames": ({"chunks": (4, HEIGHT, WIDTH, 3)}, "chunks"),
    "chunks of parts of frames": ({"chunks": (3, 16, 7, 2), "compression": "gzip"}, "chunks"),
    "chunks as h5py guesses them": ({"chunks": True, "compression": "gzip"}, "chunks"),
    "chunks that could grow": ({"chunks": (2, 64, 64, 4), "maxshape": (None, None, None, None)}, "chunks"),
    "gzip": ({"chunks": (1, HEIGHT, WIDTH, 3), "compression": "gzip"}, "chunks"),
    "shuffle and gzip": ({"chunks": (1, HEIGHT, WIDTH, 3), "compression": "gzip", "shuffle": True}, "chunks"),
    "checksums": ({"chunks": (1, HEIGHT, WIDTH, 3), "fletcher32": True}, "chunks"),
    "gzip and checksums": ({"chunks": (1, HEIGHT, WIDTH, 3), "compression": "gzip", "fletcher32": True}, "chunks"),
    "lzf": ({"chunks": (1, HEIGHT, WIDTH, 3), "compression": "lzf"}, "chunks"),
    "lz4": ({"chunks": (1, HEIGHT, WIDTH, 3), **hdf5plugin.LZ4()}, "chunks"),
    "lz4 in small blocks": ({"chunks": (2, HEIGHT, WIDTH, 3), **hdf5plugin.LZ4(nbytes=1000)}, "chunks"),
    "zstd": ({"chunks": (1, HEIGHT, WIDTH, 3), **hdf5plugin.Zstd()}, "chunks"),
    "blosc": ({"chunks": (1, HEIGHT, WIDTH, 3), **hdf5plugin.Blosc(cname="zstd")}, "chunks"),
    "bitshuffle": ({"chunks": (1, HEIGHT, WIDTH, 3), **hdf5plugin.Bitshuffle()}, "locked"),
    "blosc2": ({"chunks": (1, HEIGHT, WIDTH, 3), **hdf5plugin.Blosc2()}, "locked"),
}


@pytest.mark.parametrize("size", [(HEIGHT, WIDTH), (24, 24), (12, 15), (50, 60)])
@pytest.mark.parametrize("name", STORAGE)
def test_frames_are_those_of_hdf5_and_opencv_however_they_are_stored(tmp_path, name, size):
    options, reading = STORAGE[name]
    images = pictures()
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        file.create_dataset("x", data=images, **options)
    reader = open_reader(tmp_path / "f.hdf5")
    assert reader.sources[0].kind.reading == reading  # type: ignore[attr-defined]
    rows = [10, 0, 3, 3, 7, 2, 3]
    np.testing.assert_array_equal(read(reader, rows, size), resized(images[rows], size))


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("size", [(HEIGHT, WIDTH), (20, 20)])
def test_channels_may_come_first_or_last_and_be_one_three_or_four(tmp_path, channels, first, size):
    images = pictures(channels=channels)
    stored = np.ascontiguousarray(images.transpose(0, 3, 1, 2)) if first else images
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        file["x"] = stored
    reader = open_reader(tmp_path / "f.hdf5")
    np.testing.assert_array_equal(read(reader, [4, 9], size, channels), resized(images[[4, 9]], size))


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_user_block_before_the_file_moves_everything(tmp_path, compression):
    images = pictures()
    with h5py.File(tmp_path / "f.hdf5", "w", userblock_size=2048) as file:
        file.create_dataset("x", data=images, compression=compression)
    reader = open_reader(tmp_path / "f.hdf5")
    np.testing.assert_array_equal(read(reader, [0, 10], (24, 24)), resized(images[[0, 10]], (24, 24)))


@pytest.mark.parametrize("bgr", [False, True])
@pytest.mark.parametrize("variable", [False, True])
def test_jpegs_come_out_in_the_order_of_channels_they_went_in(tmp_path, bgr, variable):
    images = pictures(3, 32, 32)
    given = images if bgr else images[..., ::-1]  # OpenCV takes what it gets for blue, green, red
    packed = [cv2.imencode(".png" if variable else ".jpg", image)[1].reshape(-1) for image in given]
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        if variable:
            data = file.create_dataset("x", (3,), h5py.vlen_dtype(np.uint8))
            for row, one in enumerate(packed):
                data[row] = one
        else:
            width = max(map(len, packed)) + 9
            file["x"] = np.stack([np.pad(one, (0, width - len(one))) for one in packed])
    found = read(open_reader(tmp_path / "f.hdf5", bgr=bgr), [2, 1], (32, 32))
    want = images[[2, 1]].transpose(0, 3, 1, 2)
    assert np.abs(found.astype(int) - want).mean() < (1e-9 if variable else 12)


def test_chunks_that_were_never_written_are_filled(tmp_path):
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        data = file.create_dataset("x", (6, 8, 8, 3), np.uint8, chunks=(1, 8, 8, 3), fillvalue=9)
        data[2] = 200
        file.create_dataset("y", (6, 8, 8, 3), np.uint8, fillvalue=7)
    found = read(open_reader(tmp_path / "f.hdf5"), [1, 2], (8, 8))
    assert (found[0] == 9).all()
    assert (found[1] == 200).all()
    reader = open_reader(tmp_path / "f.hdf5", "y")
    assert (read(reader, [5], (8, 8)) == 7).all()


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_of_chunks_gives_the_same_frames(tmp_path, data):
    shape = (data.draw(st.integers(1, 9)), data.draw(st.integers(5, 12)), data.draw(st.integers(5, 12)), 3)
    chunk = tuple(data.draw(st.integers(1, size)) for size in shape)
    images = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        file.create_dataset("x", data=images, chunks=chunk, compression="gzip")
    rows = data.draw(st.lists(st.integers(0, shape[0] - 1), min_size=1, max_size=9))
    found = read(open_reader(tmp_path / "f.hdf5"), rows, shape[1:3])
    np.testing.assert_array_equal(found, images[rows].transpose(0, 3, 1, 2))


@pytest.mark.parametrize("number", [1, 2, 3, 32000, 32001, 32004, 32015])
@settings(deadline=None, max_examples=60)
@given(payload=st.binary(max_size=300), nbytes=st.integers(1, 500))
def test_garbage_is_a_codec_error_and_nothing_worse(number, payload, nbytes):
    data = np.frombuffer(payload, np.uint8)
    try:
        assert len(decode_chunk(data, (Filter(number, (1,)),), 0, nbytes)) == nbytes
    except CodecError:
        pass


def test_a_bomb_is_not_unpacked():
    import zlib

    import zstandard

    for number, bomb in ((1, zlib.compress(bytes(1 << 26))), (32015, zstandard.compress(bytes(1 << 26)))):
        with pytest.raises(CodecError):
            decode_chunk(np.frombuffer(bomb, np.uint8), (Filter(number),), 0, 1000)


@pytest.mark.parametrize("name", ["gzip", "checksums", "gzip and checksums", "lz4", "zstd"])
def test_a_damaged_chunk_is_named_with_its_file_and_row(tmp_path, name):
    path = tmp_path / "f.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", data=pictures(), **STORAGE[name][0])
        info = data.id.get_chunk_info(4)
    content = bytearray(path.read_bytes())
    for at in range(3, info.size, max(1, info.size // 40)):
        content[info.byte_offset + at] ^= 0xFF
    path.write_bytes(content)
    reader = open_reader(path)
    with pytest.raises(CorruptFileError, match=r"f.hdf5: row 4 of x cannot be read: its chunk"):
        read(reader, [2, 4], (24, 24))
    assert read(reader, [5], (24, 24)).shape == (1, 3, 24, 24)


def test_a_picture_that_is_none_is_named(tmp_path):
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        good = cv2.imencode(".jpg", pictures(1)[0])[1].reshape(-1)
        file["x"] = np.stack([good, np.zeros_like(good)])
    with pytest.raises(CorruptFileError, match="row 1 of x cannot be read: it is not a picture"):
        read(open_reader(tmp_path / "f.hdf5"), [0, 1], (24, 24))


def test_a_frame_that_is_wanted_twice_is_read_once(tmp_path):
    with h5py.File(tmp_path / "f.hdf5", "w") as file:
        file["x"] = pictures()
    reader = open_reader(tmp_path / "f.hdf5")
    counted = []

    class Counting(DatasetSource):
        def read(self, files, rows, targets, interpolation="linear"):
            counted.extend(rows)
            super().read(files, rows, targets, interpolation)

    source = reader.sources[0]
    assert isinstance(source, DatasetSource)
    reader.sources[0] = Counting(source.file, source.path, source.kind, source.offset)
    read(reader, [3, 4, 3, 5, 4, 3], (24, 24))
    assert sorted(counted) == [3, 4, 5]


def test_a_file_that_changes_under_us_is_an_error(tmp_path):
    path = tmp_path / "f.hdf5"
    with h5py.File(path, "w") as file:
        file["x"] = pictures()
    reader = open_reader(path)
    read(reader, [1], (24, 24))
    with h5py.File(path, "a") as file:
        file["x"][1] = 0
        file["more"] = np.zeros(1000)
    with pytest.raises(DatasetError, match=r"f.hdf5: changed since it was opened \(it was \d+ bytes and is \d+\)"):
        read(reader, [1], (24, 24))


def test_a_file_that_got_shorter_is_an_error_and_no_crash(tmp_path):
    path = tmp_path / "f.hdf5"
    with h5py.File(path, "w") as file:
        file["x"] = pictures()
    reader = open_reader(path)
    with path.open("r+b") as file:
        file.truncate(3000)
    with pytest.raises(DatasetError, match="changed since it was opened"):
        read(reader, [10], (24, 24))


def test_only_so_many_files_are_open_at_once(tmp_path):
    reader = FrameReader(Files(max_open=5))
    for number in range(20):
        path = tmp_path / f"{number}.hdf5"
        with h5py.File(path, "w") as file:
            file["x"] = np.full((2, 8, 8, 3), number, np.uint8)
        with h5py.File(path) as file:
            kind, offset = frame_kind(file["x"])
        reader.add(DatasetSource(reader.files.add(path, Identity.of(path)), "x", kind, offset))
    out = np.empty((40, 3, 8, 8), np.uint8)
    for _ in range(3):
        reader.read([Request(np.arange(40) // 2, np.arange(40) % 2, out)])
        assert out[:, 0, 0, 0].tolist() == [number // 2 for number in range(40)]
        assert reader.files.num_open <= 5
    reader.files.close()
    assert reader.files.num_open == 0
