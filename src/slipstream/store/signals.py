"""Signals wait for background jobs, and then take effect as if we were not there.

This concerns SIGTERM, SIGHUP, and SIGINT unless it raises KeyboardInterrupt. A separate thread drains the queues, for
at most `grace_period_s` seconds. Then the signal calls the handler of the program, or ends the process. Jobs that are
not done by then are listed on stderr. A second signal takes effect immediately. Ignored signals stay ignored.

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
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from slipstream.store.lifetime import Drainable, grace_period_s, main_thread_has_ended

logger = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_POLL_S = 0.05
_BLOCKED_AFTER_S = 5.0
_REPORT_WAIT_MS = 1000

# The addresses of C functions; None is SIG_DFL.
ctypes.pythonapi.PyOS_getsig.argtypes = [ctypes.c_int]
ctypes.pythonapi.PyOS_getsig.restype = ctypes.c_void_p
ctypes.pythonapi.PyOS_setsig.argtypes = [ctypes.c_int, ctypes.c_void_p]
ctypes.pythonapi.PyOS_setsig.restype = ctypes.c_void_p

# What the draining thread reads: the number of a signal, written by Python's C handler; or one of these, with the
# number of a signal in the lower bits, written by our own handler.
_WAKE = 0x00
_RECEIVED = 0x80
_END_PROCESS = 0x40
_NUMBER_BITS = 0x3F


def protect(background: Drainable) -> None:
    """Make signals drain `background` before they take effect. Cheap to repeat, from any thread.

    Call it before every job: the program may have replaced our signal handlers since the last one.
    """
    _signals.protect(background)


def watch() -> None:
    """While there are jobs, look now and then whether the program has replaced our handlers. Cheap to repeat.

    The background calls it, not the thread that submits a job: it releases the GIL, and the submitting thread would
    have to wait for the threads that it has just woken.
    """
    _signals.watch()


class _Link:
    """Our handler for one signal, in front of the handler that it replaces.

    Every installation creates another link. So if the program restores an older one, which `signal.signal` returned to
    it, then the handlers that it used in between are not called any more.
    """

    def __init__(self, signals: _Signals, previous: Handler) -> None:
        self.signals = signals
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signals.on_signal(self.previous, number, frame)


class _Signals:
    """Our signal handlers, and the thread that acts on signals. There is one of these per process.

    Two threads are involved. The main thread runs `on_signal`, when it gets to it. The draining thread runs `_listen`,
    and learns of every signal from the wakeup file descriptor immediately. They share no lock, only flags that change
    in one step.
    """

    def __init__(self) -> None:
        self._background: Drainable | None = None
        # Calls of previous handlers in progress: a handler of the program may call ours in turn.
        self._depth: dict[int, int] = {}
        # Signals whose first arrival the main thread has seen, and signals whose jobs are drained.
        self._seen: set[int] = set()
        self._drained: set[int] = set()
        # Bytes from the C handler that our handler has not confirmed yet, and signals that we raised ourselves.
        self._unconfirmed: set[int] = set()
        self._raised: set[int] = set()
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        # Codes that the draining thread has read and not acted on yet.
        self._codes: deque[int] = deque()
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

    def watch(self) -> None:
        """Make the draining thread poll as long as there are jobs."""
        if not self._is_polling:
            self._notify(_WAKE)

    def undo(self) -> None:
        """Restore the previous handlers, in a forked child: its parent handles the jobs."""
        if self._sockets is not None:
            # First: until this is done, a signal to the child wakes the parent.
            signal.set_wakeup_fd(-1)
            # The library that used it before us may have closed its file descriptor.
            with contextlib.suppress(OSError, ValueError):
                signal.set_wakeup_fd(self._other_wakeup)
            for end in self._sockets:
                end.close()
            # A handler of the program may still call one of our links. Without sockets it takes effect immediately.
            self._sockets = None
        for number in _SIGNALS:
            link = self._link(number)
            if link is not None:
                signal.signal(number, link.previous)

    # Installation

    def install(self) -> None:
        """Install our handlers where they are missing, and remember the ones before; main thread only."""
        self._asked_main_at_s = None
        for number in _SIGNALS:
            if self._is_handled(number):
                continue
            signal.signal(number, _Link(self, signal.getsignal(number)))
        if self._sockets is not None:
            ours = self._sockets[1].fileno()
            other = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
            if other != ours:
                self._other_wakeup = other

    def _is_handled(self, number: int) -> bool:
        """Return whether our handler is installed, or should not be."""
        current = signal.getsignal(number)
        # Leave alone: ignored signals, handlers set from C, and Python's Ctrl-C, which ends in a normal exit.
        if current in (None, signal.SIG_IGN, signal.default_int_handler):
            return True
        # `getsignal` does not know what C code has installed, such as `faulthandler.register`.
        if current == signal.SIG_DFL and ctypes.pythonapi.PyOS_getsig(number):
            return True
        return self._link(number) is not None

    def _link(self, number: int) -> _Link | None:
        """Return our handler of a signal, if it is installed."""
        current = signal.getsignal(number)
        # A forked child may restore a link of its parent. That one is a handler of the program there.
        if isinstance(current, _Link) and current.signals is self:
            return current
        return None

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

    def on_signal(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread. Never blocks: the main thread may hold a lock that a job needs.

        Args:
            handler: What handled the signal before us.
            number: The signal.
            frame: Where the main thread was interrupted.
        """
        depth = self._depth.get(number, 0)
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
            self._receive(receiver, timeout)
            while self._codes:
                self._act_on(self._codes.popleft(), receiver)
            if self._is_polling:
                self._install_from_any_thread()
                self._warn_if_blocked()

    def _receive(self, receiver: socket.socket, timeout_s: float | None) -> None:
        """Wait for codes for at most `timeout_s` seconds. Keep ours, and pass on the signals of others immediately."""
        receiver.settimeout(timeout_s)
        try:
            codes = receiver.recv(4096)
        except (TimeoutError, BlockingIOError):
            return
        for code in codes:
            if code & _NUMBER_BITS in _SIGNALS:
                self._codes.append(code)
            elif code != _WAKE:
                self._pass_on(code)

    def _pass_on(self, number: int) -> None:
        """Report a signal to the library that used the wakeup file descriptor before us, such as asyncio."""
        if self._other_wakeup >= 0:
            with contextlib.suppress(OSError):
                os.write(self._other_wakeup, bytes([number]))

    def _act_on(self, code: int, receiver: socket.socket) -> None:
        number = code & _NUMBER_BITS
        if code == _END_PROCESS | number:
            self._drain(number, receiver, ends_process=True)
            self._end_process(number)
        elif self._is_new(code, number):
            link = self._link(number)
            ends_process = link is not None and not callable(link.previous)
            self._drain(number, receiver, ends_process=ends_process)
            if ends_process:
                self._end_process(number)
            self._raise_again(number)

    def _raise_again(self, number: int) -> None:
        """Have the main thread call the handler of the program, and wake it for that if it sleeps."""
        self._drained.add(number)
        # Otherwise the program has removed its handler meanwhile, and the signal would end the process.
        if callable(signal.getsignal(number)):
            self._raised.add(number)
            with contextlib.suppress(OSError):
                signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _is_new(self, code: int, number: int) -> bool:
        """Tell a signal from the second report of the same signal, and from one that we raised ourselves.

        A signal is reported twice: immediately by Python's C handler, and by `on_signal` when the main thread gets to
        it. The first report may be lost if another library has replaced the wakeup file descriptor.
        """
        if code == number:
            # If our handler is not installed, the signal has had its effect: there is nothing to wait for.
            if number in self._raised or self._link(number) is None:
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
            self._receive(receiver, 0)
            if number in self._codes:
                self._codes.remove(number)
                self._pass_on(number)
                return
            if time.monotonic() > deadline:
                name = signal.Signals(number).name
                lost = "".join(f"  {label}\n" for label in background.labels())
                _report(f"slipstream: not done {grace_s:g} s after {name}, not waiting any longer:\n{lost}")
                return

    def _end_process(self, number: int) -> None:
        """End the process as the signal would have without us. Does not return."""
        # `signal.signal` works in the main thread only, and that may be stuck.
        ctypes.pythonapi.PyOS_setsig(number, None)
        os.kill(os.getpid(), number)
        # Only if the signal is blocked.
        time.sleep(1)
        os._exit(128 + number)

    def _labels(self) -> list[str]:
        if self._background is None:
            return []
        return self._background.labels()


def _report(message: str) -> None:
    """Write to stderr as far as that is possible without waiting: nobody may read it, or it may be closed."""
    # Not with `print` or `logging`, whose locks another thread may hold.
    data = message.encode(errors="replace")
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):
        # This many bytes never block if a pipe is ready for writing.
        while data and poll.poll(_REPORT_WAIT_MS) == [(2, select.POLLOUT)]:
            data = data[os.write(2, data[: select.PIPE_BUF]) :]


_signals = _Signals()


def _install_in_main_thread(_: int | None) -> int:
    _signals.install()
    return 0


# A module variable, because the interpreter calls it later and does not keep it alive.
_install_call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_install_in_main_thread)


# What each thread that is forking had blocked before.
_masks: dict[int, set[Any]] = {}


def _block_signals() -> None:
    """Before a fork: a signal to a child that still has our handlers would reach the parent, or be lost."""
    # Read first. Setting the mask may raise KeyboardInterrupt, and then the old mask would be unknown.
    _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _unblock_signals() -> None:
    """After a fork: let the signals that arrived during it take effect."""
    mask = _masks.pop(threading.get_ident(), None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _reset_after_fork() -> None:
    """Give a forked child the handlers of the program; ours return with its first job."""
    global _signals  # noqa: PLW0603 - one per process
    parents = _signals
    _signals = _Signals()
    try:
        parents.undo()
    finally:
        _unblock_signals()
        _masks.clear()


os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_reset_after_fork)
