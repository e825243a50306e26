"""Decode compressed images."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.text import install_hint

try:
    import cv2
except ImportError as error:
    raise ImportError(f"resizing images needs OpenCV, which is not installed: {install_hint('datasets')}") from error

Frame = NDArray[np.uint8]


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
