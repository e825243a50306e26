"""What a codec is: a frozen value that turns an array into bytes and back, and can be written into a file header."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from slipstream.codecs.entropy import as_bytes
from slipstream.codecs.words import Words, as_words, is_float, own_scratch, word_dtype
from slipstream.errors import CodecError

Buffer = bytes | bytearray | memoryview | NDArray[Any]
"""Anything contiguous that holds a payload."""

_MAX_ELEMENTS = 1 << 48


@dataclass(frozen=True)
class Layout:
    """What a codec may know of an array besides its bits."""

    shape: tuple[int, ...]
    floating: bool


def part_shape(shape: tuple[int, ...], itemsize: int, limit_bytes: int) -> tuple[int, ...]:
    """Return the shape of the largest part of at most `limit_bytes` that is contiguous in C order.

    Such a part spans some indices of one axis, a single index of every axis before it, and all of every axis after it.
    """
    inner = itemsize * math.prod(shape)
    part = list(shape)
    for axis, length in enumerate(shape):
        if inner <= limit_bytes or not inner:
            break
        inner //= length
        part[axis] = max(1, limit_bytes // inner)
        if part[axis] > 1:
            break
    return tuple(part)


def check_out(out: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Raise `CodecError` unless `out` is memory that an array of this dtype and shape can be decoded into."""
    fits = type(out) is np.ndarray and out.dtype == dtype and out.shape == shape
    if not fits or not out.flags.c_contiguous or not out.flags.writeable:
        raise CodecError(
            f"out is {out.dtype}{list(out.shape)}, expected a contiguous, writable array {dtype}{list(shape)}"
        )


def check_reference(reference: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return `reference` as an array; raise `CodecError` unless it is of this dtype and shape."""
    reference = np.asarray(reference)
    if reference.dtype != dtype or reference.shape != shape:
        raise CodecError(
            f"reference is {reference.dtype}{list(reference.shape)}, the array is {dtype}{list(shape)}: they must match"
        )
    return reference


class Codec(ABC):
    """Base of all codecs; subclasses are frozen dataclasses whose fields are their settings.

    A codec never changes the array it is given, may be used from several threads at once, and spends its time in NumPy
    and compression libraries that release the GIL. Decoding needs no setting that the payload does not carry, so any
    instance of a class decodes what another instance encoded. Peak memory while encoding is at most twice the size of
    the array plus 32 MiB per thread, and once more its size for each array that is not contiguous.

    Example:
        >>> import numpy as np
        >>> from slipstream.codecs import Planes
        >>> weights = np.linspace(-1, 1, 1000, dtype=np.float32)
        >>> payload = Planes(level=3).encode(weights)
        >>> bool((Planes().decode(payload, weights.dtype, weights.shape) == weights).all())
        True
    """

    name: ClassVar[str]
    """The name under which files refer to this codec; never reused for another one."""
    needs_reference: ClassVar[bool] = False
    """Whether `encode` and `decode` want a second array of the same type and shape."""

    @abstractmethod
    def encode(self, array: NDArray[Any], reference: NDArray[Any] | None = None) -> bytes:
        """Return the bytes of `array`, packed.

        Args:
            array: Bools, integers, floats or complex numbers of any shape and memory layout.
            reference: For codecs with `needs_reference`: an array of the same dtype and shape.

        Raises:
            UnsupportedDtypeError: If the elements are not plain numbers.
            CodecError: If the reference is missing or does not match.
        """

    @abstractmethod
    def decode(
        self,
        payload: Buffer,
        dtype: np.dtype[Any] | str,
        shape: Sequence[int],
        reference: NDArray[Any] | None = None,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Return the array that `encode` packed, bit for bit.

        Args:
            payload: What `encode` returned.
            dtype: Element type of the array.
            shape: Shape of the array.
            reference: The array that was given to `encode`, for codecs with `needs_reference`; it may be `out` itself.
            out: Memory to decode into, contiguous and of that dtype and shape; allocated if absent.

        Raises:
            CodecError: If the payload is damaged or of another shape; what is in `out` is then undefined.
        """

    def to_header(self) -> dict[str, Any]:
        """Return this codec as a JSON object: its name and settings."""
        return {"name": self.name, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Make a codec from the settings of a header.

        Raises:
            CodecError: If a setting is unknown or out of range.
        """
        try:
            return cls(**settings)
        except TypeError as error:
            raise CodecError(f"codec {cls.name!r} does not take the settings {dict(settings)!r}") from error


class WordCodec(Codec):
    """Base of the codecs that work on the flat bits of an array: checks arguments once, for all of them."""

    def encode(self, array: NDArray[Any], reference: NDArray[Any] | None = None) -> bytes:
        """Pack an array; see `Codec.encode`."""
        array = np.asarray(array)
        layout = Layout(array.shape, is_float(array.dtype))
        words, other = as_words(array), self._reference_words(reference, array.dtype, array.shape)
        with own_scratch():
            return self._encode(words, layout, other)

    def decode(
        self,
        payload: Buffer,
        dtype: np.dtype[Any] | str,
        shape: Sequence[int],
        reference: NDArray[Any] | None = None,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Unpack an array; see `Codec.decode`."""
        dtype = np.dtype(dtype)
        shape = tuple(shape)
        word_dtype(dtype)
        if any(length < 0 for length in shape) or math.prod(shape) > _MAX_ELEMENTS:
            raise CodecError(f"an array of shape {shape} cannot be decoded")
        if out is None:
            out = np.empty(shape, dtype)
        check_out(out, dtype, shape)
        words, other = as_words(out), self._reference_words(reference, dtype, shape)
        with own_scratch():
            self._decode(as_bytes(payload), words, Layout(shape, is_float(dtype)), other)
        return out

    def _reference_words(
        self, reference: NDArray[Any] | None, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> Words | None:
        if not self.needs_reference:
            return None
        if reference is None:
            raise CodecError(f"codec {self.name!r} needs a reference array and was given none")
        return as_words(check_reference(reference, dtype, shape))

    @abstractmethod
    def _encode(self, words: Words, layout: Layout, reference: Words | None) -> bytes:
        """Pack `words`, the flat bits of the array."""

    @abstractmethod
    def _decode(self, payload: memoryview, out: Words, layout: Layout, reference: Words | None) -> None:
        """Fill `out` from `payload`, or raise `CodecError`; read no further than the payload reaches."""
