"""How one plane of bytes is stored: every way of it comes back, and nothing else is read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.codecs.entropy import BITS, PARTS, pack_plane, unpack_plane
from slipstream.errors import CodecError


def noise(size: int, used: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Make bytes that cannot be packed, but for the bits they do not use."""
    return np.random.default_rng(size).integers(0, 256, size).astype(np.uint8) & np.uint8(used)


@settings(max_examples=300, deadline=None)
@given(size=st.integers(0, 300), used=st.integers(0, 255))
def test_bytes_that_use_some_of_their_bits_come_back(size, used):
    plane = noise(size, used)
    kind, payload = pack_plane(plane, 1)
    back = np.broadcast_to(unpack_plane(kind, memoryview(payload), size), size)
    assert back.tobytes() == plane.tobytes()


@pytest.mark.parametrize("used", [0b11, 0b1110, 0b11110000, 0b11111000, 0b1111110, 0b11111110])
def test_bits_side_by_side_take_no_more_than_themselves(used):
    plane = noise(8000, used)
    kind, payload = pack_plane(plane, 1)
    assert (kind, len(payload)) == (PARTS, 1 + 1000 * used.bit_count())
    assert unpack_plane(kind, memoryview(payload), 8000).tobytes() == plane.tobytes()


def test_parts_lie_in_the_file_as_its_format_says():
    payload = bytes([0b11111000]) + bytes([0x21, 0x43, 0x65, 0x87]) + bytes([0b10000001])
    numbers = [1, 3, 5, 7, 2, 4, 6, 8]  # the low four bits of each part first, then the high ones
    numbers[0] |= 16  # the fifth bit of the first and of the last
    numbers[7] |= 16
    assert unpack_plane(PARTS, memoryview(payload), 8).tolist() == [number << 3 for number in numbers]


def test_bits_side_by_side_are_read_where_each_was_stored_alone():
    payload = bytes([0b110, 0b10100000, 0b11000000])
    assert unpack_plane(BITS, memoryview(payload), 3).tolist() == [0b110, 0b100, 0b010]


@pytest.mark.parametrize("first", [0, 1, 0b101, 0b11111111, 0b10000001])
def test_parts_of_bits_that_are_not_side_by_side_are_refused(first):
    with pytest.raises(CodecError, match="plane of kind 4"):
        unpack_plane(PARTS, memoryview(bytes([first]) + bytes(16)), 16)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 100])
def test_parts_of_another_length_are_refused(length):
    payload = (bytes([0b1110]) + bytes(99))[:length]
    with pytest.raises(CodecError, match="plane of kind 4"):
        unpack_plane(PARTS, memoryview(payload), 8)
