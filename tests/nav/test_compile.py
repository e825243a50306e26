"""Compiled and plain execution agree, and a compiler that does not work costs one sentence."""

import logging
from typing import Any

import pytest
import torch

from slipstream import NavigationConfig
from slipstream.nav import Simulation
from slipstream.nav import compile as compiling


def working_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


@pytest.mark.skipif(not working_compiler(), reason="there is no C++ compiler here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dynamics", ["lag", pytest.param("hummingbird", marks=pytest.mark.slow)])
def test_a_compiled_simulation_flies_like_a_plain_one(dynamics):
    settings: dict[str, Any] = {"num_envs": 48, "dynamics": dynamics, "map_seed": 2}
    plain = Simulation(NavigationConfig(**settings, compile="false"))
    compiled = Simulation(NavigationConfig(**settings, compile="true"))
    generator = torch.Generator().manual_seed(0)
    inside = torch.rand(48, 3, generator=generator) * torch.tensor([40.0, 40.0, 2.5]) - torch.tensor([20.0, 20.0, -0.5])
    for each in (plain, compiled):
        each.drone = each.drone._replace(position_m=inside.clone())
    for _ in range(4):
        command = torch.rand(48, 3, generator=generator) * 4 - 2
        expected, found = plain.step(command), compiled.step(command)
        for one, other in (
            (expected.observation, found.observation),
            (expected.verdict, found.verdict),
            (expected.progress, found.progress),
            (plain.drone, compiled.drone),
        ):
            for mine, others in zip(one, other, strict=True):
                torch.testing.assert_close(mine, others, atol=2e-4, rtol=1e-4)


@pytest.fixture
def failing_compiler(monkeypatch):
    def compile_nothing(function, **_):
        def fail(*args, **kwargs):
            raise RuntimeError("g++: not found\nand a page of output")

        return fail

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(compiling, "_broken", False)


def test_where_the_compiler_does_not_work_auto_says_so_in_one_sentence_and_goes_on(failing_compiler, caplog):
    settings: dict[str, Any] = {"num_envs": 256, "num_static_obstacles": 20, "num_dynamic_obstacles": 8}
    plain = Simulation(NavigationConfig(**settings, compile="false"))
    auto = Simulation(NavigationConfig(**settings, compile="auto"))
    with caplog.at_level(logging.WARNING, logger="slipstream"):
        for _ in range(3):
            expected, found = plain.step(torch.ones(256, 3)), auto.step(torch.ones(256, 3))
            assert torch.equal(expected.verdict.reward, found.verdict.reward)
    assert [record.getMessage() for record in caplog.records] == [
        "torch.compile does not work here, so the simulation runs without it: g++: not found"
    ]


def test_where_the_compiler_does_not_work_true_is_an_error(failing_compiler):
    sim = Simulation(NavigationConfig(num_envs=2, num_static_obstacles=0, num_dynamic_obstacles=0, compile="true"))
    with pytest.raises(RuntimeError, match="g\\+\\+: not found"):
        sim.step(torch.zeros(2, 3))


def test_a_wrong_call_is_an_error_and_no_proof_of_a_broken_compiler(failing_compiler, caplog):
    sim = Simulation(NavigationConfig(num_envs=256, num_static_obstacles=0, num_dynamic_obstacles=0))
    with pytest.raises((RuntimeError, ValueError)):
        sim.step(torch.zeros(256, 7))
    assert not caplog.records


def test_few_environments_are_not_compiled_unless_asked_for(failing_compiler):
    sim = Simulation(NavigationConfig(num_envs=255, num_static_obstacles=0, num_dynamic_obstacles=0, compile="auto"))
    sim.step(torch.zeros(255, 3))
