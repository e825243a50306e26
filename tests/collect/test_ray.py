"""Rollouts over real Ray: whatever is killed, the learner trains on the bits that it would have trained on anyway."""

import functools
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import CheckpointManager, ConfigurationError, OrderError, RayDataCollector
from slipstream import collect as collect_package
from slipstream.collect.crew import Crew
from tests.collect.ray_environments import (
    NUM_ENVS,
    NUM_STEPS,
    PendulumPolicy,
    Policy,
    digest,
    learn,
    make_broken,
    make_pendulum,
    make_waiting,
    make_walk,
    serial_rounds,
    train,
)

ray = pytest.importorskip("ray")

ROOT = Path(__file__).parents[2]
NUM_ROUNDS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of one node with room for six actors, to which tests may add nodes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 6, "include_dashboard": False})
    # Workers find this package's tests by the path of the driver.
    yield cluster
    cluster.shutdown()


@pytest.fixture
def collect(cluster) -> Iterator[Any]:
    """Make collectors that use the cluster, and end them."""
    made = []

    def make(policy: Any, make_env: Any = make_walk, *, shards: Any = 3, actors: int = 2, **options: Any) -> Any:
        collector = RayDataCollector(
            make_env, policy, NUM_STEPS, shards=shards, actors=actors, address=cluster.address, **options
        )
        made.append(collector)
        return collector

    yield make
    for collector in made:
        collector.shutdown()


@functools.cache
def expected(staleness: int = 0, number: int = NUM_ROUNDS) -> list[str]:
    """Return the digests of the rounds of a run in this process."""
    policy = Policy()
    return train(serial_rounds(policy, 3, staleness), policy, number)


@pytest.mark.parametrize(("actors", "staleness"), [(1, 0), (3, 0), (2, 1), (2, 2)])
def test_actors_collect_the_rollouts_of_a_single_process(collect, actors, staleness):
    policy = Policy()
    collector = collect(policy, actors=actors, staleness=staleness)
    assert train(collector.rounds(), policy, NUM_ROUNDS) == expected(staleness)
    stats = collector.get_stats()
    assert (stats["redone"], stats["restarts"], stats["duplicates"]) == (0, 0, 0)
    assert stats["num_actors"] == actors
    assert stats["bytes_received"] > 0


def test_iterating_yields_all_shards_as_one_batch(collect):
    with collect(Policy(), total_rollouts=2) as collector:
        batches = list(collector)
    assert [batch.batch_size for batch in batches] == [torch.Size([3 * NUM_ENVS, NUM_STEPS])] * 2
    with pytest.raises(RuntimeError, match="shut down"):
        collector.collect()


@pytest.mark.parametrize("staleness", [0, 1])
def test_processes_that_are_killed_in_the_middle_of_rollouts_change_nothing(collect, tmp_path, staleness):
    # Shard 0 dies in the first step of all, shard 1 in the last of a rollout, shard 2 twice in one rollout.
    for death in ("0-1", "1-10", "2-7", "2-8"):
        (tmp_path / death).touch()
    policy = Policy()
    collector = collect(policy, functools.partial(make_walk, deaths=tmp_path), staleness=staleness)
    assert train(collector.rounds(), policy, NUM_ROUNDS) == expected(staleness)
    assert not list(tmp_path.iterdir())
    stats = collector.get_stats()
    assert (stats["redone"], stats["duplicates"]) == (4, 0)


def test_actors_that_ray_kills_between_rounds_are_replaced(collect):
    policy = Policy()
    collector = collect(policy)
    digests = []
    rounds = collector.rounds()
    for _ in range(NUM_ROUNDS):
        digests += train(rounds, policy, 1)
        for actor in collector.describe_actors():
            ray.kill(actor["handle"])
    assert digests == expected()
    assert collector.get_stats()["restarts"] >= 2


def test_a_node_that_vanishes_takes_nothing_with_it(cluster, collect):
    node = cluster.add_node(num_cpus=2, resources={"elsewhere": 2})
    policy = Policy()
    collector = collect(policy, staleness=1, resources={"num_cpus": 1, "resources": {"elsewhere": 1}})
    rounds = collector.rounds()
    digests = train(rounds, policy, 2)
    assert len({actor["node"] for actor in collector.describe_actors()}) == 1
    # With it go the actors and the rollouts of the round ahead.
    cluster.remove_node(node, allow_graceful=False)
    spare = cluster.add_node(num_cpus=2, resources={"elsewhere": 2})
    digests += train(rounds, policy, NUM_ROUNDS - 2)
    assert digests == expected(staleness=1)
    assert collector.get_stats()["restarts"] >= 2
    collector.shutdown()
    cluster.remove_node(spare)


def patch_wait(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Change what arrives from the network."""
    wait = Crew.wait
    monkeypatch.setattr(Crew, "wait", lambda crew: change(wait(crew)))


def test_answers_that_arrive_twice_are_used_once(collect, monkeypatch):
    patch_wait(monkeypatch, lambda results: [*results, *results])
    policy = Policy()
    collector = collect(policy)
    assert train(collector.rounds(), policy, NUM_ROUNDS) == expected()
    assert collector.get_stats()["duplicates"] == 3 * NUM_ROUNDS


def test_answers_that_are_damaged_on_the_way_are_collected_again(collect, monkeypatch):
    random_bytes = random.Random(0)
    damaged: list[Any] = []

    def damage(results: list[Any]) -> list[Any]:
        changed = []
        for result in results:
            if isinstance(result, tuple) and len(damaged) < 5:
                order, answer = result
                position = random_bytes.randrange(len(answer))
                flipped = bytes([answer[position] ^ 255])
                changed.append((order, answer[:position] + flipped + answer[position + 1 :]))
                damaged.append(order)
            else:
                changed.append(result)
        return changed

    patch_wait(monkeypatch, damage)
    policy = Policy()
    collector = collect(policy)
    assert train(collector.rounds(), policy, NUM_ROUNDS) == expected()
    assert collector.get_stats()["redone"] >= 4


def test_an_order_that_always_kills_its_process_is_named(collect, tmp_path):
    for step in range(6, 11):
        (tmp_path / f"1-{step}").touch()
    policy = Policy()
    collector = collect(policy, functools.partial(make_walk, deaths=tmp_path), max_restarts=2)
    rounds = collector.rounds()
    train(rounds, policy, 1)
    with pytest.raises(OrderError, match="rollout 1 of shard 1 was lost 3 times, expected at most max_restarts=2"):
        next(rounds)


def test_an_exception_of_an_environment_names_shard_and_rollout(collect):
    policy = Policy()
    collector = collect(policy, make_broken)
    rounds = collector.rounds()
    train(rounds, policy, 2)
    with pytest.raises(
        OrderError, match="rollout 2 of shard 1 failed: ArithmeticError: the simulator exploded"
    ) as caught:
        next(rounds)
    assert "ray_environments.py" in "".join(caught.value.__notes__)


def test_actors_that_cannot_be_created_are_an_error(collect):
    with pytest.raises(ConfigurationError, match="actors cannot start: .*"):
        collect(Unreadable()).collect()


class Unreadable(torch.nn.Module):
    """A policy that can be sent, and not received."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (fail_to_read, ())

    def __deepcopy__(self, _: Any) -> "Unreadable":
        return self


def fail_to_read() -> None:
    raise ModuleNotFoundError("no module named 'my_policies'")


def test_a_wrong_address_is_an_error_in_one_sentence():
    with pytest.raises(ConfigurationError, match="cannot connect to Ray at 'nowhere:1'") as caught:
        RayDataCollector(make_walk, Policy(), NUM_STEPS, shards=1, actors=1, address="nowhere:1")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_collector_continues_from_the_state_of_another_with_other_actors(collect, staleness):
    policy = Policy()
    first = collect(policy, staleness=staleness)
    rounds = first.rounds()
    digests = train(rounds, policy, 2)
    state = first.state_dict()
    # What is trained after the checkpoint is forgotten.
    forgotten = Policy()
    forgotten.load_state_dict(policy.state_dict())
    next(rounds)
    first.shutdown()
    second = collect(forgotten, actors=1, staleness=staleness)
    second.load_state_dict(state)
    digests += train(second.rounds(), forgotten, NUM_ROUNDS - 2)
    assert digests == expected(staleness)


def test_an_environment_without_a_state_is_trained_on_once_and_begins_new_episodes(collect):
    # Of several actors, one that starts later takes over a shard, which begins new episodes then, too.
    collector = collect(PendulumPolicy(), make_pendulum, shards=2, actors=1)
    rounds = collector.rounds()
    first = next(rounds)
    [actor] = collector.describe_actors()
    os.kill(actor["pid"], signal.SIGKILL)
    second = next(rounds)
    third = next(rounds)
    for shard in range(2):
        assert not torch.equal(second[shard]["observation"][:, 0], first[shard]["next", "observation"][:, -1])
        assert not torch.equal(second[shard]["observation"], first[shard]["observation"])
        assert torch.equal(third[shard]["observation"][:, 0], second[shard]["next", "observation"][:, -1])
    assert collector.num_rollouts == 3


LEARNER = """
import os, signal, sys
from slipstream import CheckpointManager, RayDataCollector, TrainingState
from tests.collect.ray_environments import NUM_STEPS, Policy, digest, learn, make_walk

folder, address, actors, until = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
policy = Policy()
digests = {"digests": []}
with RayDataCollector(make_walk, policy, NUM_STEPS, shards=3, actors=actors, address=address, staleness=1) as collector:
    state = TrainingState(policy=policy, collector=collector, digests=digests)
    with CheckpointManager(folder) as checkpoints:
        if checkpoints.steps():
            state.load_state_dict(checkpoints.restore().state)
        for rollouts in collector.rounds():
            digests["digests"].append(digest(rollouts))
            learn(policy, rollouts)
            if len(digests["digests"]) % 2 == 0:
                checkpoints.save(len(digests["digests"]), state.state_dict())
                checkpoints.flush()
            if len(digests["digests"]) == until:
                os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_learner_that_is_killed_and_resumed_trains_on_every_rollout_once(cluster, tmp_path):
    for until, actors in ((3, 2), (5, 1), (8, 3)):
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            LEARNER,
            str(tmp_path),
            cluster.address,
            str(actors),
            str(until),
        ]
        result = subprocess.run(command, cwd=ROOT, timeout=240, capture_output=True, text=True, check=False)
        assert result.returncode == -signal.SIGKILL, result.stderr
    with CheckpointManager(tmp_path) as checkpoints:
        final = checkpoints.restore().state
    assert final["digests"]["digests"] == expected(staleness=1, number=8)


def test_actors_that_are_lost_all_at_once_are_blamed_on_no_order(collect):
    policy = Policy()
    collector = collect(policy, shards=3, actors=6, max_restarts=1)
    rounds = collector.rounds()
    digests = train(rounds, policy, 2)
    # Orders are given to some of them before it is known that they are dead.
    for actor in collector.describe_actors():
        os.kill(actor["pid"], signal.SIGKILL)
    digests += train(rounds, policy, NUM_ROUNDS - 2)
    assert digests == expected()
    assert collector.get_stats()["restarts"] >= 3


def test_an_actor_that_hangs_is_replaced_after_the_time_limit(collect):
    policy = Policy()
    collector = collect(policy, order_timeout_s=5, max_restarts=100)
    rounds = collector.rounds()
    digests = train(rounds, policy, 1)
    stopped = [actor["pid"] for actor in collector.describe_actors()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    digests += train(rounds, policy, NUM_ROUNDS - 1)
    assert digests == expected()
    assert not {actor["pid"] for actor in collector.describe_actors()} & set(stopped)


@pytest.mark.parametrize("staleness", [0, 1])
def test_ctrl_c_at_any_line_loses_nothing(collect, staleness):
    policy = Policy()
    collector = collect(policy, staleness=staleness)
    steps = random.Random(0)
    folder = str(Path(collect_package.__file__).parent)
    until = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal until
        if not frame.f_code.co_filename.startswith(folder):
            return None
        until -= event == "line"
        if until == 0:
            raise KeyboardInterrupt
        return trace

    digests: list[str] = []
    interrupts = 0
    while len(digests) < NUM_ROUNDS:
        until = steps.randrange(1, 400)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            rollouts = collector.collect()
        except KeyboardInterrupt:
            interrupts += 1
            continue
        finally:
            sys.settrace(before)
        digests.append(digest(rollouts))
        learn(policy, rollouts)
    assert digests == expected(staleness)
    assert interrupts > 3
    assert collector.get_stats()["duplicates"] == 0


def test_shards_move_to_the_actor_that_replaces_a_lost_one(collect):
    policy = Policy()
    collector = collect(policy, shards=2, staleness=1)
    rounds = collector.rounds()
    train(rounds, policy, 2)
    lost = collector.describe_actors()[0]["pid"]
    os.kill(lost, signal.SIGKILL)
    busy: set[int] = set()
    # Orders may have arrived by the end of a round, so not every round shows who has worked.
    while len(busy) < 2:
        train(rounds, policy, 1)
        for actor in collector.describe_actors():
            if actor["orders"] and actor["pid"] != lost:
                busy.add(actor["pid"])
    assert collector.get_stats()["num_actors"] == 2


def test_shutdown_ends_a_collect_in_another_thread(collect, tmp_path):
    collector = collect(Policy(), functools.partial(make_waiting, folder=tmp_path))
    caught: list[BaseException] = []

    def run() -> None:
        try:
            collector.collect()
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not list(tmp_path.iterdir()):
        thread.join(0.05)
    collector.shutdown()
    thread.join()
    assert "shut down" in str(caught[0])
    collector.shutdown()


def test_a_fork_of_the_learner_cannot_use_its_collector(collect):
    collector = collect(Policy())
    child = os.fork()
    if not child:
        with pytest.raises(RuntimeError, match="belongs to another process"):
            collector.collect()
        collector.shutdown()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(collector.collect()) == 3


def test_a_collector_continues_further_ahead_than_the_one_that_was_saved(collect):
    policy = Policy()
    first = collect(policy)
    train(first.rounds(), policy, 2)
    state = first.state_dict()
    second = collect(policy, staleness=1)
    second.load_state_dict(state)
    rollouts = second.collect()
    # Collected with the weights of now, which are the oldest that there are.
    fresh = collect(policy)
    fresh.load_state_dict(state)
    assert digest(rollouts) == digest(fresh.collect())


def test_collectors_share_a_connection_until_the_last_is_shut_down(collect):
    policy = Policy()
    first, second = collect(policy), collect(policy)
    first.shutdown()
    assert len(second.collect()) == 3
    ray.shutdown()
    with pytest.raises(RuntimeError, match="Ray was shut down"):
        second.collect()
    second.shutdown()
