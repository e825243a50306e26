"""Signals: the first one finishes the iteration, the second one ends the process, whatever was saved before."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.train.conftest import SMALL

# Trains, and blocks where the test wants to send a signal. What was reached is printed.
SCRIPT = """
import logging, signal, sys
from slipstream.run.folder import RunFolder
from slipstream.train.settings import compose_settings
from slipstream.train.trainer import Trainer

logging.basicConfig(stream=sys.stdout, format="%(message)s")
trainer = Trainer(compose_settings({overrides!r}), RunFolder({run!r}))
step = trainer.shards.env._step
steps = 0

def block(what):
    print(what, flush=True)
    while True:
        signal.pause()

def count(tensordict):
    global steps
    steps += 1
    # In the third rollout: two checkpoints and two rollouts have been saved.
    if steps == 8 * 2 + 5 and {block_in_rollout}:
        trainer.checkpoints.flush()
        block("in a rollout")
    return step(tensordict)

trainer.shards.env._step = count
trainer.run()
block("after the last iteration")
"""

Script = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def script(tmp_path) -> Iterator[Script]:
    """Start the script; a process that still runs at the end of the test is killed."""
    with contextlib.ExitStack() as started:

        def start(*, block_in_rollout: bool) -> subprocess.Popen[str]:
            program = SCRIPT.format(overrides=list(SMALL), run=str(tmp_path / "x"), block_in_rollout=block_in_rollout)
            command = [sys.executable, "-W", "ignore", "-c", program]
            process = started.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            )
            started.callback(process.kill)
            return process

        yield start


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"{text!r} was not printed")


def test_the_second_sigterm_ends_a_run_that_has_saved_checkpoints(script):
    process = script(block_in_rollout=True)
    wait_for_line(process, "in a rollout")
    process.send_signal(signal.SIGTERM)
    wait_for_line(process, "SIGTERM: finishing this iteration; send it again to stop immediately")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_the_second_ctrl_c_interrupts_a_run_that_has_saved_checkpoints(script):
    process = script(block_in_rollout=True)
    wait_for_line(process, "in a rollout")
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "SIGINT: finishing this iteration; send it again to stop immediately")
    process.send_signal(signal.SIGINT)
    # Where Ray is installed, TorchRL imports it, and Ray's hook for exceptions makes Python exit with 1.
    assert process.wait() in (1, -signal.SIGINT)


def test_one_sigterm_ends_the_process_after_training(script):
    process = script(block_in_rollout=False)
    wait_for_line(process, "after the last iteration")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
