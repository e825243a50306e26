"""Images as bytes and back: one, or a batch of them.

A packed image describes itself (magic, kind, dtype, shape) and has a checksum, so that unpacking needs nothing else and
detects damage. Byte images are packed as in a replay buffer (`ImageRows`), others as vectors. Version 1 had no checksum
and is still read. The layout is in ``docs/formats/replay.md``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.codecs import Planes
from slipstream.errors import CodecError, FormatVersionError, ReplayError, SlipstreamError
from slipstream.replay.jpeg import check_quality, decode_jpeg, encode_jpeg
from slipstream.replay.packing import ImageRows, Where
from slipstream.threads import parallel_each, parallel_map

_MAGIC = b"SLIM"
_VERSION = 2
_HEADER = struct.Struct("<4sBBBB")
_CHECKSUM = struct.Struct("<Q")
_LOSSLESS, _JPEG, _NUMBERS = 0, 1, 2
_DTYPES = ("|u1", "|b1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")
_MAX_PIXELS = 1 << 31


def line_bytes_of(shape: Sequence[int]) -> int:
    """Return the bytes of one line of a byte image: its width, times its colours if they come last."""
    if not shape:
        return 1
    if len(shape) == 1:
        return int(shape[0])
    if len(shape) > 2 and shape[-1] <= 4:
        return int(shape[-1] * shape[-2])
    return int(shape[-1])


def compress_image(image: Any, *, jpeg: int | None = None) -> bytes:
    """Pack one image; without loss unless a JPEG quality is asked for.

    Args:
        image: A PIL image, or an array or tensor of numbers of any shape, such as ``[H, W, C]`` or ``[]``.
        jpeg: Quality from 1 to 100: much smaller, and no longer exact. For byte images with one or three colours.

    Returns:
        Bytes that `decompress_image` turns into an equal array.

    Raises:
        ReplayError: If it is empty, or cannot be a JPEG though that is asked for.
        UnsupportedDtypeError: If its elements are not plain numbers.

    Example:
        >>> import numpy as np
        >>> image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
        >>> bool((decompress_image(compress_image(image)) == image).all())
        True
    """
    check_quality(jpeg)
    # Unlike np.ascontiguousarray, this does not turn a single number into an axis of one.
    array = np.asarray(_as_array(image), order="C")
    if not array.size or array.ndim > 8 or array.size > _MAX_PIXELS:
        raise ReplayError(f"an image of shape {list(array.shape)} cannot be packed: it is empty or too large")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype.str not in _DTYPES:
        raise ReplayError(f"an image of {array.dtype} cannot be packed, expected whole or real numbers")
    if jpeg is not None:
        if array.dtype != np.uint8:
            raise ReplayError(f"an image of {array.dtype} cannot be a JPEG, expected bytes")
        kind, body = _JPEG, encode_jpeg(array, jpeg)
    elif array.dtype == np.uint8:
        rows = array.reshape(1, -1)
        body = ImageRows(rows.shape[1], line_bytes_of(array.shape)).pack(rows, np.ones(1, np.int64), 1).content
        kind = _LOSSLESS
    else:
        kind, body = _NUMBERS, Planes().encode(array)
    header = _HEADER.pack(_MAGIC, _VERSION, kind, _DTYPES.index(array.dtype.str), array.ndim)
    content = header + struct.pack(f"<{array.ndim}I", *array.shape) + body
    return content + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(content))


def decompress_image(data: bytes | bytearray | memoryview) -> NDArray[Any]:
    """Unpack what `compress_image` packed, into new memory.

    Raises:
        CodecError: If the bytes do not match their checksum, are cut off, or are not a packed image.
        FormatVersionError: If they were packed by a newer release.
    """
    return _unpack(_open(data))


def compress_image_seq(images: Any, *, jpeg: int | None = None, threads: int | None = None) -> list[bytes]:
    """Pack a batch of images, each on its own, on several threads.

    Args:
        images: ``[batch, C, H, W]``, an array or a tensor; or a sequence of images.
        jpeg: As for `compress_image`.
        threads: How many; by default one per core.

    Raises:
        ReplayError: If an image cannot be packed.

    Example:
        >>> import torch
        >>> batch = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
        >>> decompress_image_seq(compress_image_seq(batch)).shape
        (2, 3, 8, 8)
    """
    check_quality(jpeg)
    _check_threads(threads)
    batch = list(images) if isinstance(images, (list, tuple)) else list(_as_array(images))
    return list(parallel_map(lambda image: compress_image(image, jpeg=jpeg), batch, threads))


def decompress_image_seq(
    images: Sequence[bytes], *, out: NDArray[Any] | None = None, threads: int | None = None
) -> NDArray[Any]:
    """Unpack a batch of images of one shape and dtype, on several threads.

    Args:
        images: What `compress_image_seq` returned.
        out: Memory to unpack into, so that a loop does not allocate; ``[batch, C, H, W]`` of the right dtype.
            An empty batch without it is an array of bytes of shape ``[0]``.
        threads: How many; by default one per core.

    Raises:
        CodecError: If an image is damaged, or of another shape or dtype than the first.
        ReplayError: If `out` does not fit.
    """
    _check_threads(threads)
    if not images:
        # No image says what shape and dtype it has, but `out` does.
        return np.empty(0, np.uint8) if out is None else _check_empty(out)
    first = _open(images[0])
    shape = (len(images), *first.shape)
    if out is None:
        out = np.empty(shape, first.dtype)
    elif out.shape != shape or out.dtype != first.dtype:
        raise ReplayError(f"out is {out.dtype}{list(out.shape)}, expected {first.dtype}{list(shape)}")

    def run(number: int) -> None:
        image = _open(images[number])
        if (image.shape, image.dtype) != (first.shape, first.dtype):
            raise CodecError(
                f"image {number} is {image.dtype}{list(image.shape)}, the first is {first.dtype}{list(first.shape)}"
            )
        out[number] = _unpack(image)

    parallel_each(run, range(len(images)), threads)
    return out


def _check_threads(threads: int | None) -> None:
    if threads is not None:
        require_count("threads", threads)


def _check_empty(out: NDArray[Any]) -> NDArray[Any]:
    if len(out):
        raise ReplayError(f"out is {out.dtype}{list(out.shape)}, but there are no images")
    return out


def _as_array(image: Any) -> NDArray[Any]:
    if isinstance(image, torch.Tensor):
        try:
            return image.detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:
            raise ReplayError(f"an image of {image.dtype} cannot be packed, expected whole or real numbers") from error
    if isinstance(image, np.ndarray):
        return image
    if hasattr(image, "getbands"):  # a PIL image, without importing PIL
        return np.asarray(image)
    raise ReplayError(f"an image is a {type(image).__qualname__}, expected a PIL image, an array or a tensor")


@dataclass(frozen=True)
class _Packed:
    """A packed image whose header was checked, and its checksum if it has one."""

    kind: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    body: memoryview


def _open(data: bytes | bytearray | memoryview) -> _Packed:
    """Check a packed image and parse its header."""
    view = memoryview(b"")
    if len(data):
        view = memoryview(data).cast("B")
    if len(view) < _HEADER.size or bytes(view[:4]) != _MAGIC:
        raise CodecError("the bytes are not a packed image")
    _, version, kind, dtype, axes = _HEADER.unpack(view[: _HEADER.size])
    # Version 1 had no checksum. All later versions end with one, which tells a newer image from a damaged one.
    if version != 1:
        view = _without_checksum(view)
    if version > _VERSION:
        raise FormatVersionError(
            f"a packed image has version {version}, this release reads up to {_VERSION}; update Slipstream"
        )
    end = _HEADER.size + 4 * axes
    if not version or kind > _NUMBERS or dtype >= len(_DTYPES) or axes > 8 or len(view) < end:
        raise CodecError("a packed image is damaged in its header, or cut off")
    shape = struct.unpack(f"<{axes}I", view[_HEADER.size : end])
    if not 0 < math.prod(shape) <= _MAX_PIXELS or (kind != _NUMBERS and dtype != 0):
        raise CodecError(f"a packed image claims to be of shape {list(shape)}, which no image of this release is")
    # Nothing shrinks more than that, not even a single colour.
    if math.prod(shape) > len(view) << 18:
        raise CodecError(f"a packed image of {len(view)} bytes claims the shape {list(shape)}")
    return _Packed(kind, np.dtype(_DTYPES[dtype]), shape, view[end:])


def _without_checksum(view: memoryview) -> memoryview:
    """Return what comes before the checksum.

    Raises:
        CodecError: If it does not match.
    """
    content = view[: -_CHECKSUM.size]
    (checksum,) = _CHECKSUM.unpack(view[-_CHECKSUM.size :])
    if xxhash.xxh3_64_intdigest(content) != checksum:
        raise CodecError("a packed image is damaged or cut off: it does not match its checksum")
    return content


def _unpack(packed: _Packed) -> NDArray[Any]:
    """Unpack the pixels into new memory."""
    array: NDArray[Any] = np.empty(packed.shape, packed.dtype)
    try:
        if packed.kind == _JPEG:
            array[...] = decode_jpeg(packed.body, packed.shape)
        elif packed.kind == _LOSSLESS:
            first = np.zeros(1, np.int64)
            packer = ImageRows(array.size, line_bytes_of(packed.shape))
            packer.gather([bytes(packed.body)], Where(first, first), [array.reshape(1, -1)])
        else:
            Planes().decode(packed.body, array)
    except CodecError:
        raise
    except SlipstreamError as error:
        raise CodecError(f"a packed image is damaged ({error})") from error
    return array
