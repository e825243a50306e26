"""How words are cut into planes: low halves that are noise are stored verbatim."""

import numpy as np
import pytest

from slipstream.codecs import Difference, Planes
from slipstream.errors import CodecError
from tests.codecs.roundtrip import decode

HALVED = 8
WEIGHTS = np.random.default_rng(3).normal(scale=0.02, size=40_000)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_the_low_halves_of_weights_are_stored_verbatim(dtype):
    array = WEIGHTS.astype(dtype)
    payload = Planes().encode(array)
    words = array.view(f"u{array.itemsize}")
    lower = (words & ((1 << 4 * array.itemsize) - 1)).astype(f"u{array.itemsize // 2}")
    assert payload[0] == HALVED
    assert lower.tobytes() in payload
    assert decode(Planes(), payload, array).tobytes() == array.tobytes()


@pytest.mark.parametrize("scale", [1, 2**-8, 2**-100])
def test_words_with_compressible_low_halves_are_not_halved(scale):
    array = np.random.default_rng(0).integers(-100, 100, 40_000).astype(np.float32) * np.float32(scale)
    payload = Planes().encode(array)
    assert not payload[0] & HALVED
    assert len(payload) < array.nbytes / 3
    assert decode(Planes(), payload, array).tobytes() == array.tobytes()


@pytest.mark.parametrize("constant", [0xFF, 0xFF00])
def test_words_whose_low_halves_are_noise_in_one_byte_only_are_not_halved(constant):
    words = WEIGHTS.astype(np.float32).view(np.uint32) & ~np.uint32(constant)
    payload = Planes().encode(words.view(np.float32))
    assert not payload[0] & HALVED
    assert len(payload) < words.nbytes * 0.6
    assert decode(Planes(), payload, words).tobytes() == words.tobytes()


@pytest.mark.parametrize("mask", [np.arange(40_000) % 3 == 0, np.random.default_rng(2).random(40_000) < 1 / 3])
def test_weights_among_zeros_are_halved_too_and_stay_in_order(mask):
    array = np.where(mask, WEIGHTS, 0).astype(np.float32)
    payload = Planes().encode(array)
    assert payload[0] & HALVED
    assert (array.view(np.uint32)[mask] & 0xFFFF).astype(np.uint16).tobytes() in payload
    assert len(payload) < array.nbytes * 0.31
    assert decode(Planes(), payload, array).tobytes() == array.tobytes()


@pytest.mark.parametrize("apart", [1e-6, 1e-4, 1e-2, 1.0, 100.0])
def test_differences_of_any_size_are_restored(apart):
    old = WEIGHTS.astype(np.float32)
    new = (WEIGHTS + apart * np.random.default_rng(1).normal(scale=0.02, size=WEIGHTS.size)).astype(np.float32)
    codec = Difference().against(old)
    assert decode(codec, codec.encode(new), new).tobytes() == new.tobytes()


@pytest.mark.parametrize("bits", range(8, 26, 2))
def test_differences_take_hardly_more_than_their_entropy(bits):
    old = np.random.default_rng(0).normal(scale=0.02, size=200_000).astype(np.float32)
    apart = np.rint(np.random.default_rng(1).normal(scale=2.0**bits, size=old.size)).astype(np.int32)
    new = (old.view(np.int32) + apart).view(np.float32)
    entropy = bits + np.log2(2 * np.pi * np.e) / 2
    assert len(Difference().against(old).encode(new)) < 1.01 * old.size * entropy / 8


@pytest.mark.parametrize("head", [(HALVED | 1, 0, 0), (HALVED | 2, 0, 0), (HALVED, 1, 0), (HALVED, 0, 1), (16, 0, 0)])
def test_an_invalid_block_header_is_refused(head):
    payload = bytearray(Planes().encode(WEIGHTS))
    payload[:3] = bytes(head)
    with pytest.raises(CodecError, match="block header has flags"):
        decode(Planes(), payload, WEIGHTS)


def test_bytes_have_no_halves():
    with pytest.raises(CodecError, match="block header has flags 8"):
        Planes().decode(bytes([HALVED, 0, 0]) + bytes(20), np.empty(5, np.uint8))
