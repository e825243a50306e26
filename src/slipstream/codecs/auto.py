"""The `auto` codec: the best of the others for an array, found on a sample of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.codecs.base import Buffer, Codec, part_shape
from slipstream.codecs.difference import Difference
from slipstream.codecs.entropy import as_bytes
from slipstream.codecs.plain import Raw, Zstd
from slipstream.codecs.planes import Planes, PlaneSettings
from slipstream.codecs.timewise import Timewise
from slipstream.errors import CodecError

_SAMPLE_BYTES = 128 << 10
_NEARLY = 0.999  # what packs no more than a thousandth better is not worth its time
_BY_TAG: tuple[type[Codec], ...] = (Raw, Zstd, Planes, Timewise, Difference)


@dataclass(frozen=True)
class Auto(PlaneSettings, Codec):
    """Picks `raw`, `zstd`, `planes`, `timewise` or `difference` per array; at most one byte larger than raw."""

    name: ClassVar[str] = "auto"

    def choose(self, array: NDArray[Any], reference: NDArray[Any] | None = None) -> Codec:
        """Return the codec that packs a sample of `array` smallest; plainer ones win where they are nearly as small.

        Args:
            array: The array to be packed.
            reference: An array of the same dtype and shape, if one is at hand: then `difference` competes as well.
        """
        candidates: list[Codec] = [Raw(), Zstd(self.level), Planes(self.level, self.floating)]
        if array.ndim > 1:
            candidates.append(Timewise(self.level, self.floating))
        if reference is not None:
            candidates.append(Difference(self.level, self.floating))
        sample = _sample(array)
        sample_reference = None if reference is None else _sample(reference)
        best, least = candidates[0], float(sample.nbytes)
        for codec in candidates[1:]:
            size = len(codec.encode(sample, sample_reference))
            if size < _NEARLY * least:
                best, least = codec, size
        return best

    def encode(self, array: NDArray[Any], reference: NDArray[Any] | None = None) -> bytes:
        """Return one byte that names the codec, and its payload; see `Codec.encode`."""
        array = np.asarray(array)
        codec = self.choose(array, reference)
        payload = codec.encode(array, reference)
        if len(payload) > array.nbytes:
            codec = Raw()
            payload = codec.encode(array)
        return bytes([_BY_TAG.index(type(codec))]) + payload

    def decode(
        self,
        payload: Buffer,
        dtype: np.dtype[Any] | str,
        shape: Sequence[int],
        reference: NDArray[Any] | None = None,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Return the array that `encode` packed; see `Codec.decode`."""
        view = as_bytes(payload)
        if not view or view[0] >= len(_BY_TAG):
            raise CodecError("auto payload starts with a tag that this codec does not write")
        return _BY_TAG[view[0]]().decode(view[1:], dtype, shape, reference, out)


def _sample(array: NDArray[Any]) -> NDArray[Any]:
    """Return a part from the middle of `array`, of at most 128 KiB unless a single element is larger."""
    shape = part_shape(array.shape, array.dtype.itemsize, _SAMPLE_BYTES)
    return array[tuple(slice((n - k) // 2, (n - k) // 2 + k) for n, k in zip(array.shape, shape, strict=True))]
