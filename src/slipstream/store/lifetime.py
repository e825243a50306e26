"""What happens to background jobs when the process ends or forks.

* **Exit** (normal end, ``sys.exit``, an unhandled exception, Ctrl-C): a watching thread sees the main thread end and
  drains the queues before the interpreter shuts down. Jobs that are submitted later, in an `atexit` handler or in a
  ``__del__``, run in the thread that submits them.
* **Signals**: a thread drains the queues, for at most `grace_period_s` seconds, before a signal takes effect. See
  `slipstream.store.signals`.
* **Fork**: the child starts with empty queues and with the signal handlers of the program.
"""

from __future__ import annotations

import math
import os
import threading
from typing import Protocol

DEFAULT_GRACE_S = 30.0
"""How long a signal may wait for background jobs. torchrun kills its workers after the same time."""

GRACE_VARIABLE = "SLIPSTREAM_GRACE_S"
"""Environment variable that replaces `DEFAULT_GRACE_S`."""


class Drainable(Protocol):
    """The background jobs of the process, as far as their end is concerned."""

    def drain(self, timeout: float | None) -> bool:
        """Block until every job accepted so far is done; return whether it is."""

    def drain_at_exit(self) -> None:
        """Block until there are no jobs, and run later ones inline."""

    def refuse_jobs(self) -> None:
        """Block every later submit."""

    def labels(self) -> list[str]:
        """Return what is not done."""


def grace_period_s() -> float:
    """Return how many seconds a signal waits for background jobs: `DEFAULT_GRACE_S`, or ``SLIPSTREAM_GRACE_S``."""
    try:
        seconds = float(os.environ[GRACE_VARIABLE])
    except (KeyError, ValueError):
        return DEFAULT_GRACE_S
    if math.isnan(seconds):
        return DEFAULT_GRACE_S
    return max(0.0, seconds)


def main_thread_has_ended() -> bool:
    """Return whether the interpreter is shutting down: it no longer waits for threads that are started now."""
    return not threading.main_thread().is_alive()


def start_exit_watcher(background: Drainable) -> None:
    """Start the thread that drains `background` when the main thread has ended.

    Raises:
        RuntimeError: If the system cannot start a thread.
    """

    def watch() -> None:
        threading.main_thread().join()
        background.drain_at_exit()

    # Not a daemon: the interpreter waits for it before it shuts down.
    threading.Thread(target=watch, name="slipstream-exit", daemon=False).start()
