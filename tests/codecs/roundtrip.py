"""Encode and decode arrays of any kind: what the tests of codecs share."""

from typing import Any

import numpy as np

from slipstream.codecs import Codec

Array = np.ndarray[Any, Any]


def decode(codec: Codec, payload: bytes | bytearray, like: Array) -> Array:
    """Decode a payload into a new array of the dtype and shape of `like`."""
    out = np.empty(like.shape, like.dtype)
    codec.decode(payload, out)
    return out


def same_bytes(first: Array, second: Array) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


def with_reference(codec: Codec, array: Array) -> Codec:
    """Return the codec with a reference near `array`, if it needs one."""
    if not codec.needs_reference:
        return codec
    near = np.frombuffer(array.tobytes(), np.uint8).copy()
    near[::5] += 1
    return codec.against(near.view(array.dtype).reshape(array.shape))


def round_trip(codec: Codec, array: Array) -> bytes:
    """Encode and decode an array, require the same bytes, and return the payload."""
    before = array.tobytes()
    codec = with_reference(codec, array)
    payload = codec.encode(array)
    assert array.tobytes() == before, "encoding changed the array"
    assert same_bytes(decode(codec, payload, array), array)
    return payload
