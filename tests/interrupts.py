"""Ctrl-C at any chosen point of our code, without signals and without luck."""

import contextlib
import dis
import functools
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from slipstream import threads
from slipstream.store import background, handle, worker

INTERRUPTED_FILES = {module.__file__ for module in (background, handle, threads, worker)}


@functools.cache
def instructions_of(code: CodeType) -> dict[int, str]:
    """Return the name of the instruction at each offset."""
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


@contextlib.contextmanager
def interrupted_at(point: int) -> Iterator[None]:
    """Raise `KeyboardInterrupt` at one of the points where Ctrl-C can: after a call, a jump back, or on entering.

    Args:
        point: Which of these points, counted over all of the worker's code that this thread runs.
    """
    passed = 0
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal passed
        if frame.f_code.co_filename not in INTERRUPTED_FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            before = instructions_of(frame.f_code).get(last.get(frame, 0), "")
            last[frame] = frame.f_lasti
            if before.startswith(("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")):
                passed += 1
                if passed == point:
                    # What Python would call, which raises KeyboardInterrupt unless our code waits with that. A signal
                    # could arrive later than here, if there are other threads.
                    handler: Any = signal.getsignal(signal.SIGINT)
                    handler(signal.SIGINT, frame)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def interruptions(action: Callable[[], object]) -> Iterator[int]:
    """Run an action again and again, interrupted one instruction later each time, until it is not interrupted."""
    for instruction in itertools.count(1):
        try:
            with interrupted_at(instruction):
                action()
        except KeyboardInterrupt:
            yield instruction
        else:
            return
