"""The dtypes that files may name, and how NumPy carries those of torch.

A name that a file claims is looked up in a table or matched against a fixed pattern. It is never passed to
``getattr(torch, ...)``, which can import modules, nor unchecked to ``numpy.dtype``.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """A torch dtype, and the NumPy dtype that holds its bits.

    Attributes:
        name: Torch's name without ``torch.``, such as ``"float32"`` or ``"bfloat16"``.
        carrier: The NumPy dtype with the same bits: the same dtype if NumPy has it, else unsigned integers.
    """

    name: str
    carrier: np.dtype[Any]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.carrier.itemsize

    @property
    def is_float(self) -> bool:
        """Whether elements are real floating-point numbers."""
        return self.name.startswith(("float", "bfloat"))

    @property
    def is_complex(self) -> bool:
        """Whether elements are complex numbers."""
        return self.name.startswith("complex")

    @property
    def is_quantized(self) -> bool:
        """Whether elements have a scale and a zero point besides their bits."""
        return self.name.startswith(("qint", "quint"))

    @property
    def is_hidden_float(self) -> bool:
        """Whether the carrier's integers are floats that NumPy lacks, wide enough for byte planes: bfloat16."""
        return self.is_float and self.carrier.kind == "u" and self.itemsize > 1


_CARRIERS = {
    "bool": "|b1",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
    # NumPy has none of the following: unsigned integers of the same size carry their bits.
    "bfloat16": "<u2",
    "complex32": "<u4",
    "float8_e4m3fn": "|u1",
    "float8_e4m3fnuz": "|u1",
    "float8_e5m2": "|u1",
    "float8_e5m2fnuz": "|u1",
    "float8_e8m0fnu": "|u1",
    "float4_e2m1fn_x2": "|u1",
    # Quantized tensors and bit fields are not stored, but a state may hold their dtype as a value.
    "qint8": "|u1",
    "quint8": "|u1",
    "qint32": "<u4",
    "quint4x2": "|u1",
    "quint2x4": "|u1",
    "bits1x8": "|u1",
    "bits2x4": "|u1",
    "bits4x2": "|u1",
    "bits8": "|u1",
    "bits16": "<u2",
}
# Integers of one to seven bits take a byte each.
for _bits in range(1, 8):
    _CARRIERS[f"int{_bits}"] = "|u1"
    _CARRIERS[f"uint{_bits}"] = "|u1"

DTYPES = {name: DType(name, np.dtype(carrier)) for name, carrier in _CARRIERS.items()}
"""Every torch dtype by name."""

# Plain numbers, text, bytes, raw memory, dates and durations, spelled as `numpy.dtype.str` spells them. No long
# doubles: they have 80 bits on some machines and 128 on others, under the same name.
_NUMPY_NAME = re.compile(
    r"[<>|](b1|[iu][1248]|f[248]|c8|c16|[SU][0-9]{1,9}|V[1-9][0-9]{0,8}"
    r"|[Mm]8(\[[0-9]{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: Any) -> str:
    """Return the name of a torch dtype, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def parse_torch_dtype(name: Any) -> DType:
    """Look up a torch dtype by the name that a file claims.

    Raises:
        ValueError: If torch has no dtype of that name.
    """
    dtype = None
    if isinstance(name, str):
        dtype = DTYPES.get(name)
    if dtype is None:
        raise ValueError(f"unknown dtype {str(name)[:40]!r}")
    return dtype


def parse_numpy_dtype(name: Any) -> np.dtype[Any]:
    """Return the NumPy dtype that a file claims, spelled as in ``numpy.dtype.str``.

    Raises:
        ValueError: If it is not a dtype of plain numbers, text, bytes or times.
    """
    if not isinstance(name, str) or not _NUMPY_NAME.fullmatch(name):
        raise ValueError(f"unknown NumPy dtype {str(name)[:40]!r}")
    try:
        return np.dtype(name)
    except (TypeError, ValueError) as error:
        # Text that is too long for any array.
        raise ValueError(f"NumPy has no dtype {name!r} on this machine") from error


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether the name of a NumPy dtype says all about it, so that `parse_numpy_dtype` restores it.

    False for objects, records, long doubles, dtypes with metadata, and dtypes that other packages define.
    """
    if dtype.hasobject or dtype.metadata or not _NUMPY_NAME.fullmatch(dtype.str):
        return False
    return np.dtype(dtype.str) == dtype
