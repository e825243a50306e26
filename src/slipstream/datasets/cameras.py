"""Which datasets are images of a camera, and why others that look like images are not."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from slipstream.datasets.names import encoded
from slipstream.datasets.pictures import MAX_PIXELS, Picture, name_format, read_header
from slipstream.errors import CodecError

CHANNELS = (1, 3, 4)
_LEAST_SIDE = 8
_NUM_SAMPLES = 3
_MAX_SAMPLE_BYTES = 64 << 20
# Enough for the header of an image behind a large block of metadata.
_HEADER_BYTES = 1 << 20

_IMAGE_WORDS = {
    "image", "images", "img", "imgs", "rgb", "rgba", "color", "colour", "gray", "grey", "cam", "camera", "pixels",
    "view", "agentview", "frames", "video",
}  # fmt: skip
_OTHER_IMAGES = {
    "mask": "a mask", "masks": "a mask", "seg": "a mask", "segmentation": "a mask", "segmentations": "a mask",
    "semantic": "a mask", "instance": "a mask", "depth": "depth", "depths": "depth", "pointcloud": "a point cloud",
    "pointclouds": "a point cloud", "pcd": "a point cloud", "cloud": "a point cloud", "xyz": "a point cloud",
    "normals": "surface normals", "flow": "optical flow",
}  # fmt: skip


# What the three cameras of a `MultimodalReplayBuffer` are called elsewhere, the likeliest first.
VIEWS = {
    "left": ("left_image", "left_wrist_image", "left", "left_wrist", "cam_left_wrist", "left_cam", "left_camera"),
    "right": (
        "right_image", "right_wrist_image", "right", "right_wrist", "cam_right_wrist", "right_cam", "right_camera",
    ),
    "global": (
        "global_image", "global", "cam_high", "agentview_image", "agentview", "base_camera", "front_image", "front",
        "top_image", "top", "overhead_image", "overhead",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Pixels:
    """How the rows of a camera are pixels.

    Attributes:
        height: Pixels from top to bottom.
        width: Pixels from left to right.
        channels: 1, 3 or 4.
        channels_first: Whether channels come before height and width.
        format: ``JPEG``, ``PNG`` or ``WebP`` if rows are compressed images, else empty.
        scale: What stored values are multiplied with to become 0 to 255.
    """

    height: int
    width: int
    channels: int
    channels_first: bool = False
    format: str = ""
    scale: float = 1.0


def look_at(data: h5py.Dataset, path: str, *, named: bool = False) -> Pixels | str | None:
    """Tell what images a dataset has.

    Args:
        data: The dataset; only the first bytes of compressed images and a few rows of floats are read.
        path: Its path, whose words tell a mask from an image.
        named: Whether the user says that it has images, so that its name and size matter less.

    Returns:
        How to read them; or why images cannot be used as those of a camera; or None if it has no images.
    """
    shape = data.shape
    if not shape or shape[0] == 0:
        return None
    dtype = data.dtype
    if _is_bytes(dtype, shape):
        return _compressed(data, path, named=named)
    if dtype == np.uint8 and len(shape) == 1 and shape[0] >= 1000:
        return _one_piece(data)
    if dtype.kind not in "biuf" or len(shape) not in (3, 4, 5):
        return None
    size = _size(shape, dtype, path, named=named)
    if size is None:
        return None
    if size == "stacked":
        return f"images of {len(shape)} axes, expected one image per row"
    other = _other_image(path)
    if other and not named:
        return f"{other}, not an image of a camera"
    return _values(data, size)


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[^a-z]+", text.lower()) if word]


@functools.lru_cache(maxsize=4096)
def _other_image(path: str) -> str:
    """Say what images are that are not those of a camera, by the words of their path; else nothing."""
    above, _, name = path.lower().rpartition("/")
    if "point_cloud" in name:
        return "a point cloud"
    for word in _words(name):
        if word in _OTHER_IMAGES:
            return _OTHER_IMAGES[word]
    # A folder such as `depth/front` says it too, but not for what is called an image itself: `seg_cam/rgb`.
    if _IMAGE_WORDS.intersection(_words(name)):
        return ""
    for word in _words(above.rpartition("/")[2]):
        if word in _OTHER_IMAGES:
            return _OTHER_IMAGES[word]
    return ""


@functools.lru_cache(maxsize=4096)
def _is_named_image(path: str) -> bool:
    words = _words("/".join(path.split("/")[-2:]))
    return not _IMAGE_WORDS.isdisjoint(words)


def _size(shape: tuple[int, ...], dtype: np.dtype[Any], path: str, *, named: bool) -> Pixels | str | None:
    """Return the size of images by the shape of their dataset; None if the shape is not that of images."""
    if len(shape) == 5:
        is_stack = dtype == np.uint8 and (shape[4] in CHANNELS or shape[2] in CHANNELS)
        return "stacked" if is_stack else None
    if len(shape) == 4:
        # Small arrays of other numbers may be anything, such as the poses of several links.
        if dtype.kind != "b" and dtype != np.uint8 and sorted(shape[1:])[1] < _LEAST_SIDE and not named:
            return None
        if shape[3] in CHANNELS:
            return Pixels(shape[1], shape[2], shape[3])
        if shape[1] in CHANNELS:
            return Pixels(shape[2], shape[3], shape[1], channels_first=True)
        return None
    # Three axes may be anything; bytes, masks of flags, and names of images are not.
    is_large = min(shape[1:]) >= _LEAST_SIDE
    is_image = dtype.kind == "b" or dtype == np.uint8 or _is_named_image(path) or _other_image(path) != ""
    if named or (is_large and is_image):
        return Pixels(shape[1], shape[2], 1)
    return None


def _values(data: h5py.Dataset, size: Pixels | str) -> Pixels | str:
    """Check that values can become 0 to 255 without loss, by some of them."""
    assert isinstance(size, Pixels)  # noqa: S101 - strings were returned before
    dtype = data.dtype
    if dtype == np.uint8:
        return size
    if dtype.kind == "b":
        return "a mask, not an image of a camera"
    if dtype.itemsize == 2 and dtype.kind in "iu":
        return f"images of 16 bits ({dtype}), which 8 bits would not keep"
    low, high = _range(data)
    if not (low >= 0 and high <= 255):
        return f"values from {low:g} to {high:g}, expected 0 to 255 or 0 to 1"
    if dtype.kind == "f" and high <= 1:
        return Pixels(size.height, size.width, size.channels, size.channels_first, scale=255.0)
    return size


def _range(data: h5py.Dataset) -> tuple[float, float]:
    """Return the least and the largest value of a few rows; NaN if one is not a number."""
    rows = data.shape[0]
    row_bytes = data.dtype.itemsize * int(np.prod(data.shape[1:], dtype=np.int64))
    if row_bytes > _MAX_SAMPLE_BYTES:
        return float("nan"), float("nan")
    low = float("inf")
    high = -float("inf")
    for row in np.unique(np.linspace(0, rows - 1, _NUM_SAMPLES).astype(np.int64)).tolist():
        values = np.asarray(data[row])
        if values.size:
            # NumPy's functions return NaN if one of two numbers is NaN.
            low = float(np.minimum(low, values.min()))
            high = float(np.maximum(high, values.max()))
    return low, high


def _is_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Tell whether each row may be bytes of a compressed image."""
    if dtype == np.uint8:
        return len(shape) == 2
    one_each = len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)
    if dtype.kind == "S" or (dtype.kind == "V" and dtype.names is None and dtype.subdtype is None):
        return one_each
    inner = h5py.check_vlen_dtype(dtype)
    return one_each and (inner in (np.uint8, np.int8) or h5py.check_string_dtype(dtype) is not None)


def row_bytes(data: h5py.Dataset, row: int) -> NDArray[np.uint8]:
    """Return the bytes of a row that `look_at` found to be a compressed image."""
    value: Any = data[row]
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.reshape(-1)[0]
    if isinstance(value, str):
        value = encoded(value)
    if isinstance(value, (bytes, bytearray)):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, np.void):
        return np.frombuffer(value.tobytes(), np.uint8)
    array = np.ascontiguousarray(value)
    if array.dtype.kind in "SV":
        return np.frombuffer(array.tobytes(), np.uint8)
    return array.reshape(-1).view(np.uint8)


def to_bytes(values: NDArray[Any], scale: float) -> NDArray[np.uint8]:
    """Return stored pixels as 0 to 255.

    Args:
        values: Pixels of any type.
        scale: What they are multiplied with to become 0 to 255.

    Raises:
        CodecError: If a value is outside of the range, or NaN.
    """
    if values.dtype == np.uint8:
        return values
    limit = 255 / scale
    low = values.min()
    high = values.max()
    # A comparison with NaN is False.
    if not (low >= 0 and high <= limit):
        raise CodecError(f"its values are from {low:g} to {high:g}, expected 0 to {limit:g}")
    return np.asarray(np.rint(values * scale), np.uint8)


def _compressed(data: h5py.Dataset, path: str, *, named: bool) -> Pixels | str | None:
    """Look at the header of the first image."""
    head = row_bytes(data, 0)[:_HEADER_BYTES].tobytes()
    picture = read_header(head)
    if picture is not None:
        return _of_picture(picture, path, named=named)
    # Rows of numbers and sentences are not images; only names and contents like those of images are worth a reason.
    starts_like_one = name_format(head).startswith(("an ", "a "))
    is_fixed_uint8 = data.dtype == np.uint8
    if starts_like_one or (_is_named_image(path) and not is_fixed_uint8):
        return f"its first row is {name_format(head)}, expected a JPEG, PNG or WebP image"
    return None


def _of_picture(picture: Picture, path: str, *, named: bool) -> Pixels | str:
    if picture.bits > 8:
        return f"{picture.format} images of {picture.bits} bits, which 8 bits would not keep"
    if picture.height * picture.width > MAX_PIXELS:
        return f"a {picture.format} image of {picture.width} x {picture.height} pixels, which is refused"
    other = _other_image(path)
    if other and not named:
        return f"{other}, not an image of a camera"
    return Pixels(picture.height, picture.width, picture.channels, format=picture.format)


def _one_piece(data: h5py.Dataset) -> str | None:
    """Say what one long row of bytes is, such as a video."""
    head = np.asarray(data[:16]).tobytes()
    what = name_format(head)
    if read_header(np.asarray(data[:_HEADER_BYTES]).tobytes()) is not None:
        what = "images"
    if what.startswith("bytes") or what == "nothing":
        return None
    return f"{what} in one piece, expected a row per step"


def name_cameras(paths: Iterable[str], base: str) -> dict[str, str]:
    """Name images: left, right and global where that is clear, and the others by their paths.

    Args:
        paths: Paths of images.
        base: The group of observations that they are in.

    Returns:
        The path of each camera.
    """
    shorts: dict[str, str] = {}
    for path in paths:
        shorts.setdefault(_short(path, base), path)
    names: dict[str, str] = {}
    for view, known in _SHORT_VIEWS.items():
        for short in known:
            if short in shorts and view not in names:
                names[view] = shorts[short]
    for path in paths:
        if path in names.values():
            continue
        name = _short(path, base)
        if name in names:
            name = path
        names[name] = path
    return names


def _short(path: str, base: str) -> str:
    """Return the name of a camera without the words that all cameras have in their paths."""
    inner = path.removeprefix(f"{base}/")
    parts = [part for part in inner.split("/") if part not in ("images", "sensor_data", "rgb", "image", "rgb_image")]
    return re.sub(r"_(image|rgb|images)$", "", "/".join(parts) or inner)


_SHORT_VIEWS = {view: [_short(name, "") for name in names] for view, names in VIEWS.items()}
