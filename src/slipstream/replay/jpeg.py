"""JPEG, for those who ask for it: images with losses, many times smaller."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.errors import CodecError, ReplayError
from slipstream.text import install_hint

_COLOURS = (1, 3)
_MAX_SIDE = 65_500


def _pillow() -> Any:
    try:
        from PIL import Image  # noqa: PLC0415 - only for those who ask for it
    except ImportError as error:
        raise ImportError(f"JPEG needs Pillow: {install_hint('images')}") from error
    return Image


def check_quality(quality: int | None) -> None:
    """Raise `ConfigurationError` unless `quality` is one that JPEG has, or None."""
    if quality is not None:
        require_count("jpeg", quality, 1, 100)


def channel_axis(shape: tuple[int, ...]) -> int | None:
    """Return which axis of an image is that of colours: the last, the first, or None for grey without one.

    Raises:
        ReplayError: If JPEG cannot hold such an image.
    """
    if max(shape, default=0) > _MAX_SIDE:
        raise ReplayError(f"an image of shape {list(shape)} cannot be a JPEG, expected sides of {_MAX_SIDE} at most")
    if len(shape) == 2:
        return None
    if len(shape) == 3 and shape[2] in _COLOURS:
        return 2
    if len(shape) == 3 and shape[0] in _COLOURS:
        return 0
    raise ReplayError(f"an image of shape {list(shape)} cannot be a JPEG, expected grey or three colours of bytes")


def encode_jpeg(image: NDArray[np.uint8], quality: int) -> bytes:
    """Return an image as a JPEG file."""
    axis = channel_axis(image.shape)
    pixels = np.moveaxis(image, axis, 2) if axis is not None else image
    pixels = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    file = io.BytesIO()
    _pillow().fromarray(np.ascontiguousarray(pixels)).save(file, "JPEG", quality=quality)
    return file.getvalue()


def decode_jpeg(payload: bytes | memoryview, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return the image of a JPEG file, which must have this shape.

    Raises:
        CodecError: If it is damaged, or of another size; nothing larger than expected is decoded.
    """
    axis = channel_axis(shape)
    colours = 1 if axis is None else shape[axis]
    plane = tuple(length for number, length in enumerate(shape) if number != axis)
    pillow = _pillow()
    try:
        with pillow.open(io.BytesIO(payload), formats=["JPEG"]) as file:
            found = (file.height, file.width, len(file.getbands()))
            if found != (*plane, colours):
                raise CodecError(f"a JPEG holds {found}, expected {(*plane, colours)} (height, width, colours)")
            pixels = np.asarray(file).reshape(*plane, colours)
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        if isinstance(error, CodecError):
            raise
        raise CodecError(f"a JPEG is damaged ({error})") from error
    return pixels[..., 0] if axis is None else np.moveaxis(pixels, 2, axis)
