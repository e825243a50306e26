"""How words are cut into planes: lower halves that are noise stay as they are."""

import numpy as np
import pytest

from slipstream.codecs import Difference, Planes
from slipstream.errors import CodecError

HALVED = 8
WEIGHTS = np.random.default_rng(3).normal(scale=0.02, size=40_000)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_the_lower_halves_of_weights_are_stored_as_they_are(dtype):
    array = WEIGHTS.astype(dtype)
    payload = Planes().encode(array)
    words = array.view(f"u{array.itemsize}")
    lower = (words & ((1 << 4 * array.itemsize) - 1)).astype(f"u{array.itemsize // 2}")
    assert payload[0] == HALVED
    assert lower.tobytes() in payload
    assert Planes().decode(payload, array.dtype, array.shape).tobytes() == array.tobytes()


@pytest.mark.parametrize("scale", [1, 2**-8, 2**-100])
def test_numbers_whose_lower_halves_say_something_are_not_halved(scale):
    array = np.random.default_rng(0).integers(-100, 100, 40_000).astype(np.float32) * np.float32(scale)
    payload = Planes().encode(array)
    assert not payload[0] & HALVED
    assert len(payload) < array.nbytes / 3
    assert Planes().decode(payload, array.dtype, array.shape).tobytes() == array.tobytes()


def test_weights_among_zeros_are_halved_too():
    array = np.where(np.arange(40_000) % 3 == 0, WEIGHTS, 0).astype(np.float32)
    payload = Planes().encode(array)
    assert payload[0] & HALVED
    assert len(payload) < array.nbytes * 0.31
    assert Planes().decode(payload, array.dtype, array.shape).tobytes() == array.tobytes()


@pytest.mark.parametrize("apart", [1e-6, 1e-4, 1e-2, 1.0, 100.0])
def test_differences_of_any_size_come_back(apart):
    old = WEIGHTS.astype(np.float32)
    new = (WEIGHTS + apart * np.random.default_rng(1).normal(scale=0.02, size=WEIGHTS.size)).astype(np.float32)
    payload = Difference().encode(new, old)
    assert Difference().decode(payload, new.dtype, new.shape, old).tobytes() == new.tobytes()


@pytest.mark.parametrize("head", [(HALVED | 1, 0, 0), (HALVED | 2, 0, 0), (HALVED, 1, 0), (HALVED, 0, 1), (16, 0, 0)])
def test_a_block_that_no_encoder_writes_is_refused(head):
    payload = bytearray(Planes().encode(WEIGHTS))
    payload[:3] = bytes(head)
    with pytest.raises(CodecError, match="block header has flags"):
        Planes().decode(payload, WEIGHTS.dtype, WEIGHTS.shape)


def test_bytes_have_no_halves():
    with pytest.raises(CodecError, match="block header has flags 8"):
        Planes().decode(bytes([HALVED, 0, 0]) + bytes(20), "u1", (5,))
