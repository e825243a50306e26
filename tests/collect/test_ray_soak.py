"""A hundred kills of every kind, at random moments: nothing is lost, nothing is repeated, and no bit changes."""

import functools
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream import RayDataCollector
from tests.collect.ray_environments import NUM_STEPS, Policy, make_walk, serial_rounds, train

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SHARDS = 4
ACTORS = 4
NUM_KILLS = 100
NUM_ROUNDS = 90
# How many of each kind.
IN_ROLLOUTS = 40
SIGNALS = 26
RAY_KILLS = 26
NODES = 8
ROOM: dict[str, Any] = {"num_cpus": 4, "resources": {"soak": 4}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster whose head takes no actors, with two other nodes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(**ROOM)
    yield cluster
    cluster.shutdown()


def is_actor(pid: int) -> bool:
    """Return whether a process is that of an actor."""
    try:
        return b"RolloutActor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


class Killer:
    """Kills actors and nodes between rounds and during them, and counts what was alive before.

    Args:
        cluster: The cluster, whose head is spared.
        collector: Whose actors to kill.
    """

    def __init__(self, cluster: Any, collector: RayDataCollector) -> None:
        self.cluster = cluster
        self.collector = collector
        self.random = random.Random(1)
        self.kinds = ["signal"] * SIGNALS + ["ray"] * RAY_KILLS + ["node"] * NODES
        self.random.shuffle(self.kinds)
        self.killed = {"signal": 0, "ray": 0, "node": 0}
        self.timers: list[threading.Timer] = []

    def strike(self) -> None:
        """Kill something now or during the next round."""
        if not self.kinds:
            return
        kind = self.kinds.pop()
        if kind == "node":
            self._remove_node()
            return
        actors = self.collector.describe_actors()
        if not actors:
            self.kinds.append(kind)
            return
        actor = self.random.choice(actors)
        kill = functools.partial(self._kill, kind, actor)
        timer = threading.Timer(self.random.choice([0.0, 0.005, 0.02, 0.1]), kill)
        self.timers.append(timer)
        timer.start()

    def _kill(self, kind: str, actor: dict[str, Any]) -> None:
        if not is_actor(actor["pid"]):
            # It has died in a rollout meanwhile, or with its node.
            self.kinds.append(kind)
            return
        if kind == "ray":
            ray.kill(actor["handle"])
        else:
            os.kill(actor["pid"], signal.SIGKILL)
        self.killed[kind] += 1

    def _remove_node(self) -> None:
        """Remove a node with its actors, rollouts and copies of the weights, and add another."""
        node = self.random.choice(sorted(self.cluster.worker_nodes, key=lambda node: node.node_id))
        self.cluster.remove_node(node, allow_graceful=False)
        self.cluster.add_node(**ROOM)
        self.killed["node"] += 1


@functools.cache
def expected(staleness: int) -> list[str]:
    """Return the digests of the rounds of a run in this process, without Ray."""
    policy = Policy()
    return train(serial_rounds(policy, SHARDS, staleness), policy, NUM_ROUNDS)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_hundred_kills_of_all_kinds_lose_nothing_and_repeat_nothing(cluster, tmp_path, staleness):
    assert IN_ROLLOUTS + SIGNALS + RAY_KILLS + NODES == NUM_KILLS
    places = [(shard, step) for shard in range(SHARDS) for step in range(1, NUM_ROUNDS * NUM_STEPS + 1)]
    for shard, step in random.Random(0).sample(places, IN_ROLLOUTS):
        (tmp_path / f"{shard}-{step}").touch()
    policy = Policy()
    collector = RayDataCollector(
        functools.partial(make_walk, deaths=tmp_path),
        policy,
        NUM_STEPS,
        shards=SHARDS,
        actors=ACTORS,
        address=cluster.address,
        resources={"num_cpus": 1, "resources": {"soak": 1}},
        staleness=staleness,
        max_restarts=20,
    )
    killer = Killer(cluster, collector)
    digests: list[str] = []
    with collector:
        rounds = collector.rounds()
        for _ in range(NUM_ROUNDS):
            digests += train(rounds, policy, 1)
            killer.strike()
        for timer in killer.timers:
            timer.join()
        stats = collector.get_stats()
    assert digests == expected(staleness)
    # Each of the processes that were to die in the middle of a rollout has done so once.
    assert not list(tmp_path.iterdir())
    assert killer.killed == {"signal": SIGNALS, "ray": RAY_KILLS, "node": NODES}
    assert stats["num_rollouts"] == NUM_ROUNDS
    assert stats["duplicates"] == 0
    assert stats["restarts"] >= IN_ROLLOUTS
