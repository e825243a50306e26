"""The guard: every change of guarded state waits for the copy, and guarding changes nothing else about a model."""

import copy
import gc
import io
import logging
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from slipstream import TornStateError
from slipstream.checkpoint.guard import Guard
from slipstream.checkpoint.snapshot import Snapshot, snapshot_pool, take_snapshot

# Large enough to be copied in the background.
WIDTH = 1100


class FakePending:
    """A snapshot whose copy ends when the test says so; counts how often a barrier waited for it."""

    def __init__(self, on_wait: Callable[[], object] = lambda: None) -> None:
        self.is_complete = False
        self.num_waits = 0
        self._on_wait = on_wait

    def wait_copied(self) -> None:
        self.num_waits += 1
        self._on_wait()


class Net(torch.nn.Module):
    """A model with large weights, buffers and nested modules."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.layer(x)))
        return result


def model_and_optimizer(width: int = WIDTH) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(width)
    # Gives the statistics of the batch norm values that a reset changes.
    model(torch.randn(8, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def snapshot_of(state: Any, guard: Guard) -> Snapshot:
    return take_snapshot(state, guard, snapshot_pool(4), opaque=False)


def copy_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def load_other_weights(module: torch.nn.Module) -> None:
    module.load_state_dict({name: tensor + 1 for name, tensor in module.state_dict().items()})


# Where the promise of a guard allows guarded tensors to change.
GUARDED_CHANGES: dict[str, Callable[[Net, torch.optim.Optimizer, Guard], object]] = {
    "step": lambda model, optimizer, guard: optimizer.step(),
    "load_state_dict of the optimizer": lambda model, optimizer, guard: optimizer.load_state_dict(
        optimizer.state_dict()
    ),
    "load_state_dict of the module": lambda model, optimizer, guard: load_other_weights(model),
    "load_state_dict of a submodule": lambda model, optimizer, guard: load_other_weights(model.layer),
    "wait": lambda model, optimizer, guard: guard.wait(),
}


@pytest.mark.parametrize("change", GUARDED_CHANGES.values(), ids=GUARDED_CHANGES)
def test_guarded_changes_wait_for_the_copy(gate, change):
    model, optimizer = model_and_optimizer()
    guard = Guard()
    guard.add(model, optimizer)
    # Barriers wait in this order. So the copy can only proceed once a barrier was reached.
    opener = FakePending(gate.open)
    guard.watch(opener)
    expected = copy_of(model.state_dict())
    snapshot = snapshot_of(model.state_dict(), guard)
    change(model, optimizer, guard)
    assert opener.num_waits > 0
    assert_equal(snapshot.state(), expected)


def test_a_save_inside_a_step_is_copied_during_the_call(gate):
    model, optimizer = model_and_optimizer()
    guard = Guard()
    guard.add(model, optimizer)
    expected = copy_of(model.state_dict())
    snapshots: list[Snapshot] = []

    def save(*_: Any) -> Any:
        snapshots.append(snapshot_of(model.state_dict(), guard))

    # After the barrier of this step: by a hook that is called after it, and by the closure.
    optimizer.register_step_pre_hook(save)
    optimizer.step(save)
    gate.open()
    for snapshot in snapshots:
        assert_equal(snapshot.state(), expected)
    assert len(snapshots) == 2


def test_a_step_that_raised_stops_deferred_copies_until_a_step_succeeds():
    model, optimizer = model_and_optimizer(width=4)
    guard = Guard()
    guard.add(model, optimizer)

    def fail() -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(fail)
    assert not guard.covered().first
    optimizer.step()
    assert guard.covered().first
    with pytest.raises(ZeroDivisionError):
        optimizer.step(fail)
    # An optimizer that does not exist any more changes nothing.
    del optimizer
    gc.collect()
    assert guard.covered().first


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:Dynamo does not know:UserWarning")
def test_compiled_steps_wait_for_the_copy(gate):
    model, optimizer = model_and_optimizer()
    step = torch.compile(optimizer.step, backend="eager")
    guard = Guard()
    guard.add(model, optimizer)
    step()
    opener = FakePending(gate.open)
    guard.watch(opener)
    expected = copy_of(model.state_dict())
    snapshot = snapshot_of(model.state_dict(), guard)
    step()
    assert opener.num_waits > 0
    assert_equal(snapshot.state(), expected)
    assert guard.covered().first


def test_a_barrier_without_snapshots_does_not_count_as_waiting():
    model, optimizer = model_and_optimizer(width=4)
    guard = Guard()
    guard.add(model, optimizer)
    optimizer.step()
    assert guard.waited_s == 0
    guard.watch(FakePending())
    optimizer.step()
    assert guard.waited_s > 0


def test_two_threads_that_step_two_optimizers_wait_both():
    arrived = threading.Semaphore(0)
    proceed = threading.Event()

    def arrive_and_wait() -> None:
        arrived.release()
        assert proceed.wait(60)

    guard = Guard()
    optimizers = [model_and_optimizer(width=4)[1] for _ in range(2)]
    guard.add(*optimizers)
    guard.watch(FakePending(arrive_and_wait))
    threads = [threading.Thread(target=optimizer.step) for optimizer in optimizers]
    for thread in threads:
        thread.start()
    try:
        # While the first one waits, the second one has to wait, too.
        assert arrived.acquire(timeout=60)
        assert arrived.acquire(timeout=60)
    finally:
        proceed.set()
        for thread in threads:
            thread.join()


def test_a_barrier_that_ctrl_c_interrupted_waits_again():
    def interrupt() -> None:
        if pending.num_waits == 1:
            raise KeyboardInterrupt

    _, optimizer = model_and_optimizer(width=4)
    guard = Guard()
    guard.add(optimizer)
    pending = FakePending(interrupt)
    guard.watch(pending)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.step()
    assert pending.num_waits == 2


def test_barriers_forget_a_snapshot_that_is_complete():
    guard = Guard()
    pending = FakePending()
    guard.watch(pending)
    pending.is_complete = True
    guard.wait()
    guard.wait()
    assert pending.num_waits == 1


def run_compiled(model: Net) -> None:
    torch.compile(model, backend="eager")(torch.randn(8, WIDTH))


def add_to_buffers(model: Net) -> None:
    model.eval()
    for buffer in model.buffers():
        buffer.add_(1)


BUFFER_CHANGES: dict[str, Callable[[Net], object]] = {
    "forward": lambda model: model(torch.randn(8, WIDTH)),
    "compiled forward": run_compiled,
    "reset_running_stats": lambda model: model.norm.reset_running_stats(),
    "by hand in eval mode": add_to_buffers,
}


@pytest.mark.parametrize("change", BUFFER_CHANGES.values(), ids=BUFFER_CHANGES)
def test_buffers_may_change_anywhere_without_waiting(gate, change):
    model, optimizer = model_and_optimizer()
    guard = Guard()
    guard.add(model, optimizer)
    expected = copy_of(model.state_dict())
    snapshot = snapshot_of(model.state_dict(), guard)
    change(model)
    assert guard.waited_s == 0
    assert not torch.equal(model.state_dict()["norm.running_mean"], expected["norm.running_mean"])
    gate.open()
    assert_equal(snapshot.state(), expected)


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_the_old_spectral_norm_may_change_its_vectors_in_a_forward_pass(gate):
    model = torch.nn.utils.spectral_norm(torch.nn.Linear(WIDTH, WIDTH))
    guard = Guard()
    guard.add(model)
    expected = copy_of(model.state_dict())
    snapshot = snapshot_of(model.state_dict(), guard)
    model(torch.randn(8, WIDTH))
    gate.open()
    assert_equal(snapshot.state(), expected)


def test_an_embedding_may_scale_its_weights_in_a_forward_pass(gate):
    embedding = torch.nn.Embedding(WIDTH, WIDTH, max_norm=1.0)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    guard = Guard()
    guard.add(embedding, optimizer)
    expected = copy_of(embedding.state_dict())
    snapshot = snapshot_of(embedding.state_dict(), guard)
    embedding(torch.arange(WIDTH))
    gate.open()
    assert_equal(snapshot.state(), expected)


def test_modules_that_were_added_later_may_change_anywhere(gate):
    model, _ = model_and_optimizer()
    guard = Guard()
    guard.add(model)
    model.extra = torch.nn.Linear(WIDTH, WIDTH)
    expected = copy_of(model.state_dict())
    snapshot = snapshot_of(model.state_dict(), guard)
    with torch.no_grad():
        model.extra.weight.add_(1)
    load_other_weights(model.extra)
    gate.open()
    assert_equal(snapshot.state(), expected)


def test_guarding_again_covers_the_modules_that_were_added(gate):
    model, _ = model_and_optimizer()
    guard = Guard()
    guard.add(model)
    model.extra = torch.nn.Linear(WIDTH, WIDTH)
    guard.add(model)
    pending = FakePending()
    guard.watch(pending)
    load_other_weights(model.extra)
    assert pending.num_waits == 1


def test_guarding_again_covers_parameters_that_were_replaced():
    model, _ = model_and_optimizer(width=4)
    guard = Guard()
    guard.add(model)
    model.head.weight = torch.nn.Parameter(torch.ones(2, 4))
    address = model.head.weight.untyped_storage().data_ptr()
    # Perhaps an optimizer that is not guarded will change it.
    assert address not in guard.covered().first
    guard.add(model)
    assert address in guard.covered().first


def test_replaced_parameters_are_not_guarded_even_if_they_get_the_identities_of_old_ones():
    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(10)]
    guard = Guard()
    guard.add(*layers)
    # Pruning, again and again: a new weight is likely to be where an old one of this layer or another was.
    for _ in range(5):
        for layer in layers:
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
        assert not guard.covered().first


def test_a_guard_keeps_neither_modules_nor_replaced_parameters_alive():
    kept = torch.nn.Linear(4, 4)
    dropped = torch.nn.Linear(4, 4)
    guard = Guard()
    guard.add(kept, dropped)
    references: list[weakref.ref[Any]] = [weakref.ref(kept.weight), weakref.ref(dropped.weight), weakref.ref(dropped)]
    del dropped
    kept.weight = torch.nn.Parameter(torch.ones(2, 4))
    # The next save looks at what the module has now.
    guard.covered()
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_guarding_again_does_not_cover_the_replaced_weight_of_an_embedding_that_scales_it():
    embedding = torch.nn.Embedding(8, 8, max_norm=1.0)
    guard = Guard()
    guard.add(embedding)
    embedding.weight = torch.nn.Parameter(torch.ones(16, 8))
    guard.add(embedding)
    assert not guard.covered().first


def test_torch_can_swap_guarded_tensors_with_others():
    model, optimizer = model_and_optimizer()
    guard = Guard()
    guard.add(model, optimizer)
    expected = copy_of(model.state_dict())
    snapshot = snapshot_of(model.state_dict(), guard)
    guard.wait()
    # As `Module.to` and `load_state_dict` do with tensor subclasses, and with all tensors if torch is set up that way.
    torch.utils.swap_tensors(model.layer.weight, torch.nn.Parameter(torch.zeros(WIDTH, WIDTH)))
    assert_equal(snapshot.state(), expected)
    assert model.layer.weight.untyped_storage().data_ptr() in guard.covered().first
    guard.exclude([model.layer.weight])
    torch.utils.swap_tensors(model.layer.weight, torch.nn.Parameter(torch.ones(WIDTH, WIDTH)))
    assert model.layer.weight.untyped_storage().data_ptr() not in guard.covered().first


def test_a_tensor_that_tore_a_snapshot_is_copied_during_the_call_from_then_on(gate, caplog):
    model, optimizer = model_and_optimizer()
    guard = Guard()
    guard.add(model, optimizer)
    torn = snapshot_of({"model": model.state_dict()}, guard)
    with torch.no_grad():
        model.layer.weight.add_(1)
    gate.open()
    with caplog.at_level(logging.WARNING), pytest.raises(TornStateError, match=r"model/layer\.weight changed while"):
        torn.wait()
    assert [record.getMessage().split(" changed")[0] for record in caplog.records] == ["model/layer.weight"]

    caplog.clear()
    for _ in range(2):
        expected = copy_of(model.state_dict())
        snapshot = snapshot_of({"model": model.state_dict()}, guard)
        with torch.no_grad():
            model.layer.weight.add_(1)
        assert_equal(snapshot.state()["model"], expected)
    assert caplog.records == []


def test_the_other_tensors_stay_guarded_after_a_torn_snapshot(gate):
    model, optimizer = model_and_optimizer()
    guard = Guard()
    guard.add(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torn = snapshot_of(state, guard)
    with torch.no_grad():
        model.layer.weight.add_(1)
    gate.open()
    with pytest.raises(TornStateError):
        torn.wait()
    momentum = optimizer.state[model.layer.weight]["momentum_buffer"]
    assert momentum.untyped_storage().data_ptr() in guard.covered().first
    assert model.layer.weight.untyped_storage().data_ptr() not in guard.covered().first


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved])
def test_a_guarded_module_can_be_copied_and_the_copy_is_not_guarded(duplicate):
    model, _ = model_and_optimizer(width=4)
    guard = Guard()
    guard.add(model)
    pending = FakePending()
    guard.watch(pending)
    twin = duplicate(model)
    assert_equal(twin.state_dict(), model.state_dict())
    load_other_weights(twin)
    assert pending.num_waits == 0
    load_other_weights(model)
    assert pending.num_waits > 0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved])
def test_a_guarded_optimizer_can_be_copied_and_the_copy_is_not_guarded(duplicate):
    _, optimizer = model_and_optimizer(width=4)
    guard = Guard()
    guard.add(optimizer)
    pending = FakePending()
    guard.watch(pending)
    twin = duplicate(optimizer)
    twin.step()
    twin.load_state_dict(optimizer.state_dict())
    assert pending.num_waits == 0
    optimizer.step()
    assert pending.num_waits == 1


class KeepsEverything(torch.optim.SGD):
    """An optimizer that pickles all of its attributes, hooks included."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


def test_a_copy_of_an_optimizer_that_copies_its_hooks_is_not_guarded():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = KeepsEverything([parameter], lr=0.1)
    guard = Guard()
    guard.add(optimizer)
    pending = FakePending()
    guard.watch(pending)
    twin = copy.deepcopy(optimizer)
    twin.param_groups[0]["params"][0].grad = torch.ones(3)
    twin.step()
    assert pending.num_waits == 0


def test_a_pickled_module_loads_where_slipstream_is_not_installed(monkeypatch):
    model = torch.nn.Linear(3, 3)
    guard = Guard()
    guard.add(model)
    content = pickle.dumps(model)
    for name in list(sys.modules):
        if name.partition(".")[0] == "slipstream":
            monkeypatch.setitem(sys.modules, name, None)
    twin = pickle.loads(content)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.weight, model.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_guarded_module_can_be_scripted():
    model, _ = model_and_optimizer(width=4)
    guard = Guard()
    guard.add(model)
    model.eval()
    scripted = torch.jit.script(model)
    x = torch.randn(3, 4)
    assert torch.equal(scripted(x), model(x))


def test_guarding_twice_registers_once():
    model, optimizer = model_and_optimizer(width=4)
    guard = Guard()
    guard.add(optimizer, model, optimizer)
    guard.add(optimizer, model.head)
    pending = FakePending()
    guard.watch(pending)
    optimizer.step()
    assert pending.num_waits == 1
    load_other_weights(model.head)
    assert pending.num_waits == 2


def test_a_guard_that_nobody_refers_to_any_more_has_no_effect():
    model, optimizer = model_and_optimizer(width=4)
    guard = Guard()
    guard.add(optimizer, model)
    pending = FakePending()
    guard.watch(pending)
    del guard
    gc.collect()
    optimizer.step()
    load_other_weights(model)
    assert pending.num_waits == 0


def test_a_snapshot_that_is_kept_does_not_keep_the_guard():
    model, optimizer = model_and_optimizer()
    guard = Guard()
    guard.add(optimizer)
    snapshot = snapshot_of(model.state_dict(), guard)
    snapshot.wait()
    reference = weakref.ref(guard)
    del guard
    # The copying thread refers to it until it ends.
    while reference() is not None:
        threading.Event().wait(0.001)
    assert_equal(snapshot.state(), model.state_dict())


def test_a_guard_that_was_removed_guards_nothing(gate):
    model, optimizer = model_and_optimizer()
    guard = Guard()
    guard.add(model, optimizer)
    guard.remove()
    pending = FakePending()
    guard.watch(pending)
    expected = copy_of(model.state_dict())
    snapshot = snapshot_of(model.state_dict(), guard)
    # No barrier is left to protect the state, so it must have been copied during the call.
    optimizer.step()
    load_other_weights(model)
    assert pending.num_waits == 0
    assert_equal(snapshot.state(), expected)


def test_what_cannot_be_guarded_is_refused_and_nothing_is_registered():
    model, optimizer = model_and_optimizer(width=4)
    guard = Guard()
    pending = FakePending()
    guard.watch(pending)
    with pytest.raises(TypeError, match="guard takes optimizers and modules, not a Tensor"):
        guard.add(optimizer, model, torch.zeros(3))  # type: ignore[arg-type]
    optimizer.step()
    load_other_weights(model)
    assert pending.num_waits == 0


def test_an_optimizer_that_accepts_no_hooks_leaves_nothing_registered():
    class Stubborn(torch.optim.SGD):
        def register_load_state_dict_pre_hook(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError("no hooks")

    model, optimizer = model_and_optimizer(width=4)
    stubborn = Stubborn(model.parameters(), lr=0.1)
    guard = Guard()
    pending = FakePending()
    guard.watch(pending)
    with pytest.raises(NotImplementedError, match="no hooks"):
        guard.add(optimizer, stubborn, model)
    optimizer.step()
    stubborn.step()
    load_other_weights(model)
    assert pending.num_waits == 0
    assert guard.covered().first == {}


def test_a_lazy_module_can_be_guarded_before_it_is_initialized(gate):
    model = torch.nn.Sequential(torch.nn.LazyLinear(WIDTH))
    guard = Guard()
    guard.add(model)
    assert guard.expected_bytes() == 0
    model(torch.zeros(1, WIDTH))
    assert guard.expected_bytes() >= 4 * WIDTH * WIDTH
    expected = copy_of(model.state_dict())
    opener = FakePending(gate.open)
    guard.watch(opener)
    snapshot = snapshot_of(model.state_dict(), guard)
    load_other_weights(model)
    assert opener.num_waits > 0
    assert_equal(snapshot.state(), expected)


def test_a_module_with_a_sparse_parameter_can_be_guarded():
    model, _ = model_and_optimizer()
    model.sparse = torch.nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    guard = Guard()
    guard.add(model)
    snapshot = take_snapshot(model.state_dict(), guard, snapshot_pool(4), opaque=True)
    back = snapshot.state()
    assert torch.equal(back["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(back["head.weight"], model.head.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_part_of_a_module_is_copied_during_the_call(gate):
    model = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(WIDTH, WIDTH)), torch.nn.Linear(WIDTH, WIDTH))
    guard = Guard()
    guard.add(model)
    expected = copy_of(model.state_dict())
    snapshot = snapshot_of(model.state_dict(), guard)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    gate.open()
    assert_equal(snapshot.state(), expected)


@pytest.mark.usefixtures("process_group")
def test_a_sharded_module_can_be_guarded():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.Adam(model.parameters())
    guard = Guard()
    guard.add(model, optimizer)
    weight: Any = model[0].weight
    expected = weight.to_local().clone()
    snapshot = take_snapshot(model.state_dict(), guard, snapshot_pool(4), opaque=True)
    with torch.no_grad():
        weight.add_(1)
    back = snapshot.state()["0.weight"]
    assert type(back) is type(weight.data)
    assert torch.equal(back.to_local(), expected)


def test_the_expected_size_includes_the_moments_that_adam_will_keep():
    parameter = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.Adam([parameter])
    guard = Guard()
    guard.add(optimizer)
    before = guard.expected_bytes()
    assert 12_000 <= before < 13_000
    parameter.grad = torch.ones(1000)
    optimizer.step()
    assert before <= guard.expected_bytes() < 13_000


def test_the_expected_size_has_no_moments_of_frozen_parameters():
    frozen = torch.nn.Parameter(torch.zeros(1000), requires_grad=False)
    optimizer = torch.optim.AdamW([frozen])
    guard = Guard()
    guard.add(optimizer)
    assert guard.expected_bytes() < 5_000
