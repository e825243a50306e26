"""Turn a stored or a live camera frame into what a policy is trained on: RGB, channels first, resized."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checks import require_choice, require_count
from slipstream.errors import ConfigurationError
from slipstream.memory import scratch, scratch_scope
from slipstream.text import install_hint

try:
    import cv2
except ImportError as error:
    raise ImportError(f"resizing images needs OpenCV, which is not installed: {install_hint('datasets')}") from error

Frame = NDArray[np.uint8]
ImageSize = int | tuple[int, int] | None
"""Side of square images, or ``(height, width)``; None keeps the stored size."""
Interpolation = Literal["linear", "area", "nearest", "cubic", "lanczos"]

MAX_SIDE = 16_384
_MAX_CHANNELS = 4
_METHODS = {
    "linear": cv2.INTER_LINEAR,
    "area": cv2.INTER_AREA,
    "nearest": cv2.INTER_NEAREST,
    "cubic": cv2.INTER_CUBIC,
    "lanczos": cv2.INTER_LANCZOS4,
}


def prepare_frame(
    frame: NDArray[Any] | torch.Tensor,
    image_size: ImageSize = 224,
    *,
    interpolation: Interpolation = "linear",
    color: Literal["rgb", "bgr"] = "rgb",
    channels_first: bool = False,
) -> torch.Tensor:
    """Prepare a camera frame exactly as datasets prepare recorded frames, so that deployment matches training.

    The result is equal, bit for bit, to the image that `SequenceDataset` returns for the same pixels with the same
    `image_size` and `interpolation`. It is new memory.

    Args:
        frame: Bytes ``[height, width, channels]`` or ``[height, width]``: uint8, from 0 to 255.
        image_size: Side of the result, or its ``(height, width)``; None does not resize.
        interpolation: How to resize: ``linear``, ``area`` (averages, which avoids aliasing when shrinking a lot),
            ``nearest``, ``cubic`` or ``lanczos``.
        color: Order of the channels of `frame`. OpenCV captures ``bgr``.
        channels_first: Whether `frame` is ``[channels, height, width]``.

    Returns:
        uint8 ``[channels, height, width]``, RGB.

    Raises:
        ConfigurationError: If the frame has another shape or dtype, or a setting is invalid.

    Example:
        >>> import numpy
        >>> prepare_frame(numpy.zeros((480, 640, 3), "uint8"), (240, 320)).shape
        torch.Size([3, 240, 320])
    """
    require_choice("color", color, ("rgb", "bgr"))
    require_choice("interpolation", interpolation, tuple(_METHODS))
    size = require_image_size(image_size)
    pixels = _as_pixels(frame)
    shape = pixels.shape
    if channels_first:
        shape = (*shape[1:], shape[0])
    height, width, channels = shape
    if channels > _MAX_CHANNELS:
        raise ConfigurationError(
            f"the frame has shape {list(pixels.shape)}, so {channels} channels with channels_first={channels_first}, "
            f"expected 1 to {_MAX_CHANNELS}"
        )
    if color == "bgr" and channels < 3:
        raise ConfigurationError(f"a frame of shape {list(pixels.shape)} has no colours, expected color='rgb'")
    if size is None:
        size = (height, width)
    out = np.empty((channels, *size), np.uint8)
    with scratch_scope():
        place = placing(
            pixels.shape,
            out.shape,
            channels_first=channels_first,
            swap=color == "bgr" and not channels_first,
            interpolation=interpolation,
        )
        place(pixels, out)
    if color == "bgr" and channels_first:
        out[[0, 2]] = out[[2, 0]]
    return torch.from_numpy(out)


def _as_pixels(frame: Any) -> Frame:
    """Return a frame as an array with three axes.

    Raises:
        ConfigurationError: If it is not one.
    """
    if isinstance(frame, torch.Tensor):
        frame = frame.detach().cpu().numpy()
    if not isinstance(frame, np.ndarray):
        raise ConfigurationError(f"the frame is a {type(frame).__qualname__}, expected an array or a tensor")
    if frame.dtype != np.uint8:
        raise ConfigurationError(f"the frame is {frame.dtype}, expected uint8 from 0 to 255")
    if frame.ndim == 2:
        frame = frame[..., None]
    if frame.ndim != 3 or 0 in frame.shape:
        raise ConfigurationError(
            f"the frame has shape {list(frame.shape)}, expected [height, width, channels] or [height, width]"
        )
    return np.ascontiguousarray(frame)


def require_image_size(image_size: Any) -> tuple[int, int] | None:
    """Return the height and width that a setting means; None if frames keep their size.

    Raises:
        ConfigurationError: If it is neither a whole number, nor two, nor None.

    Example:
        >>> require_image_size(64), require_image_size((48, 64))
        ((64, 64), (48, 64))
    """
    if image_size is None:
        return None
    if not isinstance(image_size, tuple | list):
        side = require_count("image_size", image_size, 1, MAX_SIDE)
        return side, side
    if len(image_size) != 2:
        raise ConfigurationError(f"image_size is {image_size!r}, expected a whole number or (height, width)")
    height = require_count("the height in image_size", image_size[0], 1, MAX_SIDE)
    width = require_count("the width in image_size", image_size[1], 1, MAX_SIDE)
    return height, width


def require_interpolation(interpolation: Any) -> Interpolation:
    """Return the setting if it is one of the methods.

    Raises:
        ConfigurationError: If it is not.
    """
    require_choice("interpolation", interpolation, tuple(_METHODS))
    chosen: Interpolation = interpolation
    return chosen


def placing(
    shape: Sequence[int],
    target: Sequence[int],
    *,
    channels_first: bool = False,
    swap: bool = False,
    interpolation: Interpolation = "linear",
) -> Callable[[Frame, Frame], None]:
    """Return a function that copies images of one shape into targets of another, resized. For this thread only.

    Args:
        shape: Of an image: ``[height, width, channels]``, or channels first.
        target: Of a target: ``[channels, height, width]``.
        channels_first: Which of the two `shape` is.
        swap: Whether to exchange the first and the third channel.
        interpolation: How to resize.
    """
    height, width = shape[1:] if channels_first else shape[:2]
    channels = target[0]
    size = (target[2], target[1])
    same = (width, height) == size
    resize = _resizing(size, _METHODS[interpolation], same=same)

    def by_planes(image: Frame, out: Frame) -> None:
        planes = image
        if not channels_first:
            planes = image[None, ..., 0]
        for part, plane in zip(planes, out, strict=True):
            resize(part, plane)

    if channels_first or channels == 1:
        return by_planes
    order = list(range(channels))
    if swap and channels >= 3:
        order[0] = 2
        order[2] = 0

    def split(image: Frame, out: Frame) -> None:
        cv2.split(image, [out[number] for number in order])

    if same:
        return split
    middle_shape = (target[1], target[2], channels)
    middle = scratch("resized", math.prod(middle_shape), np.dtype(np.uint8), skew=1024).reshape(middle_shape)

    def resize_and_split(image: Frame, out: Frame) -> None:
        resize(image, middle)
        cv2.split(middle, [out[number] for number in order])

    return resize_and_split


def _resizing(size: tuple[int, int], method: int, *, same: bool) -> Callable[[Frame, Frame], None]:
    """Return a function that resizes an image to ``(width, height)``, or copies it if it has that size."""

    def copy(image: Frame, out: Frame) -> None:
        out[...] = image

    def resize(image: Frame, out: Frame) -> None:
        # OpenCV needs rows without gaps.
        if not image.flags.c_contiguous:
            image = image.copy()
        cv2.resize(image, size, dst=out, interpolation=method)

    if same:
        return copy
    return resize
