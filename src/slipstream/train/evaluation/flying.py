"""Fly the simulations of several jobs side by side: on several threads, and in several processes."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from slipstream.dist.group import from_rank, portable
from slipstream.dist.threads import on_one_thread_each
from slipstream.errors import RankLostError
from slipstream.text import format_seconds, list_first
from slipstream.train.evaluation.flights import (
    Flights,
    Flown,
    FlownPart,
    OnStep,
    flight_title,
    fly_part,
    join_parts,
    record_flights,
)
from slipstream.train.evaluation.scenarios import Part

if TYPE_CHECKING:
    from slipstream.train.evaluation.jobs import Job

_POLL_S = 0.1  # how often the first process looks whether the others are done
_BEAT_S = 5.0  # how often the others say that they are busy
_PATIENCE_S = 600.0  # far more than starting to fly and a step take


class Together(Protocol):
    """The processes that share the work; see `slipstream.train.processes.Processes`."""

    @property
    def rank(self) -> int:
        """The number of this process."""

    @property
    def world(self) -> int:
        """How many processes there are."""

    @property
    def store(self) -> Any:
        """Where they share values: a ``torch.distributed.Store``."""


@dataclass(frozen=True)
class Plan:
    """The simulations of a job.

    Attributes:
        job: What flies where.
        parts: The simulations whose flights are counted.
    """

    job: Job
    parts: Sequence[Part]

    @property
    def title(self) -> str:
        """What flies where, for people."""
        return flight_title(self.job.scenario, self.job.candidate, self.job.sensors)

    @property
    def num_flights(self) -> int:
        """The number of flights that are counted."""
        last = self.parts[-1]
        return last.first_flight + last.config.num_envs


Task = tuple[int, int | None]
"""The number of a plan, and that of its part; None stands for the flights that are recorded."""

Results = dict[Task, FlownPart | Flights]


class _StoppedError(Exception):
    """Another thread has failed."""


def fly_together(
    plans: Sequence[Plan],
    device: torch.device,
    *,
    threads: int,
    start_progress: Callable[[str], OnStep | None],
    processes: Together | None = None,
) -> list[Flown]:
    """Fly all simulations, each on one thread; returns what each job has flown.

    Simulations share nothing that changes. A thread that is free takes the next one, and the results are put in order
    afterwards, so they do not depend on the number of threads and processes.

    Args:
        plans: The simulations of each job.
        device: Where to simulate.
        threads: How many simulations fly at once in this process.
        start_progress: Called with a title before something flies; returns what to call after each step.
        processes: Those that share the work, if there are several. Only the first one returns anything.

    Raises:
        Exception: The first exception of a thread. If another process fails, the first one raises its exception, with a
            note that names the process.
        RankLostError: If another process does not answer.
    """
    tasks = list_tasks(plans)
    if processes is None:
        progress = Progress(plans, start_progress)
        # Threads may share an iterator of a list.
        return join_plans(plans, _fly_tasks(plans, device, threads, iter(tasks), progress))
    shared = _Shared(processes)
    shared_progress = _SharedProgress(plans, start_progress, shared)
    try:
        results = _fly_tasks(plans, device, threads, shared.iterate(tasks), shared_progress)
    except Exception as error:
        shared.hand_in(portable(error))
        raise
    if processes.rank > 0:
        shared.hand_in(results)
        return []
    for rank in range(1, processes.world):
        results |= shared.wait_for(rank, shared_progress.refresh)
    shared_progress.refresh()
    return join_plans(plans, results)


def list_tasks(plans: Sequence[Plan]) -> list[Task]:
    """Return all simulations that jobs consist of, in any order."""
    tasks: list[Task] = []
    for number, plan in enumerate(plans):
        tasks += [(number, part) for part in range(len(plan.parts))]
        if plan.job.num_recorded:
            tasks.append((number, None))
    return tasks


def fly_task(
    plans: Sequence[Plan], task: Task, device: torch.device, on_step: Callable[[int], None] | None = None
) -> FlownPart | Flights:
    """Fly one simulation; what it returns depends on nothing else.

    Args:
        plans: The simulations of each job.
        task: Which of them.
        device: Where to simulate.
        on_step: Called after each step with the number of episodes that have ended.
    """
    number, place = task
    job = plans[number].job
    parts = plans[number].parts
    if place is None:
        return record_flights(job.candidate, parts[0].config, job.sensors, job.num_recorded, device, on_step)
    return fly_part(job.candidate, parts[place], device, sensors=job.sensors, on_step=on_step)


def _fly_tasks(
    plans: Sequence[Plan],
    device: torch.device,
    threads: int,
    tasks: Iterator[Task],
    progress: Progress | _SharedProgress,
) -> Results:
    """Fly one task after another, on several threads."""
    results: Results = {}
    has_failed = threading.Event()

    def work(_: int) -> None:
        try:
            for task in tasks:
                results[task] = fly(task)
        except _StoppedError:
            # The thread that failed reports it.
            pass
        except BaseException:
            has_failed.set()
            raise

    def fly(task: Task) -> FlownPart | Flights:
        number, place = task

        def on_step(ended: int) -> None:
            # Otherwise Ctrl-C would wait until the other threads have flown to the end.
            if has_failed.is_set():
                raise _StoppedError
            progress.update(number, place, ended)

        progress.start(number)
        return fly_task(plans, task, device, on_step)

    on_one_thread_each(work, range(threads), threads)
    return results


def join_plans(plans: Sequence[Plan], results: Mapping[Task, FlownPart | Flights]) -> list[Flown]:
    """Return what each job has flown, in order."""
    flown = []
    for number, plan in enumerate(plans):
        job = plan.job
        parts: list[Any] = [results[number, place] for place in range(len(plan.parts))]
        flights: Any = results.get((number, None))
        flown.append(join_parts(job.scenario, job.candidate, job.sensors, plan.parts[0].config, parts, flights))
    return flown


class Progress:
    """Shows how many flights of each job have ended."""

    def __init__(self, plans: Sequence[Plan], start: Callable[[str], OnStep | None]) -> None:
        self._plans = plans
        self._start = start
        self._shown: dict[int, OnStep | None] = {}
        self._ended: list[list[int]] = []
        for plan in plans:
            self._ended.append([0] * len(plan.parts))
        self._lock = threading.Lock()

    def start(self, number: int) -> None:
        """Show that a job flies; more than once if it has several simulations."""
        with self._lock:
            if number not in self._shown:
                self._shown[number] = self._start(self._plans[number].title)

    def update(self, number: int, place: int | None, ended: int) -> None:
        """Show how many flights of a simulation have ended, if they are counted."""
        if place is None:
            return
        with self._lock:
            self._ended[number][place] = ended
            show = self._shown[number]
            if show is not None:
                show(sum(self._ended[number]), self._plans[number].num_flights)


class _SharedProgress:
    """Shows in the first process how many flights have ended in all processes."""

    def __init__(self, plans: Sequence[Plan], start: Callable[[str], OnStep | None], shared: _Shared) -> None:
        self._shared = shared
        self._total = 0
        titles: list[str] = []
        for plan in plans:
            self._total += plan.num_flights
            titles.append(plan.title)
        self._ended: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        self._show: OnStep | None = None
        if shared.rank == 0:
            self._show = start(f"{list_first(titles, 2)}, in {shared.world} processes")

    def start(self, number: int) -> None:
        """Do nothing: all jobs are shown as one."""

    def update(self, number: int, place: int | None, ended: int) -> None:
        """Count how many flights of a simulation have ended, if they are counted."""
        self._shared.beat()
        if place is None:
            return
        new = ended - self._ended.get((number, place), 0)
        self._ended[number, place] = ended
        if new:
            self.refresh(new)

    def refresh(self, new: int = 0) -> None:
        """Count flights that have ended, and show how many there are in all processes."""
        # Otherwise another thread could show an older number after a newer one.
        with self._lock:
            ended = self._shared.count("ended", new)
            if self._show is not None:
                self._show(ended, self._total)


class _Shared:
    """What processes know of each other while they share the flights."""

    def __init__(self, processes: Together) -> None:
        self.rank = processes.rank
        self.world = processes.world
        self._store = processes.store
        # All processes make the same calls, so they find each other by the number of the call.
        call = self._store.add(f"slipstream/flights/calls/{self.rank}", 1)
        self._prefix = f"slipstream/flights/{call}"
        self._last_beat_s = 0.0

    def count(self, name: str, amount: int) -> int:
        """Add to a number that all processes share, and return it."""
        return int(self._store.add(f"{self._prefix}/{name}", amount))

    def beat(self) -> None:
        """Tell the first process now and then that this one is still flying."""
        now = time.monotonic()
        if now - self._last_beat_s > _BEAT_S:
            self._last_beat_s = now
            self.count(f"beats/{self.rank}", 1)

    def iterate(self, tasks: Sequence[Task]) -> Iterator[Task]:
        """Yield tasks that no other process has taken."""

        def take() -> Task | None:
            number = self.count("taken", 1) - 1
            return tasks[number] if number < len(tasks) else None

        # Unlike a generator, this iterator can be shared by threads.
        return iter(take, None)

    def hand_in(self, results: Results | Exception | None) -> None:
        """Give the first process what this one has flown, or why it failed."""
        self._store.set(f"{self._prefix}/{self.rank}", pickle.dumps(results))

    def wait_for(self, rank: int, refresh: Callable[[], None]) -> Results:
        """Return what another process has flown.

        Args:
            rank: Its number.
            refresh: Called again and again until it is done.

        Raises:
            Exception: What the other process failed with.
            RankLostError: If it has not shown any sign of life for minutes.
        """
        key = f"{self._prefix}/{rank}"
        beats = -1
        heard_s = time.monotonic()
        # Waiting in the store would time out, and a simulation may take any time.
        while not self._store.check([key]):
            refresh()
            if (counted := self.count(f"beats/{rank}", 0)) != beats:
                beats = counted
                heard_s = time.monotonic()
            if time.monotonic() - heard_s > _PATIENCE_S:
                raise RankLostError(f"rank {rank} has not answered for {format_seconds(_PATIENCE_S)}")
            time.sleep(_POLL_S)
        results: Results | Exception = pickle.loads(self._store.get(key))  # noqa: S301 - from a process of this job
        if isinstance(results, Exception):
            raise from_rank(results, rank)
        return results
