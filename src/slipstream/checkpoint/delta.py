"""Differential checkpoints: how an entry is stored if an earlier checkpoint has it as well.

An entry that did not change is stored by reference. One that changed is stored as an integer difference if that is at
least a quarter smaller than storing it whole: close to each other in training, weights and moments differ only in their
low bits. Everything else is stored whole, so a delta never takes noticeably more space than a whole checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from slipstream.checkpoint.layout import Ancestor
from slipstream.codecs import Codec, Difference, Planes

# A difference has to save this share of the size of the entry stored whole: it takes longer to load.
_MIN_SAVING = 0.25
# Packing less than this takes longer than it is worth.
MIN_PACKED_BYTES = 2048
_SAMPLE_BYTES = 64 << 10
# Where samples are taken, as a share of the array. Training may change one part of an array more than another.
_SAMPLE_PLACES = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class Parent:
    """A checkpoint that another one may be stored against.

    Attributes:
        ancestors: The checkpoint itself, then its parents, nearest first.
        content: Its entries by name.
    """

    ancestors: tuple[Ancestor, ...]
    content: Mapping[str, EntryContent]

    def find(self, name: str, array: NDArray[Any]) -> EntryContent | None:
        """Return the entry of the same name, if it has the dtype and the size of `array`."""
        found = self.content.get(name)
        if found is None or (found.array.dtype, found.array.shape) != (array.dtype, array.shape):
            return None
        return found


@dataclass(frozen=True)
class EntryContent:
    """What an entry contains.

    Attributes:
        array: Its memory, flat.
        digests: The digests of its regions, in order. Two entries with the same digests are the same.
    """

    array: NDArray[Any]
    digests: tuple[bytes, ...]


def choose_difference(array: NDArray[Any], before: NDArray[Any], plain: Codec) -> Codec | None:
    """Return the codec that stores an entry as a difference to the parent, or None if that does not pay.

    Args:
        array: The entry, flat.
        before: The entry of the parent, of the same dtype and size.
        plain: The codec that would store it whole.
    """
    if array.nbytes < MIN_PACKED_BYTES:
        return None
    floating = None
    if isinstance(plain, Planes):
        floating = plain.floating
    difference = Difference(floating=floating)
    plain_bytes = 0
    difference_bytes = 0
    for part in _samples(array):
        plain_bytes += len(plain.encode(array[part]))
        difference_bytes += len(difference.against(before[part]).encode(array[part]))
    if difference_bytes > (1 - _MIN_SAVING) * plain_bytes:
        return None
    return difference


def _samples(array: NDArray[Any]) -> list[slice]:
    """Return parts of a flat array that stand for all of it."""
    count = min(array.size, _SAMPLE_BYTES // array.itemsize)
    starts = {int(place * (array.size - count)) for place in _SAMPLE_PLACES}
    return [slice(start, start + count) for start in sorted(starts)]
