"""Decode compressed images, and put images into a batch: resized, with channels first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.memory import scratch
from slipstream.text import install_hint

try:
    import cv2
except ImportError as error:
    raise ImportError(f"resizing images needs OpenCV, which is not installed: {install_hint('datasets')}") from error

Frame = NDArray[np.uint8]

_BYTES = np.dtype(np.uint8)


def decode_picture(raw: NDArray[np.uint8], channels: int) -> Frame | None:
    """Decode a JPEG, PNG or WebP as ``[height, width, channels]``, blue first.

    Returns:
        The image; None if it cannot be decoded, or claims to be larger than OpenCV allows.
    """
    flag = cv2.IMREAD_COLOR
    if channels == 1:
        flag = cv2.IMREAD_GRAYSCALE
    try:
        picture = cv2.imdecode(raw, flag) if raw.size else None
    except cv2.error:
        return None
    if picture is None:
        return None
    return np.asarray(picture, np.uint8).reshape(*picture.shape[:2], -1)


def placing(
    shape: Sequence[int], target: Sequence[int], *, channels_first: bool = False, swap: bool = False
) -> Callable[[Frame, Frame], None]:
    """Return what puts images of one shape into targets of another, resized; it is for this thread only.

    Shrinking to half or less averages the pixels that fall together; anything else is interpolated between the four
    nearest, which takes a seventh of the time and is as good at such scales.

    Args:
        shape: Of an image: ``[height, width, channels]``, or channels first.
        target: Of a target: ``[channels, height, width]``.
        channels_first: Which of the two `shape` is.
        swap: Whether to exchange the first and the third channel.
    """
    height, width = shape[1:] if channels_first else shape[:2]
    channels, size = target[0], (target[2], target[1])
    same = (width, height) == size
    method = cv2.INTER_AREA if width >= 2 * size[0] and height >= 2 * size[1] else cv2.INTER_LINEAR

    def resize(image: Frame, out: Frame) -> None:
        if same:
            out[...] = image
        else:
            cv2.resize(image if image.flags.c_contiguous else image.copy(), size, dst=out, interpolation=method)

    def by_planes(image: Frame, out: Frame) -> None:
        for part, plane in zip(image if channels_first else (image[..., 0],), out, strict=True):
            resize(part, plane)

    if channels_first or channels == 1:
        return by_planes
    order = [2, 1, 0, *range(3, channels)] if swap and channels >= 3 else list(range(channels))

    def split(image: Frame, out: Frame) -> None:
        cv2.split(image, [out[number] for number in order])

    if same:
        return split
    middle_shape = (target[1], target[2], channels)
    middle = scratch("resized", math.prod(middle_shape), _BYTES, skew=1024).reshape(middle_shape)

    def resize_and_split(image: Frame, out: Frame) -> None:
        resize(image, middle)
        cv2.split(middle, [out[number] for number in order])

    return resize_and_split
