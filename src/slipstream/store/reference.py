"""What an entry is stored against: a whole array, or a function that returns parts of it.

A checkpoint stores the difference to its parent. The parent may exist only as a file, so a reference can be a function:
then only the parts that belong to the chunks in progress are in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.codecs import Codec
from slipstream.codecs.base import check_reference

Reference = NDArray[Any] | Callable[[int, int], NDArray[Any]]
"""An array of the entry's dtype and shape, or a function that returns its elements `start` to `stop` in C order."""


class ChunkReferences:
    """The parts of a reference that belong to the chunks of an entry. Thread-safe if the function is.

    Args:
        reference: The reference, or None if there is none.
        dtype: Dtype of the entry.
        shape: Shape of the entry.

    Raises:
        CodecError: If the reference is an array of another dtype or shape.
    """

    def __init__(self, reference: Reference | None, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._part_of: Callable[[int, int], NDArray[Any]] | None = None
        if callable(reference):
            self._part_of = reference
        elif reference is not None:
            array = np.asarray(reference)
            check_reference(array, dtype, shape)
            self._part_of = functools.partial(_slice, array.reshape(-1))

    def bind(self, codec: Codec, start: int, shape: tuple[int, ...]) -> Codec:
        """Return the codec for one chunk: with its part of the reference if it needs one and there is one.

        Args:
            codec: The codec of the entry.
            start: Number of the chunk's first element in the flat array.
            shape: Shape of the chunk.
        """
        if self._part_of is None or not codec.needs_reference:
            return codec
        part = self._part_of(start, start + math.prod(shape))
        return codec.against(part.reshape(shape))


def _slice(flat: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
    return flat[start:stop]
