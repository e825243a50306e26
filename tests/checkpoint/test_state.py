"""Exact resume: a run that was killed and resumed equals the run that was not."""

import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import AsyncCheckpointSaver, StateMismatchError, TrainingState, load_checkpoint

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


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert (one == other).all()
    else:
        assert one == other


def test_a_run_that_was_killed_and_resumed_equals_the_run_that_was_not(tmp_path):
    assert run(tmp_path / "straight", "fresh", "12") == 0
    assert run(tmp_path / "broken", "fresh", "12", "5") == -9
    assert run(tmp_path / "broken", "resume", "12") == 0
    for step in (6, 9, 12):
        name = f"checkpoint_iter_{step}.slip"
        assert_equal(load_checkpoint(tmp_path / "broken" / name), load_checkpoint(tmp_path / "straight" / name))


def test_global_random_numbers_go_on_where_they_were():
    training = TrainingState()
    saved = training.state_dict()
    first = (random.random(), float(np.random.rand()), torch.rand(3).tolist())
    training.load_state_dict(saved)
    assert (random.random(), float(np.random.rand()), torch.rand(3).tolist()) == first


def test_a_training_state_saved_for_torch_loads_without_running_code(tmp_path):
    training = TrainingState(arena=np.random.default_rng(3), noise=torch.Generator().manual_seed(1))
    with AsyncCheckpointSaver() as saver:
        path = saver.save_async(training.state_dict(), tmp_path / "c.pt").result().path
    training.load_state_dict(load_checkpoint(path))


def test_random_numbers_are_left_alone_when_not_wanted():
    assert TrainingState(rng=False, counters={"n": 1}).state_dict() == {"counters": {"n": 1}}


def test_a_checkpoint_of_another_model_is_refused_with_a_list_and_nothing_changes():
    small = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    large = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.LayerNorm(4))
    saved = TrainingState(model=large, extra={}).state_dict()
    before = {key: value.clone() for key, value in small.state_dict().items()}
    with pytest.raises(StateMismatchError) as caught:
        TrainingState(model=small, optimizer=torch.optim.Adam(small.parameters())).load_state_dict(saved)
    message = str(caught.value)
    for part in (
        "missing optimizer",
        "unexpected extra",
        "model/0.weight has shape [3, 2], the checkpoint [4, 2]",
        "model/1.weight has shape [1, 3], the checkpoint [4]",
    ):
        assert part in message
    assert_equal(small.state_dict(), before)


def test_an_optimizer_of_other_parameters_is_refused():
    def adam(*sizes: int) -> torch.optim.Optimizer:
        parameters = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
        optimizer = torch.optim.Adam(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer

    saved = TrainingState(optimizer=adam(3, 4)).state_dict()
    with pytest.raises(StateMismatchError, match=r"optimizer has parameter groups of \[3\], the checkpoint of \[2\]"):
        TrainingState(optimizer=adam(3, 4, 5)).load_state_dict(saved)
    with pytest.raises(StateMismatchError, match=r"optimizer/1 has shape \[5\], the checkpoint \[4\]"):
        TrainingState(optimizer=adam(3, 5)).load_state_dict(saved)


def test_a_long_list_of_differences_is_cut_short():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))
    with pytest.raises(StateMismatchError, match="and 32 more"):
        TrainingState(rng=False, model=model).load_state_dict({"model": {}})


def test_something_without_state_is_refused_by_name():
    with pytest.raises(TypeError, match="epoch is a int: expected something with state_dict"):
        TrainingState(epoch=3)


def test_the_random_numbers_of_python_continue_from_a_checkpoint():
    training = TrainingState()
    random.seed(3)
    state = training.state_dict()
    expected = [random.random() for _ in range(3)]
    training.load_state_dict(state)
    assert [random.random() for _ in range(3)] == expected
