"""Short-lived threads that keep order, bounds and errors."""

import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slipstream.threads import (
    Notifier,
    Uninterrupted,
    background_threads,
    default_threads,
    parallel_each,
    parallel_map,
    usable_cores,
)
from tests.interrupts import interruptions


def test_results_come_in_the_order_of_the_items():
    last_done = threading.Event()

    def slow_first(number: int) -> int:
        if number == 0:
            assert last_done.wait(60)
        if number == 7:
            last_done.set()
        return number * number

    assert list(parallel_map(slow_first, range(50), threads=4)) == [n * n for n in range(50)]


def test_work_stays_within_two_items_per_thread_of_the_consumer():
    started: list[int] = []
    full = threading.Event()

    def note(number: int) -> int:
        started.append(number)
        if number == 6:
            full.set()
        return number

    results = parallel_map(note, range(100), threads=3)
    assert next(results) == 0
    # One is consumed, six are ahead: the threads now wait, whatever time they get.
    assert full.wait(60)
    assert next(results) == 1
    assert max(started) <= 1 + 2 * 3
    results.close()  # type: ignore[attr-defined]
    assert max(started) <= 1 + 2 * 3


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


def test_a_consumer_that_stops_early_leaves_no_thread_behind():
    before = threading.active_count()
    for result in parallel_map(lambda number: number, range(100), threads=4):
        if result == 5:
            break
    assert threading.active_count() == before


def test_if_no_thread_can_be_started_the_caller_does_the_work(monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert list(parallel_map(lambda number: number + 1, [1, 2, 3], threads=3)) == [2, 3, 4]


def test_if_only_some_threads_can_be_started_they_do_all_the_work(monkeypatch):
    start = threading.Thread.start
    num_started = 0

    def refuse_the_third(self: threading.Thread) -> None:
        nonlocal num_started
        if num_started == 2:
            raise RuntimeError("can't start new thread")
        num_started += 1
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_third)
    assert list(parallel_map(lambda number: number + 1, range(20), threads=5)) == list(range(1, 21))
    assert num_started == 2


@pytest.mark.parametrize("threads", [1, 2, 5, None])
def test_every_item_is_processed_exactly_once(threads):
    processed: list[int] = []
    parallel_each(processed.append, range(200), threads)
    assert sorted(processed) == list(range(200))
    parallel_each(processed.append, [], threads)
    assert len(processed) == 200


def test_the_calling_thread_works_beside_one_thread_less():
    workers: set[int] = set()
    together = threading.Barrier(3)

    def meet(_: int) -> None:
        workers.add(threading.get_ident())
        together.wait(60)

    parallel_each(meet, range(3), threads=3)
    assert len(workers) == 3
    assert threading.get_ident() in workers


def system_threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not list its threads there")
def test_a_tidy_loop_spares_a_thread_that_may_end_later_and_leaves_none_to_the_system():
    workers: list[int] = []
    left: list[set[str]] = []

    def loop() -> None:
        for _ in range(20):
            parallel_each(lambda _: workers.append(threading.get_native_id()), range(3), threads=2, tidy=True)
            left.append(system_threads() & set(map(str, workers)))

    caller = threading.Thread(target=loop)
    caller.start()
    caller.join()
    assert len(workers) == 60
    assert caller.native_id not in workers
    assert left == [set()] * 20
    parallel_each(lambda _: workers.append(threading.get_native_id()), [0], tidy=True)
    assert workers[-1] == threading.get_native_id()  # the main thread, which ends last


@pytest.mark.parametrize("threads", [1, 4])
def test_the_first_failure_ends_the_loop_and_no_thread_stays(threads):
    before = threading.active_count()
    processed: list[int] = []

    def fail_from_seven(number: int) -> None:
        if number >= 7:
            raise ValueError(f"item {number}")
        processed.append(number)

    with pytest.raises(ValueError, match="item 7"):
        parallel_each(fail_from_seven, range(100_000), threads)
    assert sorted(processed) == list(range(7))
    assert threading.active_count() == before


def test_a_loop_runs_on_the_calling_thread_if_no_other_can_be_started(monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    processed: list[int] = []
    parallel_each(processed.append, [1, 2, 3], threads=3)
    assert processed == [1, 2, 3]


def test_a_failed_loop_keeps_nothing_alive():
    class Item:
        pass

    def fail(_: Item) -> None:
        raise ValueError("no")

    items = [Item(), Item(), Item()]
    references = [weakref.ref(item) for item in items]
    with pytest.raises(ValueError, match="no"):
        parallel_each(fail, items, threads=2)
    del items
    assert [reference() for reference in references] == [None] * 3


def test_a_loop_that_is_interrupted_anywhere_leaves_no_thread_behind():
    before = threading.active_count()
    interrupted = 0
    for _ in interruptions(lambda: parallel_each(abs, range(-3, 3), threads=2)):
        interrupted += 1
    assert interrupted > 5
    # Threads that nobody waits for need a moment to end.
    while threading.active_count() > before:
        time.sleep(0.01)


def test_results_are_not_kept_after_they_are_consumed():
    class Result:
        pass

    results = parallel_map(lambda _: Result(), range(6), threads=2)
    consumed = [weakref.ref(next(results)) for _ in range(6)]
    gc.collect()
    assert [reference() for reference in consumed] == [None] * 6


def test_thread_counts_are_positive_and_ordered():
    assert 1 <= background_threads() <= default_threads() <= usable_cores()
    assert default_threads() <= 8


def test_a_map_that_is_interrupted_anywhere_leaves_no_thread_behind():
    before = threading.active_count()
    interrupted = 0
    for _ in interruptions(lambda: list(parallel_map(abs, range(-3, 3), threads=2))):
        interrupted += 1
        assert list(parallel_map(abs, [-1, 2], threads=2)) == [1, 2]
    assert interrupted > 10
    # Threads that nobody waits for need a moment to end.
    while threading.active_count() > before:
        time.sleep(0.01)


def test_a_forked_child_computes_what_its_threads_would_have():
    results = parallel_map(lambda number: number + 1, range(40), threads=2)
    assert next(results) == 1
    child = os.fork()
    if child == 0:
        os._exit(0 if list(results) == list(range(2, 41)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(results) == list(range(2, 41))


def test_a_notifier_wakes_every_thread_whose_condition_is_true():
    notifier = Notifier()
    numbers: list[int] = []
    woken: list[int] = []

    def wait(number: int) -> None:
        assert notifier.wait_until(lambda: number in numbers, timeout_s=60)
        woken.append(number)

    crew = [threading.Thread(target=wait, args=(number,)) for number in range(20)]
    for thread in crew:
        thread.start()
    for number in range(20):
        numbers.append(number)
        notifier.notify_all()
    for thread in crew:
        thread.join()
    assert sorted(woken) == list(range(20))


def test_a_notifier_gives_up_when_the_time_is_up():
    assert not Notifier().wait_until(lambda: False, timeout_s=0.001)
    assert Notifier().wait_until(lambda: True, timeout_s=0)


def test_a_notifier_that_is_interrupted_anywhere_still_wakes_others():
    notifier = Notifier()
    is_ready = False
    crew = [threading.Thread(target=notifier.wait_until, args=(lambda: is_ready,)) for _ in range(3)]
    for thread in crew:
        thread.start()
    for action in (notifier.notify_all, lambda: notifier.wait_until(lambda: False, timeout_s=0.001)):
        for point in interruptions(action):
            if point == 100:
                break
    is_ready = True
    notifier.notify_all()
    for thread in crew:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_function_that_raises_stop_iteration_is_an_error_and_not_the_end(threads):
    def raise_stop_iteration(item):
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(parallel_map(raise_stop_iteration, [1, 2, 3], threads))


def test_what_changes_under_an_uninterrupted_lock_changes_completely():
    tables = threading.RLock()
    lock = Uninterrupted(tables)
    inner = Uninterrupted(tables)
    changes: list[list[str]] = [[]]

    def change():
        with lock:
            changes[0].append("one")
            with inner, lock:
                changes[0].append("two")
            changes[0].append("three")

    num_points = 0
    for _ in interruptions(change):
        num_points += 1
        assert changes[0] in ([], ["one", "two", "three"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(tables.acquire, blocking=False).result()
            # The thread that took it has to give it back, so another lock takes its place.
        tables = threading.RLock()
        lock, inner = Uninterrupted(tables), Uninterrupted(tables)
        changes[0] = []
    assert num_points > 20


def test_an_uninterrupted_lock_works_in_every_thread_and_with_every_handler():
    lock = Uninterrupted(threading.RLock())

    def use():
        with lock:
            return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: use(), range(100)))
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with lock:
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with lock:
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
