"""States as bytes in memory."""

import io
import json
import os
import pickle
import random
import re
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tensordict import TensorDict

from slipstream import (
    ConfigurationError,
    CorruptFileError,
    FormatVersionError,
    UnsupportedStateError,
    load_checkpoint,
    pack_rollout,
    pack_state,
    unpack_state,
)
from slipstream.checkpoint.delta import Parent
from slipstream.checkpoint.layout import Ancestor, digest_of
from slipstream.checkpoint.native import NativeFile, write_native
from slipstream.codecs import Codec, Difference, Planes, Raw
from slipstream.store.container import Container
from slipstream.store.reference import Reference
from slipstream.store.writer import DEFAULT_CHUNK_BYTES, ContainerWriter
from tests.contracts.file import forge, mutate, split
from tests.schema.roundtrip import bits
from tests.schema.test_types import PLAIN, REFUSED, nested

REFUSALS = (CorruptFileError, FormatVersionError)
SENTENCE = r"\Apacked state: [^\n]+\Z"
# Bytes of the version at the start of a container.
VERSION_BYTES = range(8, 12)


def small_state() -> dict[str, Any]:
    """Return a state with an entry of each kind: packed floats, packed integers, and bytes that are stored verbatim."""
    weight = torch.linspace(0, 1, 800)
    return {
        "weight": weight,
        "tied": weight[100:200],
        "steps": np.arange(700),
        "flags": torch.tensor([True, False]),
        "expanded": torch.ones(1).expand(5),
        "empty": torch.zeros(0, 3),
        "plain": (1, 2.5, "text", None),
    }


# ---- what comes back


@given(nested(PLAIN), st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(TensorDict({"a": torch.ones(2, 3, dtype=torch.bfloat16)}, [2]), True)
@example({"x": [torch.randn(4, 1000), np.arange(4000)]}, True)
def test_any_nested_state_comes_back_bit_for_bit(value, compress):
    packed = pack_state(value, compress=compress)
    assert type(packed) is bytes
    assert bits(unpack_state(packed)) == bits(value)


@pytest.mark.parametrize("compress", [True, False])
def test_the_bytes_are_those_of_the_file(tmp_path, compress):
    state = {**small_state(), "large": torch.linspace(-1, 1, 600_000)}
    write_native(tmp_path / "a.slip", state, compress=compress)
    packed = pack_state(state, compress=compress)
    assert packed == (tmp_path / "a.slip").read_bytes()
    (tmp_path / "b.slip").write_bytes(packed)
    assert bits(load_checkpoint(tmp_path / "b.slip")) == bits(state)


def test_the_bytes_depend_on_the_content_only():
    large = torch.linspace(0, 1, 3_000_000)
    state: Any = {"a": large, "b": torch.arange(5), "tied": [torch.ones(6).view(2, 3)] * 2}
    packed = pack_state(state, threads=1)
    assert pack_state(state, threads=4) == packed
    copies: Any = {"a": large.clone(), "b": state["b"].clone(), "tied": [torch.ones(2, 3)] * 2}
    assert pack_state(copies) == packed
    assert pack_state(unpack_state(packed)) == packed


def test_tied_tensors_come_back_tied_and_parameters_as_parameters():
    weight = torch.nn.Parameter(torch.ones(4, 3))
    back = unpack_state(pack_state({"a": weight, "b": weight, "row": weight.detach()[1]}))
    assert type(back["a"]) is torch.nn.Parameter
    back["row"].fill_(7)
    assert back["a"][1].tolist() == back["b"][1].tolist() == [7, 7, 7]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_contiguous_buffer_is_read_and_not_changed(kind):
    packed = pack_state(small_state())
    buffer = kind(packed)
    assert bits(unpack_state(buffer)) == bits(small_state())
    assert bytes(buffer) == packed
    padded = memoryview(b"xx" + packed + b"yy")[2:-2]
    assert bits(unpack_state(padded)) == bits(small_state())


@pytest.mark.parametrize("compress", [True, False])
def test_the_result_is_writable_memory_apart_from_the_buffer(compress):
    packed = bytearray(pack_state(small_state(), compress=compress))
    original = bytes(packed)
    found = unpack_state(packed)
    packed[:] = bytes(len(packed))
    assert bits(found) == bits(small_state())
    packed[:] = original
    found["weight"].fill_(3)
    found["steps"][:] = 3
    found["flags"].fill_(True)
    assert packed == original


def test_what_cannot_be_stored_is_refused_with_its_key():
    value, problem = REFUSED["function"]
    with pytest.raises(UnsupportedStateError, match=rf"a/0 is a {problem}"):
        pack_state({"a": [value]})


# ---- damage


def test_every_truncation_raises_one_sentence():
    packed = pack_state(small_state())
    for length in range(len(packed)):
        with pytest.raises(CorruptFileError, match=SENTENCE):
            unpack_state(memoryview(packed)[:length])
    with pytest.raises(CorruptFileError, match=SENTENCE):
        unpack_state(packed + b"\0")


@pytest.mark.parametrize("compress", [True, False])
def test_a_flipped_bit_in_any_byte_raises_one_sentence(compress):
    packed = pack_state(small_state(), compress=compress)
    chosen = random.Random(0)
    for position in range(len(packed)):
        damaged = bytearray(packed)
        damaged[position] ^= 1 << chosen.randrange(8)
        expected: type[Exception] = CorruptFileError
        if position in VERSION_BYTES:
            expected = FormatVersionError
        with pytest.raises(expected, match=SENTENCE):
            unpack_state(damaged)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x89SLIP\r\n\x1a",
        bytes(1000),
        random.Random(1).randbytes(5000),
        pickle.dumps({"a": 1}),
        pack_rollout(TensorDict({"x": torch.zeros(2, 3)}, [2, 3])),
    ],
    ids=len,
)
def test_other_bytes_raise_one_sentence(content):
    with pytest.raises(CorruptFileError, match=SENTENCE):
        unpack_state(content)


@pytest.mark.parametrize("buffer", [None, "text", 5, [1, 2], Path("state.slip"), memoryview(bytes(100))[::2]])
def test_what_is_no_buffer_is_refused(buffer):
    with pytest.raises(TypeError, match="the buffer is .*expected"):
        unpack_state(buffer)


# ---- hostile bytes


def forge_state(
    state: Any,
    entries: Mapping[str, tuple[NDArray[Any], Codec]],
    rows: Any,
    *,
    table_codec: Codec | None = None,
    reference: Reference | None = None,
    **header: Any,
) -> bytes:
    """Return a packed state that may claim anything, with every checksum as it should be."""
    file = io.BytesIO()
    writer = ContainerWriter(file, "checkpoint", DEFAULT_CHUNK_BYTES, None, verify=False)
    for name, (array, codec) in entries.items():
        writer.add(name, array, codec, reference if codec.needs_reference else None)
    table = np.array(rows, np.uint64)
    writer.add("regions", table, table_codec or Raw(), None if table_codec is None else reference)
    writer.set("checkpoint", {"version": 1, "identity": "f", "entries": list(entries), **header})
    writer.set("state", state)
    writer.set("metadata", None)
    writer.finish()
    return file.getvalue()


def tensor_node(shape: list[int], region: int = 0, **extra: Any) -> dict[str, Any]:
    return {"$": "tensor", "dtype": "float32", "shape": shape, "region": region, **extra}


NUMBERS = np.arange(40, dtype=np.float32)
DIGEST = np.frombuffer(digest_of(NUMBERS.view(np.uint8)), ">u8").tolist()
# The memory of one region of 160 bytes, stored verbatim.
ONE_REGION: Any = ({"w": (NUMBERS, Raw())}, [[0, 0, 160, *DIGEST]])


@pytest.fixture
def decodes_nothing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that unpacks what must be refused before anything is decoded, and returns the message."""

    def decode(*_: Any, **__: Any) -> Any:
        raise AssertionError("decoded something")

    def refuse(packed: bytes, **options: Any) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(Container, "read", decode)
            patch.setattr(Container, "read_many", decode)
            with pytest.raises(CorruptFileError, match=SENTENCE) as caught:
                unpack_state(packed, **options)
        return str(caught.value)

    return refuse


def test_a_forged_state_that_claims_the_truth_is_unpacked():
    assert unpack_state(forge_state({"x": tensor_node([40])}, *ONE_REGION))["x"].tolist() == list(range(40))


def test_a_digest_that_does_not_match_is_refused_also_for_what_is_stored_verbatim():
    packed = forge_state({"x": tensor_node([40])}, ONE_REGION[0], [[0, 0, 160, 0, 0]])
    with pytest.raises(CorruptFileError, match=r"packed state: 'x' does not match its digest"):
        unpack_state(packed)


def test_a_state_of_exactly_max_bytes_is_unpacked_and_one_byte_less_is_refused(decodes_nothing):
    state = {"a": torch.zeros(64, 1024), "b": [torch.ones(1) for _ in range(50)], "c": np.zeros(3, np.uint8)}
    needed = 4 * 64 * 1024 + 50 * 4 + 3
    packed = pack_state(state)
    assert bits(unpack_state(packed, max_bytes=needed)) == bits(state)
    message = decodes_nothing(packed, max_bytes=needed - 1)
    assert message.endswith(f"claims {needed} bytes when unpacked, expected at most max_bytes={needed - 1}")
    assert unpack_state(pack_state({"plain": [1, 2]}), max_bytes=1) == {"plain": [1, 2]}


@pytest.mark.parametrize("limit", [0, -1, 1.5, "1 GB", True])
def test_a_limit_is_a_whole_number(limit):
    with pytest.raises(ConfigurationError, match="max_bytes is"):
        unpack_state(pack_state({}), max_bytes=limit)


def test_a_memory_bomb_is_refused_before_memory_is_allocated(decodes_nothing):
    packed = pack_state({"x": torch.zeros(16 << 20)})
    assert len(packed) < 100_000
    tracemalloc.start()
    try:
        assert "claims 67108864 bytes" in decodes_nothing(packed, max_bytes=1_000_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


@pytest.mark.parametrize(
    "state",
    [
        [tensor_node([40]) for _ in range(7)],
        [{"$": "array", "dtype": "<f4", "shape": [40], "region": 0} for _ in range(7)],
        tensor_node([7, 40], stride=[0, 1]),
        tensor_node([300], stride=[0]),
        [tensor_node([150], stride=[0]), tensor_node([150], stride=[0])],
    ],
    ids=["tied tensors", "arrays of one region", "expanded", "one element", "several expanded"],
)
def test_leaves_that_share_memory_count_each(state, decodes_nothing):
    packed = forge_state(state, *ONE_REGION)
    unpack_state(packed, max_bytes=2000)
    assert re.search(r"claims (1120|1200) bytes", decodes_nothing(packed, max_bytes=1000))


@pytest.mark.parametrize(
    "state",
    [
        tensor_node([1 << 40], stride=[0]),
        tensor_node([1 << 20, 1 << 20], stride=[0, 0]),
        tensor_node([1 << 61], stride=[0]),
        tensor_node([1 << 40]),
        {"$": "array", "dtype": "<f8", "shape": [1 << 50], "region": 0},
        {str(number): tensor_node([1 << 30], stride=[0]) for number in range(1000)},
    ],
    ids=["expanded", "two axes", "more than torch can count", "huge shape", "huge array", "many"],
)
def test_shapes_larger_than_this_machine_are_refused_by_default(state, decodes_nothing):
    assert "bytes when unpacked, expected at most" in decodes_nothing(forge_state({"x": state}, *ONE_REGION))


def test_entries_that_no_leaf_needs_count_as_well(decodes_nothing):
    entries = {**ONE_REGION[0], "hidden": (np.zeros(100_000), Planes())}
    packed = forge_state({"x": tensor_node([40])}, entries, ONE_REGION[1])
    assert "claims 800160 bytes" in decodes_nothing(packed, max_bytes=10_000)


def test_a_table_larger_than_everything_is_refused(tmp_path, decodes_nothing):
    rows = np.zeros((200_000, 5), np.uint64)
    packed = forge_state({"x": tensor_node([40])}, ONE_REGION[0], rows, table_codec=Planes())
    assert len(packed) < 100_000
    assert "its table of regions claims 8000000 bytes, more than the whole of" in decodes_nothing(packed)
    (tmp_path / "f.slip").write_bytes(packed)
    with pytest.raises(CorruptFileError, match=r"f\.slip: its table of regions claims 8000000 bytes"):
        load_checkpoint(tmp_path / "f.slip")


def test_the_table_of_many_tiny_tensors_is_accepted():
    state = [torch.tensor(number % 2 == 0) for number in range(2000)]
    assert bits(unpack_state(pack_state(state), max_bytes=2000)) == bits(state)


def test_what_is_stored_as_a_difference_to_nothing_is_refused():
    content = np.arange(4000, dtype=np.float32)
    entries = {"w": (content, Difference())}
    packed = forge_state({"x": tensor_node([4000])}, entries, [[0, 0, 16_000, 0, 0]], reference=content + 1)
    with pytest.raises(CorruptFileError, match=SENTENCE):
        unpack_state(packed)
    rows = np.array(ONE_REGION[1], np.uint64)
    packed = forge_state(
        {"x": tensor_node([40])}, ONE_REGION[0], rows, table_codec=Difference(), reference=rows + np.uint64(1)
    )
    with pytest.raises(CorruptFileError, match="its table of regions is stored as a difference"):
        unpack_state(packed)


def write_delta(folder: Path) -> Path:
    """Write two checkpoints, the second as a delta to the first."""
    frozen = torch.linspace(0, 1, 300_000)
    first = write_native(folder / "first.slip", {"frozen": frozen, "step": 1})
    parent = Parent((Ancestor(first.header.identity, "first.slip"),), first.content)
    assert write_native(folder / "second.slip", {"frozen": frozen, "step": 2}, parent=parent).header.parents
    return folder / "second.slip"


def test_a_delta_is_refused_without_a_look_at_the_file_system(tmp_path, monkeypatch):
    packed = write_delta(tmp_path).read_bytes()
    # The parent is where a file of the name "packed state" would look for it.
    monkeypatch.chdir(tmp_path)

    def touch(*_: Any, **__: Any) -> Any:
        raise AssertionError("touched the file system")

    with monkeypatch.context() as patch:
        for name in ("open", "stat", "listdir", "scandir"):
            patch.setattr(os, name, touch)
        with pytest.raises(
            CorruptFileError, match=r"^packed state: is stored against another checkpoint \('first\.slip'\)"
        ):
            unpack_state(packed)


def test_a_delta_in_an_open_container_of_a_file_finds_its_parent(tmp_path):
    with NativeFile(Container(write_delta(tmp_path))) as file:
        assert file.load()["frozen"][-1] == 1


@pytest.mark.parametrize("version", [0, 2, 99, None, "1"])
def test_another_version_of_the_checkpoint_is_a_version_error(version):
    with pytest.raises(FormatVersionError, match=r"packed state: has checkpoint version .*this release reads 1"):
        unpack_state(forge_state({"x": 1}, *ONE_REGION, version=version))


def test_a_kind_of_value_from_the_future_is_a_version_error():
    with pytest.raises(FormatVersionError, match=r"packed state: .*'hologram'"):
        unpack_state(forge_state({"$": "hologram"}, *ONE_REGION))


# A state is not large, whatever its index claims.
MAX_BYTES = 10_000_000


def test_a_forged_index_gives_one_sentence_and_nothing_worse():
    data, index = split(pack_state(small_state()))
    text = json.dumps(index)

    @settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
    @given(choice=st.data())
    def check(choice: st.DataObject) -> None:
        forged = json.loads(text)
        for _ in range(choice.draw(st.integers(1, 3))):
            mutate(forged, choice)
        try:
            unpack_state(forge(json.dumps(forged).encode(), data), max_bytes=MAX_BYTES)
        except REFUSALS as error:
            assert re.match(SENTENCE, str(error))

    check()


def test_a_newer_container_is_refused_by_number():
    data, index = split(pack_state(small_state()))
    with pytest.raises(FormatVersionError, match=r"packed state: has format version 7, this release reads version 1"):
        unpack_state(forge(json.dumps(index).encode(), data, version=7))


# ---- documentation


def test_the_example_of_the_guide_runs():
    guide = Path(__file__).parents[2] / "docs" / "guides" / "checkpoints.md"
    (code,) = [
        code for code in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL) if "pack_state" in code
    ]
    names: dict[str, Any] = {}
    exec(code, names)
    one = names["env"].rand_step(names["observation"].clone())
    after = names["received"]["observation"]
    after["agents", "action"] = one["agents", "action"]
    other = names["other"].step(after)
    assert bits(other["next"].to_dict()) == bits(one["next"].to_dict())
