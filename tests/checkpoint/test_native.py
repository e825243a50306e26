"""The native format: content, damage, hostility and deltas."""

import copy
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from slipstream import (
    AsyncCheckpointSaver,
    CheckpointManager,
    CorruptFileError,
    FormatVersionError,
    UnsupportedStateError,
    load_checkpoint,
)
from slipstream.checkpoint.delta import Parent
from slipstream.checkpoint.layout import Ancestor, RegionTable
from slipstream.checkpoint.native import NativeFile, StoredState, encode_metadata, rewrite_whole, write_native
from slipstream.checkpoint.verify import verify_checkpoint
from slipstream.codecs import Raw
from slipstream.store.container import Container
from slipstream.store.writer import write_container
from tests.contracts.file import FileContract


def adam_run(optimizer_class: Any = torch.optim.Adam, **options: Any) -> Any:
    """Return a network of layers of equal shape, its optimizer, and a function that trains it for some steps."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    optimizer = optimizer_class(network.parameters(), lr=1e-3, **options)

    def train(steps: int) -> None:
        for _ in range(steps):
            inputs = torch.randn(32, 64)
            (network(inputs) - inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(20)
    return network, optimizer, train


def state_of(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": network.state_dict(), "optimizer": optimizer.state_dict()}


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


class TestNativeFile(FileContract):
    content: ClassVar = {"w": list(range(40)), "packed": [1.0] * 600, "b": [1.0, 1.0], "n": 3}
    flips = 3

    def write(self, path: Path) -> None:
        write_native(path, {"w": torch.arange(40.0), "packed": torch.ones(600), "b": torch.ones(2), "n": 3})

    def read(self, path: Path) -> Any:
        state = load_checkpoint(path)
        if isinstance(state, dict):
            return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        return state


# ---- content


def test_small_tensors_share_an_entry_and_come_back_in_memory_of_their_own(tmp_path):
    state = {f"layer {number}": {"weight": torch.full((10, 10), float(number))} for number in range(100)}
    write_native(tmp_path / "c.slip", state)
    with Container(tmp_path / "c.slip") as container:
        assert len(container.entries) == 2
    back = load_checkpoint(tmp_path / "c.slip")
    assert_same(back, state)
    # One of them does not keep the memory of all others alive.
    assert back["layer 5"]["weight"].untyped_storage().nbytes() == 400


def test_damage_in_an_entry_of_small_tensors_names_these_tensors(tmp_path):
    path = tmp_path / "c.slip"
    names = ["actor", "critic", "encoder", "head"]
    write_native(path, {name: torch.randn(500) for name in names})
    with Container(path) as container:
        chunk = container.entries["small"].chunks[0]
    content = bytearray(path.read_bytes())
    content[chunk.offset + 10] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"checksum; it contains actor, critic, encoder and 1 more$") as caught:
        load_checkpoint(path)
    assert str(caught.value).startswith(f"{path}: ")
    [problem] = verify_checkpoint(path).problems[:1]
    assert "actor" in problem


def test_a_single_small_tensor_is_loaded_without_decoding_all_others(tmp_path, monkeypatch):
    state = {f"{number}": torch.randn(1000) for number in range(1000)}
    write_native(tmp_path / "c.slip", state)
    read = []
    original = os.preadv

    def counting(descriptor: int, buffers: Any, offset: int) -> int:
        read.append(sum(map(len, buffers)))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    assert torch.equal(load_checkpoint(tmp_path / "c.slip", keys="777")["777"], state["777"])
    assert sum(read) < (tmp_path / "c.slip").stat().st_size / 2


def test_what_was_decoded_is_compared_with_its_digest(tmp_path, monkeypatch):
    """A codec that returns wrong bytes, for whatever reason, is noticed, though every checksum of the file is right."""
    write_native(tmp_path / "c.slip", {"policy": {"weight": torch.linspace(0, 1, 400_000)}})
    original = Container.read_many

    def flush_denormals(self: Container, names: Any, *args: Any, **options: Any) -> Any:
        arrays = original(self, names, *args, **options)
        for array in arrays.values():
            array.reshape(-1).view(np.uint8)[1234] ^= 1
        return arrays

    monkeypatch.setattr(Container, "read_many", flush_denormals)
    with pytest.raises(CorruptFileError, match=r"c\.slip: 'policy/weight' does not match its digest after decoding"):
        load_checkpoint(tmp_path / "c.slip")


def test_two_columns_of_a_large_tensor_are_stored_as_two_columns(tmp_path):
    large = torch.randn(2000, 1000)
    write_native(tmp_path / "c.slip", {"a": large[:, 0], "b": large[:, 900]}, compress=False)
    assert (tmp_path / "c.slip").stat().st_size < 3 * 2 * 8000


def test_tied_tensors_come_back_tied_and_are_saved_tied_by_torch(tmp_path):
    weight = torch.randn(300, 300)
    write_native(tmp_path / "c.slip", {"a": weight, "b": weight, "row": weight[7]})
    back = load_checkpoint(tmp_path / "c.slip")
    back["a"][7] = 3.0
    assert torch.equal(back["b"], back["a"])
    assert back["row"].unique().tolist() == [3.0]
    torch.save(back, tmp_path / "c.pt")
    assert (tmp_path / "c.pt").stat().st_size < 1.1 * weight.nbytes


def test_tensors_too_small_to_gain_are_stored_verbatim_and_larger_ones_are_packed(tmp_path):
    write_native(tmp_path / "a.slip", {"bias": torch.zeros(100)})
    write_native(tmp_path / "b.slip", {"weight": torch.zeros(1000)})
    sizes = []
    for name in ("a", "b"):
        with Container(tmp_path / f"{name}.slip") as container:
            entry = container.entries["small"]
            sizes.append(entry.stored_bytes < entry.nbytes)
    assert sizes == [False, True]


def test_many_entries_of_the_same_name_are_numbered_quickly(tmp_path):
    state = {"/".join("a" * 5): torch.ones(2), "a": {"a": {"a": {"a": {"a": torch.zeros(2)}}}}}
    large = {"small": torch.ones(200_000), "regions": torch.zeros(200_000), "small#2": torch.ones(200_000)}
    write_native(tmp_path / "c.slip", {**state, **large})
    assert_same(load_checkpoint(tmp_path / "c.slip"), {**state, **large})


def test_a_state_nested_too_deeply_is_refused_with_a_sentence(tmp_path):
    state: Any = 1
    for _ in range(3000):
        state = [state]
    with pytest.raises(UnsupportedStateError, match="is nested more than 100 levels deep"):
        write_native(tmp_path / "c.slip", state)
    assert list(tmp_path.iterdir()) == []


def test_whatever_can_be_saved_can_be_loaded(tmp_path):
    deep: Any = 1
    for _ in range(98):
        deep = {0: deep}
    state = {
        "deep": deep,
        "texts": np.array(["name"] * 100),
        "dates": np.arange("2026-01-01", "2026-06-01", dtype="datetime64[D]"),
        "axes": [torch.ones([1] * 40 + [50]), np.ones([1] * 40 + [50])],
        "empty": [np.str_(""), np.bytes_(b""), np.zeros((0, 3)), torch.zeros(0, 2**40)],
        "surrogates": {"\ud800": "\udc00", "😀": "\udc00\ud800"},
        "huge": 2**14_000 - 1,
    }
    write_native(tmp_path / "c.slip", state)
    back = load_checkpoint(tmp_path / "c.slip")
    assert back["deep"] == deep
    assert back["texts"].tolist() == state["texts"].tolist()
    assert back["dates"].dtype == state["dates"].dtype
    assert (back["dates"] == state["dates"]).all()
    assert [value.shape for value in back["axes"]] == [value.shape for value in state["axes"]]
    assert [value.shape for value in back["empty"]] == [(), (), (0, 3), (0, 2**40)]
    assert back["surrogates"] == state["surrogates"]
    assert back["huge"] == state["huge"]


@pytest.mark.parametrize("value", [torch.arange(3), np.arange(3), {"deep": [torch.ones(1, 1)]}])
def test_metadata_is_for_plain_values(value):
    with pytest.raises(UnsupportedStateError, match=r"metadata.*pass value.item\(\)"):
        encode_metadata({"x": value})


def test_metadata_comes_back_with_scalars_as_numbers(tmp_path):
    metadata = {"a": np.float32(1.5), "b": torch.tensor(3), "c": [np.int64(4), (np.array(2.5), True)], "d": {1: None}}
    write_native(tmp_path / "c.slip", {}, encode_metadata(metadata))
    with NativeFile(tmp_path / "c.slip") as file:
        assert file.metadata == {"a": 1.5, "b": 3, "c": [4, (2.5, True)], "d": {1: None}}
        assert type(file.metadata["a"]) is float


# ---- hostile files


def forge(path: Path, state: Any, rows: Any = None, **values: Any) -> Path:
    """Write a checkpoint of one region of 160 bytes that claims whatever it is told to."""
    table = RegionTable(np.array([0]), np.array([0]), np.array([160]), [bytes(16)]).to_array()
    with write_container(path, kind="checkpoint") as writer:
        writer.add("w", torch.arange(40.0).numpy(), Raw())
        writer.add("regions", table if rows is None else np.array(rows, np.uint64), Raw())
        writer.set("checkpoint", {"version": 1, "identity": "f", "entries": ["w"], **values})
        writer.set("state", state)
        writer.set("metadata", None)
    return path


def test_a_forged_file_that_claims_the_truth_loads(tmp_path):
    node = {"$": "tensor", "region": 0, "dtype": "float32", "shape": [40]}
    assert load_checkpoint(forge(tmp_path / "f.slip", {"x": node}))["x"].tolist() == list(range(40))


@pytest.mark.parametrize(
    "state",
    [
        {"$": "tensor", "region": 0, "dtype": "float32", "shape": [41]},
        {"$": "tensor", "region": 0, "dtype": "float64", "shape": [40]},
        {"$": "tensor", "region": 0, "dtype": "float32", "shape": [2**40]},
        {"$": "tensor", "region": 0, "dtype": "float32", "shape": [4], "stride": [2**40]},
        {"$": "tensor", "region": 0, "dtype": "float32", "shape": [4], "stride": [-1]},
        {"$": "tensor", "region": 0, "dtype": "float32", "shape": [4], "offset": 158},
        {"$": "tensor", "region": 0, "dtype": "float32", "shape": [4], "offset": 400},
        {"$": "tensor", "region": 0, "dtype": "load", "shape": [4]},
        {"$": "tensor", "region": 0, "dtype": "float32", "shape": "four"},
        {"$": "tensor", "region": 0, "dtype": 3, "shape": [4]},
        {"$": "tensor", "region": 1, "dtype": "float32", "shape": [4]},
        {"$": "tensor", "region": -1, "dtype": "float32", "shape": [4]},
        {"$": "tensor", "region": True, "dtype": "float32", "shape": [4]},
        {"$": "tensor", "region": 0.0, "dtype": "float32", "shape": [4]},
        {"$": "tensor", "region": [0], "dtype": "float32", "shape": [4]},
        {"$": "tensor", "dtype": "float32", "shape": [4]},
        {"$": "tensor", "region": 0, "dtype": "qint8", "shape": [1]},
        {"$": "tensor", "dtype": "quint4x2", "shape": [0]},
        {"$": "array", "region": 0, "dtype": "O", "shape": [1]},
        {"$": "array", "region": 0, "dtype": "<f8", "shape": [9]},
        {"$": "array", "dtype": "<U0", "shape": [0]},
        {"$": "array", "dtype": "|S0", "shape": [3]},
        {"$": "torch.dtype", "v": "load"},
        {"$": "torch.device", "v": "moon"},
        {"$": "torch.device", "v": "cuda:9999"},
        {"$": "bytes", "v": 5},
        {"$": "numpy", "v": ["O", "00" * 8]},
        {"$": "tuple", "v": 3},
        {"$": "dict", "v": [[1]]},
        {"$": "dict", "v": [[[1], 2]]},
        {"$": "range", "v": ["a"]},
        {"$": "TensorDict", "v": {"a": 3}, "batch_size": ["x"]},
        {"$": 5},
    ],
    ids=json.dumps,
)
def test_a_state_that_lies_is_refused(tmp_path, state):
    path = forge(tmp_path / "forged.slip", {"x": state})
    with pytest.raises((CorruptFileError, FormatVersionError), match=r"forged\.slip"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 0, 160, 0, 0]],
        [[0, 0, 161, 0, 0]],
        [[0, 160, 1, 0, 0]],
        [[0, 0, 0, 0, 0]],
        [[0, 0, 2**64 - 1, 0, 0]],
        [[0, 2**63, 2**63, 0, 0]],
        [[0, 0, 100, 0, 0], [0, 50, 100, 0, 0]],
        [[0, 80, 80, 0, 0], [0, 0, 80, 0, 0]],
        [[0, 0, 160, 0]],
        [0, 0, 160, 0, 0],
    ],
    ids=str,
)
def test_a_table_of_regions_that_lies_is_refused(tmp_path, rows):
    node = {"$": "tensor", "region": 0, "dtype": "uint8", "shape": [1]}
    path = forge(tmp_path / "forged.slip", {"x": node}, rows)
    with pytest.raises(CorruptFileError, match=r"forged\.slip"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "header",
    [
        {"version": 2},
        {"version": True},
        {"version": None},
        {"identity": 5},
        {"identity": ""},
        {"entries": "w"},
        {"entries": ["w", "w"]},
        {"entries": ["absent"]},
        {"entries": [1]},
        {"same": ["w"]},
        {"parents": [["id", "x.slip"]], "same": ["absent"]},
        {"parents": [["id", "../x.slip"]]},
        {"parents": [["id", "/etc/passwd"]]},
        {"parents": [["id"]]},
        {"parents": {"id": 1}},
        {"parents": [["id", "x"]] * 17},
        {"sequence": -1},
        {"sequence": 1 << 63},
        {"sequence": True},
        {"sequence": "1"},
        {"thinned": "all"},
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused(tmp_path, header):
    path = forge(tmp_path / "forged.slip", {"x": 1}, **header)
    with pytest.raises((CorruptFileError, FormatVersionError), match=r"forged\.slip"):
        load_checkpoint(path)


def test_deltas_that_refer_to_each_other_or_to_themselves_are_refused(tmp_path):
    node = {"$": "tensor", "region": 0, "dtype": "float32", "shape": [1]}
    for name, parent in (("a.slip", "b.slip"), ("b.slip", "a.slip"), ("c.slip", "c.slip")):
        with write_container(tmp_path / name, kind="checkpoint") as writer:
            writer.add("regions", np.array([[0, 0, 4, 0, 0]], np.uint64), Raw())
            header = {"version": 1, "identity": name, "entries": ["y"], "same": ["y"], "parents": [[parent, parent]]}
            writer.set("checkpoint", header)
            writer.set("state", {"x": node})
            writer.set("metadata", None)
    for name in ("a.slip", "c.slip"):
        with pytest.raises(CorruptFileError, match="has more than 16 parents"):
            load_checkpoint(tmp_path / name)


def test_a_kind_of_value_from_the_future_is_a_version_error(tmp_path):
    with pytest.raises(FormatVersionError, match=r"f\.slip: the state (holds|contains) a value of kind 'hologram'"):
        load_checkpoint(forge(tmp_path / "f.slip", {"$": "hologram"}))


def test_a_file_of_a_draft_of_the_format_is_a_version_error(tmp_path):
    with write_container(tmp_path / "draft.slip", kind="checkpoint") as writer:
        writer.set("state", {})
    with pytest.raises(FormatVersionError, match="a draft of the format before its first release wrote it"):
        load_checkpoint(tmp_path / "draft.slip")


def test_a_container_that_is_no_checkpoint_is_said_to_be_so(tmp_path):
    with write_container(tmp_path / "other.slip", kind="rollout"):
        pass
    with pytest.raises(CorruptFileError, match="is a container of kind 'rollout', expected a checkpoint"):
        load_checkpoint(tmp_path / "other.slip")


# ---- deltas


def write_chain(folder: Path, states: list[Any]) -> list[StoredState]:
    """Write states, each against the one before."""
    stored: list[StoredState] = []
    parent = None
    for number, state in enumerate(states):
        stored.append(write_native(folder / f"{number}.slip", state, parent=parent))
        header = stored[-1].header
        parent = Parent((Ancestor(header.identity, f"{number}.slip"), *header.parents), stored[-1].content)
    return stored


@pytest.mark.parametrize("steps_apart", [1, 7])
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer_class": torch.optim.Adam},
        {"optimizer_class": torch.optim.AdamW, "weight_decay": 0.1},
        {"optimizer_class": torch.optim.Adam, "amsgrad": True},
        {"optimizer_class": torch.optim.SGD, "momentum": 0.9},
    ],
    ids=str,
)
def test_a_chain_of_deltas_loads_exactly(tmp_path, steps_apart, options):
    network, optimizer, train = adam_run(**options)
    states = []
    for _ in range(6):
        states.append(copy.deepcopy(state_of(network, optimizer)))
        train(steps_apart)
    write_chain(tmp_path, states)
    for number, state in enumerate(states):
        assert_same(load_checkpoint(tmp_path / f"{number}.slip"), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64])
def test_small_changes_are_stored_as_differences_whatever_the_dtype(tmp_path, dtype):
    values = torch.randint(1 << 62, (300_000,))
    if dtype != torch.int64:
        values = torch.randn(300_000, dtype=dtype)
    words = values.view(torch.uint8)
    states = []
    for _ in range(4):
        states.append({"x": values.clone()})
        # One unit in the last place of every hundredth element.
        words[:: 100 * values.itemsize] ^= 1
    stored = write_chain(tmp_path, states)
    assert stored[1].stored_bytes < stored[0].stored_bytes / 2
    assert len(stored[3].header.parents) == 3
    for number, state in enumerate(states):
        found = load_checkpoint(tmp_path / f"{number}.slip")["x"]
        assert torch.equal(found.view(torch.uint8), state["x"].view(torch.uint8))


def test_loading_a_chain_reads_every_chunk_of_every_file_at_most_once(tmp_path, monkeypatch):
    states = [{"x": torch.linspace(0, 1, 600_000) + number * 1e-7} for number in range(4)]
    write_chain(tmp_path, states)
    read: list[tuple[int, int]] = []
    original = os.preadv

    def recording(descriptor: int, buffers: Any, offset: int) -> int:
        read.append((os.fstat(descriptor).st_ino, offset))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", recording)
    assert_same(load_checkpoint(tmp_path / "3.slip"), states[3])
    assert len({inode for inode, _ in read}) == 4
    assert len(read) == len(set(read))


def test_only_part_of_a_delta_can_be_loaded(tmp_path):
    large = {"frozen": torch.randn(200_000), "moving": torch.randn(200_000)}
    write_chain(tmp_path, [large, {**large, "moving": large["moving"] + 1e-7}])
    assert torch.equal(load_checkpoint(tmp_path / "1.slip", keys=["frozen"])["frozen"], large["frozen"])


def test_a_delta_of_tensors_that_changed_shape_or_dtype_is_complete(tmp_path):
    first = {"a": torch.randn(200_000), "b": torch.randn(200_000), "gone": torch.randn(200_000)}
    second = {"a": torch.randn(100_000, 2), "b": torch.randn(200_000).double(), "new": torch.randn(200_000)}
    stored = write_chain(tmp_path, [first, second])
    assert stored[1].header.parents == ()
    (tmp_path / "0.slip").unlink()
    assert_same(load_checkpoint(tmp_path / "1.slip"), second)


def test_another_file_under_the_name_of_the_parent_is_not_taken_for_it(tmp_path):
    frozen = torch.randn(200_000)
    write_chain(tmp_path, [{"f": frozen, "n": 0}, {"f": frozen, "n": 1}])
    write_native(tmp_path / "0.slip", {"f": torch.randn(200_000)})
    with pytest.raises(CorruptFileError, match="contains only what changed since 0.slip, which is missing or damaged"):
        load_checkpoint(tmp_path / "1.slip")


def test_a_delta_made_whole_is_still_the_parent_of_its_children(tmp_path):
    states = [{"frozen": torch.arange(200_000.0), "x": torch.linspace(0, 1, 300_000) + n * 1e-7} for n in range(4)]
    stored = write_chain(tmp_path, states)
    rewrite_whole(tmp_path / "2.slip")
    for number in (0, 1):
        (tmp_path / f"{number}.slip").unlink()
    with NativeFile(tmp_path / "2.slip") as file:
        assert file.header.identity == stored[2].header.identity
        assert file.header.parents == ()
    for number in (2, 3):
        assert_same(load_checkpoint(tmp_path / f"{number}.slip"), states[number])


def test_a_delta_that_cannot_be_made_whole_stays_as_it_is(tmp_path):
    states = [{"frozen": torch.arange(200_000.0), "n": n} for n in range(2)]
    write_chain(tmp_path, states)
    content = (tmp_path / "1.slip").read_bytes()
    parent = bytearray((tmp_path / "0.slip").read_bytes())
    parent[1000] ^= 1
    (tmp_path / "0.slip").write_bytes(parent)
    with pytest.raises(CorruptFileError, match="'frozen' is damaged"):
        rewrite_whole(tmp_path / "1.slip")
    assert (tmp_path / "1.slip").read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.slip", "1.slip"]


def test_saving_while_training_steps_in_between_gives_exact_deltas(tmp_path):
    network, optimizer, train = adam_run()
    expected = []
    with AsyncCheckpointSaver(), CheckpointManager(tmp_path, keep_last=None, differential=True) as manager:
        manager.guard(optimizer)
        for number in range(25):
            manager.save(number, state_of(network, optimizer))
            expected.append(copy.deepcopy(state_of(network, optimizer)))
            train(1)
    for number, state in enumerate(expected):
        assert_same(load_checkpoint(manager.path(number)), state)
