"""What a codec is, and the words that codecs work on.

A codec is a frozen value that turns an array into bytes and back, and can be written into a file header. Most codecs
see an array as *words*: its bits as unsigned integers. The maps on words at the end of this module make floats easier
to compress. Every map is a bijection on the bits, so NaN payloads, -0.0 and denormals survive.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import CodecError, UnsupportedDtypeError
from slipstream.memory import scratch, scratch_scope

if sys.byteorder != "little":  # pragma: no cover - no such machine to test on
    raise ImportError("slipstream requires a little-endian machine, this one is big-endian")

Buffer = bytes | bytearray | memoryview | NDArray[Any]
"""Anything contiguous that holds a payload."""

Words = NDArray[np.unsignedinteger[Any]]
"""A 1-D array of uint8, uint16, uint32 or uint64."""


class Codec(ABC):
    """Base of all codecs. Subclasses are frozen dataclasses whose fields are their settings.

    A codec never modifies the array it encodes. It is thread-safe, and spends its time in NumPy and compression
    libraries, which release the GIL. Decoding depends on the payload alone: any instance of a class decodes what
    another instance encoded. Peak memory while encoding is at most twice the size of the array plus 32 MiB per thread,
    and once more the size of each array that is not contiguous.

    Example:
        >>> import numpy as np
        >>> from slipstream.codecs import Planes
        >>> weights = np.linspace(-1, 1, 1000, dtype=np.float32)
        >>> payload = Planes(level=3).encode(weights)
        >>> decoded = np.empty_like(weights)
        >>> Planes().decode(payload, decoded)
        >>> bool((decoded == weights).all())
        True
    """

    name: ClassVar[str]
    """The name of this codec in files; never reused for another codec."""
    needs_reference: ClassVar[bool] = False
    """Whether a reference must be set with `against` before encoding or decoding."""

    @abstractmethod
    def encode(self, array: NDArray[Any]) -> bytes:
        """Return the payload of `array`.

        Args:
            array: Bools, integers, floats or complex numbers of any shape and memory layout.

        Raises:
            UnsupportedDtypeError: If the elements are not plain numbers.
            CodecError: If the codec needs a reference and has none, or one of another dtype or shape.
        """

    @abstractmethod
    def decode(self, payload: Buffer, out: NDArray[Any]) -> None:
        """Fill `out` with the array that `encode` was called with, bit for bit.

        Memory is bounded by the size of `out`, whatever the payload claims.

        Args:
            payload: What `encode` returned.
            out: A writable, C-contiguous array of the dtype and shape of the encoded array. It may be the memory of the
                reference.

        Raises:
            CodecError: If the payload is damaged or belongs to an array of another size, or if `out` cannot be written.
                The content of `out` is then undefined.
        """

    def against(self, reference: NDArray[Any]) -> Codec:
        """Return this codec with a reference: an array of the dtype and shape of the one to encode or decode.

        The reference is not copied, and is part neither of the header nor of equality.

        Raises:
            CodecError: If this codec takes no reference. Only `Difference` does.
        """
        raise CodecError(f"codec {self.name!r} takes no reference (array of shape {list(np.shape(reference))})")

    def to_header(self) -> dict[str, Any]:
        """Return this codec as a JSON object: its name and settings."""
        header: dict[str, Any] = {"name": self.name}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.init:
                header[field.name] = getattr(self, field.name)
        return header

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Create a codec from the settings of a header.

        Raises:
            CodecError: If a setting is unknown or out of range.
        """
        try:
            return cls(**settings)
        except TypeError as error:
            raise CodecError(f"codec {cls.name!r} does not accept the settings {dict(settings)!r}") from error


@dataclass(frozen=True)
class Layout:
    """What a codec may know about an array besides its bits."""

    shape: tuple[int, ...]
    floating: bool


class WordCodec(Codec):
    """Base of the codecs that work on the flat bits of an array. Validates arguments once, for all of them."""

    def encode(self, array: NDArray[Any]) -> bytes:
        """Return the payload of `array`; see `Codec.encode`."""
        array = np.asarray(array)
        self._check(array)
        words = as_words(array)
        with scratch_scope():
            return self._encode(words, _layout_of(array))

    def decode(self, payload: Buffer, out: NDArray[Any]) -> None:
        """Fill `out` from `payload`; see `Codec.decode`."""
        _require_writable(out)
        self._check(out)
        words = as_words(out)
        with scratch_scope():
            self._decode(as_bytes(payload), words, _layout_of(out))

    def _check(self, array: NDArray[Any]) -> None:
        """Raise `CodecError` unless this codec can encode or decode arrays like `array`."""

    @abstractmethod
    def _encode(self, words: Words, layout: Layout) -> bytes:
        """Return the payload of `words`, the flat bits of the array."""

    @abstractmethod
    def _decode(self, payload: memoryview, out: Words, layout: Layout) -> None:
        """Fill `out` from `payload`, or raise `CodecError`. Must not read beyond the payload."""


def part_shape(shape: tuple[int, ...], itemsize: int, limit_bytes: int) -> tuple[int, ...]:
    """Return the shape of the largest part of at most `limit_bytes` that is contiguous in C order.

    Such a part spans some indices of one axis, a single index of every axis before it, and all of every axis after it.
    If a single element is larger than the limit, the part is that element.
    """
    part = list(shape)
    part_bytes = itemsize * math.prod(shape)
    for axis, length in enumerate(shape):
        # The array is empty, or the part is small enough with all of this axis and of those after it.
        if part_bytes <= limit_bytes or not part_bytes:
            break
        # The size of the part with a single index of this axis.
        part_bytes //= length
        part[axis] = max(1, limit_bytes // part_bytes)
        # If not even two indices fit, the next axis may have to be split as well.
        if part[axis] > 1:
            break
    return tuple(part)


def middle_part(array: NDArray[Any], limit_bytes: int) -> NDArray[Any]:
    """Return a sample: a contiguous part from the middle of `array`, at most `limit_bytes` or a single element."""
    part = part_shape(array.shape, array.dtype.itemsize, limit_bytes)
    middle = []
    for length, count in zip(array.shape, part, strict=True):
        start = (length - count) // 2
        middle.append(slice(start, start + count))
    return array[tuple(middle)]


def as_bytes(payload: Any) -> memoryview:
    """View any contiguous bytes-like object as a flat memoryview of unsigned bytes."""
    view = memoryview(payload)
    # A view with a zero in its shape cannot be cast.
    if not view.nbytes:
        return memoryview(b"")
    return view.cast("B")


def word_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the unsigned integer type that holds one real number of `dtype`.

    Raises:
        UnsupportedDtypeError: For objects, strings, records and extended precision.
    """
    itemsize = dtype.itemsize
    if dtype.kind == "c":
        itemsize //= 2
    if dtype.kind not in "biufc" or itemsize not in (1, 2, 4, 8):
        raise UnsupportedDtypeError(
            f"arrays of dtype {dtype} cannot be stored, expected bools, integers, floats or complex numbers "
            "of at most 64 bits each"
        )
    return np.dtype(f"u{itemsize}")


def as_words(array: NDArray[Any]) -> Words:
    """View `array` as a flat array of words in C order; copies only if it is not contiguous."""
    dtype = word_dtype(array.dtype)
    return np.ascontiguousarray(array).reshape(-1).view(dtype)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether words of `dtype` have a sign, an exponent and a mantissa in native byte order."""
    return dtype.kind in "fc" and dtype.isnative


def _layout_of(array: NDArray[Any]) -> Layout:
    return Layout(array.shape, is_float(array.dtype))


def _require_writable(out: NDArray[Any]) -> None:
    """Raise `CodecError` unless a codec can decode into `out`."""
    if type(out) is not np.ndarray:
        raise CodecError(f"out is a {type(out).__name__}, expected a NumPy array")
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise CodecError(f"out is {out.dtype}{list(out.shape)}, expected a C-contiguous, writable array")


def check_reference(reference: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Raise `CodecError` unless `reference` has the dtype and shape of the array that is stored against it."""
    if reference.dtype != dtype or reference.shape != shape:
        raise CodecError(
            f"reference is {reference.dtype}{list(reference.shape)}, the array is {dtype}{list(shape)}: they must match"
        )


def rotate_left(words: Words, out: Words) -> None:
    """Move the sign bit to the bottom, so that the exponent of a float starts at the top bit."""
    sign_place = words.dtype.itemsize * 8 - 1
    # Without negative numbers there is no sign to move: one pass instead of three.
    if words.size and int(words.max()) >> sign_place == 0:
        # Adding a word to itself shifts it left by one bit, and is faster than a shift.
        np.add(words, words, out=out)
        return
    sign = scratch("carry", words.size, words.dtype)
    # Read the sign first: `out` may be the same memory as `words`.
    np.right_shift(words, sign_place, out=sign)
    np.add(words, words, out=out)
    np.bitwise_or(out, sign, out=out)


def rotate_right(words: Words, out: Words) -> None:
    """Undo `rotate_left`."""
    sign = scratch("carry", words.size, words.dtype)
    # The product keeps the lowest bit only, as the top bit.
    np.multiply(words, 1 << (words.dtype.itemsize * 8 - 1), out=sign)
    np.right_shift(words, 1, out=out)
    np.bitwise_or(out, sign, out=out)


def flip_negative(words: Words, out: Words) -> None:
    """Map float bits to two's-complement integers in the order of the floats; its own inverse."""
    sign_place = words.dtype.itemsize * 8 - 1
    # Positive floats are in order already: one pass instead of three.
    if not words.size or int(words.max()) >> sign_place == 0:
        if words is not out:
            np.copyto(out, words)
        return
    mask = scratch("carry", words.size, words.dtype)
    # An arithmetic shift copies the sign into all bits; the second shift clears the sign itself. The mask then has all
    # other bits where a word is negative, and no bits elsewhere.
    np.right_shift(_signed(words), sign_place, out=_signed(mask))
    np.right_shift(mask, 1, out=mask)
    np.bitwise_xor(words, mask, out=out)


def zigzag(words: Words, out: Words) -> None:
    """Map small two's-complement numbers of either sign to small unsigned ones: 0, -1, 1, -2 to 0, 1, 2, 3."""
    sign = scratch("carry", words.size, words.dtype)
    # All bits where a word is negative, no bits elsewhere.
    np.right_shift(_signed(words), words.dtype.itemsize * 8 - 1, out=_signed(sign))
    np.left_shift(words, 1, out=out)
    np.bitwise_xor(out, sign, out=out)


def unzigzag(words: Words, out: Words) -> None:
    """Undo `zigzag`."""
    sign = scratch("carry", words.size, words.dtype)
    # The lowest bit is the sign. Negating 1 sets all bits, negating 0 none.
    np.bitwise_and(words, 1, out=sign)
    np.negative(_signed(sign), out=_signed(sign))
    np.right_shift(words, 1, out=out)
    np.bitwise_xor(out, sign, out=out)


def _signed(words: Words) -> NDArray[Any]:
    return words.view(f"i{words.dtype.itemsize}")
