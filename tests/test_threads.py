"""Short-lived threads that keep order, bounds and errors."""

import threading
import time

import pytest

from slipstream.threads import parallel_map


def test_results_come_in_the_order_of_the_items():
    def slow_first(number: int) -> int:
        time.sleep(0.02 if number == 0 else 0)
        return number * number

    assert list(parallel_map(slow_first, range(50), threads=4)) == [n * n for n in range(50)]


def test_work_stays_within_two_items_per_thread_of_the_consumer():
    started: list[int] = []
    results = parallel_map(started.append, range(100), threads=3)
    next(results)
    time.sleep(0.05)
    assert len(started) <= 1 + 2 * 3
    results.close()  # type: ignore[attr-defined]


def test_the_first_failure_in_order_is_raised_and_no_thread_stays():
    before = threading.active_count()

    def fail_late(number: int) -> int:
        if number >= 7:
            raise ValueError(f"item {number}")
        return number

    results = parallel_map(fail_late, range(100), threads=4)
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="item 7"):
        next(results)
    assert threading.active_count() == before


def test_a_consumer_that_gives_up_leaves_no_thread_behind():
    before = threading.active_count()
    for result in parallel_map(lambda number: number, range(100), threads=4):
        if result == 5:
            break
    assert threading.active_count() == before


def test_without_threads_to_be_had_the_caller_does_the_work(monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert list(parallel_map(lambda number: number + 1, [1, 2, 3], threads=3)) == [2, 3, 4]
