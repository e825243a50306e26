"""How arrays over time are laid out: what was written before is read, and what nobody writes is refused."""

import numpy as np
import pytest

from slipstream.codecs import Planes, Timewise
from slipstream.errors import CodecError

FLOATS, WHOLE = 4, 8
ARRAY = np.random.default_rng(5).normal(size=(6, 9, 4)).astype(np.float32)


def test_plain_steps_are_packed_together_with_time_innermost():
    moved = np.concatenate([ARRAY[:, 0].reshape(-1), ARRAY[:, 1:].transpose(0, 2, 1).reshape(-1)])
    assert Timewise(mode="plain").encode(ARRAY) == bytes([WHOLE | FLOATS]) + Planes().encode(moved)


def test_plain_steps_are_read_where_the_first_is_apart():
    first, later = Planes().encode(ARRAY[:, 0]), Planes().encode(ARRAY[:, 1:].transpose(0, 2, 1))
    back = Timewise().decode(bytes([FLOATS]) + first + later, ARRAY.dtype, ARRAY.shape)
    assert back.tobytes() == ARRAY.tobytes()


@pytest.mark.parametrize("mode", [WHOLE | 1, WHOLE | 2, WHOLE | 3, 16, 255])
def test_a_mode_that_no_encoder_writes_is_refused(mode):
    payload = bytearray(Timewise(mode="plain").encode(ARRAY))
    payload[0] = mode
    with pytest.raises(CodecError, match="a mode that this codec does not write"):
        Timewise().decode(payload, ARRAY.dtype, ARRAY.shape)


@pytest.mark.parametrize("mode", ["plain", "xor", "ordered", "linear"])
@pytest.mark.parametrize(
    "shape", [(7, 40, 1), (7, 40, 3), (3, 40, 200), (1, 2, 300_000), (500, 1, 5), (2, 3), (1, 900_000)]
)
@pytest.mark.parametrize("dtype", ["f4", "i2", "u1", "f8"])
def test_steps_of_any_width_come_back(mode, shape, dtype):
    array = (np.random.default_rng(1).normal(size=shape).cumsum(axis=1) * 50).astype(dtype)
    codec = Timewise(mode=mode)
    assert codec.decode(codec.encode(array), array.dtype, array.shape).tobytes() == array.tobytes()
