"""The result of a background job, without locks that Ctrl-C could leave behind."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

from slipstream.threads import Notifier

logger = logging.getLogger(__name__)

T = TypeVar("T")

changed = Notifier()
"""Notified whenever something happens to a job of this process."""


class Handle(Generic[T]):
    """The result of a background job, once there is one. Has the methods of `concurrent.futures.Future`.

    Retrieving the result or the error of a failed job counts as having noticed the failure: it is not raised again.
    Thread-safe.
    """

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        """Return whether the job has finished, failed or was cancelled."""
        return self._outcome.is_done

    def running(self) -> bool:
        """Return whether the job is running now."""
        return self._outcome.is_claimed and not self._outcome.is_done

    def cancelled(self) -> bool:
        """Return whether the job was cancelled before it started."""
        # Not by the error that the job raised: that may be a CancelledError, too.
        return isinstance(self._outcome.claim_error, CancelledError)

    def cancel(self) -> bool:
        """Cancel the job unless it has started; return whether it will not run."""
        error = CancelledError()
        if self._outcome.claim(error):
            self._outcome.is_noticed = True
            self._outcome.resolve(error=error)
        return self.cancelled()

    def failed(self) -> bool:
        """Return whether the job has failed. Unlike `exception`, this does not count as having noticed the failure."""
        return self._outcome.error is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the job is done; return False if that takes longer than `timeout` seconds.

        Raises:
            BaseException: The error of the job, if it failed.
        """
        try:
            self.result(timeout)
        except TimeoutError:
            # The job itself may have raised a TimeoutError.
            if self.done():
                raise
            return False
        return True

    def result(self, timeout: float | None = None) -> T:
        """Block until the job is done, then return its result or raise its error.

        Raises:
            TimeoutError: If the job is not done after `timeout` seconds.
            CancelledError: If the job was cancelled.
        """
        error = self._wait_for_error(timeout)
        if error is not None:
            try:
                raise error
            finally:
                # The traceback refers to this frame; without this, frame and error would keep each other alive.
                del error
        value: T = self._outcome.value
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until the job is done, then return its error, or None if it succeeded.

        Raises:
            TimeoutError: If the job is not done after `timeout` seconds.
            CancelledError: If the job was cancelled.
        """
        error = self._wait_for_error(timeout)
        if error is not None and self.cancelled():
            raise error
        return error

    def add_done_callback(self, callback: Callable[[Handle[T]], object]) -> None:
        """Call ``callback(handle)`` when the job is done, on the background thread; now if it is done already."""
        self._outcome.add_callback(functools.partial(callback, self))

    def _wait_for_error(self, timeout: float | None) -> BaseException | None:
        if not changed.wait_until(self.done, timeout):
            raise TimeoutError(f"the background job is not done after {timeout} s")
        self._outcome.is_noticed = True
        return self._outcome.error


class Outcome:
    """What a job returned or raised. Exactly one thread claims it, and with it the right to resolve it."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_noticed = False
        self.value: Any = None
        self.error: BaseException | None = None
        # At most one entry: the error that the claimant will resolve the outcome with, if it knows that already.
        self._claims: dict[None, tuple[BaseException | None]] = {}
        self._callbacks: deque[Callable[[], object]] = deque()

    @property
    def is_claimed(self) -> bool:
        """Whether the job has started, or was skipped or cancelled."""
        return bool(self._claims)

    @property
    def claim_error(self) -> BaseException | None:
        """The error that a job was skipped or cancelled with."""
        (error,) = self._claims.get(None, (None,))
        return error

    def claim(self, error: BaseException | None = None) -> bool:
        """Return True to the first caller, and False to all others.

        Args:
            error: What the caller will resolve the outcome with, unless Ctrl-C interrupts it: then the background does.
        """
        claim = (error,)
        # One step, in which the claim and its error become visible.
        return self._claims.setdefault(None, claim) is claim

    def resolve(self, value: Any = None, error: BaseException | None = None) -> None:
        """Store the result, wake everyone who waits for it, and run the callbacks."""
        self.value = value
        self.error = error
        self.is_done = True
        changed.notify_all()
        self._run_callbacks()

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Run `callback` once the outcome is known."""
        self._callbacks.append(callback)
        if self.is_done:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return  # another thread ran the last one
            try:
                callback()
            except BaseException:
                # Not our error, and no reason to stop the background.
                logger.exception("a callback of a background job failed")
