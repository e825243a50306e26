"""What holds for all tests."""

import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

# Threads that spin while they wait for each other keep the cores from everyone else: on a busy machine tests take many
# times longer. It has to be set before torch is imported, by the tests or by the processes that they start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def survive(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing."""


def pytest_configure(config: pytest.Config) -> None:
    """Let child processes start with default signal handlers, whatever this process ignores.

    ``nohup`` ignores SIGHUP, and a shell ignores SIGINT and SIGQUIT in background jobs. A process that ignores a signal
    passes that on to the programs it starts, where tests send these signals. A signal with a handler is reset to its
    default instead.
    """
    # The controller of pytest-xdist runs no tests, and its workers set their own handlers.
    if config.getoption("dist", "no") != "no":
        return
    # Whoever used nohup wants the tests to survive the terminal, so this process does.
    replacements: dict[signal.Signals, Any] = {
        signal.SIGHUP: survive,
        signal.SIGQUIT: survive,
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    for number, handler in replacements.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Yield the URL of a bucket on this machine, whose credentials are in the environment."""
    from tests.s3 import BUCKET, environment, serving_s3

    with serving_s3() as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(endpoint).items():
            patch.setenv(name, value)
        yield f"s3://{BUCKET}"
