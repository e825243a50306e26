"""Images are read however they are stored, without loss, or rejected with a reason."""

import tracemalloc
from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import CorruptFileError, DatasetError, Fields, MissingEntryError, SequenceDataset, ingest
from slipstream.datasets.describe import describe
from slipstream.datasets.pictures import read_header
from tests.datasets.layouts import encoded, images, numbers, padded

ROWS, HEIGHT, WIDTH = 5, 20, 24
SHAPE = (ROWS, HEIGHT, WIDTH, 3)


def write(path: Path, value: Any, *, name: str = "front_image", **options: Any) -> Path:
    """A file with one camera."""
    with h5py.File(path, "w") as file:
        file.create_dataset(f"observations/{name}", data=value, **options)
        file["observations/joint"], file["actions"] = numbers(ROWS, 3), numbers(ROWS, 2)
    return path


def write_variable(path: Path, rows: list[Any], dtype: Any) -> Path:
    with h5py.File(path, "w") as file:
        data = file.create_dataset("observations/front_image", (ROWS,), dtype)
        for number, row in enumerate(rows):
            data[number] = row
        file["observations/joint"], file["actions"] = numbers(ROWS, 3), numbers(ROWS, 2)
    return path


def read_all(path: Path, **options: Any) -> Any:
    """All frames of the only camera, as they are stored."""
    with SequenceDataset(path, 1, image_size=None, **options) as data:
        (camera,) = data.cameras
        return data[list(range(len(data)))]["images"][camera][:, 0].numpy()


def decode(row: Any) -> Any:
    """What OpenCV makes of an encoded image, channels first."""
    image: Any = cv2.imdecode(row, cv2.IMREAD_COLOR)
    return image.transpose(2, 0, 1)


STORED = {
    "float32 of 0 to 1": lambda pictures: (pictures / 255).astype(np.float32),
    "float64 of 0 to 255": lambda pictures: pictures.astype(np.float64),
    "float16 of 0 to 255": lambda pictures: pictures.astype(np.float16),
    "int32": lambda pictures: pictures.astype(np.int32),
    "big-endian int64": lambda pictures: pictures.astype(">i8"),
    "channels first, float32": lambda pictures: (pictures / 255).astype(np.float32).transpose(0, 3, 1, 2),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "a chunk per frame": {"chunks": (1, 20, 24, 3), "compression": "gzip"},
    "chunks of parts": {"chunks": (2, 7, 9, 3), "shuffle": True, "compression": "gzip"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", STORED)
def test_images_of_other_types_are_read_without_loss(tmp_path, stored, layout):
    pictures = images(*SHAPE)
    values = STORED[stored](pictures)
    options = LAYOUTS[layout]
    if "chunks" in options and values.shape[1] == 3:
        chunk = options["chunks"]
        options = {**options, "chunks": (chunk[0], chunk[3], chunk[1], chunk[2])}
    path = write(tmp_path / "f.hdf5", values, **options)
    np.testing.assert_array_equal(read_all(path), pictures.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("options", [{}, {"chunks": (1, 20, 24)}, {"chunks": (2, 7, 9), "compression": "gzip"}])
@pytest.mark.parametrize("dtype", ["u1", "f4"])
def test_grey_images_may_have_no_axis_of_channels(tmp_path, dtype, options):
    pictures = images(ROWS, HEIGHT, WIDTH)
    path = write(tmp_path / "f.hdf5", pictures.astype(dtype), **options)
    np.testing.assert_array_equal(read_all(path), pictures[:, None])


@pytest.mark.parametrize("kind", [".jpg", ".png", ".webp"])
@pytest.mark.parametrize("rows", ["padded", "variable", "opaque", "opaque in chunks", "bytes", "column of bytes"])
def test_compressed_images_may_be_any_kind_of_bytes(tmp_path, kind, rows):
    packed = encoded(images(*SHAPE), kind)
    path = tmp_path / "f.hdf5"
    longest = max(map(len, packed))
    if rows == "padded":
        write(path, padded(packed))
    elif rows == "variable":
        write_variable(path, packed, h5py.vlen_dtype(np.uint8))
    elif rows.startswith("opaque"):
        values = np.array([np.void(row.tobytes().ljust(longest, b"\0")) for row in packed], f"V{longest}")
        options: dict[str, Any] = {}
        if "chunks" in rows:
            options = {"chunks": (2,), "compression": "gzip"}
        write(path, values, **options)
    else:
        values = np.array([row.tobytes() for row in packed], f"S{longest}")
        write(path, values[:, None] if rows.startswith("column") else values)
    expected = [decode(row)[::-1] for row in packed]
    np.testing.assert_array_equal(read_all(path), np.stack(expected))


REJECTED: dict[str, tuple[str, Any, str]] = {
    "16 bits": ("front_image", np.zeros(SHAPE, np.uint16), "images of 16 bits (uint16), which 8 bits would not keep"),
    "depth of 16 bits": ("front_depth", np.zeros((ROWS, 20, 24, 1), np.uint16), "depth, not an image"),
    "a mask": ("front_mask", np.zeros((ROWS, 20, 24, 1), np.uint8), "a mask, not an image"),
    "flags": ("front_image", np.zeros((ROWS, 20, 24), bool), "a mask, not an image"),
    "segmentation": ("seg/front", np.zeros((ROWS, 20, 24), np.int32), "a mask, not an image"),
    "a point cloud": ("pointcloud", np.zeros((ROWS, 20, 24, 3), np.float32), "a point cloud, not an image"),
    "negative values": ("front_image", np.full(SHAPE, -1, np.float32), "values from -1 to -1, expected 0 to 255"),
    "large values": ("front_image", np.full(SHAPE, 300, np.int32), "values from 300 to 300, expected 0 to 255"),
    "NaN": ("front_image", np.full(SHAPE, np.nan, np.float32), "values from nan to nan, expected 0 to 255"),
    "several in a row": ("images", np.zeros((ROWS, 2, 20, 24, 3), np.uint8), "images of 5 axes, expected one image"),
    "a video": ("front_image", np.frombuffer(b"\0\0\0\x18ftypmp42" + bytes(2000), np.uint8), "an MP4 video in one"),
    "PNG of 16 bits": ("front_image", padded([*encoded(np.full((1, 9, 9), 999, np.uint16), ".png")] * ROWS),
                       "PNG images of 16 bits, which 8 bits would not keep"),
    "garbage": ("front_image", np.array([b"\x07garbage"] * ROWS), "its first row is bytes that begin with 07 67"),
    "cut off": ("front_image", np.array([b"\xff\xd8\xff\xe0ab"] * ROWS), "its first row is a damaged or truncated"),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTED)
def test_what_is_no_image_of_a_camera_is_listed_with_the_reason(tmp_path, case):
    name, values, reason = REJECTED[case]
    path = write(tmp_path / "f.hdf5", values, name=name)
    found = describe(path)
    assert found.roles.cameras == {}
    assert found.rejected[f"observations/{name}"].startswith(reason)
    assert any(note.startswith(f"not used: observations/{name}: {reason}") for note in found.notes)
    with pytest.raises(MissingEntryError, match=f"there is no camera front; .*not usable: observations/{name}"):
        describe(path, cameras=["front"])


def test_16_bits_are_never_cut_to_8(tmp_path):
    path = write(tmp_path / "f.hdf5", np.zeros(SHAPE, np.uint16))
    with pytest.raises(DatasetError, match="/observations/front_image cannot be used as a camera: images of 16 bits"):
        describe(path, Fields(cameras={"front": "observations/front_image"}))


def test_a_mask_can_be_read_if_it_is_named(tmp_path):
    path = write(tmp_path / "f.hdf5", images(ROWS, HEIGHT, WIDTH, 1), name="front_mask")
    found = describe(path, Fields(cameras={"mask": "observations/front_mask"}))
    assert found.roles.cameras == {"mask": "observations/front_mask"}


@pytest.mark.parametrize(("name", "is_camera"), [("seg_cam/rgb", True), ("depth/front", False), ("rgb/depth", False)])
def test_the_last_name_says_what_an_image_is(tmp_path, name, is_camera):
    found = describe(write(tmp_path / "f.hdf5", images(*SHAPE), name=name))
    assert (list(found.roles.cameras.values()) == [f"observations/{name}"]) == is_camera


def test_small_arrays_of_floats_are_no_images(tmp_path):
    found = describe(write(tmp_path / "f.hdf5", np.ones((ROWS, 6, 4, 4), np.float32), name="link_poses"))
    assert (found.roles.cameras, found.rejected) == ({}, {})


def test_vectors_of_bytes_and_sentences_are_no_images(tmp_path):
    path = write(tmp_path / "f.hdf5", images(ROWS, 7), name="buttons")
    with h5py.File(path, "a") as file:
        file["observations/language"] = [b"pick up the cup"] * ROWS
        file["observations/fps"], file["observations/task"] = 30, "cups"
    found = describe(path)
    assert (found.roles.cameras, found.rejected) == ({}, {})
    assert "not used: observations/buttons [5, 7]; select with joint='observations/buttons'" in found.notes


@pytest.mark.parametrize("color", [None, "rgb", "bgr"])
def test_the_order_of_colors_of_compressed_images_can_be_given(tmp_path, color, caplog):
    packed = encoded(images(*SHAPE), ".png")
    path = write(tmp_path / "f.hdf5", padded(packed))
    decoded = np.stack([decode(row) for row in packed])
    found = read_all(path, fields=Fields(color=color))
    np.testing.assert_array_equal(found, decoded if color == "bgr" else decoded[:, ::-1])
    assert ("PNG images of the camera global are assumed to be RGB" in caplog.text) == (color is None)


def test_a_cache_of_other_colors_is_not_used(tmp_path):
    path = write(tmp_path / "f.hdf5", padded(encoded(images(*SHAPE), ".png")))
    ingest(path, 8)

    def read(color: Any) -> Any:
        with SequenceDataset(path, 1, image_size=8, fields=Fields(color=color)) as data:
            return data[0]["images"]["global"][0].numpy()

    np.testing.assert_array_equal(read("bgr"), read("rgb")[::-1])
    np.testing.assert_array_equal(read(None), read("rgb"))


def test_images_of_several_sizes_are_resized_to_one(tmp_path):
    rows = [encoded(images(1, 10 + 3 * number, 12, 3))[0] for number in range(ROWS)]
    path = write_variable(tmp_path / "f.hdf5", rows, h5py.vlen_dtype(np.uint8))
    with SequenceDataset(path, 1, image_size=16) as data:
        assert data[[0, 1, 2, 3]]["images"]["global"].shape == (4, 1, 3, 16, 16)


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + bytes(4)


def huge_png(width: int, height: int) -> bytes:
    """The header of a large image, and nothing else."""
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size + bytes([8, 2, 0, 0, 0]))


def test_huge_images_are_described_from_their_headers(tmp_path):
    path = write(tmp_path / "f.hdf5", np.array([huge_png(12_000, 12_000).ljust(64, b"x")] * ROWS))
    tracemalloc.start()
    found = describe(path)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()
    kind = found.stretches[0].cameras["global"].kind
    assert (kind.height, kind.width, kind.format) == (12_000, 12_000, "PNG")
    bomb = write(tmp_path / "g.hdf5", np.array([huge_png(1 << 30, 1 << 30).ljust(64, b"x")] * ROWS))
    assert "pixels, which is refused" in describe(bomb).rejected["observations/front_image"]


def test_a_row_that_is_much_larger_than_others_is_not_decoded(tmp_path):
    rows = [encoded(images(1, 8, 8, 3), ".png")[0].tobytes()] * (ROWS - 1)
    path = write(tmp_path / "f.hdf5", np.array([*rows[:2], huge_png(12_000, 12_000).ljust(64, b"x"), *rows[2:]]))
    with pytest.raises(CorruptFileError, match="row 2 of .* 12000 x 12000 pixels, others 64 in total"):
        read_all(path)


@pytest.mark.parametrize(("value", "sentence"), [(2, "from 0 to 2, expected 0 to 1"), (np.nan, "nan"), (-1, "from -1")])
def test_a_value_outside_of_the_range_is_an_error_with_its_row(tmp_path, value, sentence):
    pictures = np.zeros(SHAPE, np.float32)
    pictures[1, 3, 4, 0] = value
    pictures[0, 0, 0, 0] = 1
    path = write(tmp_path / "f.hdf5", pictures)
    with pytest.raises(CorruptFileError, match=f"row 1 of .* cannot be read: its values are .*{sentence}"):
        read_all(path)


@given(
    data=st.binary(max_size=200), start=st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF1234WEBP"])
)
def test_any_bytes_have_a_header_or_none(data, start):
    found = read_header(start + data)
    assert found is None or (found.height > 0 and found.width > 0)


@pytest.mark.parametrize("kind", [".jpg", ".png", ".webp"])
@pytest.mark.parametrize("shape", [(1, 1, 3), (17, 300, 3), (40, 9)])
def test_headers_agree_with_opencv(kind, shape):
    found = read_header(cv2.imencode(kind, images(*shape))[1].tobytes())
    assert found is not None
    channels = 1 if len(shape) == 2 and kind != ".webp" else 3
    assert (found.height, found.width, found.channels) == (*shape[:2], channels)
