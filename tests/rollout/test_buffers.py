"""Rollouts as bytes in memory."""

import random
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from slipstream import (
    CorruptFileError,
    FormatVersionError,
    RolloutError,
    load_rollout,
    pack_rollout,
    save_rollout_compressed,
    unpack_rollout,
)
from slipstream.codecs import Codec
from slipstream.rollout.files import RolloutFile, encode_rollout
from slipstream.rollout.layout import Field, Layout, Rollout
from slipstream.schema.dtypes import DTYPES
from slipstream.store.container import Container

# Bytes of magic and version at the start of a container.
VERSION_BYTES = range(8, 12)

DTYPES_TESTED = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
NAMES = st.sampled_from(["observation", "state", "next", "agents", "é/x", "done"])


@st.composite
def batches(draw):
    """Draw batches of nested keys, any dtype, with NaN, infinities and negative zeros, and a `next` that follows."""
    num_envs = draw(st.integers(1, 5))
    num_steps = draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    batch = TensorDict({}, [num_envs, num_steps])
    for name in draw(st.lists(NAMES, min_size=1, max_size=4, unique=True)):
        dtype = draw(st.sampled_from(DTYPES_TESTED))
        shape = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
        key = ("group", name)
        if draw(st.booleans()):
            key = name
        values = torch.randn(num_envs, num_steps + 1, *shape, generator=generator).mul(3).to(dtype)
        if dtype.is_floating_point:
            for special in (float("nan"), -0.0, float("inf")):
                values[torch.rand(values.shape, generator=generator) < 0.1] = special
        batch[key] = values[:, :-1]
        if name not in ("next", "done"):
            path = (key,) if isinstance(key, str) else key
            batch[("after", *path)] = values[:, 1:]
    if "next" not in batch and "after" in batch:
        batch.rename_key_("after", "next")
    return batch


@given(batches(), st.sampled_from([0, 9, 10]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_rollout_comes_back_bit_for_bit(same, batch, level):
    same(unpack_rollout(pack_rollout(batch, level)), batch)


def test_the_bytes_are_those_of_the_file(make_rollout, tmp_path, same):
    batch = make_rollout(13, 8)
    path = save_rollout_compressed(batch, tmp_path / "a.slip", metadata={"iteration": 3})
    packed = pack_rollout(batch, metadata={"iteration": 3})
    assert packed == path.read_bytes()
    (tmp_path / "b.slip").write_bytes(packed)
    same(load_rollout(tmp_path / "b.slip"), batch)
    with RolloutFile(Container("memory", buffer=packed)) as file:
        assert file.metadata == {"iteration": 3}


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_contiguous_buffer_is_read_and_not_changed(make_rollout, same, kind):
    batch = make_rollout()
    packed = pack_rollout(batch)
    buffer = kind(packed)
    same(unpack_rollout(buffer), batch)
    assert bytes(buffer) == packed
    padded = memoryview(b"xx" + packed + b"yy")[2:-2]
    same(unpack_rollout(padded), batch)


def test_what_is_no_buffer_is_refused(make_rollout):
    packed = pack_rollout(make_rollout())
    with pytest.raises(TypeError, match="the buffer is a str, expected bytes"):
        unpack_rollout("text")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a memoryview with gaps"):
        unpack_rollout(memoryview(packed)[::2])
    with pytest.raises(RolloutError, match="not a dict"):
        pack_rollout({"x": torch.zeros(2, 3)})


def test_the_result_is_new_memory_on_the_device(make_rollout):
    packed = bytearray(pack_rollout(make_rollout()))
    found = unpack_rollout(packed, "cpu")
    assert found.device == torch.device("cpu")
    before = found.clone()
    packed[:] = bytes(len(packed))
    assert torch.equal(found["action"], before["action"])
    assert unpack_rollout(pack_rollout(make_rollout()), device="meta")["action"].is_meta


def test_every_truncation_raises_one_sentence(make_rollout):
    packed = pack_rollout(make_rollout(2, 3))
    for length in range(len(packed)):
        with pytest.raises(CorruptFileError, match=r"\Apacked rollout: [^\n]+\Z"):
            unpack_rollout(memoryview(packed)[:length])
    with pytest.raises(CorruptFileError):
        unpack_rollout(packed + b"\0")


def test_every_flipped_bit_raises_or_changes_nothing(make_rollout, same):
    batch = make_rollout(3, 4)
    packed = pack_rollout(batch)
    chosen = random.Random(0)
    positions = {*range(16), *range(len(packed) - 40, len(packed)), *chosen.choices(range(len(packed)), k=500)}
    for position in positions:
        damaged = bytearray(packed)
        damaged[position] ^= 1 << chosen.randrange(8)
        expected: type[Exception] = CorruptFileError
        if position in VERSION_BYTES:
            expected = FormatVersionError
        with pytest.raises(expected, match=r"\Apacked rollout: [^\n]+\Z"):
            same(unpack_rollout(damaged), batch)


def test_other_bytes_raise_one_sentence():
    for content in (b"", b"\x89SLIP\r\n\x1a", bytes(1000), random.Random(1).randbytes(5000)):
        with pytest.raises(CorruptFileError, match=r"\Apacked rollout: [^\n]+\Z"):
            unpack_rollout(content)


def test_a_memory_bomb_is_refused_before_memory_is_allocated():
    batch = TensorDict({"x": torch.zeros(64, 64, 1024)}, [64, 64])
    packed = pack_rollout(batch)
    assert len(packed) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError, match=r"claims 16777216 bytes when unpacked, expected at most max_bytes="):
            unpack_rollout(packed, max_bytes=1_000_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    assert torch.equal(unpack_rollout(packed, max_bytes=16_777_216)["x"], batch["x"])


@pytest.mark.parametrize("batch_size", [(1 << 39, 1 << 39), (4, 1 << 40), (0, 5)])
def test_a_layout_that_claims_more_than_there_is_raises(batch_size):
    field = Field(("x",), DTYPES["float32"], (3,), "x")
    rollout = Rollout(Layout(batch_size, 1, (), (field,)), {"x": torch.zeros(4, 5, 3).numpy()})
    with pytest.raises(CorruptFileError, match="expected float32"):
        unpack_rollout(encode_rollout(rollout, 1, {}))


def test_choices_of_codecs_serve_the_next_rollout(make_rollout, same):
    codecs: dict[str, Codec] = {}
    first = pack_rollout(make_rollout(seed=0), codecs=codecs)
    assert first == pack_rollout(make_rollout(seed=0))
    assert "action" in codecs
    same(unpack_rollout(pack_rollout(make_rollout(seed=1), codecs=codecs)), make_rollout(seed=1))


def test_metadata_that_is_not_json_is_refused(make_rollout):
    with pytest.raises(TypeError):
        pack_rollout(make_rollout(), metadata=object())


def test_the_example_of_the_guide_runs():
    guide = Path(__file__).parents[2] / "docs" / "guides" / "rollouts.md"
    (example,) = [
        code for code in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL) if "pack_rollout" in code
    ]
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["received"].batch_size == (8, 32)


def test_none_is_not_bytes():
    with pytest.raises(TypeError, match="the buffer is None, expected bytes"):
        unpack_rollout(None)  # type: ignore[arg-type]
