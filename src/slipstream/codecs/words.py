"""Bit-level views of arrays: unsigned words, and the reversible maps that make floats easier to compress.

Every map here is a bijection on the bits, so NaN payloads, -0.0 and denormals survive. Maps write into a caller's
buffer, or into per-thread scratch memory: for arrays of about 1 MiB a fresh allocation costs more than the arithmetic.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import UnsupportedDtypeError

if sys.byteorder != "little":  # pragma: no cover - no such machine to test on
    raise ImportError("slipstream needs a little-endian machine, this one is big-endian")

Words = NDArray[np.unsignedinteger[Any]]
"""A 1-D array of uint8, uint16, uint32 or uint64."""

_SCRATCH_LIMIT_BYTES = 8 << 20
_scratch = threading.local()


def word_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the unsigned integer type that holds one real number of `dtype`.

    Raises:
        UnsupportedDtypeError: for objects, strings, records and extended precision.
    """
    itemsize = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    if dtype.kind not in "biufc" or itemsize not in (1, 2, 4, 8):
        raise UnsupportedDtypeError(
            f"arrays of dtype {dtype} cannot be stored, expected bools, integers, floats or complex numbers "
            "of at most 64 bits each"
        )
    return np.dtype(f"u{itemsize}")


def as_words(array: NDArray[Any]) -> Words:
    """View `array` as a flat array of words in C order; copies only what is not contiguous."""
    dtype = word_dtype(array.dtype)
    return np.ascontiguousarray(array).reshape(-1).view(dtype)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Tell whether the words of `dtype` carry a sign, an exponent and a mantissa in native byte order."""
    return dtype.kind in "fc" and dtype.isnative


@contextlib.contextmanager
def own_scratch() -> Iterator[None]:
    """Give the block scratch memory of its own.

    A signal handler or a finalizer may use a codec while this thread is in the middle of another: each use, however
    deeply nested, has its own buffers, which the next use at the same depth finds again.
    """
    depth = _scratch.__dict__.get("depth", 0)
    levels: list[dict[str, NDArray[np.uint8]]] = _scratch.__dict__.setdefault("levels", [])
    if len(levels) == depth:
        levels.append({})
    _scratch.depth = depth + 1
    try:
        yield
    finally:
        _scratch.depth = depth


def scratch(slot: str, count: int, dtype: np.dtype[Any], *, limit: int = _SCRATCH_LIMIT_BYTES) -> NDArray[Any]:
    """Return uninitialised memory for `count` items, reused by the next call with the same slot on this thread.

    Call it inside `own_scratch`, and be done with the memory before asking for the same slot again. Requests above
    `limit` bytes get memory of their own, so that a thread never holds on to more than that per slot.
    """
    nbytes = count * dtype.itemsize
    depth: int = _scratch.__dict__.get("depth", 0)
    if nbytes > limit or not depth:
        return np.empty(count, dtype)
    buffers: dict[str, NDArray[np.uint8]] = _scratch.levels[depth - 1]
    buffer = buffers.get(slot)
    if buffer is None or buffer.nbytes < nbytes:
        buffer = buffers[slot] = np.empty(max(nbytes, 1 << 16), np.uint8)
    return buffer[:nbytes].view(dtype)


def rotate_left(words: Words, out: Words) -> None:
    """Move the sign bit to the bottom, so that a float's exponent fills the top byte."""
    if words.size and int(words.max()) >> (words.dtype.itemsize * 8 - 1) == 0:  # no sign: one pass instead of three
        np.add(words, words, out=out)
        return
    carry = scratch("carry", words.size, words.dtype)
    np.right_shift(words, words.dtype.itemsize * 8 - 1, out=carry)
    np.add(words, words, out=out)  # as a shift to the left, and faster
    np.bitwise_or(out, carry, out=out)


def rotate_right(words: Words, out: Words) -> None:
    """Undo `rotate_left`."""
    carry = scratch("carry", words.size, words.dtype)
    np.multiply(words, 1 << (words.dtype.itemsize * 8 - 1), out=carry)
    np.right_shift(words, 1, out=out)
    np.bitwise_or(out, carry, out=out)


def _signed(words: Words) -> NDArray[Any]:
    return words.view(f"i{words.dtype.itemsize}")


def flip_negative(words: Words, out: Words) -> None:
    """Map float bits to two's-complement integers in the order of the floats; its own inverse."""
    bits = words.dtype.itemsize * 8
    if not words.size or int(words.max()) >> (bits - 1) == 0:  # no negative number: one pass instead of three
        if words is not out:
            np.copyto(out, words)
        return
    mask = scratch("carry", words.size, words.dtype)
    np.right_shift(_signed(words), bits - 1, out=_signed(mask))
    np.right_shift(mask, 1, out=mask)
    np.bitwise_xor(words, mask, out=out)


def zigzag(words: Words, out: Words) -> None:
    """Map small two's-complement numbers of either sign to small unsigned ones."""
    bits = words.dtype.itemsize * 8
    sign = scratch("carry", words.size, words.dtype)
    np.right_shift(_signed(words), bits - 1, out=_signed(sign))
    np.left_shift(words, 1, out=out)
    np.bitwise_xor(out, sign, out=out)


def unzigzag(words: Words, out: Words) -> None:
    """Undo `zigzag`."""
    sign = scratch("carry", words.size, words.dtype)
    np.bitwise_and(words, 1, out=sign)
    np.negative(_signed(sign), out=_signed(sign))
    np.right_shift(words, 1, out=out)
    np.bitwise_xor(out, sign, out=out)
