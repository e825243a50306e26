"""Exact resume: a run that was killed and resumed equals the run that was not, and a failed load changes nothing."""

import collections
import copy
import random
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slipstream
from slipstream import AsyncCheckpointSaver, StateMismatchError, TrainingState, UnsupportedStateError
from tests.checkpoint.parts import (
    FAILURES,
    Agent,
    Extra,
    Locked,
    assert_nothing_changes,
    content,
    everything,
    make_part,
    train,
)

RUN = """
    import random, sys
    import numpy as np, torch
    from slipstream import CheckpointManager, TrainingState

    folder, resume, stop = sys.argv[1], sys.argv[2] == "resume", int(sys.argv[3])
    torch.manual_seed(0); np.random.seed(0); random.seed(0)
    torch.set_num_threads(1)
    layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers)
    actor = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    critic = torch.optim.SGD(model[3].parameters(), lr=1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(actor, 20)
    noise = torch.Generator().manual_seed(5)
    arena = np.random.default_rng(6)
    counters = {"step": 0, "losses": []}
    parts = {"actor": actor, "critic": critic, "schedule": schedule, "noise": noise, "arena": arena}
    training = TrainingState(model=model, counters=counters, **parts)
    with CheckpointManager(folder, keep_last=None) as manager:
        manager.guard(actor, critic, model)
        if resume:
            training.load_state_dict(manager.restore().state)
        while counters["step"] < stop:
            inputs = torch.randn(16, 8) + torch.randn(16, 8, generator=noise) + float(arena.normal()) + random.random()
            loss = (model(inputs) - float(np.random.rand())).square().mean()
            loss.backward()
            for optimizer in (actor, critic):
                optimizer.step(); optimizer.zero_grad()
            schedule.step()
            counters["step"] += 1
            counters["losses"].append(loss.item())
            manager.save(counters["step"], training.state_dict())
            if len(sys.argv) > 4 and counters["step"] == int(sys.argv[4]):
                import os, signal
                manager.flush()
                os.kill(os.getpid(), signal.SIGKILL)
"""


def run(folder: Path, *arguments: str) -> int:
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(folder), *arguments]
    return subprocess.run(command, check=False, timeout=200).returncode


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(FAILURES)), min_size=1, max_size=6),
    broken=st.integers(0, 5),
    point=st.integers(0, 15),
    rng=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_load_that_fails_anywhere_changes_nothing_anywhere(kinds, broken, point, rng, seed):
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)
    saved_parts = {f"{kind}_{number}": make_part(kind) for number, kind in enumerate(kinds)}
    saved = copy.deepcopy(TrainingState(rng=rng, **saved_parts).state_dict())
    parts = {name: make_part(name.split("_")[0]) for name in saved_parts}
    name = list(parts)[broken % len(parts)]
    spoilt = FAILURES[name.split("_")[0]](parts[name], saved[name], point)
    error = assert_nothing_changes(parts, {**saved, name: spoilt}, match=name, rng=rng)
    assert "nothing was changed" in str(error)


@settings(max_examples=30, deadline=None)
@given(kinds=st.lists(st.sampled_from(sorted(FAILURES)), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_a_load_that_does_not_fail_restores_everything(kinds, seed):
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)
    saved_parts = {f"{kind}_{number}": make_part(kind) for number, kind in enumerate(kinds)}
    saved = copy.deepcopy(TrainingState(**saved_parts).state_dict())
    expected = content(saved)
    training = TrainingState(**{name: make_part(name.split("_")[0]) for name in saved_parts})
    training.load_state_dict(saved)
    assert content(training.state_dict()) == expected


def test_a_run_that_was_killed_and_resumed_equals_the_run_that_was_not(tmp_path):
    assert run(tmp_path / "straight", "fresh", "12") == 0
    assert run(tmp_path / "broken", "fresh", "12", "5") == -9
    assert run(tmp_path / "broken", "resume", "12") == 0
    for step in (6, 9, 12):
        name = f"checkpoint_iter_{step}.slip"
        resumed = slipstream.load_checkpoint(tmp_path / "broken" / name)
        assert content(resumed) == content(slipstream.load_checkpoint(tmp_path / "straight" / name))


def test_global_random_numbers_continue_where_they_were():
    training = TrainingState()
    random.gauss(0, 1)  # leaves a second number for the next call, which is part of the state
    saved = training.state_dict()
    first = (random.gauss(0, 1), random.random(), float(np.random.rand()), torch.rand(3).tolist())
    training.load_state_dict(saved)
    assert (random.gauss(0, 1), random.random(), float(np.random.rand()), torch.rand(3).tolist()) == first


def test_a_training_state_saved_for_torch_loads_without_running_code(tmp_path):
    training = TrainingState(arena=np.random.default_rng(3), noise=torch.Generator().manual_seed(1))
    with slipstream.AsyncCheckpointSaver() as saver:
        path = saver.save_async(training.state_dict(), tmp_path / "c.pt").result().path
    training.load_state_dict(slipstream.load_checkpoint(path))


def test_random_numbers_are_left_alone_when_not_wanted():
    assert TrainingState(rng=False, counters={"n": 1}).state_dict() == {"counters": {"n": 1}}


@pytest.mark.parametrize("rng", [torch.Generator(), np.random.default_rng(0), 1, None, "yes"])
def test_a_generator_passed_as_rng_is_refused_with_a_hint(rng):
    with pytest.raises(TypeError, match=r"expected True or False.*TrainingState\(noise=generator\)"):
        TrainingState(rng=rng)
    with pytest.raises(TypeError, match="under another name"):
        TrainingState(rng=rng, counters={})


def test_a_generator_under_another_name_is_restored():
    noise = torch.Generator().manual_seed(3)
    training = TrainingState(noise=noise, rng=False)
    saved = training.state_dict()
    first = torch.rand(4, generator=noise)
    training.load_state_dict(saved)
    assert torch.equal(torch.rand(4, generator=noise), first)


def test_a_part_may_have_any_name_but_rng():
    parts: dict[str, Any] = {"self": {"n": 1}, "state": {"n": 2}, "a b/c": {"n": 3}}
    training = TrainingState(rng=False, **parts)
    training.load_state_dict({name: {"n": 9} for name in parts})
    assert parts == {name: {"n": 9} for name in parts}


@pytest.mark.parametrize("part", [3, None, torch.nn.Linear, [torch.zeros(1)]])
def test_something_without_state_is_refused_by_name(part):
    with pytest.raises(TypeError, match="epoch is a .*, expected something with state_dict"):
        TrainingState(epoch=part)


def test_a_part_that_cannot_give_its_state_is_named():
    class Broken(Agent):
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("weights")

    with pytest.raises(UnsupportedStateError, match="the state of critic cannot be collected: KeyError") as caught:
        TrainingState(actor=Agent(), critic=Broken()).state_dict()
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(UnsupportedStateError, match="the state of counters cannot be collected"):
        TrainingState(counters={"lock": threading.Lock()}).state_dict()


@pytest.mark.parametrize("state", [None, [], 3, "text"])
def test_what_is_not_a_state_at_all_is_refused(state):
    assert_nothing_changes({"counters": {"n": 1}}, state, match="expected a dict of parts by name")


def test_a_loaded_scheduler_does_not_change_the_state_that_was_loaded():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2])
    counters = {"losses": [1.0]}
    training = TrainingState(rng=False, schedule=schedule, counters=counters)
    saved = copy.deepcopy(training.state_dict())
    before = copy.deepcopy(saved)
    training.load_state_dict(saved)
    schedule.milestones[9] += 1
    counters["losses"].append(2.0)
    assert saved == before


def test_a_gradient_scaler_is_put_back_when_a_later_part_fails():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    saved = {"scaler": {**scaler.state_dict(), "scale": 4.0}, "agent": Agent().state_dict()}
    agent = Agent()
    agent.fails_at = 3
    assert_nothing_changes({"scaler": scaler, "agent": agent}, saved, match="agent failed", rng=False)
    assert scaler.get_scale() == 8.0


def test_two_parts_that_share_a_module_are_saved_and_restored_together():
    shared = torch.nn.Linear(2, 2)
    agent = Agent()
    agent.net = shared
    parts = {"model": shared, "same": shared, "agent": agent, "wrapped": torch.nn.Sequential(shared)}
    saved = copy.deepcopy(TrainingState(rng=False, **parts).state_dict())
    with torch.no_grad():
        shared.weight.zero_()
    agent.fails_at = 5
    assert_nothing_changes(parts, saved, match="agent failed with KeyError", rng=False)
    agent.fails_at = -1
    TrainingState(rng=False, **parts).load_state_dict(saved)
    assert torch.equal(agent.net.weight, saved["model"]["weight"])


def test_tied_weights_stay_tied_after_a_load_that_failed():
    first = torch.nn.Linear(2, 2)
    second = torch.nn.Linear(2, 2)
    second.weight = first.weight
    model = torch.nn.Sequential(first, second, Extra())
    saved = copy.deepcopy(TrainingState(rng=False, model=model).state_dict())
    saved["model"]["2._extra_state"] = "broken"
    with torch.no_grad():
        first.weight.fill_(3)
    error = assert_nothing_changes({"model": model}, saved, match="model failed with ValueError: broken", rng=False)
    assert isinstance(error.__cause__, ValueError)
    assert second.weight is first.weight


def test_a_lazy_module_is_restored_and_is_lazy_again_after_a_load_that_failed():
    saved = TrainingState(rng=False, model=torch.nn.Linear(3, 2), agent=Agent()).state_dict()
    agent = Agent()
    agent.fails_at = 8
    lazy = torch.nn.LazyLinear(2)
    assert_nothing_changes({"model": lazy, "agent": agent}, saved, match="agent failed", rng=False)
    assert isinstance(lazy.weight, torch.nn.parameter.UninitializedParameter)
    agent.fails_at = -1
    TrainingState(rng=False, model=lazy, agent=agent).load_state_dict(saved)
    assert torch.equal(lazy.weight, saved["model"]["weight"])
    assert lazy(torch.ones(1, 3)).shape == (1, 2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_scripted_module_is_restored_and_put_back():
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    saved = TrainingState(rng=False, model=torch.nn.Sequential(torch.nn.Linear(3, 2)), agent=Agent()).state_dict()
    agent = Agent()
    agent.fails_at = 8
    before = content(scripted.state_dict())
    with pytest.raises(StateMismatchError, match="nothing was changed: agent failed"):
        TrainingState(rng=False, model=scripted, agent=agent).load_state_dict(saved)
    assert content(scripted.state_dict()) == before
    TrainingState(rng=False, model=scripted, agent=Agent()).load_state_dict(saved)
    assert content(scripted.state_dict()) == content(saved["model"])


def test_parameters_that_torch_swaps_while_loading_are_put_back():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = TrainingState(rng=False, model=torch.nn.Linear(3, 2), agent=Agent()).state_dict()
    agent = Agent()
    agent.fails_at = 4
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert_nothing_changes({"model": model, "agent": agent}, saved, match="agent failed", rng=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert optimizer.param_groups[0]["params"][0] is model.weight


@pytest.mark.parametrize("hook", ["pre", "post"])
def test_a_hook_that_fails_while_a_module_loads_changes_nothing(hook):
    def refuse(*arguments: Any) -> None:
        raise RuntimeError("refused\nby a hook")

    first = torch.nn.Linear(2, 2)
    second = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(first, second)
    saved = copy.deepcopy(TrainingState(rng=False, model=model, counters={}).state_dict())
    with torch.no_grad():
        first.weight.zero_()
    getattr(second, f"register_load_state_dict_{hook}_hook")(refuse)
    parts = {"model": model, "counters": {"n": 1}}
    assert_nothing_changes(parts, saved, match="model failed with RuntimeError: refused by a hook", rng=False)


def test_a_hook_that_renames_what_a_module_saves_changes_nothing():
    def rename(module: Any, state: Any, prefix: str, metadata: Any) -> Any:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")

    first = torch.nn.Linear(2, 2)
    second = torch.nn.Linear(2, 2)
    second.register_state_dict_post_hook(rename)
    model = torch.nn.Sequential(first, second)
    saved = copy.deepcopy(TrainingState(rng=False, model=model).state_dict())
    with torch.no_grad():
        first.weight.zero_()
    # There is no hook that would undo the name when it is loaded.
    assert_nothing_changes({"model": model}, saved, match="model failed with RuntimeError", rng=False)


def test_a_hook_that_renames_what_an_older_version_saved_is_asked():
    def rename(module: Any, state: Any, prefix: str, *arguments: Any) -> None:
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    first = torch.nn.Linear(2, 2)
    second = torch.nn.Linear(2, 2)
    second.register_load_state_dict_pre_hook(rename)
    model = torch.nn.Sequential(first, second)
    saved = copy.deepcopy(model.state_dict())
    saved["1.kernel"] = saved.pop("1.weight") + 1
    TrainingState(rng=False, model=model).load_state_dict({"model": saved})
    assert torch.equal(second.weight, saved["1.kernel"])
    saved["1.gain"] = saved.pop("1.kernel") + 1
    saved["0.weight"] = saved["0.weight"] + 1
    assert_nothing_changes({"model": model}, {"model": saved}, match='Missing key.*"1.weight"', rng=False)


def test_an_optimizer_that_exchanges_the_state_of_its_parameters_is_put_back():
    class Exchanging(torch.optim.Adam):
        def load_state_dict(self, state_dict: Any) -> None:
            entries = list(self.state.items())
            self.state.clear()
            self.state.update(reversed(entries))
            raise RuntimeError("exchanged")

    model = torch.nn.Linear(3, 2)
    optimizer = Exchanging(model.parameters())
    train(model, optimizer)
    saved = TrainingState(rng=False, optimizer=optimizer).state_dict()
    assert_nothing_changes({"optimizer": optimizer}, saved, match="optimizer failed with RuntimeError", rng=False)


def test_a_part_in_a_file_is_put_back_by_its_earlier_state(tmp_path):
    class Table:
        def __init__(self, name: str) -> None:
            self.rows = np.memmap(tmp_path / name, np.float32, "w+", shape=(4,))

        def state_dict(self) -> dict[str, Any]:
            return {"count": float(self.rows[0])}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.rows[0] = state["count"]

    table = Table("a")
    table.rows[:] = [1, 2, 3, 4]
    agent = Agent()
    agent.fails_at = 3
    saved = TrainingState(rng=False, table=Table("b"), agent=agent).state_dict()
    assert_nothing_changes({"table": table, "agent": agent}, saved, match="agent failed", rng=False)
    assert table.rows.tolist() == [1, 2, 3, 4]


def test_what_cannot_be_written_to_is_put_back_as_well():
    model = torch.nn.Linear(2, 2)
    model.register_buffer("constant", torch.zeros(1).expand(3))
    saved = TrainingState(rng=False, model=copy.deepcopy(model)).state_dict()
    with torch.no_grad():
        model.weight.zero_()
    assert_nothing_changes({"model": model}, saved, match="model failed with RuntimeError", rng=False)


@pytest.mark.parametrize(
    "member", [random.SystemRandom(), np.ma.masked_array([1.0, 2.0], [False, True])], ids=["system", "masked"]
)
def test_a_part_with_a_member_that_cannot_be_copied_is_put_back_by_its_earlier_state(member):
    class Owner:
        def __init__(self) -> None:
            self.member = member
            self.mask = [False, True]

        def state_dict(self) -> dict[str, Any]:
            return {"mask": self.mask}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.mask = state["mask"]
            if isinstance(self.member, np.ma.MaskedArray):
                self.member.mask = self.mask

    owner = Owner()
    agent = Agent()
    agent.fails_at = 3
    saved = {"owner": {"mask": [True, True]}, "agent": Agent().state_dict()}
    assert_nothing_changes({"owner": owner, "agent": agent}, saved, match="agent failed", rng=False)
    assert owner.mask == [False, True]
    if isinstance(member, np.ma.MaskedArray):
        assert member.mask.tolist() == [False, True]


def test_sparse_parameters_are_put_back():
    model = torch.nn.Module()
    with torch.sparse.check_sparse_tensor_invariants():
        model.register_buffer("table", torch.eye(3).to_sparse())
        saved = {"model": {"table": 2 * torch.ones(3, 3).to_sparse()}, "agent": Agent().state_dict()}
        agent = Agent()
        agent.fails_at = 2
        assert_nothing_changes({"model": model, "agent": agent}, saved, match="agent failed", rng=False)


def test_a_dict_keeps_its_identity_and_that_of_its_parameters():
    alpha = torch.nn.Parameter(torch.zeros(1))
    inner = {"best": 1.0}
    counters: dict[str, Any] = {"alpha": alpha, "inner": inner, "old": 1}
    training = TrainingState(rng=False, counters=counters)
    saved = {"alpha": torch.ones(1), "inner": {"best": 2.0}, "new": [1]}
    training.load_state_dict({"counters": saved})
    assert counters == {"alpha": alpha, "inner": {"best": 2.0}, "new": [1]}
    assert counters["alpha"] is alpha
    assert counters["inner"] is inner
    assert alpha.item() == 1
    problem = r"counters/alpha has shape \[1\], the checkpoint \[2\]"
    assert_nothing_changes({"counters": counters}, {"counters": {"alpha": torch.ones(2)}}, match=problem, rng=False)


def test_a_dict_does_not_lose_a_parameter_that_the_checkpoint_lacks():
    counters = {"inner": {"alpha": torch.nn.Parameter(torch.zeros(1))}, "n": 1}
    saved = {"counters": {"inner": {}, "n": 2}}
    assert_nothing_changes({"counters": counters}, saved, match="missing counters/inner/alpha", rng=False)


@pytest.mark.parametrize("saved", [None, 3, [("n", 1)]])
def test_a_dict_takes_only_a_dict(saved):
    assert_nothing_changes({"counters": {"n": 1}}, {"counters": saved}, match="counters is a", rng=False)


def test_a_counter_is_put_back_although_it_adds_up_when_it_is_updated():
    counts = collections.Counter(a=3)
    agent = Agent()
    agent.fails_at = 1
    saved = TrainingState(rng=False, counts=collections.Counter(b=2), agent=agent).state_dict()
    assert_nothing_changes({"counts": counts, "agent": agent}, saved, match="agent failed", rng=False)
    assert counts == {"a": 3}


@pytest.mark.parametrize("file_format", ["native", "pt"])
def test_counters_and_default_dicts_are_stored_and_keep_their_type(tmp_path, file_format):
    def make() -> dict[str, Any]:
        wins: dict[str, int] = collections.defaultdict(int)
        return {"wins": wins, "runs": {"seen": collections.Counter()}}

    source = make()
    source["wins"]["alice"] += 2
    source["runs"]["seen"].update("aab")
    with AsyncCheckpointSaver() as saver:
        state = TrainingState(**source).state_dict()
        saver.save_async(state, tmp_path / "checkpoint", compress=False, format=file_format)
    target = make()
    TrainingState(**target).load_state_dict(slipstream.load_checkpoint(tmp_path / "checkpoint"))
    assert target == source
    target["wins"]["bob"] += 1
    target["runs"]["seen"].update("a")
    assert target["runs"]["seen"]["a"] == 3


def test_an_error_of_the_same_kind_from_a_part_is_kept_as_the_cause():
    class Picky(Agent):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = -1
            raise StateMismatchError("this is the state of a cat")

    saved = {"pet": Agent().state_dict()}
    error = assert_nothing_changes({"pet": Picky()}, saved, match="pet failed with .*the state of a cat", rng=False)
    assert str(error.__cause__) == "this is the state of a cat"


def test_an_interrupt_while_a_part_loads_is_undone_and_passed_on():
    class Interrupted(Agent):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.table.zero_()
            raise KeyboardInterrupt

    parts = {"model": torch.nn.Linear(2, 2), "agent": Interrupted()}
    saved = TrainingState(rng=False, model=torch.nn.Linear(2, 2), agent=Agent()).state_dict()
    before = everything(parts)
    with pytest.raises(KeyboardInterrupt):
        TrainingState(rng=False, **parts).load_state_dict(saved)
    assert everything(parts) == before


def test_a_part_that_refuses_even_its_earlier_state_is_named():
    class Stubborn(Locked):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.second = 0.5
            raise RuntimeError("never")

    model = torch.nn.Linear(2, 2)
    saved = TrainingState(rng=False, model=torch.nn.Linear(2, 2), robot=Locked()).state_dict()
    before = content(model.state_dict())
    with pytest.raises(StateMismatchError, match="not everything could be put back: robot refused its earlier state"):
        TrainingState(rng=False, model=model, robot=Stubborn()).load_state_dict(saved)
    assert content(model.state_dict()) == before


def test_the_code_of_a_part_that_was_not_reached_does_not_run():
    class Watched(Locked):
        num_loads = 0

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.num_loads += 1
            super().load_state_dict(state)

    agent = Agent()
    agent.fails_at = 0
    robot = Watched()
    saved = TrainingState(rng=False, agent=Agent(), robot=Locked()).state_dict()
    assert_nothing_changes({"agent": agent, "robot": robot}, saved, match="agent failed", rng=False)
    assert robot.num_loads == 0


def test_a_part_without_a_state_before_its_first_load_can_be_loaded():
    class Late(Locked):
        is_ready = False

        def state_dict(self) -> dict[str, Any]:
            if not self.is_ready:
                raise RuntimeError("not ready")
            return super().state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.is_ready = True

    saved = TrainingState(rng=False, robot=Locked()).state_dict()
    robot = Late()
    TrainingState(rng=False, robot=robot).load_state_dict(saved)
    assert robot.second == saved["robot"]["second"]


@pytest.mark.parametrize("is_guarded", [True, False])
def test_loading_what_torch_can_check_takes_no_copy_of_the_model(is_guarded):
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    training = TrainingState(model=model, optimizer=optimizer, schedule=schedule, counters={"n": 1})
    saved = copy.deepcopy(training.state_dict())
    allocated = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not re.search("detach|copy_", str(func)):
                allocated.append(result.untyped_storage().nbytes())
            return result

    with AsyncCheckpointSaver() as saver:
        if is_guarded:
            saver.guard(model, optimizer)
        with Watch():
            training.load_state_dict(saved)
    # Random states take 5 kB, a copy of the weights 4 MB.
    assert sum(allocated) < 100_000
