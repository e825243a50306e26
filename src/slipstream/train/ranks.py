"""`Ranks`: what the processes of a run have to agree on while they train."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from slipstream.dist.group import ShardGroup
from slipstream.dist.threads import one_thread
from slipstream.errors import RankLostError

T = TypeVar("T")

_BEAT_S = 15.0  # a quarter of the shortest dist.timeout_s


class Ranks:
    """The processes of a run. One that trains by itself agrees with itself, and waits for nobody.

    Args:
        group: The shards of the run and the processes that share them; None if the run is not divided.

    Attributes:
        is_first: Whether this is the process that writes, logs and evaluates.
        are_many: Whether there is more than one process.
        patience: How many times a signal has to arrive before it ends this process at once.
    """

    def __init__(self, group: ShardGroup | None) -> None:
        self._group = group
        self.is_first = group is None or group.rank == 0
        self.are_many = group is not None and group.world > 1
        # Launchers pass signals on to processes that may have got them already.
        self.patience = 1 + self.are_many
        self._stop: signal.Signals | None = None  # what arrived here
        self._agreed: signal.Signals | None = None  # what all processes know of
        self._failure: Exception | None = None  # of the first process, and not raised in all yet

    def first(self, function: Callable[[], T]) -> T:
        """Call a function in the first process; returns its result, or raises its exception, in all."""
        if self._group is None:
            return function()
        return self._group.first(function)

    def together(self, function: Callable[[], T]) -> T:
        """Call a function in all processes; raises in all of them if it fails in one."""
        if self._group is None:
            return function()
        return self._group.together(function)

    def first_while_others_wait(self, function: Callable[[Callable[..., None]], T]) -> T:
        """Call a function that takes long in the first process; returns its result, or raises its exception, in all.

        The others wait for any length of time, because the first process says now and then that it is still busy.

        Args:
            function: Gets something to call often, with any arguments.

        Raises:
            RankLostError: If another process has exited.
        """
        group = self._group
        if group is None or group.world == 1:
            return function(_ignore)
        error: Exception | None = None
        result: Any = None
        if group.rank == 0:
            try:
                result = function(_Beat(group))
            except RankLostError:
                raise
            except Exception as raised:  # noqa: BLE001 - raised below, in all processes
                error = raised
        while group.broadcast(value=group.rank > 0):
            pass

        def end() -> T:
            if error is not None:
                raise error
            return result  # type: ignore[no-any-return]

        return group.first(end)

    def write(self, function: Callable[[], object]) -> None:
        """Call a function in the first process only; if it fails, all processes fail after the next iteration."""
        if not self.are_many:
            function()
        elif self.is_first and self._failure is None:
            try:
                function()
            except Exception as error:  # noqa: BLE001 - raised by `raise_failure`
                self._failure = error

    def raise_failure(self) -> None:
        """Raise what went wrong in `write`, if anything."""
        if self._failure is not None:
            raise self._failure

    def stop(self, number: int) -> None:
        """Remember a signal; the others learn of it after this iteration."""
        self._stop = signal.Signals(number)

    def flags(self) -> list[bool]:
        """Return what the others have to know of this process."""
        return [self._stop == signal.SIGINT, self._stop == signal.SIGTERM, self._failure is not None]

    def take(self, flags: Sequence[bool]) -> None:
        """Take the flags of all processes.

        Raises:
            Exception: What went wrong in `write`, in all processes.
        """
        is_interrupted, is_terminated, has_failed = flags
        if has_failed:
            self.first(self.raise_failure)
        if is_interrupted:
            self._agreed = signal.SIGINT
        if is_terminated:
            self._agreed = signal.SIGTERM

    def stopped(self) -> signal.Signals | None:
        """Return the signal to stop for, if there is one."""
        if self.are_many:
            return self._agreed
        return self._stop

    def threads(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which results do not depend on the number of cores, if the run is divided."""
        if self._group is None:
            return contextlib.nullcontext()
        return one_thread()

    @contextlib.contextmanager
    def naming(self, run: Path) -> Iterator[None]:
        """Say how to resume a run if another process is lost."""
        try:
            yield
        except RankLostError as error:
            who = "another rank"
            if error.rank is not None:
                who = f"rank {error.rank}"
            problem = "exited"
            if "timed out" in str(error).lower():
                problem = "did not answer"
            lost = RankLostError(f"{who} {problem}; resume with: slipstream train resume={run}")
            lost.rank = error.rank
            raise lost from error


class _Beat:
    """Tells the other processes now and then that the first one is busy."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        self._last_s = time.monotonic()

    def __call__(self, *_: object) -> None:
        if time.monotonic() - self._last_s > _BEAT_S:
            self._group.broadcast(value=True)
            self._last_s = time.monotonic()


def _ignore(*_: object) -> None:
    """Stand in for a `_Beat` where nobody waits."""
