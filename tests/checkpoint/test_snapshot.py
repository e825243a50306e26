"""Snapshots: the state at the moment of the call, however soon training changes it."""

import copy
import os
import random
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from slipstream import (
    AsyncCheckpointSaver,
    BackgroundError,
    TornStateError,
    UnsupportedStateError,
    load_checkpoint,
    tensors,
)
from slipstream.checkpoint import saver as saver_module
from slipstream.checkpoint import snapshot
from slipstream.checkpoint.native import write_native
from slipstream.memory import aligned
from slipstream.tensors import copy_memory

FORMATS = ["pt", "native"]


def model_and_optimizer(width: int = 64) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, width)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, len(list(model.parameters())[-1]))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(node: Any) -> Any:
    """Turn a nested state into something that compares bit for bit, NaN and types included."""
    if isinstance(node, torch.Tensor):
        flat = node.detach().resolve_conj().contiguous().cpu().reshape(-1)
        return (
            "tensor",
            str(node.dtype),
            tuple(node.shape),
            bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b"",
        )
    if isinstance(node, np.ndarray):
        return ("array", node.dtype.str, node.shape, node.tobytes())
    if isinstance(node, TensorDict):
        return ("tensordict", tuple(node.batch_size), {key: bits(value) for key, value in node.items()})
    if isinstance(node, dict):
        return (type(node).__name__, [(bits(key), bits(value)) for key, value in node.items()])
    if isinstance(node, (list, tuple)):
        return (type(node).__name__, [bits(value) for value in node])
    if isinstance(node, float):
        return np.float64(node).tobytes()
    return (type(node).__name__, node)


def everything() -> dict[str, Any]:
    """A state with one of everything that a loop may keep."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(40, 50, generator=generator)
    model, optimizer = model_and_optimizer()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "dtypes": {
            str(dtype): torch.randn(3000, generator=generator).to(dtype)
            for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
        },
        "ints": [
            torch.arange(-50, 50).repeat(30).to(dtype) for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
        ],
        "unsigned": [
            torch.arange(100).repeat(30).to(dtype) for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
        ],
        "bool": torch.arange(5000) % 3 == 0,
        "complex": torch.randn(700, dtype=torch.complex64, generator=generator),
        "special": torch.tensor([float("nan"), -0.0, float("inf"), 1e-42]),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 5),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": base[0].expand(9, 50),
        "channels last": torch.randn(2, 3, 16, 16, generator=generator).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(600, generator=generator)),
        "frozen": torch.nn.Parameter(torch.randn(600, generator=generator), requires_grad=False),
        "conjugate": torch.randn(400, dtype=torch.complex64, generator=generator).conj(),
        "tensordict": TensorDict({"a": torch.randn(4, 3), "nested": {"b": torch.arange(4)}}, batch_size=[4]),
        "numpy": np.random.default_rng(0).normal(size=(300, 5)),
        "numpy fortran": np.asfortranarray(np.arange(600.0).reshape(20, 30)),
        "numpy scalar": np.float32(1.25),
        "plain": [
            1,
            2.5,
            float("nan"),
            -0.0,
            "text",
            None,
            True,
            b"bytes",
            (1, (2,)),
            {3: "int key", (1, 2): "tuple key"},
        ],
        "ordered": OrderedDict([("z", 1), ("a", 2)]),
        "large int": 2**200,
        "rng": {
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),
        },
        "torch values": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
    }


@pytest.mark.parametrize("format", FORMATS)
def test_everything_comes_back_bit_for_bit(tmp_path, format):
    state = everything()
    with AsyncCheckpointSaver() as saver:
        path = saver.save_async(state, tmp_path / "c", format=format).result().path
    assert bits(load_checkpoint(path, weights_only=format == "native")) == bits(state)


def test_strides_parameters_and_metadata_survive_in_the_native_format(tmp_path):
    state = everything()
    with AsyncCheckpointSaver() as saver:
        saver.save_async(state, tmp_path / "c", format="native")
    back = load_checkpoint(tmp_path / "c")
    for name in ("transposed", "expanded", "channels last"):
        assert back[name].stride() == state[name].stride(), name
    assert isinstance(back["parameter"], torch.nn.Parameter)
    assert (back["parameter"].requires_grad, back["frozen"].requires_grad) == (True, False)
    assert back["model"]._metadata == state["model"]._metadata


@pytest.mark.parametrize("format", FORMATS)
def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path, format):
    weight = torch.randn(500, 500)
    state = {"embedding": weight, "head": weight, "row": weight[3], "transposed": weight.t()}
    with AsyncCheckpointSaver() as saver:
        result = saver.save_async(state, tmp_path / "c", compress=False, format=format).result()
    assert result.stored_bytes < 1.1 * weight.nbytes
    back = load_checkpoint(result.path)
    back["embedding"][3, 4] = 99
    assert (back["head"][3, 4], back["row"][4], back["transposed"][4, 3]) == (99, 99, 99)


@pytest.mark.parametrize("format", FORMATS)
def test_a_small_view_of_a_large_storage_is_stored_small(tmp_path, format):
    large = torch.randn(1000, 1000)
    with AsyncCheckpointSaver() as saver:
        state = {"row": large[5], "column": large[:, 5], "corner": large[:3, :3]}
        result = saver.save_async(
            {"view": state["row"], "column": state["column"]}, tmp_path / "c", compress=False, format=format
        )
        alone = saver.save_async(large[:, 7], tmp_path / "d", compress=False, format=format).result()
    assert alone.stored_bytes < 10_000
    back = load_checkpoint(result.result().path)
    assert torch.equal(back["view"], large[5])
    assert torch.equal(back["column"], large[:, 5])


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_the_state_at_the_call_is_saved_though_training_goes_on_at_once(tmp_path, format, guarded):
    model, optimizer = model_and_optimizer(width=200)
    expected = []
    with AsyncCheckpointSaver(max_queue_size=4) as saver:
        if guarded:
            saver.guard(optimizer, model)
        for number in range(60):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "number": number}
            expected.append(bits(copy.deepcopy(state)))
            saver.save_async(state, tmp_path / f"{number}", compress=False, format=format)
            step(model, optimizer)
    for number, wanted in enumerate(expected):
        assert bits(load_checkpoint(tmp_path / f"{number}")) == wanted


@pytest.mark.parametrize("guarded", [True, False])
def test_hundreds_of_saves_while_every_tensor_changes_in_a_tight_loop(tmp_path, guarded):
    tensors = [torch.zeros(3000) for _ in range(40)]
    optimizer = torch.optim.SGD([torch.nn.Parameter(tensor) for tensor in tensors], lr=1.0)
    parameters = optimizer.param_groups[0]["params"]
    with AsyncCheckpointSaver(max_queue_size=3) as saver:
        if guarded:
            saver.guard(optimizer)
        for number in range(300):
            saver.save_async({"tensors": list(parameters)}, tmp_path / f"{number % 7}", format="native")
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, -1.0)
            optimizer.step()  # every element counts up by one
            if number % 7 == 6:
                saver.flush()
                for recent in range(7):
                    values = {
                        float(v)
                        for t in load_checkpoint(tmp_path / f"{recent}")["tensors"]
                        for v in t.detach().unique()
                    }
                    assert values == {float(number - 6 + recent)}, "a torn snapshot"


def slow_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold up the copying thread until the returned event is set."""
    go = threading.Event()

    def wait_then_copy(*arguments: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(30)
        copy_memory(*arguments)

    monkeypatch.setattr(tensors, "copy_memory", wait_then_copy)
    return go


def test_guarded_state_is_not_copied_on_the_callers_thread(tmp_path, monkeypatch):
    model, optimizer = model_and_optimizer()
    go = slow_copies(monkeypatch)
    with AsyncCheckpointSaver() as saver:
        saver.guard(optimizer)
        before = bits(copy.deepcopy(model[0].weight))
        handle = saver.save_async({"weight": model[0].weight}, tmp_path / "c", format="native")
        assert not handle.done()
        threading.Timer(0.05, go.set).start()
        step(model, optimizer)  # waits at the barrier for the copy
        assert saver.get_stats()["total_barrier_s"] > 0
        assert bits(load_checkpoint(handle.result().path)["weight"]) == before


def test_the_barrier_waits_for_the_copy_and_not_for_the_write(tmp_path, monkeypatch):
    gate = threading.Event()
    write = write_native

    def blocked(*arguments: Any, **options: Any) -> Any:
        assert gate.wait(30)
        return write(*arguments, **options)

    monkeypatch.setattr(saver_module, "write_native", blocked)
    model, optimizer = model_and_optimizer()
    with AsyncCheckpointSaver() as saver:
        saver.guard(optimizer)
        handle = saver.save_async({"model": model.state_dict()}, tmp_path / "c", format="native")
        step(model, optimizer)
        assert not handle.done()
        gate.set()


@pytest.mark.parametrize(
    "change", ["in place", "load_state_dict of a module", "load_state_dict of an optimizer", "buffer"]
)
def test_guarded_places_wait_for_the_copy(tmp_path, monkeypatch, change):
    model, optimizer = model_and_optimizer()
    other = copy.deepcopy(model.state_dict())
    for tensor in other.values():
        tensor.add_(1)
    go = slow_copies(monkeypatch)
    with AsyncCheckpointSaver() as saver:
        saver.guard(optimizer, model)
        expected = bits(copy.deepcopy(model.state_dict()))
        handle = saver.save_async(model.state_dict(), tmp_path / "c", format="native")
        threading.Timer(0.05, go.set).start()
        if change == "in place":
            with saver.mutating(), torch.no_grad():
                next(model.parameters()).add_(1)
        elif change == "load_state_dict of a module":
            model.load_state_dict(other)
        elif change == "load_state_dict of an optimizer":
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            model(torch.randn(8, 64))
        assert bits(load_checkpoint(handle.result().path)) == expected


def test_a_broken_promise_is_found_and_nothing_is_written(tmp_path, monkeypatch):
    model, optimizer = model_and_optimizer()
    go = slow_copies(monkeypatch)
    saver = AsyncCheckpointSaver()
    saver.guard(optimizer)
    handle = saver.save_async({"model": model.state_dict()}, tmp_path / "c", format="native")
    with torch.no_grad():
        next(model.parameters()).add_(1)  # behind the saver's back
    go.set()
    with pytest.raises(TornStateError, match=r"model/0\.weight changed while being copied"):
        handle.result()
    assert list(tmp_path.iterdir()) == []
    saver.shutdown()


def test_an_evaluation_forward_pass_does_not_wait(tmp_path, monkeypatch):
    model, optimizer = model_and_optimizer()
    go = slow_copies(monkeypatch)
    with AsyncCheckpointSaver() as saver:
        saver.guard(model, optimizer)
        saver.save_async(model.state_dict(), tmp_path / "c", format="native")
        model.eval()
        model(torch.randn(8, 64))  # would hang here
        assert saver.get_stats()["total_barrier_s"] == 0
        go.set()


def test_shutdown_takes_the_hooks_back(tmp_path):
    model, optimizer = model_and_optimizer()
    saver = AsyncCheckpointSaver()
    saver.guard(optimizer, model)
    saver.shutdown()
    assert not optimizer._optimizer_step_pre_hooks
    assert not model._load_state_dict_pre_hooks


def test_hooks_are_taken_back_though_a_save_failed_unheard(tmp_path):
    model, optimizer = model_and_optimizer()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BackgroundError), AsyncCheckpointSaver() as saver:
        saver.guard(optimizer)
        saver.save_async({"model": model.state_dict()}, tmp_path / "file" / "c", format="native")
    assert not optimizer._optimizer_step_pre_hooks


@pytest.fixture
def allocating_threads(monkeypatch):
    """Return the names of the threads that allocated memory for snapshots, one per allocation."""
    names: list[str] = []

    def allocate(nbytes: int) -> Any:
        names.append(threading.current_thread().name)
        return aligned(nbytes)

    monkeypatch.setattr(snapshot, "allocate_host", allocate)
    return names


def test_memory_is_reused_from_one_save_to_the_next(tmp_path, allocating_threads):
    model, optimizer = model_and_optimizer(width=300)
    with AsyncCheckpointSaver() as saver:
        saver.guard(optimizer, model)
        for number in range(10):
            saver.save_async({"model": model.state_dict()}, tmp_path / f"{number}", format="native")
            saver.flush()
    assert len(allocating_threads) == 1


def test_guarding_gets_memory_ready_that_the_first_save_uses(tmp_path, allocating_threads):
    model, optimizer = model_and_optimizer(width=300)
    with AsyncCheckpointSaver() as saver:
        saver.guard(optimizer)
        saver.guard(model)
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saver.save_async(state, tmp_path / "c", format="native").wait()
    assert set(allocating_threads) == {"slipstream-warm"}
    assert torch.equal(load_checkpoint(tmp_path / "c")["model"]["0.weight"], model.state_dict()["0.weight"])


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"a": [object()]}, "a/0 is a builtins.object"),
        ({"model": torch.nn.Linear(1, 1)}, "model is a torch.nn.modules.linear.Linear"),
        ({"f": lambda: None}, "f is a builtins.function"),
        ({"sparse": torch.eye(3).to_sparse()}, "sparse has layout torch.sparse_coo"),
        ({"meta": torch.empty(3, device="meta")}, "meta is a meta tensor"),
        ({"objects": np.array([{}], dtype=object)}, "objects is a numpy.ndarray"),
    ],
)
def test_what_cannot_be_stored_as_data_is_refused_at_the_call_by_name(tmp_path, state, problem):
    with AsyncCheckpointSaver() as saver, pytest.raises(UnsupportedStateError, match=problem):
        saver.save_async(state, tmp_path / "c", format="native")
    assert list(tmp_path.iterdir()) == []


def test_objects_are_copied_at_once_for_torch_save(tmp_path):
    model = torch.nn.Linear(3, 3)
    weight = bits(copy.deepcopy(model.weight))
    with AsyncCheckpointSaver() as saver:
        handle = saver.save_async({"model": model}, tmp_path / "c")
        with torch.no_grad():
            model.weight.zero_()
    back = load_checkpoint(handle.result().path, weights_only=False)
    assert bits(back["model"].weight) == weight


def test_guard_refuses_what_it_cannot_guard():
    with AsyncCheckpointSaver() as saver, pytest.raises(TypeError, match="not a Tensor"):
        saver.guard(torch.zeros(3))  # type: ignore[arg-type]


def test_a_forked_child_trains_on_while_the_parent_copies(tmp_path, monkeypatch):
    model, optimizer = model_and_optimizer()
    go = slow_copies(monkeypatch)
    with AsyncCheckpointSaver() as saver:
        saver.guard(optimizer)
        handle = saver.save_async({"model": model.state_dict()}, tmp_path / "c", format="native")
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            saver._guard.wait()
            os._exit(7)
        started = time.monotonic()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert time.monotonic() - started < 25
        go.set()
        assert Path(handle.result().path).exists()
