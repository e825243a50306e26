"""What is stored does not depend on how a thread treats denormal numbers."""

import concurrent.futures
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import load_checkpoint, write_container
from slipstream.checkpoint.delta import Parent
from slipstream.checkpoint.layout import Ancestor
from slipstream.checkpoint.native import NativeFile, write_native
from slipstream.floats import ieee_arithmetic
from slipstream.store.container import Container


def run_flushing(function: Callable[[], Any]) -> Any:
    """Call a function on a thread that flushes denormal numbers to zero, as training does."""

    def run() -> Any:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush denormal numbers")
        assert is_flushing()
        result = function()
        assert is_flushing()
        return result

    # Each thread has a separate setting, so this one keeps what it has.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()


def is_flushing() -> bool:
    return bool(np.float32(2.0**-126) * np.float32(0.5) == 0)


def run_plainly(function: Callable[[], Any]) -> Any:
    assert not is_flushing()
    return function()


def test_inside_the_block_denormal_numbers_count_and_afterwards_the_thread_is_as_before():
    def halve() -> bytes:
        with ieee_arithmetic(), ieee_arithmetic():
            return (np.array([2.0**-126, -(2.0**-148)], np.float32) * np.float32(0.5)).tobytes()

    assert run_flushing(halve) == run_plainly(halve) == np.array([2.0**-127, -(2.0**-149)], np.float32).tobytes()


def test_the_thread_is_as_before_after_an_error():
    def fail() -> None:
        with pytest.raises(ZeroDivisionError), ieee_arithmetic():
            raise ZeroDivisionError

    run_flushing(fail)


def denormal_states() -> list[Any]:
    """Return two states of denormal numbers that differ in their last bits."""
    bits = torch.randint(1, 1 << 20, (40_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return [{"moments": (bits + number).view(torch.float32)} for number in range(2)]


def write_delta(folder: Path, states: list[Any]) -> None:
    base = write_native(folder / "0.slip", states[0])
    parent = Parent((Ancestor(base.header.identity, "0.slip"),), base.content)
    write_native(folder / "1.slip", states[1], parent=parent)


@pytest.mark.parametrize("write_with", [run_plainly, run_flushing])
@pytest.mark.parametrize("read_with", [run_plainly, run_flushing])
def test_a_differential_checkpoint_loads_exactly_whether_or_not_denormal_numbers_are_flushed(
    tmp_path, write_with, read_with
):
    states = denormal_states()
    write_with(lambda: write_delta(tmp_path, states))
    with NativeFile(tmp_path / "1.slip") as file:
        assert file.header.parents
    back = read_with(lambda: load_checkpoint(tmp_path / "1.slip"))
    assert back["moments"].numpy().tobytes() == states[1]["moments"].numpy().tobytes()


@pytest.mark.parametrize("write_with", [run_plainly, run_flushing])
@pytest.mark.parametrize("read_with", [run_plainly, run_flushing])
def test_denormal_values_come_back_whether_or_not_they_are_flushed(tmp_path, write_with, read_with):
    values = [5e-324, -2.2e-310]

    def write() -> None:
        write_native(tmp_path / "state.slip", values)
        with write_container(tmp_path / "container.slip") as writer:
            writer.set("values", values)

    write_with(write)
    state = read_with(lambda: load_checkpoint(tmp_path / "state.slip"))
    container = read_with(lambda: Container(tmp_path / "container.slip"))
    assert state == container.values["values"] == values
