"""Trainings and evaluations on a real Ray cluster: the results of one process, whatever is killed."""

import functools
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import NavRLPolicy, OrderError, policy_candidate
from slipstream.nav import NavigationConfig, velocity_from_unit
from slipstream.nav.observation import Observation
from slipstream.train.evaluation.jobs import Job, run_jobs
from slipstream.train.evaluation.pilots import Candidate, Pilot, Sensors
from slipstream.train.groups import RaySettings
from tests.cli.conftest import Server, serve
from tests.train.conftest import small
from tests.train.evaluation.conftest import CROWDED, FEW_BOXES, STRAIGHT, fly_straight
from tests.train.evaluation.test_flying import MANY_MAPS, flights_of
from tests.train.ranks import assert_same, content

pytest.importorskip("ray")

# What Ray calls the processes of actors.
ACTOR = b"ray::RolloutActor"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RaySettings]:
    """Settings that name a cluster of one node."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    yield RaySettings(address=cluster.address, actors=2)
    cluster.shutdown()


@pytest.fixture
def slipstream() -> Iterator[Server]:
    """The command line, as in the tests of commands."""
    yield from serve()


def kill_an_actor() -> None:
    """Kill a process that collects rollouts for the cluster."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(ACTOR):
                os.kill(int(folder.name), signal.SIGKILL)
                return
        except (FileNotFoundError, ProcessLookupError):
            # It has ended by itself.
            continue


def test_a_run_is_the_same_on_ray_in_one_process_and_on_both_in_turns(tmp_path, train, cluster):
    plan = ("dist.shards=2", "compress_lidar=true")
    on_ray = (*plan, "rollouts=ray", f"ray.address={cluster.address}")
    seen: list[Mapping[str, float]] = []

    def watch(metrics: Mapping[str, float]) -> None:
        seen.append(metrics)
        if metrics["iteration"] in (1, 5):
            kill_an_actor()

    train("alone", *plan)
    train("both", *on_ray, "ray.actors=2", until=2, watch=watch)
    train("both", *plan, resume=True, until=3)
    train("both", *on_ray, "ray.actors=1", resume=True, watch=watch)
    assert [metrics["ray/restarts"] for metrics in seen] == [0, 1, 0, 0, 1]
    assert seen[-1]["ray/actors"] == 1
    assert_same(content(tmp_path / "both"), content(tmp_path / "alone"))


def test_rollouts_that_are_collected_ahead_on_ray_continue_where_they_were(tmp_path, train, cluster):
    plan = ("dist.shards=2", "rollouts=ray", f"ray.address={cluster.address}", "use_pipelined_collector=true")
    train("whole", *plan, "ray.actors=2")
    train("parts", *plan, "ray.actors=1", until=3)
    train("parts", *plan, "ray.actors=2", resume=True)
    assert_same(content(tmp_path / "parts"), content(tmp_path / "whole"))


def die_once(config: NavigationConfig, marker: Path) -> Pilot:
    """Return a pilot that kills its process in its third step, the first time."""
    steps = iter(range(3))

    def pilot(observation: Observation) -> torch.Tensor:
        if next(steps, None) is None and marker.exists():
            marker.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return fly_straight(observation)

    return pilot


def test_an_evaluation_is_the_same_on_ray_though_one_of_its_processes_is_killed(tmp_path, cluster):
    policy = NavRLPolicy(action_map=velocity_from_unit)
    marker = tmp_path / "die"
    jobs = [
        Job(policy_candidate(policy), MANY_MAPS, num_recorded=3),
        Job(policy_candidate(policy, "sample"), MANY_MAPS, Sensors(lidar_noise_m=0.1)),
        Job(Candidate("mortal", "mortal", functools.partial(die_once, marker=marker)), CROWDED),
    ]
    here = run_jobs(jobs, small(), episodes=520)
    marker.touch()
    shown: dict[str, list[tuple[int, int]]] = {}

    def start(title: str) -> Any:
        calls = shown.setdefault(title, [])
        return lambda ended, total: calls.append((ended, total))

    there = run_jobs(jobs, small(), episodes=520, ray=cluster, start_progress=start)
    assert not marker.exists()
    assert [flights_of(result.flown) for result in there] == [flights_of(result.flown) for result in here]
    assert {calls[-1] for calls in shown.values()} == {(520, 520)}
    assert len(shown) == 3


def fail(_: NavigationConfig) -> Pilot:
    raise ValueError("the pilot is ill")


def test_a_flight_that_fails_on_ray_is_named_with_its_reason(cluster):
    jobs = [Job(STRAIGHT, FEW_BOXES), Job(Candidate("ill", "ill", fail), FEW_BOXES)]
    with pytest.raises(OrderError, match="a simulation of 'Few boxes: ill' failed: ValueError: the pilot is ill"):
        run_jobs(jobs, small(), episodes=16, ray=cluster)


def test_eval_flies_on_ray_and_writes_what_it_writes_without(tmp_path, train, cluster, slipstream):
    train("x", until=1)
    command = ("eval", tmp_path / "x", "--scenario", "through", "--episodes", 8, "--maps", 4)
    here = slipstream.json(*command, "--output", tmp_path / "here")
    there = slipstream.json(
        *command, "rollouts=ray", f"ray.address={cluster.address}", "ray.actors=2", "--output", tmp_path / "there"
    )
    for document in (here, there):
        document.pop("time")
        document["results"][0].pop("steps_per_s")
    assert there == here
    failed = slipstream(*command, "rollouts=ray", "ray.actors=-1")
    assert failed.code == 2
    assert "ray.actors is -1, expected a whole number of at least 0" in failed.err
