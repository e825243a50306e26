"""Images of numbers whose pixels are those of bytes: 0 to 255, or divided by 255.

Wrappers of Atari and ``ToTensor`` return such images. They are packed as images of bytes where that gives back all
bits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

BYTES = "|u1"
DTYPES = ("<f2", "<f4", "<f8")
"""The dtypes of numbers that are looked at."""

NOT_SCALED = 0
"""The way of an image that has other numbers than bytes scaled in some way."""
_WHOLE, _DIVIDED = 8, 9
WAYS = (_WHOLE, _DIVIDED)
"""The ways in which pixels may be scaled; packed images start with them."""

_LEAST_PIXELS = 1024
_MOST_ROWS = 16


@functools.cache
def _table(way: int, dtype: str) -> NDArray[Any]:
    """Return the number that each byte stands for."""
    numbers = np.arange(256).astype(dtype)
    if way == _DIVIDED:
        numbers = numbers / np.array(255, dtype)
    numbers.flags.writeable = False
    return numbers


def is_scaled(values: NDArray[Any]) -> bool:
    """Return whether arrays ``[..., planes..., lines, pixels]`` are images of numbers whose pixels are those of bytes.

    Args:
        values: ``[streams, steps, ...]``; a few of the steps are looked at.
    """
    shape = values.shape[2:]
    is_image = len(shape) > 1 and int(np.prod(shape)) >= _LEAST_PIXELS
    if not is_image or values.dtype.str not in DTYPES or not values.size:
        return False
    steps = np.linspace(0, values.shape[1] - 1, min(values.shape[1], _MOST_ROWS)).astype(np.int64)
    some = np.ascontiguousarray(values[:, steps]).reshape(values.shape[0] * len(steps), -1)
    _, ways = to_pixels(some.view(np.uint8), values.dtype.str)
    return bool((ways != NOT_SCALED).all())


def to_pixels(rows: NDArray[np.uint8], dtype: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the bytes of images of numbers, and how each image was scaled.

    Args:
        rows: ``[images, bytes of an image]``.
        dtype: Of a pixel.
    """
    numbers = np.ascontiguousarray(rows).view(dtype)
    words = numbers.view(f"<u{numbers.itemsize}")
    pixels = np.zeros(numbers.shape, np.uint8)
    ways = np.full(len(rows), NOT_SCALED, np.uint8)
    for way in WAYS:
        left = np.flatnonzero(ways == NOT_SCALED)
        if not len(left):
            break
        some = numbers[left]
        # NaN and numbers that are out of range become some byte, and are found to differ from it.
        with np.errstate(all="ignore"):
            if way == _DIVIDED:
                some = some * np.array(255, dtype)
            found = np.clip(np.rint(some), 0, 255).astype(np.uint8)
        # Compared as whole numbers, so that -0.0 is not 0.0.
        exact = _table(way, dtype).view(words.dtype)[found] == words[left]
        fits = exact.all(axis=1)
        pixels[left[fits]] = found[fits]
        ways[left[fits]] = way
    return pixels, ways


def from_pixels(pixels: NDArray[np.uint8], ways: NDArray[np.uint8], out: NDArray[np.uint8], dtype: str) -> None:
    """Undo `to_pixels`.

    Args:
        pixels: Those of the images that are scaled in some way, in order.
        ways: How each image was scaled; those of other images are left as they are.
        out: ``[images, bytes of an image]``.
        dtype: Of a pixel.
    """
    numbers = out.view(dtype)
    places = np.flatnonzero(np.isin(ways, WAYS))
    for way in np.unique(ways[places]).tolist():
        mine = ways[places] == way
        if mine.all() and len(places) == len(out):
            np.take(_table(way, dtype), pixels, out=numbers, mode="clip")
        else:
            numbers[places[mine]] = _table(way, dtype)[pixels[mine]]
