"""How arrays over time are laid out: older payloads are read, and invalid ones refused."""

import numpy as np
import pytest

from slipstream.codecs import Planes, Timewise
from slipstream.errors import CodecError
from tests.codecs.roundtrip import decode, round_trip

FLOATS, WHOLE = 4, 8
ARRAY = np.random.default_rng(5).normal(size=(6, 9, 4)).astype(np.float32)


def test_plain_steps_are_encoded_as_one_array_with_time_innermost():
    moved = np.concatenate([ARRAY[:, 0].reshape(-1), ARRAY[:, 1:].transpose(0, 2, 1).reshape(-1)])
    assert Timewise(mode="plain").encode(ARRAY) == bytes([WHOLE | FLOATS]) + Planes().encode(moved)


def test_plain_steps_are_read_if_the_first_is_encoded_separately():
    first, later = Planes().encode(ARRAY[:, 0]), Planes().encode(ARRAY[:, 1:].transpose(0, 2, 1))
    back = decode(Timewise(), bytes([FLOATS]) + first + later, ARRAY)
    assert back.tobytes() == ARRAY.tobytes()


@pytest.mark.parametrize("mode", [WHOLE | 1, WHOLE | 2, WHOLE | 3, 16, 255])
def test_an_invalid_mode_is_refused(mode):
    payload = bytearray(Timewise(mode="plain").encode(ARRAY))
    payload[0] = mode
    with pytest.raises(CodecError, match=f"starts with {mode}, which is not a valid mode"):
        decode(Timewise(), payload, ARRAY)


@pytest.mark.parametrize("mode", ["plain", "xor", "ordered", "linear"])
def test_steps_of_any_width_and_dtype_are_restored(mode):
    for shape in [(7, 40, 1), (7, 40, 3), (3, 40, 200), (1, 2, 300_000), (500, 1, 5), (2, 3), (1, 900_000)]:
        walk = np.random.default_rng(1).normal(size=shape).cumsum(axis=1) * 50
        for dtype in ("f4", "i2", "u1", "f8"):
            round_trip(Timewise(mode=mode), walk.astype(dtype))


def test_a_step_larger_than_scratch_memory_is_restored():
    walk = np.random.default_rng(2).normal(size=(1, 3, 2_500_000)).astype(np.float32)
    for mode in ("plain", "xor", "ordered", "linear"):
        round_trip(Timewise(mode=mode), walk)
