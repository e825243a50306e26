"""Compressed images: what their headers say, read without decoding them, and how to decode them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import CodecError

MAX_PIXELS = 1 << 28
_NO_SIZE = {0xC4, 0xC8, 0xCC}
_HEADER_BYTES = 1 << 16
# An image may have this many pixels, whatever the size of others.
_LARGE_PIXELS = 1 << 24


@dataclass(frozen=True)
class Picture:
    """The header of a JPEG, PNG or WebP image.

    Attributes:
        format: ``JPEG``, ``PNG`` or ``WebP``.
        height: Pixels from top to bottom.
        width: Pixels from left to right.
        channels: 1 if it is grey, else 3.
        bits: Bits of a value: 8, or 16 in a PNG of depth.
    """

    format: str
    height: int
    width: int
    channels: int
    bits: int = 8


def read_header(data: bytes) -> Picture | None:
    """Return what the beginning of an image says; None if it is no JPEG, PNG or WebP, or ends too early."""
    try:
        if data.startswith(b"\xff\xd8\xff"):
            return _jpeg(data)
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            return _png(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp(data)
    except (struct.error, IndexError):
        return None
    return None


def name_format(data: bytes) -> str:
    """Say what bytes that are no image begin with."""
    if data[4:8] == b"ftyp":
        return "an MP4 video"
    if data[:4] == b"RIFF" and data[8:11] == b"AVI":
        return "an AVI video"
    if data.startswith((b"\xff\xd8\xff", b"\x89PNG", b"RIFF")):
        return "a damaged or truncated image"
    if not data.strip(b"\0"):
        return "nothing"
    return f"bytes that begin with {data[:8].hex(' ')}"


def _jpeg(data: bytes) -> Picture | None:
    position = 2
    while position + 9 <= len(data):
        if data[position] != 0xFF:
            return None
        marker = data[position + 1]
        if marker == 0xFF:
            position += 1
            continue
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:
            position += 2
            continue
        # A frame header: precision, height, width, number of components.
        if 0xC0 <= marker <= 0xCF and marker not in _NO_SIZE:
            bits, height, width, components = struct.unpack(">BHHB", data[position + 4 : position + 10])
            return _checked("JPEG", height, width, 1 if components == 1 else 3, bits)
        position += 2 + struct.unpack(">H", data[position + 2 : position + 4])[0]
    return None


def _png(data: bytes) -> Picture | None:
    kind, width, height, bits, color = struct.unpack(">4sIIBB", data[12:26])
    if kind != b"IHDR":
        return None
    is_grey = color in (0, 4)
    return _checked("PNG", height, width, 1 if is_grey else 3, max(8, bits))


def _webp(data: bytes) -> Picture | None:
    kind = data[12:16]
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", data[26:30])
        return _checked("WebP", height & 0x3FFF, width & 0x3FFF, 3, 8)
    if kind == b"VP8L" and data[20] == 0x2F:
        (packed,) = struct.unpack("<I", data[21:25])
        return _checked("WebP", (packed >> 14 & 0x3FFF) + 1, (packed & 0x3FFF) + 1, 3, 8)
    if kind == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
        return _checked("WebP", height, width, 3, 8)
    return None


def _checked(name: str, height: int, width: int, channels: int, bits: int) -> Picture | None:
    if height == 0 or width == 0:
        return None
    return Picture(name, height, width, channels, bits)


def decode_picture(raw: NDArray[np.uint8], channels: int, num_pixels: int) -> NDArray[np.uint8]:
    """Decode a JPEG, PNG or WebP as ``[height, width, channels]``, blue first.

    Args:
        raw: The bytes; zeros may follow.
        channels: 1 decodes as grey, everything else as color.
        num_pixels: Pixels of other images of the same camera.

    Raises:
        CodecError: If it cannot be decoded, has 16 bits, or is much larger than the others.
    """
    import cv2  # noqa: PLC0415 - headers are read without it

    # A header is a few bytes; a hostile one may claim gigabytes.
    header = read_header(raw[:_HEADER_BYTES].tobytes()) or read_header(raw.tobytes())
    if header is None:
        raise CodecError(f"it is not a picture that can be decoded but {name_format(raw[:16].tobytes())}")
    if header.bits > 8:
        raise CodecError(f"it has {header.bits} bits, which 8 bits would not keep")
    if header.height * header.width > max(_LARGE_PIXELS, 4 * num_pixels):
        raise CodecError(f"it has {header.width} x {header.height} pixels, others {num_pixels} in total")
    flag = cv2.IMREAD_COLOR
    if channels == 1:
        flag = cv2.IMREAD_GRAYSCALE
    try:
        picture = cv2.imdecode(raw, flag)
    except cv2.error:
        picture = None
    if picture is None:
        raise CodecError("it is not a picture that can be decoded")
    return np.asarray(picture, np.uint8).reshape(*picture.shape[:2], -1)
