"""What happens to background jobs when the process ends or forks.

* **Exit** (normal end, ``sys.exit``, an unhandled exception, Ctrl-C): a watching thread sees the main thread end and
  drains the queues before the interpreter shuts down. Jobs that are submitted later, in an `atexit` handler or in a
  ``__del__``, run in the thread that submits them.
* **SIGTERM, SIGHUP, and SIGINT unless it raises KeyboardInterrupt**: a separate thread drains the queues, for at most
  `grace_period_s` seconds. Then the signal does what it would have done without us: it calls the handler of the
  program, or ends the process. Jobs that are not done by then are listed on stderr. A second signal takes effect
  immediately. Ignored signals stay ignored.
* **Fork**: the child starts with empty queues and with the signal handlers of the program.

The draining thread learns of a signal through Python's wakeup file descriptor, so it does not need the main thread:
that may be stuck in a long call, or hold a lock (such as that of `logging`) that a job needs. The main thread is never
blocked by a signal. For the same reason nothing here takes a lock or writes to the log while a signal is handled.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

logger = logging.getLogger(__name__)

DEFAULT_GRACE_S = 30.0
"""How long a signal may wait for background jobs. torchrun kills its workers after the same time."""

GRACE_VARIABLE = "SLIPSTREAM_GRACE_S"
"""Environment variable that replaces `DEFAULT_GRACE_S`."""

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_POLL_S = 0.05
_BLOCKED_AFTER_S = 5.0

# What the draining thread reads: the number of a signal, written by Python's C handler; or one of these, with the
# number of a signal in the lower bits, written by our own handler.
_WAKE = 0x00
_RECEIVED = 0x80
_END_PROCESS = 0x40
_NUMBER_BITS = 0x3F


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
        return max(0.0, float(os.environ[GRACE_VARIABLE]))
    except (KeyError, ValueError):
        return DEFAULT_GRACE_S


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


def protect(background: Drainable) -> None:
    """Make signals drain `background` before they take effect. Cheap to repeat, from any thread.

    Call it before every job: the program may have replaced our signal handlers since the last one.
    """
    _signals.protect(background)


class _Signals:
    """Our signal handlers, and the thread that acts on signals. There is one of these per process.

    Two threads are involved. The main thread runs `_on_signal`, when it gets to it. The draining thread runs `_listen`,
    and learns of every signal from the wakeup file descriptor immediately. They share no lock, only flags that change
    in one step.
    """

    def __init__(self) -> None:
        self._background: Drainable | None = None
        # What handled each signal before us, in the order of installation: more than one if the program installed its
        # handlers after us.
        self._previous: dict[int, list[Handler]] = {}
        # Calls of previous handlers in progress: a handler of the program may call ours in turn.
        self._depth: dict[int, int] = {}
        # Signals whose first arrival the main thread has seen, and signals whose jobs are drained.
        self._seen: set[int] = set()
        self._drained: set[int] = set()
        # Bytes from the C handler that our handler has not confirmed yet, and signals that we raised ourselves.
        self._unconfirmed: set[int] = set()
        self._raised: set[int] = set()
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._other_wakeup = -1
        self._is_polling = False
        self._asked_main_at_s: float | None = None
        # Reentrant: the garbage collector may run a finalizer that submits a job while this thread holds it.
        self._starting = threading.RLock()

    def protect(self, background: Drainable) -> None:
        """Install what is missing, from the thread that is allowed to."""
        self._background = background
        if self._sockets is None and not main_thread_has_ended():
            with self._starting:
                if self._sockets is None:
                    self._start_listening()
        self._install_from_any_thread()
        if not self._is_polling:
            self._notify(_WAKE)

    def undo(self) -> None:
        """Restore the previous handlers, in a forked child: its parent handles the jobs."""
        if self._sockets is not None:
            # First: until this is done, a signal to the child wakes the parent.
            signal.set_wakeup_fd(self._other_wakeup)
            for end in self._sockets:
                end.close()
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous[-1])

    # Installation

    def install(self) -> None:
        """Install our handlers where they are missing, and remember the ones before; main thread only."""
        self._asked_main_at_s = None
        for number in _SIGNALS:
            if self._is_handled(number):
                continue
            current = signal.getsignal(number)
            previous = self._previous.setdefault(number, [])
            if current not in previous:
                previous.append(current)
            signal.signal(number, self._on_signal)
        if self._sockets is not None:
            ours = self._sockets[1].fileno()
            other = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
            if other != ours:
                self._other_wakeup = other

    def _is_handled(self, number: int) -> bool:
        """Return whether our handler is installed, or should not be."""
        current = signal.getsignal(number)
        # Leave alone: ignored signals, handlers set from C, and Python's Ctrl-C, which ends in a normal exit.
        return current in (None, signal.SIG_IGN, signal.default_int_handler, self._on_signal)

    def _install_from_any_thread(self) -> None:
        if all(map(self._is_handled, _SIGNALS)) or main_thread_has_ended():
            return
        if threading.current_thread() is threading.main_thread():
            self.install()
        elif self._asked_main_at_s is None:
            # Python installs handlers in the main thread only. This runs `install` there, between two bytecodes.
            self._asked_main_at_s = time.monotonic()
            ctypes.pythonapi.Py_AddPendingCall(_install_call, None)

    def _warn_if_blocked(self) -> None:
        """Warn once if the main thread does not get to installing the handlers."""
        asked = self._asked_main_at_s
        if asked is None or time.monotonic() - asked < _BLOCKED_AFTER_S:
            return
        self._asked_main_at_s = math.inf
        message = (
            "SIGTERM will not wait for background jobs: the main thread is blocked, and only the main thread can "
            "install a signal handler. Create the saver or storage in the main thread."
        )
        # On a separate thread, because another thread may hold the lock of a log handler for long.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=logger.warning, args=(message,), daemon=True).start()

    # The main thread

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread. Never blocks: the main thread may hold a lock that a job needs."""
        previous = self._previous.get(number, [])
        depth = self._depth.get(number, 0)
        if depth >= len(previous):
            return  # a handler of the program calls ours, and there was none before it
        # The newest handler first. If that calls ours in turn, the one before it.
        handler = previous[-1 - depth]
        if not callable(handler):
            # The program has no handler, so the signal ends the process: the draining thread does that when the jobs
            # are done. From now on a second signal ends the process immediately.
            signal.signal(number, signal.SIG_DFL)
            self._notify(_END_PROCESS | number)
            if self._sockets is None:
                self._end_process(number)
            return
        is_first = number not in self._seen and number not in self._drained
        if is_first and depth == 0 and self._sockets is not None:
            # The draining thread raises the signal again when the jobs are done.
            self._seen.add(number)
            self._notify(_RECEIVED | number)
            return
        # The jobs are done, and the handler gets its signal. The next one is a first signal again.
        if depth == 0 and number in self._drained:
            self._drained.discard(number)
            self._seen.discard(number)
        self._depth[number] = depth + 1
        try:
            handler(number, frame)
        finally:
            self._depth[number] = depth

    def _notify(self, code: int) -> None:
        """Tell the draining thread about something."""
        if self._sockets is not None:
            # A full buffer means that the thread has enough to read.
            with contextlib.suppress(OSError):
                self._sockets[1].send(bytes([code]))

    # The draining thread

    def _start_listening(self) -> None:
        receiver, sender = socket.socketpair()
        sender.settimeout(0)
        thread = threading.Thread(target=self._listen, args=(receiver,), name="slipstream-signals", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No more threads. Then no jobs run in the background either, and there is nothing to drain.
            receiver.close()
            sender.close()
            return
        self._sockets = (receiver, sender)

    def _listen(self, receiver: socket.socket) -> None:
        while True:
            # While there are jobs, look now and then whether the program has replaced our handlers.
            self._is_polling = bool(self._labels())
            timeout = None
            if self._is_polling:
                timeout = _POLL_S
            for code in self._read(receiver, timeout):
                self._act_on(code, receiver)
            if self._is_polling:
                self._install_from_any_thread()
                self._warn_if_blocked()

    def _read(self, receiver: socket.socket, timeout_s: float | None) -> bytes:
        """Return the codes that have arrived, after at most `timeout_s` seconds."""
        readable, _, _ = select.select([receiver], [], [], timeout_s)
        if not readable:
            return b""
        return receiver.recv(4096)

    def _pass_on(self, number: int) -> None:
        """Report a signal to the library that used the wakeup file descriptor before us, such as asyncio."""
        if self._other_wakeup >= 0:
            with contextlib.suppress(OSError):
                os.write(self._other_wakeup, bytes([number]))

    def _act_on(self, code: int, receiver: socket.socket) -> None:
        number = code & _NUMBER_BITS
        # Not a signal that we handle. `_WAKE` needs no action: it has woken this thread.
        if number not in self._previous:
            is_signal = code == number and code != _WAKE
            if is_signal:
                self._pass_on(number)
            return
        if code == _END_PROCESS | number:
            self._drain(number, receiver, ends_process=True)
            self._end_process(number)
        elif self._is_new(code, number):
            handler = self._previous[number][-1]
            self._drain(number, receiver, ends_process=not callable(handler))
            if not callable(handler):
                self._end_process(number)
            self._raise_again(number)

    def _raise_again(self, number: int) -> None:
        """Have the main thread call the handler of the program, and wake it for that if it sleeps."""
        self._drained.add(number)
        # Otherwise the program has removed its handler meanwhile, and the signal would end the process.
        if signal.getsignal(number) == self._on_signal:
            self._raised.add(number)
            with contextlib.suppress(OSError):
                signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _is_new(self, code: int, number: int) -> bool:
        """Tell a signal from the second report of the same signal, and from one that we raised ourselves.

        A signal is reported twice: immediately by Python's C handler, and by `_on_signal` when the main thread gets to
        it. The first report may be lost if another library has replaced the wakeup file descriptor.
        """
        if code == number:
            if number in self._raised:
                self._raised.discard(number)
                self._pass_on(number)
                return False
            self._unconfirmed.add(number)
            return True
        is_confirmation = number in self._unconfirmed
        self._unconfirmed.discard(number)
        return not is_confirmation

    def _drain(self, number: int, receiver: socket.socket, *, ends_process: bool) -> None:
        """Wait for the jobs until they are done, the grace period is over, or the signal arrives again."""
        background = self._background
        if background is None:
            return
        if ends_process:
            background.refuse_jobs()
        grace_s = grace_period_s()
        deadline = time.monotonic() + grace_s
        while not background.drain(_POLL_S):
            if number in self._read(receiver, 0):
                self._pass_on(number)
                return
            if time.monotonic() > deadline:
                name = signal.Signals(number).name
                lost = "".join(f"  {label}\n" for label in background.labels())
                # Not with `print` or `logging`, whose locks another thread may hold.
                message = f"slipstream: not done {grace_s:g} s after {name}, not waiting any longer:\n{lost}"
                os.write(2, message.encode(errors="replace"))
                return

    def _end_process(self, number: int) -> None:
        """End the process as the signal would have without us. Does not return."""
        # `signal.signal` works in the main thread only, and that may be stuck.
        set_handler = ctypes.pythonapi.PyOS_setsig
        set_handler.argtypes = [ctypes.c_int, ctypes.c_void_p]
        set_handler.restype = ctypes.c_void_p
        # A null pointer is SIG_DFL.
        set_handler(number, None)
        os.kill(os.getpid(), number)
        # Only if the signal is blocked.
        time.sleep(1)
        os._exit(128 + number)

    def _labels(self) -> list[str]:
        if self._background is None:
            return []
        return self._background.labels()


_signals = _Signals()


def _install_in_main_thread(_: int | None) -> int:
    _signals.install()
    return 0


# A module variable, because the interpreter calls it later and does not keep it alive.
_install_call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_install_in_main_thread)


def _reset_after_fork() -> None:
    """Give a forked child the handlers of the program; ours return with its first job."""
    global _signals  # noqa: PLW0603 - one per process
    parents = _signals
    _signals = _Signals()
    parents.undo()


os.register_at_fork(after_in_child=_reset_after_fork)
