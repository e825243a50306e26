"""Signals that stop a training after the current iteration."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def stopping_on_signals(stop: Callable[[int], None], *, patience: int = 1) -> Iterator[None]:
    """Let SIGINT and SIGTERM stop training after the current iteration, until they have arrived too often.

    After that many, a signal has the effect that it had before.

    Args:
        stop: Called with the number of the signal.
        patience: How many of each signal to take. Under a launcher that passes signals on, one may arrive twice.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    arrived = dict.fromkeys(before, 0)

    def on_signal(number: int, _: FrameType | None) -> None:
        arrived[signal.Signals(number)] += 1
        if arrived[signal.Signals(number)] >= patience:
            signal.signal(number, before[signal.Signals(number)])
        name = signal.Signals(number).name
        if arrived[signal.Signals(number)] == 1:
            again = "again"
            if patience > 1:
                again = f"{patience} more times"
            logger.warning("%s: finishing this iteration; send it %s to stop immediately", name, again)
        stop(number)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
