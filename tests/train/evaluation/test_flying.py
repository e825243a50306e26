"""Flying on several threads and in several processes: the same result, and an error in one ends all."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from slipstream import NavRLPolicy, RankLostError, policy_candidate
from slipstream.nav import velocity_from_unit
from slipstream.train.evaluation.flights import FlightLog, Flown
from slipstream.train.evaluation.jobs import Job, evaluate, run_jobs
from slipstream.train.evaluation.pilots import Candidate, Sensors
from slipstream.train.evaluation.scenarios import Scenario
from tests.train.conftest import small
from tests.train.evaluation.conftest import CROWDED, EMPTY, FEW_BOXES, STILL, STRAIGHT, fly_straight, long_enough

MANY_MAPS = Scenario("through", "Through", "through", 1000, 40, 20, 8)


@dataclass
class Rank:
    """A process of a job, played by a thread."""

    rank: int
    world: int
    store: Any


def flights_of(flown: Flown) -> tuple[Any, ...]:
    """Return everything about flights that does not depend on the time they took."""
    recorded = None
    if flown.flights is not None:
        rollout = flown.flights.rollout
        arrays = {name: array.tolist() for name, array in flown.flights.world.arrays().items()}
        recorded = (rollout["info", "position"].tolist(), flown.flights.world.metadata(), arrays)
    columns = [getattr(flown.log, name).tolist() for name in FlightLog.__dataclass_fields__]
    return flown.title, columns, recorded


def run_on(threads: int, jobs: list[Job], **options: Any) -> list[Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return [flights_of(result.flown) for result in run_jobs(jobs, small(), **options)]
    finally:
        torch.set_num_threads(before)


def run_in_processes(world: int, jobs: list[Job], **options: Any) -> list[list[Any]]:
    """Return what each process gets."""
    store = HashStore()
    settings = small()  # Hydra composes in one thread at a time

    def run(rank: int) -> list[Any]:
        results = run_jobs(jobs, settings, processes=Rank(rank, world, store), **options)
        return [flights_of(result.flown) for result in results]

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


@pytest.fixture
def jobs() -> list[Job]:
    policy = NavRLPolicy(action_map=velocity_from_unit)
    return [
        Job(policy_candidate(policy), MANY_MAPS, num_recorded=3),
        Job(policy_candidate(policy, "sample"), MANY_MAPS, Sensors(lidar_noise_m=0.1)),
        Job(STRAIGHT, CROWDED),
    ]


def test_results_do_not_depend_on_the_number_of_threads_and_processes(jobs):
    alone = run_on(1, jobs, episodes=520)
    assert run_on(3, jobs, episodes=520) == alone
    first, *others = run_in_processes(3, jobs, episodes=520)
    assert first == alone
    assert others == [[], []]


def test_progress_counts_the_flights_of_all_processes():
    shown: list[tuple[int, int]] = []
    titles: list[str] = []

    def start(title):
        titles.append(title)
        return lambda ended, total: shown.append((ended, total))

    run_in_processes(2, [Job(STILL, EMPTY), Job(STILL, FEW_BOXES)], episodes=16, start_progress=start)
    assert titles == ["Empty world: still, Few boxes: still, in 2 processes"]
    assert shown[-1] == (32, 32)
    assert shown == sorted(shown)


def test_each_job_has_progress_of_its_own_in_one_process():
    shown: dict[str, list[tuple[int, int]]] = {}

    def start(title):
        calls = shown.setdefault(title, [])
        return lambda ended, total: calls.append((ended, total))

    run_jobs([Job(STILL, EMPTY), Job(STILL, MANY_MAPS)], small(), episodes=520, start_progress=start)
    assert {title: calls[-1] for title, calls in shown.items()} == {
        "Empty world: still": (520, 520),
        "Through: still": (520, 520),
    }


def failing_after(steps: int) -> Candidate:
    def make_pilot(_: Any) -> Any:
        left = iter(range(steps))

        def pilot(observation):
            if next(left, None) is None:
                raise ValueError("the pilot is ill")
            return fly_straight(observation)

        return pilot

    return Candidate("ill", "ill", make_pilot)


def test_a_pilot_that_fails_ends_all_flights():
    ended: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="the pilot is ill"):
            run_jobs(
                [Job(STRAIGHT, EMPTY), Job(failing_after(3), EMPTY)],
                long_enough(),
                episodes=4,
                start_progress=lambda _: lambda count, _total: ended.append(count),
            )
    finally:
        torch.set_num_threads(before)
    assert 4 not in ended  # nobody has flown to the end


def test_what_fails_in_another_process_is_raised_in_the_first_one():
    store = HashStore()
    jobs = [Job(failing_after(2), EMPTY)]
    with pytest.raises(ValueError, match="the pilot is ill"):
        run_jobs(jobs, small(), episodes=4, processes=Rank(1, 2, store))
    # Nothing is left for the first process to fly.
    with pytest.raises(ValueError, match="the pilot is ill") as raised:
        run_jobs(jobs, small(), episodes=4, processes=Rank(0, 2, store))
    assert raised.value.__notes__ == ["in rank 1"]


def test_processes_may_evaluate_more_than_once():
    store = HashStore()
    for _ in range(2):
        assert run_jobs([Job(STILL, EMPTY)], small(), episodes=4, processes=Rank(1, 2, store)) == []
        [result] = run_jobs([Job(STILL, EMPTY)], small(), episodes=4, processes=Rank(0, 2, store))
        assert result.episodes == 4


def test_an_evaluation_flies_on_several_threads_what_it_flies_on_one():
    assert np.array_equal(
        evaluate(STRAIGHT, small(), MANY_MAPS, episodes=520).flown.log.path_m,
        np.array(run_on(1, [Job(STRAIGHT, MANY_MAPS)], episodes=520)[0][1][3]),
    )


def test_a_process_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr("slipstream.train.evaluation.flying._PATIENCE_S", 0.3)
    with pytest.raises(RankLostError, match="rank 1 has not answered for"):
        run_jobs([Job(STILL, EMPTY)], small(), episodes=4, processes=Rank(0, 2, HashStore()))
