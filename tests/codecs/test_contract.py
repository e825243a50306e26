"""What every codec must do: restore the same bytes, and reject everything else."""

import json
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slipstream.codecs import (
    CODECS,
    Codec,
    Difference,
    Lz4,
    Planes,
    Raw,
    Timewise,
    Zstd,
    choose_codec,
    codec_from_header,
)
from slipstream.errors import CodecError, FormatVersionError, UnsupportedDtypeError
from tests.codecs.roundtrip import Array, decode, round_trip, same_bytes, with_reference

DTYPES = [
    np.dtype(name) for name in ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
]
BIG_ENDIAN = [dtype.newbyteorder(">") for dtype in DTYPES if dtype.itemsize > 1]
SETTINGS: list[Codec] = [
    *(codec() for codec in CODECS.values()),
    Zstd(level=19),
    Lz4(level=9),
    Planes(level=1, floating=True),
    Planes(floating=False),
    Timewise(floating=True),
    *(Timewise(mode=mode) for mode in ("plain", "xor", "ordered", "linear")),
    Difference(floating=True),
]
SPECIALS = [np.nan, -0.0, np.inf, 5e-324, np.float64(np.nan).view("u8").__or__(1), 1e-40]

every_codec = pytest.mark.parametrize("codec", SETTINGS, ids=repr)
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Draw arrays of any dtype and shape whose bits are arbitrary: every NaN payload, -0.0 and denormal among them."""
    dtype = draw(st.sampled_from(DTYPES + BIG_ENDIAN))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9))
    size = int(np.prod(shape)) * dtype.itemsize
    if draw(st.booleans()):
        content = draw(st.binary(min_size=size, max_size=size))
    else:
        pattern = draw(st.binary(min_size=1, max_size=24))
        content = (pattern * (size // len(pattern) + 1))[:size]
    array = np.frombuffer(bytearray(content), np.uint8).view(dtype).reshape(shape)
    if array.ndim and draw(st.booleans()):
        array = array[::-1]
    if array.ndim > 1 and draw(st.booleans()):
        array = array.swapaxes(0, -1)
    return array


def special_floats(special: Any, dtype: str) -> Array:
    """Return a ramp of floats with a special value at every seventh place."""
    with np.errstate(over="ignore", under="ignore"):
        array = np.linspace(-1, 1, 4000).astype(dtype)
        array[::7] = special
    array.reshape(-1).view(np.uint8)[3] ^= 0x55
    return array.reshape(8, 500)


def with_special_floats(test: Callable[..., Any]) -> Callable[..., Any]:
    """Add an example per special float and dtype."""
    for dtype in ("f2", "f4", "f8", "c8"):
        for special in SPECIALS:
            test = example(array=special_floats(special, dtype))(test)
    return test


@every_codec
@quick
@with_special_floats
@given(array=arrays())
def test_decoding_restores_the_same_bytes(codec: Codec, array):
    round_trip(codec, array)


@every_codec
def test_an_array_of_several_blocks_of_any_dtype_is_restored(codec: Codec):
    numbers = np.random.default_rng(7).normal(size=(3, 5, 29, 251)) * 40
    numbers[0] = 0
    numbers[1, 2] = numbers[1, 3]
    for dtype in DTYPES:
        tiled = np.concatenate([numbers] * (2_400_000 // (numbers.size * dtype.itemsize) + 1))
        with np.errstate(invalid="ignore"):
            round_trip(codec, tiled.astype(dtype))


@every_codec
def test_a_codec_is_a_value_that_survives_a_json_header(codec: Codec):
    header = json.loads(json.dumps(codec.to_header()))
    assert codec_from_header(header) == codec
    assert hash(codec_from_header(header)) == hash(codec)


@every_codec
def test_any_instance_decodes_what_another_encoded(codec: Codec):
    array = np.linspace(0, 1, 999, dtype=np.float32).reshape(9, 111)
    payload = with_reference(codec, array).encode(array)
    assert same_bytes(decode(with_reference(type(codec)(), array), payload, array), array)


@every_codec
def test_memory_that_cannot_be_decoded_into_is_refused(codec: Codec):
    array = np.zeros(4, np.float32)
    read_only = np.zeros(4, np.float32)
    read_only.flags.writeable = False
    codec = with_reference(codec, array)
    payload = codec.encode(array)
    for out in (np.empty((4, 2), np.float32)[:, 0], read_only, np.ma.zeros(4, np.float32)):
        with pytest.raises(CodecError, match="out is"):
            codec.decode(payload, out)


@every_codec
def test_memory_of_another_size_is_refused(codec: Codec):
    array = np.random.default_rng(0).integers(0, 2**32, 40, np.uint32)
    payload = with_reference(codec, array).encode(array)
    for out in (np.empty(30, np.uint32), np.empty(50, np.uint32), np.empty(40, np.uint64)):
        with pytest.raises(CodecError):
            with_reference(codec, out).decode(payload, out)


@every_codec
def test_arrays_that_are_not_numbers_are_refused_by_name(codec: Codec):
    for array in (np.array(["a"]), np.array([object()]), np.zeros(2, "V3"), np.zeros(2, np.longdouble)):
        bound = codec.against(array) if codec.needs_reference else codec
        with pytest.raises(UnsupportedDtypeError, match=r"cannot be stored"):
            bound.encode(array)


@every_codec
@settings(max_examples=80, deadline=None)
@given(payload=st.binary(max_size=200), shape=hnp.array_shapes(max_dims=3, min_side=0), data=st.data())
def test_garbage_is_a_codec_error_and_nothing_else(codec: Codec, payload, shape, data):
    out = np.zeros(shape, data.draw(st.sampled_from(DTYPES)))
    try:
        with_reference(codec, out).decode(payload, out)
    except CodecError:
        pass


@every_codec
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_damaged_payload_is_a_codec_error_or_an_array(codec: Codec, data):
    array = np.tile(np.linspace(-3, 3, 200, dtype=np.float32), 4).reshape(4, 200)
    codec = with_reference(codec, array)
    payload = bytearray(codec.encode(array))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 5, 50]))
    try:
        decode(codec, payload[: len(payload) - cut], array)
    except CodecError:
        pass


@every_codec
def test_a_payload_cut_at_any_length_is_refused(codec: Codec):
    array = np.linspace(0, 9, 60, dtype=np.float32).reshape(6, 10)
    codec = with_reference(codec, array)
    payload = codec.encode(array)
    for length in range(len(payload)):
        with pytest.raises(CodecError):
            decode(codec, payload[:length], array)


@every_codec
def test_bytes_after_the_payload_are_refused(codec: Codec):
    array = np.linspace(0, 9, 60, dtype=np.float32)
    codec = with_reference(codec, array)
    with pytest.raises(CodecError):
        decode(codec, codec.encode(array) + b"x", array)


@pytest.mark.parametrize("codec", [codec for codec in CODECS.values() if codec is not Difference])
def test_a_codec_without_references_refuses_one(codec):
    with pytest.raises(CodecError, match=f"codec '{codec.name}' takes no reference"):
        codec().against(np.zeros(3))


def test_difference_says_what_is_wrong_with_its_reference():
    array = np.zeros((2, 3), np.float32)
    with pytest.raises(CodecError, match="needs a reference"):
        Difference().encode(array)
    with pytest.raises(CodecError, match="needs a reference"):
        Difference().decode(b"", array)
    with pytest.raises(CodecError, match=r"reference is float64\[2, 3\], the array is float32\[2, 3\]"):
        Difference().against(array.astype(np.float64)).encode(array)
    with pytest.raises(CodecError, match=r"reference is float32\[3, 2\], the array is float32\[2, 3\]"):
        Difference().against(array.reshape(3, 2)).decode(b"", array)


def test_a_reference_is_part_neither_of_the_header_nor_of_equality():
    codec = Difference(level=3, floating=True)
    bound = codec.against(np.zeros(5))
    assert bound == codec
    assert hash(bound) == hash(codec)
    assert repr(bound) == repr(codec)
    assert bound.to_header() == {"name": "difference", "level": 3, "floating": True}
    with pytest.raises(CodecError, match="needs a reference"):
        codec.encode(np.zeros(5))
    with pytest.raises(CodecError, match="does not accept the settings"):
        codec_from_header({"name": "difference", "_reference": [0.0]})


@pytest.mark.parametrize(
    ("header", "error"),
    [
        ({"name": "from-the-future"}, FormatVersionError),
        ({"name": "auto"}, FormatVersionError),
        ({"name": "planes", "level": 99}, CodecError),
        ({"name": "planes", "level": "high"}, CodecError),
        ({"name": "planes", "level": True}, CodecError),
        ({"name": "planes", "floating": 3}, CodecError),
        ({"name": "planes", "strength": 3}, CodecError),
        ({"name": "lz4", "level": -1}, CodecError),
        ({"name": 3}, CodecError),
        ({}, CodecError),
        ([], CodecError),
    ],
)
def test_an_invalid_header_is_refused(header, error):
    with pytest.raises(error):
        codec_from_header(header)


@pytest.mark.parametrize("codec", [Planes(), Timewise(), Difference()], ids=repr)
def test_a_signal_handler_may_use_a_codec_while_another_one_runs(codec: Codec):
    mine = np.random.default_rng(0).normal(size=(50, 5000)).astype(np.float32)
    other = np.random.default_rng(1).normal(size=(50, 5000)).astype(np.float32) * 1e6
    codec = with_reference(codec, mine)
    num_calls = 0
    depth = 0

    def interrupt(*_: object) -> None:
        nonlocal num_calls, depth
        # On a busy machine handlers could interrupt each other forever.
        if depth > 3:
            return
        num_calls += 1
        depth += 1
        Planes().encode(other)
        depth -= 1

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.004)
    try:
        payloads = [codec.encode(mine) for _ in range(15)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_calls
    assert all(same_bytes(decode(codec, payload, mine), mine) for payload in payloads)


def test_a_difference_may_be_decoded_over_its_reference():
    old = np.random.default_rng(0).normal(size=300_000).astype(np.float32)
    new = old * np.float32(1.001)
    codec = Difference().against(old)
    payload = codec.encode(new)
    codec.decode(payload, old)
    assert same_bytes(old, new)


def test_several_threads_may_use_codecs_at_once():
    inputs = [np.random.default_rng(seed).normal(size=(40, 3000)).astype(np.float32) for seed in range(6)]
    wrong: list[int] = []

    def work(number: int) -> None:
        array = inputs[number]
        for kind in CODECS.values():
            codec = with_reference(kind(), array)
            if not same_bytes(decode(codec, codec.encode(array), array), array):
                wrong.append(number)

    crew = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    assert wrong == []


@quick
@given(array=arrays())
def test_the_chosen_codec_restores_any_array(array):
    round_trip(choose_codec(array), array)
    round_trip(choose_codec(array, array), array)


def test_choosing_a_codec_keeps_the_settings():
    weights = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
    assert choose_codec(bits, level=7, floating=True) == Planes(7, floating=True)
    assert choose_codec(np.zeros(0, np.float32)) == Raw()
