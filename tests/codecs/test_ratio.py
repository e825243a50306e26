"""What each codec is for: how small it makes the data it was built for. Speed is measured in bench/."""

import lz4.frame
import numpy as np
import pytest
import zstandard

from slipstream.codecs import Difference, Planes, Raw, Timewise, Zstd, choose_codec
from slipstream.errors import CodecError
from tests.codecs.roundtrip import Array, decode


def weights(seed: int = 0) -> Array:
    """Weights as a layer's initialisation leaves them, with a few exact zeros."""
    values = np.random.default_rng(seed).normal(scale=0.03, size=(512, 1024)).astype(np.float32)
    values[::64] = 0
    return values


def lidar() -> Array:
    """Ranges of 64 environments over 32 steps: most rays see nothing, the others change smoothly."""
    rng = np.random.default_rng(1)
    distance = rng.uniform(0, 12, (64, 1, 144)) - 0.03 * rng.uniform(0, 1, (64, 1, 144)) * np.arange(32)[:, None]
    return np.clip(4 - distance, 0, 4).astype(np.float32)


def test_planes_beats_zstd_and_lz4_on_weights():
    array = weights()
    packed = len(Planes().encode(array))
    assert packed < 0.84 * array.nbytes
    assert packed < 0.92 * len(zstandard.ZstdCompressor(level=3).compress(array.tobytes()))
    assert packed < 0.85 * len(lz4.frame.compress(array.tobytes(), compression_level=9))


def test_planes_comes_near_the_entropy_of_exponent_and_mantissa():
    array = weights()[1:64]
    symbols = (array.view(np.uint32) >> 20) & 0x7FF  # exponent and three bits of the mantissa
    p = np.unique(symbols, return_counts=True)[1] / symbols.size
    bound = array.nbytes * (-(p * np.log2(p)).sum() + 21) / 32
    assert len(Planes().encode(array)) < 1.01 * bound


def test_bfloat16_kept_as_uint16_compresses_better_as_floats():
    bfloat16 = (weights().view(np.uint32) >> 16).astype(np.uint16)
    assert len(Planes(floating=True).encode(bfloat16)) < 0.99 * len(Planes().encode(bfloat16))
    assert len(Planes(floating=True).encode(bfloat16)) < 0.72 * bfloat16.nbytes


def test_zeros_and_constants_are_nearly_free():
    for value in (0.0, 1.5):
        assert len(Planes().encode(np.full((256, 1024), value, np.float32))) < 100


@pytest.mark.parametrize("bits", [0b1, 0b1000_0000, 0b0101_0001, 0b1111_1110])
def test_bytes_that_use_some_of_their_bits_take_no_more_than_those(bits):
    array = np.random.default_rng(3).integers(0, 256, 100_001, dtype=np.uint8) & np.uint8(bits)
    packed = Planes().encode(array)
    assert len(packed) < array.nbytes * bits.bit_count() / 8 + 32
    assert np.array_equal(decode(Planes(), packed, array), array)


def test_noise_is_stored_with_a_few_bytes_more():
    noise = np.random.default_rng(2).integers(0, 2**32, 1 << 18, dtype=np.uint32)
    assert len(Planes().encode(noise)) < noise.nbytes + 32


def test_a_plane_that_repeats_is_found_though_every_byte_value_is_as_frequent():
    counter = np.arange(1 << 18, dtype=np.uint32)
    assert len(Planes().encode(counter)) < 0.1 * counter.nbytes


def test_timewise_packs_a_rollout_several_times_smaller_than_lz4():
    array = lidar()
    assert 2 * len(Timewise().encode(array)) < len(lz4.frame.compress(array.tobytes(), compression_level=9))
    assert len(Timewise().encode(array)) < 0.8 * len(Planes().encode(array))


def test_timewise_counts_on_time_being_the_second_axis():
    array = lidar()
    swapped = np.ascontiguousarray(array.swapaxes(1, 2))
    assert len(Timewise().encode(array)) < len(Timewise().encode(swapped))


@pytest.mark.parametrize("ulps", [1, 100, 10_000])
def test_difference_pays_for_the_distance_not_for_the_value(ulps):
    old = weights()[1:64]  # without zeros, whose neighbours are of either sign
    step = np.random.default_rng(3).integers(-ulps, ulps + 1, old.shape, dtype=np.int32)
    new = (old.view(np.int32) + step).view(np.float32)
    bits = np.log2(2 * ulps + 1)
    assert len(Difference().against(old).encode(new)) < 1.15 * old.size * bits / 8 + 5000
    assert len(Difference().against(old).encode(old)) < 200


def test_difference_is_small_across_zero():
    old = np.full(1 << 16, 1e-45, np.float32)
    assert len(Difference().against(old).encode(-old)) < 100


@pytest.mark.parametrize(
    ("array", "reference", "choice"),
    [
        (weights(), None, Planes),
        (lidar(), None, Timewise),
        (weights(), weights() * np.float32(1.0001), Difference),
        (np.random.default_rng(4).integers(0, 256, 1 << 18, dtype=np.uint8), None, Raw),
        (np.tile(np.random.default_rng(5).integers(0, 256, 999, dtype=np.uint8), 99), None, Zstd),
    ],
)
def test_the_codec_that_suits_the_data_is_chosen(array, reference, choice):
    assert isinstance(choose_codec(array, reference), choice)


def test_values_with_constant_velocity_use_linear_differences():
    rng = np.random.default_rng(4)
    start, speed = rng.uniform(-20, 20, (64, 1, 3)), rng.uniform(-0.2, 0.2, (64, 1, 3))
    position = (start + speed * np.arange(32)[:, None]).astype(np.float32)
    settled = Timewise().settle(position)
    assert settled.mode == "linear"
    assert len(settled.encode(position)) < 0.88 * len(Timewise(mode="ordered").encode(position))
    assert np.array_equal(decode(settled, settled.encode(position), position), position)


def test_a_settled_codec_is_as_good_as_one_that_tries_again():
    for array in (lidar(), weights(), lidar() > 0):
        settled = Timewise().settle(array)
        assert len(settled.encode(array)) < 1.05 * len(Timewise().encode(array))
    assert Timewise(mode="xor").settle(lidar()).mode == "xor"
    assert Timewise().settle(lidar()[:0]) == Timewise()


def test_an_unknown_mode_is_refused():
    with pytest.raises(CodecError, match="timewise mode is 'cubic', expected one of plain, xor, ordered, linear"):
        Timewise(mode="cubic")
