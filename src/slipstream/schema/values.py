"""Plain values that JSON lacks, each as a tag and JSON: floats with all their bits, bytes, NumPy scalars, torch dtypes.

Reading trusts nothing: JSON that `Kind.write` could not have returned raises `ValueError` or `TypeError`.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.schema.dtypes import DTYPES, dtype_name, is_plain, parse_numpy_dtype, parse_torch_dtype

Json = Any

MAX_INDEX = (1 << 63) - 1
"""The largest size or offset that torch can count."""

# Python refuses to print or parse integers with many decimal digits. The limit can be set, but not below 640 digits.
_MAX_INT_BITS = 2_000

# JSON writes characters beyond the 16-bit range as surrogate pairs. Two characters that happen to be the halves of a
# pair would therefore come back as one.
_SPLIT_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_DEVICE = re.compile(r"[a-z]{1,40}(:[0-9]{1,4})?")


class TorchValues:
    """How values that need torch are built. This class describes them, for readers without torch."""

    def dtype(self, name: str) -> Any:
        """Return a ``torch.dtype``."""
        return name

    def device(self, name: str) -> Any:
        """Return a ``torch.device``."""
        return name

    def size(self, sizes: list[int]) -> Any:
        """Return a ``torch.Size``."""
        return tuple(sizes)

    def tensordict(
        self, members: dict[str, Any], batch_size: list[int], names: list[str | None] | None, device: str | None
    ) -> Any:
        """Return a ``TensorDict``.

        Args:
            members: Its tensors and nested TensorDicts.
            batch_size: Its batch size.
            names: The names of its batch dimensions, or None if none of them has one.
            device: The device that it had when it was saved, or None if it had none.
        """
        return members


@dataclass(frozen=True)
class Kind:
    """How values of one kind are written and read.

    Attributes:
        write: Returns JSON, or None if the value cannot be written exactly.
        read: Returns the value. Raises `ValueError` or `TypeError` if `write` could not have written the JSON.
    """

    write: Callable[[Any], Json | None]
    read: Callable[[Json, TorchValues], Any]


def is_exact_text(text: str) -> bool:
    """Return whether text comes back from JSON as it was."""
    return text.isascii() or not _SPLIT_PAIR.search(text)


def is_exact_int(number: int) -> bool:
    """Return whether JSON holds an integer in decimal digits; a longer one has a tag."""
    return number.bit_length() <= _MAX_INT_BITS


def read_sizes(sizes: Json, least: int = 0) -> list[int]:
    """Return a list of sizes after checking it.

    Raises:
        ValueError: If it is not a list of integers that torch can count, each at least `least`.
    """
    if not isinstance(sizes, list):
        raise ValueError(f"{str(sizes)[:40]!r} is not a list of sizes")  # noqa: TRY004 - one error for bad JSON
    for size in sizes:
        # Not isinstance: a bool is an int, but not a size.
        if type(size) is not int or not least <= size <= MAX_INDEX:
            raise ValueError(f"{str(size)[:40]!r} is not a size")
    return sizes


def read_names(names: Json, num_axes: int) -> list[str | None]:
    """Return the names of batch dimensions after checking them.

    Raises:
        ValueError: If it is not a list of strings and nulls, one per dimension and at least one of them a string.
    """
    if not isinstance(names, list) or len(names) != num_axes:
        raise ValueError(f"{str(names)[:40]!r} is not a list of {num_axes} names")
    if not {str, type(None)}.issuperset(map(type, names)) or not set(names) - {None}:
        raise ValueError(f"{str(names)[:40]!r} are not names")
    return names


def read_device(name: Json) -> str:
    """Return the name of a device after checking it. Raises `ValueError` if torch cannot have such a device."""
    if not isinstance(name, str) or not _DEVICE.fullmatch(name):
        raise ValueError(f"{str(name)[:40]!r} is not a device")
    return name


def _write_int(value: int) -> Json:
    # Hexadecimal digits have no limit, and take linear time.
    return hex(value)


def _read_int(value: Json, _: TorchValues) -> int:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is not hexadecimal text")
    number = int(value, 16)
    # Python accepts more spellings than are written: underscores, spaces, capitals.
    if hex(number) != value:
        raise ValueError(f"{value[:40]!r} is not written as {hex(number)[:40]!r}")
    return number


def _write_float(value: float) -> Json:
    # JSON has no NaN and no infinity, and a NaN has bits to keep.
    if math.isfinite(value):
        return value
    return struct.pack("<d", value).hex()


def _read_float(value: Json, _: TorchValues) -> float:
    if isinstance(value, str):
        content = bytes.fromhex(value)
        if len(content) != 8:
            raise ValueError(f"a float has 8 bytes, not {len(content)}")
        return float(struct.unpack("<d", content)[0])
    # JSON keeps integers and floats apart, and floats are written as floats.
    if not isinstance(value, float):
        raise TypeError(f"{str(value)[:40]!r} is not a float")
    return value


def _write_complex(value: complex) -> Json:
    return [_write_float(value.real), _write_float(value.imag)]


def _read_complex(value: Json, torch: TorchValues) -> complex:
    real, imaginary = value
    return complex(_read_float(real, torch), _read_float(imaginary, torch))


def _write_bytes(value: bytes | bytearray) -> Json:
    return base64.b64encode(value).decode()


def _read_bytes(value: Json, _: TorchValues) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is not base64 text")
    return base64.b64decode(value, validate=True)


def _read_bytearray(value: Json, torch: TorchValues) -> bytearray:
    return bytearray(_read_bytes(value, torch))


def _write_steps(value: range | slice) -> Json | None:
    parts = [value.start, value.stop, value.step]
    if not all(map(_is_step, parts)):
        return None
    return parts


def _read_range(value: Json, _: TorchValues) -> range:
    return range(*_check_steps(value))


def _read_slice(value: Json, _: TorchValues) -> slice:
    return slice(*_check_steps(value))


def _check_steps(value: Json) -> list[Any]:
    if not isinstance(value, list) or len(value) != 3 or not all(map(_is_step, value)):
        raise ValueError(f"{str(value)[:40]!r} is not start, stop and step")
    return value


def _is_step(part: Any) -> bool:
    """Return whether JSON holds a part of a slice as it is. Slices are of numbers, or of labels in a table."""
    if type(part) is int:
        return is_exact_int(part)
    if type(part) is float:
        return math.isfinite(part)
    if type(part) is str:
        return is_exact_text(part)
    return part is None or type(part) is bool


def _write_scalar(value: np.generic) -> Json | None:
    # Not for subclasses, nor for a second type of the same size: `numpy.longlong` would come back as `numpy.int64`.
    if not is_plain(value.dtype) or type(value) is not np.dtype(value.dtype.str).type:
        return None
    # NumPy gives empty text one character more than its dtype has.
    return [value.dtype.str, value.tobytes()[: value.dtype.itemsize].hex()]


def _read_scalar(value: Json, _: TorchValues) -> Any:
    name, digits = value
    dtype = parse_numpy_dtype(name)
    content = bytes.fromhex(digits)
    if len(content) != dtype.itemsize:
        raise ValueError(f"{len(content)} bytes for a {dtype}")
    # An array would drop trailing zeros of text and bytes.
    if dtype.kind == "S":
        return np.bytes_(content)
    if dtype.kind == "U":
        return np.str_(content.decode("utf-32-le", "surrogatepass"))
    return np.frombuffer(content, dtype)[0]


def _write_path(value: Any) -> Json | None:
    text = str(value)
    if not is_exact_text(text):
        return None
    return text


def _read_path(value: Json, _: TorchValues) -> Path:
    return Path(value)


def _write_dtype(value: Any) -> Json | None:
    name = dtype_name(value)
    if name not in DTYPES:
        return None
    return name


def _read_dtype(value: Json, torch: TorchValues) -> Any:
    return torch.dtype(parse_torch_dtype(value).name)


def write_device(value: Any) -> str | None:
    """Return the name of a device, or None if it has an unusual one."""
    name = str(value)
    if not _DEVICE.fullmatch(name):
        return None
    return name


def _read_device(value: Json, torch: TorchValues) -> Any:
    return torch.device(read_device(value))


def _read_size(value: Json, torch: TorchValues) -> Any:
    # A size is stored as it is, and the -1 of a reshape is one.
    return torch.size(read_sizes(value, least=-MAX_INDEX))


KINDS = {
    "int": Kind(_write_int, _read_int),
    "float": Kind(_write_float, _read_float),
    "complex": Kind(_write_complex, _read_complex),
    "bytes": Kind(_write_bytes, _read_bytes),
    "bytearray": Kind(_write_bytes, _read_bytearray),
    "range": Kind(_write_steps, _read_range),
    "slice": Kind(_write_steps, _read_slice),
    "numpy": Kind(_write_scalar, _read_scalar),
    "path": Kind(_write_path, _read_path),
    "torch.dtype": Kind(_write_dtype, _read_dtype),
    "torch.device": Kind(write_device, _read_device),
    "torch.Size": Kind(list, _read_size),
}
"""The kinds of plain values by tag."""
