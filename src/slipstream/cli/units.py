"""Sizes, bandwidths and shapes as people type them."""

from __future__ import annotations

import re

from slipstream.errors import ConfigurationError

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z/]*)\s*")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"([kmgt]?)(i?)b?", re.IGNORECASE)
_BITS = re.compile(r"([kmgtKMGT]?)(?:[bB]its?(?:/s)?|b/s|bps|bit/sec)")
_BYTES = re.compile(r"([kmgtKMGT]?)(i?)(?:B(?:/s)?|[bB]ytes?(?:/s)?)")


def parse_size(text: str, option: str) -> int:
    """Read ``4GB``, ``512MiB`` or ``1000000``, in bytes.

    Raises:
        ConfigurationError: If it is something else; `option` is named then.
    """
    number = _NUMBER.fullmatch(text)
    unit = _SIZE.fullmatch(number[2]) if number else None
    if number is None or unit is None or (unit[2] and not unit[1]):
        raise ConfigurationError(f"{option} is {text!r}, expected a size such as 4GB or 512MiB")
    size = round(float(number[1]) * _factor(1024 if unit[2] else 1000, unit[1]))
    if size < 1:
        raise ConfigurationError(f"{option} is {text!r}, expected a size above 0 such as 4GB or 512MiB")
    return size


def parse_bandwidth(text: str, option: str) -> float:
    """Read ``1Gbit``, ``100Mbit/s`` or ``125MB/s``, in bytes per second; a small ``b`` alone is a bit.

    Raises:
        ConfigurationError: If it is something else; `option` is named then.
    """
    number = _NUMBER.fullmatch(text)
    bits = _BITS.fullmatch(number[2]) if number else None
    whole = _BYTES.fullmatch(number[2]) if number else None
    unit = bits or whole
    if number is None or unit is None or float(number[1]) <= 0:
        raise ConfigurationError(f"{option} is {text!r}, expected a bandwidth such as 1Gbit, 100Mbit/s or 125MB/s")
    base = 1024 if unit is whole and unit[2] else 1000
    return float(number[1]) * _factor(base, unit[1]) / (8 if unit is bits else 1)


def _factor(base: int, prefix: str) -> int:
    factor: int = base ** _POWERS[prefix.lower()]
    return factor


def parse_shape(text: str, option: str) -> tuple[str, tuple[tuple[int, ...], str]]:
    """Read ``lidar=36x4:float32``: a key, the shape of one step, and a dtype, which is float32 if left out.

    Raises:
        ConfigurationError: If it is something else; `option` is named then.
    """
    key, equals, rest = text.partition("=")
    sizes, colon, dtype = rest.partition(":")
    if not key or not equals or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or (colon and not dtype):
        raise ConfigurationError(f"{option} is {text!r}, expected a key and a shape such as lidar=36x4:float32")
    return key, (tuple(map(int, sizes.split("x"))), dtype or "float32")
