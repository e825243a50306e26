"""One process per contender; all stay alive and take turns, so that a slow minute of the machine hits all alike."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from bench.saving.contenders import CONTENDERS
from bench.saving.floors import FLOORS, Floors
from bench.saving.training import Size
from bench.saving.turns import Player

_TIMEOUT_S = 180
# Slow contenders take part in every fourth round: they are not close to any other.
_SLOW_EVERY = 4


class Participant(Protocol):
    """Something that measures when it is its turn."""

    def take_turn(self) -> Any:
        """Measure, and return what was measured."""

    def close(self) -> None:
        """Release everything."""


def _make(name: str, size: Size, start: Path, folder: Path) -> Participant:
    if name == FLOORS:
        return Floors(start, folder / name)
    return Player(name, size, start, folder / name)


def serve(name: str, connection: Connection) -> None:
    """Answer requests until there are no more; what a participant's process does."""
    # Peers, and the processes that they start, log to the terminal.
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    participant: Participant | None = None
    while True:
        request = connection.recv()
        try:
            if request == "turn" and participant is not None:
                connection.send(participant.take_turn())
            elif request == "close" and participant is not None:
                participant.close()
                participant = None
                connection.send(None)
            else:
                participant = _make(name, *request)
                connection.send(None)
        except BaseException as error:  # noqa: BLE001 - whatever a peer fails with
            text = str(error).partition("\n")[0]
            connection.send(RuntimeError(f"{type(error).__name__}: {text}"))


class Process:
    """The process of one participant.

    Args:
        name: In `CONTENDERS`, or `FLOORS`.
    """

    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("forkserver")
        # Imported once, before anything runs.
        context.set_forkserver_preload(["torch._dynamo", "slipstream.checkpoint"])
        self.name = name
        self._connection, remote = context.Pipe()
        self._process = context.Process(target=serve, args=(name, remote))
        self._process.start()
        remote.close()

    def ask(self, request: Any) -> None:
        """Send a request; `answer` gets its result."""
        self._connection.send(request)

    def answer(self) -> Any:
        """Return the answer to the last request.

        Raises:
            RuntimeError: If it failed, took too long, or ended the process.
        """
        if not self._connection.poll(_TIMEOUT_S):
            raise RuntimeError(f"took more than {_TIMEOUT_S} s")
        try:
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError("its process died") from None
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


class Company:
    """The processes of all participants.

    Args:
        names: Of the contenders. The floors are always measured, too.

    Attributes:
        left_out: Why some are not measured any more.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.left_out: list[str] = []
        self._processes = [Process(name) for name in [FLOORS, *names]]

    def measure(self, size: Size, start: Path, folder: Path) -> dict[str, list[Any]]:
        """Measure one size, round by round; returns the turns of each participant, None for rounds without it."""
        self._ask_all((size, start, folder))
        turns: dict[str, list[Any]] = {process.name: [] for process in self._processes}
        order = random.Random(0)
        for number in range(size.rounds):
            print(f"{size.name}: round {number + 1} of {size.rounds}", file=sys.stderr)
            # In another order every time, so that nobody always follows the same neighbour.
            order.shuffle(self._processes)
            for process in list(self._processes):
                with self._leaving_out(process):
                    turns[process.name].append(_take_turn(process, number))
        self._ask_all("close")
        remaining = {process.name for process in self._processes}
        return {name: found for name, found in turns.items() if name in remaining}

    def end(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.end()

    def _ask_all(self, request: Any) -> None:
        """Send a request to all, and wait for all answers."""
        # Two at a time: nothing is measured yet, but some peers give up if they have to wait for a core for too long.
        pairs = itertools.zip_longest(self._processes[::2], self._processes[1::2])
        for pair in list(pairs):
            asked = [process for process in pair if process is not None]
            for process in asked:
                process.ask(request)
            for process in asked:
                with self._leaving_out(process):
                    process.answer()

    @contextlib.contextmanager
    def _leaving_out(self, process: Process) -> Iterator[None]:
        """Leave a process out from now on if it fails."""
        try:
            yield
        except RuntimeError as error:
            title = process.name
            if process.name in CONTENDERS:
                title = CONTENDERS[process.name].name
            self.left_out.append(f"{title} is left out: {error}")
            print(self.left_out[-1], file=sys.stderr)
            process.end()
            self._processes.remove(process)


def _take_turn(process: Process, number: int) -> Any:
    """Let one participant measure; None if it is slow and does not take part in this round."""
    is_slow = process.name in CONTENDERS and CONTENDERS[process.name].is_slow
    if is_slow and number % _SLOW_EVERY:
        return None
    # What others have written must be on the disk, and not on its way there.
    os.sync()
    process.ask("turn")
    return process.answer()
