"""Snapshots: the state at the moment of the call, however soon training changes it."""

import _thread
import copy
import io
import logging
import os
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from slipstream import (
    AsyncCheckpointSaver,
    TornStateError,
    UnsupportedStateError,
    load_checkpoint,
    tensors,
)
from slipstream.checkpoint import guard as guard_module
from slipstream.checkpoint import parts, snapshot
from slipstream.checkpoint.guard import Guard
from slipstream.checkpoint.snapshot import Snapshot, snapshot_pool, take_snapshot
from slipstream.memory import Pool, aligned
from slipstream.tensors import copy_memory
from tests import interrupts
from tests.checkpoint.conftest import Gate

FORMATS = ["pt", "native"]

# Guarded weights of this width are copied in the background.
WIDTH = 1100


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
        path = saver.save_async(state, tmp_path / "c", format=format, weights_only=format == "native").result().path
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
    # With two moments of Adam, this is enough to be copied in the background.
    model, optimizer = model_and_optimizer(width=450)
    expected = []
    with AsyncCheckpointSaver(max_queue_size=4) as saver:
        if guarded:
            saver.guard(optimizer, model)
        for number in range(30):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "number": number}
            expected.append(bits(copy.deepcopy(state)))
            saver.save_async(state, tmp_path / f"{number}", compress=False, format=format)
            step(model, optimizer)
    for number, wanted in enumerate(expected):
        assert bits(load_checkpoint(tmp_path / f"{number}")) == wanted


@pytest.mark.parametrize("size", [3000, 30_000], ids=["copied during the call", "copied later"])
@pytest.mark.parametrize("guarded", [True, False])
def test_hundreds_of_snapshots_while_every_tensor_changes_in_a_tight_loop(guarded, size):
    parameters = [torch.nn.Parameter(torch.zeros(size)) for _ in range(40)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, -1.0)
    guard = Guard()
    if guarded:
        guard.add(optimizer)
    pool = snapshot_pool(4)
    recent: deque[tuple[int, Snapshot]] = deque()
    for number in range(300):
        recent.append((number, take_snapshot(parameters, guard, pool, opaque=False)))
        # Every element counts up by one.
        optimizer.step()
        if len(recent) > 3:
            expected, taken = recent.popleft()
            for tensor in taken.state():
                assert (tensor == expected).all(), "a torn snapshot"
            taken.release()


def guarded_parameter(*sizes: int) -> tuple[torch.nn.Parameter, torch.optim.Optimizer, Guard]:
    """Return a parameter of ones, an optimizer whose steps count it up by one, and the guard of both."""
    parameter = torch.nn.Parameter(torch.ones(sizes or (WIDTH, WIDTH)))
    parameter.grad = -torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    guard = Guard()
    guard.add(optimizer)
    return parameter, optimizer, guard


def snapshot_of(state: Any, guard: Guard | None = None, pool: Pool | None = None) -> Snapshot:
    return take_snapshot(state, guard or Guard(), pool or snapshot_pool(4), opaque=True)


def values_in(tensor: torch.Tensor) -> set[float]:
    return set(tensor.detach().unique().tolist())


class Opener:
    """Stands before a snapshot in the queue of a barrier, and opens the gate when the barrier is reached."""

    is_complete = False

    def __init__(self, gate: Gate) -> None:
        self.wait_copied = gate.open


def test_guarded_state_is_copied_while_the_caller_continues(gate):
    parameter, optimizer, guard = guarded_parameter()
    guard.watch(Opener(gate))
    # Would not return if the copy were made by this call.
    taken = snapshot_of({"weight": parameter}, guard)
    optimizer.step()
    assert values_in(taken.state()["weight"]) == {1.0}
    assert values_in(parameter) == {2.0}


def test_the_barrier_waits_for_the_copy_and_not_for_the_write(tmp_path):
    go = threading.Event()

    class SlowFormat:
        opaque = False

        def check(self, tree: Any) -> None:
            pass

        def write(self, path: Any, taken: Snapshot, metadata: Any) -> Any:
            assert go.wait(60)
            raise OSError("this format writes nothing")

    parameter, optimizer, _ = guarded_parameter()
    saver = AsyncCheckpointSaver()
    saver.guard(optimizer)
    handle = saver.save({"weight": parameter}, tmp_path / "c", SlowFormat())
    optimizer.step()
    assert not handle.done()
    go.set()
    with pytest.raises(OSError, match="writes nothing"):
        handle.result()
    saver.shutdown()


def test_few_small_guarded_tensors_are_copied_without_a_thread(monkeypatch):
    def refuse(*_: Any) -> int:
        raise AssertionError("a thread was started")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    parameter, _, guard = guarded_parameter(1000)
    taken = snapshot_of({"weight": parameter}, guard)
    # Though nothing waits for a change like this, it comes too late to tear anything.
    with torch.no_grad():
        parameter.add_(1)
    assert values_in(taken.state()["weight"]) == {1.0}


def test_without_a_thread_the_caller_copies(monkeypatch):
    def refuse(*_: Any) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    parameter, optimizer, guard = guarded_parameter()
    taken = snapshot_of({"weight": parameter}, guard)
    optimizer.step()
    assert values_in(taken.state()["weight"]) == {1.0}


def test_without_a_thread_and_memory_the_call_raises_and_training_continues(monkeypatch):
    def refuse(*_: Any) -> int:
        raise RuntimeError("can't start new thread")

    def allocate(nbytes: int) -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    parameter, optimizer, guard = guarded_parameter()
    with pytest.raises(MemoryError):
        snapshot_of({"weight": parameter}, guard, Pool(allocate=allocate))
    optimizer.step()
    assert values_in(parameter) == {2.0}


def test_a_copy_that_fails_in_the_background_opens_the_barrier_and_fails_the_snapshot():
    def allocate(nbytes: int) -> Any:
        raise MemoryError("no memory")

    parameter, optimizer, guard = guarded_parameter()
    taken = snapshot_of({"weight": parameter}, guard, Pool(allocate=allocate))
    optimizer.step()
    with pytest.raises(MemoryError):
        taken.wait()


def test_the_check_sees_the_state_before_anything_is_copied(monkeypatch):
    def copy_nothing(*_: int) -> None:
        raise AssertionError("copied before the check")

    def refuse(tree: Any) -> None:
        seen.extend(key for key, _ in tree.nodes)
        raise UnsupportedStateError("not today")

    seen: list[Any] = []
    monkeypatch.setattr(tensors, "copy_memory", copy_nothing)
    parameter, _, guard = guarded_parameter()
    state = {"guarded": parameter, "other": torch.ones(3)}
    with pytest.raises(UnsupportedStateError, match="not today"):
        take_snapshot(state, guard, snapshot_pool(4), opaque=False, check=refuse)
    assert seen == [("guarded",), ("other",)]


# Other memory for a guarded tensor.


class LateThreads:
    """Starts threads only when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._start = _thread.start_new_thread
        self._waiting: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        monkeypatch.setattr(_thread, "start_new_thread", self._hold)

    def start(self) -> None:
        for function, arguments in self._waiting:
            self._start(function, arguments)

    def _hold(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> int:
        self._waiting.append((function, arguments))
        return 0


def test_a_tensor_that_is_given_other_memory_is_stored_as_it_was(monkeypatch):
    threads = LateThreads(monkeypatch)
    module = torch.nn.Linear(WIDTH, WIDTH)
    guard = Guard()
    guard.add(module)
    before = module.weight.detach().clone()
    taken = snapshot_of({"w": module.weight}, guard)
    module.weight.data = torch.zeros(WIDTH, WIDTH)
    threads.start()
    assert torch.equal(taken.state()["w"], before)


def test_in_place_changes_of_the_other_memory_never_give_a_wrong_snapshot(monkeypatch):
    threads = LateThreads(monkeypatch)
    module = torch.nn.Linear(WIDTH, WIDTH)
    guard = Guard()
    guard.add(module)
    taken = snapshot_of({"w": module.weight}, guard)
    module.weight.data = torch.zeros(WIDTH, WIDTH)
    add_one(module.weight)
    threads.start()
    # Torch keeps the version counter of the parameter, so this looks like a change of the old memory.
    with pytest.raises(TornStateError, match="w changed while being copied"):
        taken.wait()
    # The next snapshot copies it during the call.
    again = snapshot_of({"w": module.weight}, guard)
    add_one(module.weight)
    assert values_in(again.state()["w"]) == {1.0}


def test_other_memory_that_was_changed_before_the_call_is_stored():
    module = torch.nn.Linear(WIDTH, WIDTH)
    guard = Guard()
    guard.add(module)
    module.weight.data = torch.zeros(WIDTH, WIDTH)
    with torch.no_grad():
        module.weight.add_(3)
    assert values_in(snapshot_of({"w": module.weight}, guard).state()["w"]) == {3.0}


# Changes that bypass the barrier.


def change_during_copies(monkeypatch: pytest.MonkeyPatch, change: Callable[[int], None]) -> None:
    """Call a function with the address of each piece, after a part of it was copied."""

    def copy_and_change(target: int, source: int, nbytes: int) -> None:
        half = nbytes // 2
        copy_memory(target, source, half)
        change(source)
        copy_memory(target + half, source + half, nbytes - half)

    monkeypatch.setattr(tensors, "copy_memory", copy_and_change)


def two_guarded_parameters() -> tuple[torch.nn.ParameterList, Guard]:
    """Return two parameters, in the order of their addresses, which is the order of their copies."""
    parameters = [torch.nn.Parameter(torch.ones(1_000_000)) for _ in range(2)]
    module = torch.nn.ParameterList(sorted(parameters, key=torch.Tensor.data_ptr))
    guard = Guard()
    guard.add(module)
    return module, guard


def add_one(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def test_a_change_while_a_tensor_is_copied_tears_the_snapshot(monkeypatch):
    module, guard = two_guarded_parameters()
    first, second = module

    def change(address: int) -> None:
        if address == second.data_ptr():
            add_one(second)

    change_during_copies(monkeypatch, change)
    taken = snapshot_of({"first": first, "second": second}, guard)
    with pytest.raises(TornStateError, match=r"^second changed while being copied, .* nothing was written"):
        taken.wait()


def test_a_change_before_a_tensor_is_copied_tears_the_snapshot(monkeypatch):
    module, guard = two_guarded_parameters()
    first, second = module

    def change(address: int) -> None:
        if address == first.data_ptr():
            add_one(second)

    change_during_copies(monkeypatch, change)
    taken = snapshot_of({"first": first, "second": second}, guard)
    with pytest.raises(TornStateError, match="^second changed"):
        taken.wait()


def test_a_change_after_a_tensor_was_copied_does_no_harm_but_ends_its_guard(monkeypatch, caplog):
    module, guard = two_guarded_parameters()
    first, second = module

    def change(address: int) -> None:
        if address == second.data_ptr():
            add_one(first)

    change_during_copies(monkeypatch, change)
    with caplog.at_level(logging.WARNING):
        taken = snapshot_of({"first": first, "second": second}, guard)
        back = taken.state()
    assert (values_in(back["first"]), values_in(back["second"])) == ({1.0}, {1.0})
    assert "first changed outside of a guarded optimizer's step" in caplog.text
    assert first.untyped_storage().data_ptr() not in guard.covered().first
    assert second.untyped_storage().data_ptr() in guard.covered().first


def test_a_change_is_found_though_the_state_holds_an_alias_with_another_counter(gate):
    parameter, _, guard = guarded_parameter()
    taken = snapshot_of({"w": parameter.data}, guard)
    add_one(parameter)
    gate.open()
    with pytest.raises(TornStateError, match="^w changed"):
        taken.wait()


def test_a_change_of_one_of_many_tensors_in_a_storage_is_found(gate):
    flat = torch.ones(2_000_000)
    parameters = [torch.nn.Parameter(piece.clone().set_(piece)) for piece in flat.detach().split(20_000)]
    guard = Guard()
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    guard.add(optimizer)
    taken = snapshot_of({"pieces": [parameter.data for parameter in parameters]}, guard)
    add_one(parameters[41])
    gate.open()
    with pytest.raises(TornStateError, match="changed while being copied"):
        taken.wait()


def test_memory_beside_a_guarded_tensor_in_the_same_storage_is_copied_during_the_call(gate):
    flat = torch.ones(3_000_000)
    parameter, optimizer, guard = guarded_parameter(2_000_000)
    parameter.data = flat[:2_000_000]
    average = flat[2_000_000:]
    # The whole storage is copied now, because tensors of one storage stay together.
    taken = snapshot_of({"w": parameter, "average": average}, guard)
    average.zero_()
    optimizer.step()
    gate.open()
    back = taken.state()
    assert (values_in(back["w"]), values_in(back["average"])) == ({1.0}, {1.0})


def test_a_storage_that_is_guarded_piece_by_piece_is_copied_later(gate):
    flat = torch.ones(3_000_000)
    parameters = [torch.nn.Parameter(torch.empty(0)) for _ in range(3)]
    for parameter, piece in zip(parameters, flat.split(1_000_000), strict=True):
        parameter.data = piece
        parameter.grad = -torch.ones_like(piece)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    guard = Guard()
    guard.add(optimizer)
    guard.watch(Opener(gate))
    # Would not return if the copy were made by this call.
    taken = snapshot_of({"flat": flat, "across": flat[500_000:2_500_000:2]}, guard)
    optimizer.step()
    assert values_in(taken.state()["flat"]) == {1.0}
    assert values_in(flat) == {2.0}


def test_inference_tensors_are_copied_during_the_call(gate):
    with torch.inference_mode():
        parameter = torch.nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
    module = torch.nn.Linear(1, 1)
    module.weight = parameter
    guard = Guard()
    guard.add(module)
    taken = snapshot_of({"w": module.weight}, guard)
    with torch.inference_mode():
        parameter.add_(1)
    assert values_in(taken.state()["w"]) == {1.0}


def test_guarded_tensors_that_share_memory_come_back_tied(gate):
    parameter, _, guard = guarded_parameter()
    state = {"w": parameter, "row": parameter.detach()[3], "transposed": parameter.detach().t()}
    taken = snapshot_of(state, guard)
    gate.open()
    back = taken.state()
    assert taken.nbytes == parameter.nbytes
    with torch.no_grad():
        back["w"][3, 4] = 99
    assert (back["row"][4], back["transposed"][4, 3]) == (99, 99)


# The memory of snapshots.


class CountingPool(Pool):
    """A pool that tells when memory is returned."""

    def __init__(self) -> None:
        super().__init__(slack=4)
        self.released = threading.Semaphore(0)

    def release(self, array: Any) -> None:
        super().release(array)
        self.released.release()


def test_memory_goes_back_when_everyone_has_released_it():
    pool = CountingPool()
    taken = snapshot_of({"w": torch.ones(1000)}, pool=pool)
    taken.retain()
    taken.release()
    assert values_in(taken.state()["w"]) == {1.0}
    assert pool.free_bytes == 0
    taken.release()
    assert pool.free_bytes >= 4000
    with pytest.raises(RuntimeError, match="was released"):
        taken.flat()


def test_memory_that_is_released_while_it_is_written_is_handed_out_only_after_that(gate):
    parameter, _, guard = guarded_parameter()
    pool = CountingPool()
    taken = snapshot_of({"w": parameter}, guard, pool)
    taken.release()
    assert pool.free_bytes == 0
    gate.open()
    assert pool.released.acquire(timeout=60)
    assert pool.free_bytes >= parameter.nbytes


def test_a_torn_snapshot_gives_its_memory_back(gate):
    parameter, _, guard = guarded_parameter()
    pool = CountingPool()
    taken = snapshot_of({"w": parameter}, guard, pool)
    add_one(parameter)
    gate.open()
    with pytest.raises(TornStateError):
        taken.wait()
    taken.release()
    assert pool.released.acquire(timeout=60)
    assert pool.free_bytes >= parameter.nbytes


def test_threads_that_retain_and_release_return_the_memory_once():
    pool = CountingPool()
    taken = snapshot_of({"w": torch.ones(1000)}, pool=pool)

    def use() -> None:
        for _ in range(1000):
            taken.retain()
            taken.release()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values_in(taken.state()["w"]) == {1.0}
    taken.release()
    assert pool.free_bytes >= 4000


@pytest.fixture
def allocations(monkeypatch):
    """Return the sizes of all allocations for snapshots, with the name of the thread that made them."""
    made: list[tuple[str, int]] = []

    def allocate(nbytes: int) -> Any:
        made.append((threading.current_thread().name, nbytes))
        return aligned(nbytes)

    monkeypatch.setattr(snapshot, "allocate_host", allocate)
    return made


def test_memory_is_reused_from_one_save_to_the_next(tmp_path, allocations):
    model, optimizer = model_and_optimizer(width=300)
    with AsyncCheckpointSaver() as saver:
        saver.guard(optimizer, model)
        for number in range(10):
            saver.save_async({"model": model.state_dict()}, tmp_path / f"{number}", format="native")
            saver.flush()
    assert len(allocations) <= 2


def test_guarding_prepares_memory_that_the_first_save_uses(tmp_path, allocations):
    model, optimizer = model_and_optimizer(width=WIDTH)
    with AsyncCheckpointSaver() as saver:
        saver.guard(optimizer)
        saver.guard(model)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saver.save_async(state, tmp_path / "c", format="native").wait()
    large = {thread for thread, nbytes in allocations if nbytes > 1 << 20}
    assert large == {"slipstream-warm"}
    assert torch.equal(load_checkpoint(tmp_path / "c")["model"]["0.weight"], model.state_dict()["0.weight"])


# Interrupts and forks.


def test_ctrl_c_at_any_point_of_a_snapshot_leaves_a_barrier_that_opens(monkeypatch):
    files = {module.__file__ for module in (guard_module, parts, snapshot)}
    monkeypatch.setattr(interrupts, "INTERRUPTED_FILES", files)
    parameter, optimizer, guard = guarded_parameter()
    pool = snapshot_pool(4)

    def take_and_step() -> None:
        snapshot_of({"w": parameter, "other": torch.ones(3)}, guard, pool).release()
        guard.wait()

    num_points = 0
    for _ in interrupts.interruptions(take_and_step):
        num_points += 1
        # Would hang if the interrupted snapshot were still waited for.
        optimizer.step()
    assert num_points > 50
    expected = values_in(parameter)
    assert values_in(snapshot_of({"w": parameter}, guard, pool).state()["w"]) == expected


def in_child(action: Callable[[], object]) -> int:
    """Run a function in a forked child and return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # The threads of torch do not survive a fork.
            torch.set_num_threads(1)
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_during_a_copy_trains_and_takes_snapshots_with_the_same_guard(gate):
    parameter, optimizer, guard = guarded_parameter()
    pool = snapshot_pool(4)
    taken = snapshot_of({"w": parameter}, guard, pool)

    def train_and_save() -> None:
        optimizer.step()
        gate.open()
        inner = snapshot_of({"w": parameter}, guard, pool)
        optimizer.step()
        assert values_in(inner.state()["w"]) == {2.0}
        assert values_in(parameter) == {3.0}

    assert in_child(train_and_save) == 0
    gate.open()
    assert values_in(taken.state()["w"]) == {1.0}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_cannot_wait_for_a_copy_that_only_its_parent_makes(gate):
    parameter, _, guard = guarded_parameter()
    taken = snapshot_of({"w": parameter}, guard)

    def wait() -> None:
        with pytest.raises(RuntimeError, match="belongs to the parent process"):
            taken.wait()

    assert in_child(wait) == 0


# Objects that are not plain data, for files that `torch.save` writes.


class Marked(torch.Tensor):
    """A tensor of another type."""


class WithResult(torch.nn.Linear):
    """A module with an attribute that `copy.deepcopy` refuses, as the old ``weight_norm`` makes."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.product = self.weight * 2


def result_of_an_operation() -> torch.Tensor:
    return torch.arange(3.0, requires_grad=True) * 2


def same_module_twice() -> list[torch.nn.Module]:
    module = torch.nn.Embedding(5, 4)
    return [module, module]


OBJECTS: dict[str, Callable[[], Any]] = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "meta": lambda: torch.empty(3, device="meta"),
    "subclass": lambda: torch.arange(3.0).as_subclass(Marked),
    "result of a subclass": lambda: result_of_an_operation().as_subclass(Marked),
    "result": result_of_an_operation,
    "module that holds a result": WithResult,
    "modules": same_module_twice,
    "storage": lambda: torch.arange(3).untyped_storage(),
    "exception": lambda: ValueError("text"),
}


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.filterwarnings("ignore::UserWarning")  # most of these kinds are experimental, and torch says so
@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_whatever_torch_save_stores_is_stored_the_same_way(make):
    value = make()
    assert saved(snapshot_of([value]).state()) == saved([value])


def test_objects_are_stored_as_they_were_at_the_call():
    module = WithResult()
    sparse = torch.eye(3).to_sparse()
    before = module.weight.detach().clone()
    taken = snapshot_of({"module": module, "sparse": sparse})
    with torch.no_grad():
        module.weight.zero_()
        sparse.values().zero_()
    back = taken.state()
    assert torch.equal(back["module"].weight, before)
    assert torch.equal(back["module"].product, before * 2)
    assert torch.equal(back["sparse"].to_dense(), torch.eye(3))


def test_objects_that_share_memory_share_it_afterwards():
    module = torch.nn.Linear(3, 3)
    module.twin = module.weight
    back = snapshot_of({"module": module, "again": module}).state()
    assert back["again"] is back["module"]
    assert back["module"].twin is back["module"].weight


def test_an_object_that_cannot_be_pickled_is_refused_at_the_call_by_name():
    state = {"fine": ValueError("text"), "loss": {"function": lambda: None}}
    with pytest.raises(UnsupportedStateError, match="^loss/function is a function that cannot be pickled"):
        snapshot_of(state)


@pytest.mark.usefixtures("process_group")
def test_a_distributed_tensor_is_stored():
    tensor = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (1,)), [Shard(0)])
    back = snapshot_of({"d": tensor}).state()["d"]
    assert type(back) is type(tensor)
    assert torch.equal(back.to_local(), tensor.to_local())


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


# CUDA, with fakes of its streams and events, and with a device if there is one.


class FakeCuda:
    """Records what is queued on which stream. Tensors on the host stand for tensors of a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.is_copied = threading.Event()
        self._current = FakeStream(self, "current")
        monkeypatch.setattr(torch.cuda, "Stream", self._make_stream)
        monkeypatch.setattr(torch.cuda, "Event", self._make_event)
        monkeypatch.setattr(torch.cuda, "current_stream", self._current_stream)
        monkeypatch.setattr(snapshot, "split_tensors", self._split)
        monkeypatch.setattr(tensors, "copy_memory", self._copy)

    def _make_stream(self, device: torch.device) -> "FakeStream":
        return FakeStream(self, "copying")

    def _make_event(self, **_: Any) -> "FakeEvent":
        return FakeEvent(self)

    def _current_stream(self, device: torch.device) -> "FakeStream":
        return self._current

    def _split(self, *arguments: Any) -> dict[torch.device, parts.DeviceParts]:
        on_host = parts.split_tensors(*arguments)
        return {torch.device("cuda:0"): on_host[torch.device("cpu")]}

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        # Large tensors are copied in several pieces.
        if self.log[-1] != "copy":
            self.log.append("copy")
        copy_memory(target, source, nbytes)


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.name = name
        self._cuda = cuda

    def wait_stream(self, other: "FakeStream") -> None:
        self._cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "FakeEvent") -> None:
        self._cuda.log.append(f"{self.name} waits for event")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self._cuda.log.append(f"{stream.name} records event")

    def synchronize(self) -> None:
        assert self._cuda.is_copied.wait(60)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    cuda = FakeCuda(monkeypatch)
    yield cuda
    cuda.is_copied.set()


def test_memory_is_on_the_host_whatever_the_default_device(monkeypatch):
    devices: list[torch.device] = []
    make = torch.empty

    def record(*sizes: int, pin_memory: bool, **options: Any) -> torch.Tensor:
        # Only with a CUDA device is there pinned memory.
        assert pin_memory
        made = make(*sizes, **options)
        devices.append(made.device)
        return made

    with torch.device("meta"):
        # Torch collects the functions that a default device affects at their first call, before `empty` is replaced.
        assert torch.empty(0).is_meta
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch, "empty", record)
        assert snapshot.allocate_host(1000).nbytes == 1000
    assert devices == [torch.device("cpu")]


COPY_ON_STREAM = ["copying waits for current", "copy", "copying records event"]


def test_the_current_stream_waits_for_the_copy_of_unguarded_cuda_tensors_during_the_call(cuda):
    tensor = torch.ones(1000)
    taken = snapshot_of({"w": tensor})
    assert cuda.log == [*COPY_ON_STREAM, "current waits for event"]
    cuda.is_copied.set()
    tensor.add_(1)
    assert values_in(taken.state()["w"]) == {1.0}


def test_the_current_stream_waits_for_the_copy_of_guarded_cuda_tensors_in_the_barrier(cuda):
    parameter, optimizer, guard = guarded_parameter()
    taken = snapshot_of({"w": parameter}, guard)
    assert cuda.log == COPY_ON_STREAM
    # The thread that steps does not wait, though the copy is not complete.
    optimizer.step()
    assert cuda.log == [*COPY_ON_STREAM, "current waits for event"]
    # Another stream may be current in the next barrier.
    guard.wait()
    assert cuda.log == [*COPY_ON_STREAM, "current waits for event", "current waits for event"]
    cuda.is_copied.set()
    assert values_in(taken.state()["w"]) == {1.0}


def test_a_change_of_guarded_cuda_tensors_before_the_barrier_tears_the_snapshot(cuda):
    parameter, optimizer, guard = guarded_parameter()
    taken = snapshot_of({"w": parameter}, guard)
    add_one(parameter)
    optimizer.step()
    cuda.is_copied.set()
    with pytest.raises(TornStateError, match="^w changed"):
        taken.wait()


def test_a_change_of_guarded_cuda_tensors_without_a_barrier_tears_the_snapshot(cuda):
    parameter, _, guard = guarded_parameter()
    taken = snapshot_of({"w": parameter}, guard)
    add_one(parameter)
    cuda.is_copied.set()
    with pytest.raises(TornStateError, match="^w changed"):
        taken.wait()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("guarded", [True, False])
def test_cuda_tensors_are_stored_as_they_were_at_the_call(guarded):
    parameter = torch.nn.Parameter(torch.zeros(20_000_000, device="cuda"))
    parameter.grad = -torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    guard = Guard()
    if guarded:
        guard.add(optimizer)
    pool = snapshot_pool(4)
    for number in range(20):
        taken = snapshot_of({"w": parameter, "strided": parameter.detach()[::2]}, guard, pool)
        optimizer.step()
        back = taken.state()
        assert values_in(back["w"]) == {float(number)}
        assert values_in(back["strided"]) == {float(number)}
        taken.release()
