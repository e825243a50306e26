"""Memory that is reused: never while somebody can still see it, and never more than was promised."""

import gc
import mmap
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from slipstream.memory import HUGE_PAGE_BYTES, PAGE_BYTES, Pool, aligned, fresh, scratch, scratch_scope

BYTES = np.dtype(np.uint8)


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("nbytes", [1, 4095, 1_000_000])
@pytest.mark.parametrize("skew", [0, 64, 1024])
def test_aligned_memory_starts_where_it_should(nbytes, skew):
    memory = aligned(nbytes, skew=skew)
    assert memory.shape == (nbytes,)
    assert address(memory) % PAGE_BYTES == skew


@pytest.mark.parametrize(
    "nbytes", [0, 1, 5000, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 7 * HUGE_PAGE_BYTES // 2, 33_000_001]
)
def test_fresh_memory_has_the_size_that_was_asked_for_and_can_be_written(nbytes):
    memory = fresh(nbytes)
    assert memory.shape == (nbytes,)
    memory[:] = 7
    assert torch.from_numpy(memory).sum(dtype=torch.int64) == 7 * nbytes
    assert not np.shares_memory(memory, fresh(nbytes))


def test_fresh_memory_lives_as_long_as_any_view_of_it():
    view = fresh(2 * HUGE_PAGE_BYTES)[:10]
    view[:] = range(10)
    gc.collect()
    others = [fresh(2 * HUGE_PAGE_BYTES) for _ in range(3)]
    for other in others:
        other[:] = 255
    assert view.tolist() == list(range(10))


def test_fresh_memory_comes_from_numpy_if_there_are_no_more_mappings(monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert fresh(2 * HUGE_PAGE_BYTES).shape == (2 * HUGE_PAGE_BYTES,)


def test_a_scope_reuses_the_memory_of_the_scope_before_it():
    with scratch_scope():
        first = scratch("a", 100_000, np.dtype(np.uint16))
        other = scratch("b", 100_000, np.dtype(np.uint16))
        assert not np.shares_memory(first, other)
    with scratch_scope():
        assert address(scratch("a", 50_000, np.dtype(np.uint32))) == address(first)


def test_a_nested_scope_never_touches_the_memory_of_the_outer_one():
    with scratch_scope():
        outer = scratch("a", 1000, BYTES)
        outer[:] = 1
        with scratch_scope():
            inner = scratch("a", 1000, BYTES)
            inner[:] = 2
        assert (outer == 1).all()
        assert not np.shares_memory(outer, inner)
        with scratch_scope():
            assert address(scratch("a", 1000, BYTES)) == address(inner)


def test_a_scope_that_fails_is_left():
    with scratch_scope():
        outer = scratch("a", 1000, BYTES)
    with pytest.raises(ValueError, match="stop"), scratch_scope():
        raise ValueError("stop")
    with scratch_scope():
        assert address(scratch("a", 1000, BYTES)) == address(outer)


def test_threads_have_separate_scratch_memory():
    with scratch_scope():
        mine = scratch("a", 1000, BYTES)
        theirs: list[np.ndarray] = []

        def work() -> None:
            with scratch_scope():
                theirs.append(scratch("a", 1000, BYTES))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not np.shares_memory(mine, theirs[0])


def test_large_requests_and_those_outside_a_scope_are_not_retained():
    assert not np.shares_memory(scratch("a", 1000, BYTES), scratch("a", 1000, BYTES))
    with scratch_scope():
        first = scratch("big", 2000, BYTES, limit_bytes=1999)
        assert not np.shares_memory(first, scratch("big", 2000, BYTES, limit_bytes=1999))


def test_scratch_memory_keeps_its_distance_from_a_page():
    with scratch_scope():
        assert address(scratch("page", 1000, BYTES)) % PAGE_BYTES == 0
        assert address(scratch("skewed", 1000, BYTES, skew=1024)) % PAGE_BYTES == 1024


@pytest.mark.parametrize(
    "view_of",
    [
        lambda array: array[3:],
        lambda array: array.reshape(-1)[::7].view(np.int8),
        torch.from_numpy,
        lambda array: torch.from_numpy(array)[2:].permute(1, 0)[1:],
        lambda array: memoryview(array)[1:],
    ],
    ids=["slice", "view of a view", "tensor", "view of a tensor", "memoryview"],
)
def test_memory_is_in_use_as_long_as_any_view_of_it(view_of):
    pool = Pool()
    array = pool.take((64, 32))
    place = address(array)
    view = view_of(array)
    del array
    gc.collect()
    assert address(pool.take((64, 32))) != place
    del view
    gc.collect()
    assert place in {address(array) for array in [pool.take((64, 32)) for _ in range(2)]}


def test_arrays_in_use_never_share_memory():
    pool = Pool()
    held = [pool.take((100,)) for _ in range(20)]
    for number, array in enumerate(held):
        array[:] = number
    del held[::2]
    for _ in range(10):
        pool.take(100)[:] = 255
    assert [array[0] for array in held] == list(range(1, 20, 2))


def test_the_smallest_buffer_that_fits_is_taken():
    pool = Pool(slack=4)
    arrays = {mebibytes: pool.take(mebibytes << 20) for mebibytes in (32, 8, 16)}
    places = {mebibytes: address(array) for mebibytes, array in arrays.items()}
    arrays.clear()
    first = pool.take(6 << 20)
    assert address(first) == places[8]
    assert address(pool.take(7 << 20)) == places[16]


def test_a_buffer_that_is_much_too_large_is_not_wasted_on_a_small_request():
    pool = Pool(slack=1)
    large = pool.take(64 << 20)
    place = address(large)
    del large
    assert address(pool.take(32 << 20)) != place


def test_a_released_array_is_reused_at_once_and_releasing_is_idempotent():
    pool = Pool()
    array = pool.take((10, 10))
    pool.release(array)
    pool.release(array)
    again = pool.take((10, 10))
    assert address(again) == address(array)
    del array
    gc.collect()
    assert address(pool.take((10, 10))) != address(again)


def test_an_array_from_elsewhere_cannot_be_released():
    pool = Pool()
    for array in (np.zeros(5, np.uint8), pool.take(5)[1:]):
        with pytest.raises(TypeError, match=r"does not come from Pool\.take"):
            pool.release(array)


def test_only_the_largest_free_buffers_are_retained():
    pool = Pool(max_free=2, slack=4)
    sizes = [4 << 20, 1 << 20, 3 << 20, 2 << 20]
    arrays = [pool.take(size) for size in sizes]
    arrays.clear()
    assert pool.free_bytes == 7 << 20


def test_memory_of_a_size_that_nobody_asks_for_any_more_is_freed():
    pool = Pool()
    pool.take(64 << 20)
    for _ in range(100):
        pool.take(1 << 10)
    assert pool.free_bytes < 1 << 20


def test_a_cleared_pool_retains_nothing_and_what_is_in_use_stays_valid():
    pool = Pool()
    free = pool.take(1000)
    held = pool.take(1000)
    held[:] = 7
    del free
    pool.clear()
    assert pool.free_bytes == 0
    assert (held == 7).all()
    del held
    assert pool.free_bytes == 0
    array = pool.take(1000)
    del array
    assert pool.free_bytes == 1000


def test_a_pool_that_is_cleared_while_it_is_warming_retains_nothing():
    is_allocating = threading.Event()
    proceed = threading.Event()
    threads: list[threading.Thread] = []

    def allocate(nbytes: int) -> np.ndarray:
        threads.append(threading.current_thread())
        is_allocating.set()
        assert proceed.wait(60)
        return np.empty(nbytes, np.uint8)

    pool = Pool(allocate=allocate)
    pool.warm(1000, 3)
    assert is_allocating.wait(60)
    pool.clear()
    proceed.set()
    threads[0].join()
    assert len(threads) == 1
    assert pool.free_bytes == 0


def test_an_array_that_is_released_after_the_pool_was_cleared_is_freed():
    pool = Pool()
    array = pool.take(1000)
    pool.clear()
    pool.release(array)
    assert pool.free_bytes == 0


def test_arrays_outlive_their_pool():
    pool = Pool()
    array = pool.take(1000)
    array[:] = 3
    del pool
    gc.collect()
    assert (array == 3).all()


def test_a_pickled_pool_is_an_empty_one():
    pool = Pool(max_free=3)
    pool.take(1000)
    again = pickle.loads(pickle.dumps(pool))
    assert again.free_bytes == 0
    array = again.take(1000)
    del array
    assert again.free_bytes == 1000


def allocate_with(calls: list[int]):
    def allocate(nbytes: int) -> np.ndarray:
        calls.append(nbytes)
        return np.empty(nbytes, np.uint8)

    return allocate


def test_a_warmed_pool_has_buffers_before_they_are_needed():
    calls: list[int] = []
    pool = Pool(slack=4, allocate=allocate_with(calls))
    pool.warm(8 << 20, 3)
    held = [pool.take(7 << 20) for _ in range(3)]
    assert calls == [8 << 20] * 3
    assert len({address(array) for array in held}) == 3
    pool.take(7 << 20)
    assert calls == [8 << 20] * 3 + [7 << 20]


def test_warming_again_replaces_buffers_that_are_too_small():
    calls: list[int] = []
    pool = Pool(slack=4, allocate=allocate_with(calls))
    small = pool.take(1 << 20)
    del small
    pool.warm(8 << 20, 1)
    pool.take(8 << 20)
    assert pool.free_bytes == 8 << 20


def test_warming_that_fails_leaves_the_error_to_the_caller_who_needs_the_memory():
    def refuse(nbytes: int) -> np.ndarray:
        raise MemoryError(f"no {nbytes} bytes")

    pool = Pool(allocate=refuse)
    pool.warm(1000, 2)
    with pytest.raises(MemoryError, match="no 1000 bytes"):
        pool.take(1000)


def test_without_a_thread_to_warm_it_a_pool_allocates_as_needed(monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool = Pool()
    pool.warm(1000, 2)
    assert pool.take(1000).shape == (1000,)


def test_a_child_forked_while_a_pool_is_warming_does_not_wait_for_it():
    blocked = threading.Event()
    proceed = threading.Event()
    warming = threading.current_thread()

    def allocate(nbytes: int) -> np.ndarray:
        if threading.current_thread() is not warming:
            blocked.set()
            proceed.wait()
        return np.empty(nbytes, np.uint8)

    pool = Pool(allocate=allocate)
    pool.warm(1000, 1)
    assert blocked.wait(60)

    def take_in_child() -> None:
        os._exit(pool.take(1000).nbytes != 1000)

    child = multiprocessing.get_context("fork").Process(target=take_in_child, daemon=True)
    child.start()
    try:
        child.join(60)
        assert child.exitcode == 0
    finally:
        proceed.set()
        child.kill()


def test_a_pool_works_while_the_interpreter_shuts_down():
    script = """
import numpy as np
from slipstream.memory import Pool

pool = Pool()

class AtShutdown:
    def __del__(self):
        pool.take(1000)[:] = 1
        print("taken", flush=True)

pool.warm(64 << 20, 20)
keep = AtShutdown()
held = pool.take(1000)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("taken\n", "")


def test_threads_that_take_and_drop_memory_never_see_each_other():
    pool = Pool(max_free=4)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(300):
            array = pool.take(2000)
            array[:] = number
            if not (array == number).all():
                wrong.append(number)

    crew = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    assert wrong == []
    assert pool.free_bytes <= 4 * 2000


class PoolMachine(RuleBasedStateMachine):
    """Takes, copies, drops and releases arrays in any order; every array that is held keeps its content."""

    arrays = Bundle("arrays")

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(max_free=3, slack=2)
        self.held: dict[int, np.ndarray] = {}
        self.number = 0

    @rule(target=arrays, size=st.sampled_from([0, 1, 100, 5000, 3 << 20]))
    def take(self, size):
        self.number += 1
        array = self.pool.take(size)
        array[:] = self.number % 251
        self.held[self.number] = array
        return self.number

    @rule(target=arrays, number=arrays)
    def view(self, number):
        if number not in self.held:
            return number
        self.number += 251
        while self.number % 251 != number % 251:
            self.number += 1
        self.held[self.number] = self.held[number][1:]
        return self.number

    @rule(number=consumes(arrays))
    def drop(self, number):
        self.held.pop(number, None)

    @rule()
    def clear(self):
        self.pool.clear()

    @invariant()
    def held_arrays_keep_their_content(self):
        for number, array in self.held.items():
            assert (array == number % 251).all()


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
