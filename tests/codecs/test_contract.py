"""What every codec must do, whatever its name: give back the same bytes, and refuse anything else."""

import json
import signal
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slipstream.codecs import CODECS, Auto, Codec, Difference, Lz4, Planes, Timewise, Zstd, codec_from_header
from slipstream.errors import CodecError, FormatVersionError, UnsupportedDtypeError

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
    Auto(level=1),
]

every_codec = pytest.mark.parametrize("codec", SETTINGS, ids=repr)
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
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


def same_bytes(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


def reference_for(codec: Codec, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Make an array near `array`, for the codecs that want one."""
    if not codec.needs_reference:
        return None
    words = np.frombuffer(array.tobytes(), np.uint8).copy()
    words[::5] += 1
    return words.view(array.dtype).reshape(array.shape)


def round_trip(codec: Codec, array: np.ndarray[Any, Any]) -> bytes:
    before = array.tobytes()
    reference = reference_for(codec, array)
    payload = codec.encode(array, reference)
    assert array.tobytes() == before, "encoding changed the array"
    assert same_bytes(codec.decode(payload, array.dtype, array.shape, reference), array)
    return payload


@every_codec
@quick
@given(array=arrays())
def test_decoding_gives_back_the_same_bytes(codec: Codec, array):
    round_trip(codec, array)


@every_codec
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_array_of_several_blocks_comes_back(codec: Codec, dtype):
    numbers = np.random.default_rng(7).normal(size=(3, 5, 29, 251)) * 40
    numbers[0] = 0
    numbers[1, 2] = numbers[1, 3]
    tiled = np.concatenate([numbers] * (2_400_000 // (numbers.size * dtype.itemsize) + 1))
    with np.errstate(invalid="ignore"):
        round_trip(codec, tiled.astype(dtype))


@every_codec
@pytest.mark.parametrize("special", [np.nan, -0.0, np.inf, 5e-324, np.float64(np.nan).view("u8").__or__(1), 1e-40])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8"])
def test_special_floats_among_ordinary_ones_survive(codec: Codec, special, dtype):
    with np.errstate(over="ignore", under="ignore"):
        array = np.linspace(-1, 1, 4000).astype(dtype)
        array[::7] = special
    array.reshape(-1).view(np.uint8)[3] ^= 0x55
    round_trip(codec, array.reshape(8, 500))


@every_codec
def test_a_codec_is_a_value_that_survives_a_json_header(codec: Codec):
    header = json.loads(json.dumps(codec.to_header()))
    assert codec_from_header(header) == codec
    assert hash(codec_from_header(header)) == hash(codec)


@every_codec
def test_any_instance_decodes_what_another_encoded(codec: Codec):
    array = np.linspace(0, 1, 999, dtype=np.float32).reshape(9, 111)
    reference = reference_for(codec, array)
    payload = codec.encode(array, reference)
    assert same_bytes(type(codec)().decode(payload, array.dtype, array.shape, reference), array)


@every_codec
def test_decoding_into_given_memory_allocates_nothing_else(codec: Codec):
    array = np.arange(3000, dtype=np.float64).reshape(30, 100)
    reference = reference_for(codec, array)
    out = np.full_like(array, -1)
    assert codec.decode(codec.encode(array, reference), array.dtype, array.shape, reference, out) is out
    assert same_bytes(out, array)


@every_codec
@pytest.mark.parametrize("out", [np.empty(5, np.float32), np.empty(4), np.empty((4, 2), np.float32)[:, 0]])
def test_memory_that_does_not_fit_is_refused(codec: Codec, out):
    array = np.zeros(4, np.float32)
    payload = codec.encode(array, reference_for(codec, array))
    with pytest.raises(CodecError, match="out is"):
        codec.decode(payload, array.dtype, array.shape, array, out)


@every_codec
@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([object()]), np.zeros(2, "V3"), np.zeros(2, np.longdouble)]
)
def test_arrays_that_are_not_numbers_are_refused_by_name(codec: Codec, array):
    with pytest.raises(UnsupportedDtypeError, match=r"cannot be stored"):
        codec.encode(array, array)


@every_codec
@settings(max_examples=80, deadline=None)
@given(payload=st.binary(max_size=200), shape=hnp.array_shapes(max_dims=3, min_side=0), data=st.data())
def test_garbage_is_a_codec_error_and_nothing_else(codec: Codec, payload, shape, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    try:
        codec.decode(payload, dtype, shape, np.zeros(shape, dtype))
    except CodecError:
        pass


@every_codec
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_damaged_payload_is_a_codec_error_or_an_array_of_the_right_shape(codec: Codec, data):
    array = np.tile(np.linspace(-3, 3, 200, dtype=np.float32), 4).reshape(4, 200)
    reference = reference_for(codec, array)
    payload = bytearray(codec.encode(array, reference))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 5, 50]))
    try:
        decoded = codec.decode(payload[: len(payload) - cut], array.dtype, array.shape, reference)
    except CodecError:
        return
    assert decoded.shape == array.shape


@every_codec
def test_a_payload_cut_at_any_length_is_refused(codec: Codec):
    array = np.linspace(0, 9, 60, dtype=np.float32).reshape(6, 10)
    reference = reference_for(codec, array)
    payload = codec.encode(array, reference)
    for length in range(len(payload)):
        with pytest.raises(CodecError):
            codec.decode(payload[:length], array.dtype, array.shape, reference)


@every_codec
def test_bytes_after_the_payload_are_refused(codec: Codec):
    array = np.linspace(0, 9, 60, dtype=np.float32)
    reference = reference_for(codec, array)
    with pytest.raises(CodecError):
        codec.decode(codec.encode(array, reference) + b"x", array.dtype, array.shape, reference)


@quick
@given(array=arrays())
def test_auto_is_at_most_one_byte_larger_than_raw(array):
    assert len(Auto().encode(array)) <= array.nbytes + 1


@pytest.mark.parametrize("shape", [(-1,), (2**40, 2**40)])
def test_an_impossible_shape_is_refused_before_memory_is_taken(shape):
    with pytest.raises(CodecError, match="cannot be decoded"):
        Planes().decode(b"", "f4", shape)


def test_difference_says_what_is_wrong_with_its_reference():
    array = np.zeros((2, 3), np.float32)
    with pytest.raises(CodecError, match="needs a reference"):
        Difference().encode(array)
    with pytest.raises(CodecError, match=r"reference is float64\[2, 3\], the array is float32\[2, 3\]"):
        Difference().encode(array, array.astype(np.float64))


@pytest.mark.parametrize(
    ("header", "error"),
    [
        ({"name": "from-the-future"}, FormatVersionError),
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
def test_a_header_that_no_codec_wrote_is_refused(header, error):
    with pytest.raises(error):
        codec_from_header(header)


@pytest.mark.parametrize("codec", [Planes(), Timewise(), Difference(), Auto()], ids=repr)
def test_a_signal_handler_may_use_a_codec_while_another_is_at_work(codec: Codec):
    mine = np.random.default_rng(0).normal(size=(50, 5000)).astype(np.float32)
    other = np.random.default_rng(1).normal(size=(50, 5000)).astype(np.float32) * 1e6
    calls = depth = 0

    def interrupt(*_: object) -> None:
        nonlocal calls, depth
        if depth > 3:  # a machine so busy that one interrupts the other for ever
            return
        calls, depth = calls + 1, depth + 1
        Planes().encode(other)
        depth -= 1

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.004)
    try:
        payloads = [codec.encode(mine, mine) for _ in range(15)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls
    assert all(same_bytes(codec.decode(payload, mine.dtype, mine.shape, mine), mine) for payload in payloads)


def test_a_difference_may_be_decoded_over_its_own_reference():
    old = np.random.default_rng(0).normal(size=300_000).astype(np.float32)
    new = old * np.float32(1.001)
    payload = Difference().encode(new, old)
    assert same_bytes(Difference().decode(payload, new.dtype, new.shape, old, out=old), new)


def test_several_threads_may_use_codecs_at_once():
    arrays = [np.random.default_rng(seed).normal(size=(40, 3000)).astype(np.float32) for seed in range(6)]
    wrong: list[int] = []

    def work(number: int) -> None:
        for codec in (Planes(), Timewise(), Difference(), Auto(), Zstd(), Lz4()):
            array = arrays[number]
            if not same_bytes(codec.decode(codec.encode(array, array), array.dtype, array.shape, array), array):
                wrong.append(number)

    crew = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    assert wrong == []


def test_memory_that_is_read_only_is_refused():
    out = np.zeros(4, np.float32)
    out.flags.writeable = False
    with pytest.raises(CodecError, match="writable"):
        Planes().decode(Planes().encode(np.zeros(4, np.float32)), "f4", (4,), out=out)
