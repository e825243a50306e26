"""The native format: damage, hostility, deltas and predictions."""

import copy
import json
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
from slipstream.checkpoint.native import NativeFile, write_native
from slipstream.store.container import Container
from slipstream.store.writer import write_container
from tests.contracts.file import FileContract


def adam_run(optimizer_class: Any = torch.optim.Adam, **options: Any) -> Any:
    """Return a network of layers of equal shape, its optimizer, and a function that trains it for so many steps."""
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


def forge(path: Path, state: Any, **values: Any) -> Path:
    with write_container(path, kind="checkpoint") as writer:
        writer.add("w", torch.arange(40.0).numpy())
        writer.set("state", state)
        for name, value in values.items():
            writer.set(name, value)
    return path


@pytest.mark.parametrize(
    "state",
    [
        {"$": "tensor", "entry": "w", "dtype": "float32", "shape": [41]},
        {"$": "tensor", "entry": "w", "dtype": "float64", "shape": [40]},
        {"$": "tensor", "entry": "w", "dtype": "float32", "shape": [2**40]},
        {"$": "tensor", "entry": "w", "dtype": "float32", "shape": [4], "stride": [2**40]},
        {"$": "tensor", "entry": "w", "dtype": "float32", "shape": [4], "stride": [-1]},
        {"$": "tensor", "entry": "w", "dtype": "float32", "shape": [4], "offset": 158},
        {"$": "tensor", "entry": "w", "dtype": "float32", "shape": [4], "offset": 400},
        {"$": "tensor", "entry": "w", "dtype": "load", "shape": [4]},
        {"$": "tensor", "entry": "w", "dtype": "float32", "shape": "four"},
        {"$": "tensor", "entry": "w", "dtype": 3, "shape": [4]},
        {"$": "tensor", "entry": "absent", "dtype": "float32", "shape": [4]},
        {"$": "tensor", "entry": ["w"], "dtype": "float32", "shape": [4]},
        {"$": "tensor", "dtype": "float32", "shape": [4]},
        {"$": "tensor", "hex": "zz", "dtype": "float32", "shape": [1]},
        {"$": "tensor", "hex": "00", "dtype": "float32", "shape": [1]},
        {"$": "tensor", "hex": "00", "dtype": "qint8", "shape": [1]},
        {"$": "tensor", "hex": "", "dtype": "quint4x2", "shape": [0]},
        {"$": "array", "hex": "00", "dtype": "O", "shape": [1]},
        {"$": "array", "hex": "00" * 8, "dtype": "<f8", "shape": [9]},
        {"$": "array", "hex": "", "dtype": "<U0", "shape": [0]},
        {"$": "array", "hex": "", "dtype": "|S0", "shape": [3]},
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
    with pytest.raises((CorruptFileError, FormatVersionError, KeyError), match=r"forged\.slip|absent"):
        load_checkpoint(path)


def test_a_kind_of_value_from_the_future_is_a_version_error(tmp_path):
    with pytest.raises(FormatVersionError, match=r"f\.slip: the state holds a value of kind 'hologram'"):
        load_checkpoint(forge(tmp_path / "f.slip", {"$": "hologram"}))


def test_a_container_that_is_no_checkpoint_is_said_to_be_so(tmp_path):
    with write_container(tmp_path / "other.slip", kind="rollout"):
        pass
    with pytest.raises(CorruptFileError, match="is a container of kind 'rollout', expected a checkpoint"):
        load_checkpoint(tmp_path / "other.slip")


def save_chain(folder: Path, steps_apart: int, count: int = 6, **options: Any) -> tuple[list[Any], CheckpointManager]:
    network, optimizer, train = adam_run(**options)
    states = []
    with CheckpointManager(folder, keep_last=None, full_every=4) as manager:
        manager.guard(optimizer)
        for number in range(count):
            manager.save(number, state_of(network, optimizer))
            states.append(copy.deepcopy(state_of(network, optimizer)))
            train(steps_apart)
    return states, manager


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
    states, manager = save_chain(tmp_path, steps_apart, **options)
    for number, state in enumerate(states):
        assert_same(load_checkpoint(manager.path(number)), state)


def test_a_chain_is_at_most_full_every_long(tmp_path):
    _, manager = save_chain(tmp_path, 1, count=9)
    depths = []
    for number in range(9):
        with NativeFile(manager.path(number)) as file:
            depths.append(file.depth)
    assert depths == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_one_adam_step_apart_weights_and_second_moments_cost_nearly_nothing(tmp_path):
    _, manager = save_chain(tmp_path, 1)
    with NativeFile(manager.path(2)) as file:
        sizes = {name: entry.stored_bytes / entry.nbytes for name, entry in file.container.entries.items()}
        kinds = {name: recipe["kind"] for name, recipe in file.parent["predicted"].items()}
    for layer in range(3):
        assert kinds[f"model/{layer}.weight"] == "adam weights"
        assert kinds[f"optimizer/state/{2 * layer}/exp_avg_sq"] == "adam second moment"
        assert sizes[f"model/{layer}.weight"] < 0.1
        assert sizes[f"optimizer/state/{2 * layer}/exp_avg_sq"] < 0.1
    full, delta = (manager.path(number).stat().st_size for number in (0, 2))
    assert delta < 0.5 * full


def test_tensors_that_did_not_change_are_not_stored_again(tmp_path):
    frozen, moving = torch.randn(1000), torch.randn(1000)
    with CheckpointManager(tmp_path) as manager:
        for number in range(3):
            manager.save(number, {"frozen": frozen, "moving": moving})
            manager.flush()
            moving.mul_(1.01)
    with Container(manager.path(2)) as container:
        assert list(container.entries) == ["moving"]
    assert torch.equal(load_checkpoint(manager.path(2))["frozen"], frozen)


@pytest.mark.parametrize("steps_apart", [1, 3])
def test_loading_a_chain_reads_every_chunk_of_every_file_at_most_once(tmp_path, monkeypatch, steps_apart):
    _, manager = save_chain(tmp_path, steps_apart)
    read: list[tuple[Path, str, int]] = []
    original = Container._read_chunk

    def recording(self: Container, entry: Any, number: int, *args: Any) -> Any:
        read.append((self.path, entry.name, number))
        return original(self, entry, number, *args)

    monkeypatch.setattr(Container, "_read_chunk", recording)
    load_checkpoint(manager.path(3))
    assert len({path for path, _, _ in read}) == 4
    assert len(read) == len(set(read))


def test_only_part_of_a_delta_can_be_loaded(tmp_path):
    states, manager = save_chain(tmp_path, 1)
    part = load_checkpoint(manager.path(2), keys=["model/1.*"])
    assert list(part["model"]) == ["1.weight", "1.bias"]
    assert torch.equal(part["model"]["1.weight"], states[2]["model"]["1.weight"])


def test_a_delta_whose_parent_is_gone_or_another_file_is_refused(tmp_path):
    states, manager = save_chain(tmp_path / "run", 1, count=2)
    alone = tmp_path / "alone.slip"
    alone.write_bytes(manager.path(1).read_bytes())
    with pytest.raises(CorruptFileError, match="holds only what changed since .* which is missing"):
        load_checkpoint(alone)
    (base,) = (tmp_path / "run" / ".bases").glob("*.slip")
    base.unlink()
    write_native(base, states[1])
    with pytest.raises(CorruptFileError, match="is not the file that it was saved against"):
        load_checkpoint(manager.path(1))


def test_deltas_that_refer_to_each_other_or_to_themselves_are_refused(tmp_path):
    path = forge(
        tmp_path / "f.slip", {"x": 1}, parent={"file": "f.slip", "identity": "0" * 16, "depth": 5, "same": ["y"]}
    )
    forge(
        path,
        {"x": {"$": "tensor", "entry": "y", "dtype": "float32", "shape": [1]}},
        parent={"file": "f.slip", "identity": "0" * 16, "depth": 5, "same": ["y"]},
    )
    with pytest.raises(CorruptFileError, match=r"f\.slip"):
        load_checkpoint(path)


def test_a_delta_of_tensors_that_changed_shape_or_dtype_is_complete(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, {"a": torch.randn(1000), "b": torch.randn(1000), "gone": torch.randn(1000)})
        state = {"a": torch.randn(500, 4), "b": torch.randn(1000).double(), "new": torch.randn(1000)}
        manager.save(1, state)
    assert_same(load_checkpoint(manager.path(1)), state)


def test_saving_while_training_steps_in_between_gives_exact_deltas(tmp_path):
    network, optimizer, train = adam_run()
    expected = []
    with AsyncCheckpointSaver(), CheckpointManager(tmp_path, keep_last=None, full_every=5) as manager:
        manager.guard(optimizer)
        for number in range(25):
            manager.save(number, state_of(network, optimizer))
            expected.append(copy.deepcopy(state_of(network, optimizer)))
            train(1)
    for number, state in enumerate(expected):
        assert_same(load_checkpoint(manager.path(number)), state)


def test_tensors_in_metadata_and_metrics_are_saved_like_any_other(tmp_path):
    metrics = {"loss": torch.tensor(0.5), "histogram": torch.arange(3000.0), "counts": torch.arange(3000).numpy()}
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        for step in range(5):
            manager.save(step, {"x": torch.full((3000,), float(step))}, metrics)
    assert manager.steps() == [3, 4]
    back = manager.restore()
    assert back.state["x"].unique().tolist() == [4.0]
    assert back.metrics["loss"] == 0.5
    assert torch.equal(back.metrics["histogram"], metrics["histogram"])  # type: ignore[arg-type]
    assert back.metrics["counts"].sum() == sum(range(3000))


def test_tensors_that_come_back_tied_are_saved_tied_by_torch(tmp_path):
    weight = torch.randn(300, 300)
    write_native(tmp_path / "c.slip", {"a": weight, "b": weight})
    torch.save(load_checkpoint(tmp_path / "c.slip"), tmp_path / "c.pt")
    assert (tmp_path / "c.pt").stat().st_size < 1.1 * weight.nbytes


def test_a_file_that_cannot_be_read_keeps_the_bases_of_the_folder(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None, full_every=10) as manager:
        for step in range(4):
            manager.save(step, {"x": torch.full((5000,), float(step))})
        manager.flush()
        hidden = manager.path(3).read_bytes()
        manager.path(3).write_bytes(b"unreadable for now")
        manager.prune()
        manager.path(3).write_bytes(hidden)
        assert manager.restore(3).state["x"].unique().tolist() == [3.0]


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


@pytest.mark.parametrize("parent", [[1], "x", {"predicted": [1]}, {"file": "../x", "depth": 1, "same": ["y"]}])
def test_a_parent_that_makes_no_sense_is_refused(tmp_path, parent):
    state = {"x": {"$": "tensor", "entry": "y", "dtype": "float32", "shape": [1]}}
    with pytest.raises((CorruptFileError, KeyError)):
        load_checkpoint(forge(tmp_path / "f.slip", state, parent=parent))


def test_tensors_too_small_to_gain_are_stored_as_they_are_and_larger_ones_are_packed(tmp_path):
    state = {"bias": torch.zeros(100), "weight": torch.zeros(1000)}
    write_native(tmp_path / "a.slip", state)
    with Container(tmp_path / "a.slip") as container:
        assert {name: entry.stored_bytes < entry.nbytes for name, entry in container.entries.items()} == {
            "bias": False,
            "weight": True,
        }
    assert torch.equal(load_checkpoint(tmp_path / "a.slip")["bias"], state["bias"])


def test_retention_knows_the_parents_of_what_was_just_saved_without_reading_it_again(tmp_path, monkeypatch):
    network, optimizer, train = adam_run()
    opened: list[Path] = []
    init = NativeFile.__init__

    def counting(self: NativeFile, path: Any) -> None:
        opened.append(Path(path))
        init(self, path)

    monkeypatch.setattr(NativeFile, "__init__", counting)
    with CheckpointManager(tmp_path, keep_last=3) as manager:
        for step in range(8):
            train(1)
            manager.save(step, state_of(network, optimizer), {"reward": step}).wait()
    assert all(path.parent.name == ".bases" for path in opened)
    assert len(opened) == 7
    fresh = CheckpointManager(tmp_path, keep_last=3)
    assert fresh.prune() == []
    assert len(list((tmp_path / ".bases").iterdir())) == 7
    for step in fresh.steps():
        load_checkpoint(fresh.path(step))
    fresh.close()
