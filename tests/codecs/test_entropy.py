"""How one plane of bytes is stored: every kind is restored, and everything else is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.codecs.entropy import (
    BIT_GROUPS,
    CONSTANT,
    SINGLE_BITS,
    STORED,
    ZSTD_FRAME,
    compress_zstd,
    decode_plane,
    decompress_into,
    encode_plane,
)
from slipstream.errors import CodecError


def noise(size: int, used: int = 255) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Make bytes that are incompressible but for the bits that they do not use."""
    return np.random.default_rng(size).integers(0, 256, size).astype(np.uint8) & np.uint8(used)


@settings(max_examples=300, deadline=None)
@given(size=st.integers(0, 300), used=st.integers(0, 255))
def test_bytes_that_use_some_of_their_bits_are_restored(size, used):
    plane = noise(size, used)
    kind, payload = encode_plane(plane, 1)
    back = np.broadcast_to(decode_plane(kind, memoryview(payload), size), size)
    assert back.tobytes() == plane.tobytes()


@pytest.mark.parametrize(
    ("plane", "kind"),
    [
        (noise(0), STORED),
        (noise(9000), STORED),
        (np.full(9000, 7, np.uint8), CONSTANT),
        (np.tile(noise(100), 90), ZSTD_FRAME),
        (np.random.default_rng(0).geometric(0.3, 9000).astype(np.uint8), ZSTD_FRAME),
        (noise(9000, 0b1010), SINGLE_BITS),
        (noise(9000, 0b0110), BIT_GROUPS),
    ],
    ids=["empty", "noise", "constant", "repeats", "skewed", "scattered bits", "adjacent bits"],
)
def test_every_plane_is_encoded_in_the_way_that_suits_it(plane, kind):
    found, payload = encode_plane(plane, 1)
    assert found == kind
    assert len(payload) <= plane.size
    back = np.broadcast_to(decode_plane(found, memoryview(payload), plane.size), plane.size)
    assert back.tobytes() == plane.tobytes()


@pytest.mark.parametrize("used", [0b11, 0b1110, 0b11110000, 0b11111000, 0b1111110, 0b11111110])
def test_adjacent_bits_take_no_more_than_their_number(used):
    plane = noise(8000, used)
    kind, payload = encode_plane(plane, 1)
    assert (kind, len(payload)) == (BIT_GROUPS, 1 + 1000 * used.bit_count())
    assert decode_plane(kind, memoryview(payload), 8000).tobytes() == plane.tobytes()


def test_groups_of_bits_are_laid_out_as_the_format_says():
    payload = bytes([0b11111000]) + bytes([0x21, 0x43, 0x65, 0x87]) + bytes([0b10000001])
    numbers = [1, 3, 5, 7, 2, 4, 6, 8]  # the low four bits of each packed byte first, then the high ones
    numbers[0] |= 16  # the fifth bit of the first and of the last
    numbers[7] |= 16
    assert decode_plane(BIT_GROUPS, memoryview(payload), 8).tolist() == [number << 3 for number in numbers]


def test_adjacent_bits_may_also_be_stored_one_by_one():
    payload = bytes([0b110, 0b10100000, 0b11000000])
    assert decode_plane(SINGLE_BITS, memoryview(payload), 3).tolist() == [0b110, 0b100, 0b010]


@pytest.mark.parametrize("first", [0, 1, 0b101, 0b11111111, 0b10000001])
@pytest.mark.parametrize("size", [0, 8, 16])
def test_groups_of_bits_that_are_not_adjacent_are_refused_at_any_length(first, size):
    for length in range(20):
        with pytest.raises(CodecError, match="plane of kind 4"):
            decode_plane(BIT_GROUPS, memoryview(bytes([first]) + bytes(length)), size)


@pytest.mark.parametrize("kind", [SINGLE_BITS, BIT_GROUPS])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 100])
def test_packed_bits_of_another_length_are_refused(kind, length):
    payload = (bytes([0b1110]) + bytes(99))[:length]
    with pytest.raises(CodecError, match=f"plane of kind {kind}"):
        decode_plane(kind, memoryview(payload), 8)


@pytest.mark.parametrize(("kind", "payload"), [(STORED, b"abc"), (CONSTANT, b""), (CONSTANT, b"ab"), (5, b"a")])
def test_a_plane_that_does_not_fit_its_kind_is_refused(kind, payload):
    with pytest.raises(CodecError):
        decode_plane(kind, memoryview(payload), 4)


def test_many_zstd_frames_are_decompressed_one_after_another():
    rows = np.arange(600, dtype=np.uint8).reshape(6, 100) // 7
    frames = [b"tag" + compress_zstd(row, 1) for row in rows]
    out = np.empty_like(rows)
    decompress_into(out.reshape(-1).data, frames, 100, skip=3)
    assert (out == rows).all()
    for wrong in (frames[0] + b"x", frames[0][:-1], b"tag" + compress_zstd(rows[0][:99], 1), b"tag"):
        with pytest.raises(CodecError, match="zstd frame"):
            decompress_into(out.reshape(-1).data, [wrong], 100, skip=3)
