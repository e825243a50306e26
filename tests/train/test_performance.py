"""Where time goes."""

import threading
import time

import pytest

from slipstream import PerformanceMonitor


def test_statistics_are_those_of_the_last_values_and_totals_those_of_all():
    monitor = PerformanceMonitor()
    for value in (100.0, 1.0, 2.0, 3.0):
        monitor.record("step", value)
    stats = monitor.get_stats(window=3)["step"]
    assert stats == {"mean": 2.0, "std": (2 / 3) ** 0.5, "min": 1.0, "max": 3.0, "total": 106.0, "count": 4}


def test_timers_measure_seconds_and_blocks_that_fail_too():
    monitor = PerformanceMonitor()
    with monitor.timer("sleep"):
        time.sleep(0.02)
    with pytest.raises(RuntimeError), monitor.timer("sleep"):
        raise RuntimeError
    monitor.start_timer("sleep")
    assert monitor.end_timer("sleep") >= 0
    stats = monitor.get_stats()["sleep"]
    assert stats["count"] == 3
    assert stats["max"] >= 0.02


def test_timers_of_one_name_may_be_nested():
    monitor = PerformanceMonitor()
    monitor.start_timer("a")
    monitor.start_timer("a")
    inner = monitor.end_timer("a")
    assert monitor.end_timer("a") >= inner


def test_a_timer_that_is_not_running_is_said_not_to_be():
    monitor = PerformanceMonitor()
    with pytest.raises(ValueError, match="no timer 'rollout' is running"):
        monitor.end_timer("rollout")
    monitor.start_timer("rollout")
    failures = []

    def end_in_another_thread() -> None:
        try:
            monitor.end_timer("rollout")
        except ValueError as error:
            failures.append(error)

    thread = threading.Thread(target=end_in_another_thread)
    thread.start()
    thread.join()
    assert len(failures) == 1
    assert monitor.get_stats() == {}
    monitor.end_timer("rollout")


def test_reports_are_flat_and_summaries_have_a_heading_and_a_line_per_name():
    monitor = PerformanceMonitor()
    for value in (0.001, 0.003):
        monitor.record("rollout", value)
    monitor.record("update", 0.5)
    assert monitor.report() == {
        "rollout_mean": 0.002,
        "rollout_std": 0.001,
        "update_mean": 0.5,
        "update_std": 0.0,
    }
    heading, first, second = monitor.get_summary().splitlines()
    assert heading == "=== Performance Summary ==="
    assert first.split() == ["update", "500.000", "±", "0.000", "ms", "[500.000,", "500.000]"]
    assert second.split() == ["rollout", "2.000", "±", "1.000", "ms", "[1.000,", "3.000]"]


def test_the_summary_of_nothing_is_its_heading():
    assert PerformanceMonitor().get_summary() == "=== Performance Summary ==="


def test_memory_is_bounded_and_totals_are_exact_all_the_same():
    monitor = PerformanceMonitor(max_samples=10)
    for value in range(1000):
        monitor.record("x", value)
    assert len(monitor._series["x"].recent) == 10
    assert monitor.get_stats(window=500)["x"]["min"] == 990
    assert monitor.get_stats()["x"]["total"] == sum(range(1000))


def test_reset_forgets_values_and_keeps_running_timers():
    monitor = PerformanceMonitor()
    monitor.record("x", 1)
    monitor.start_timer("y")
    monitor.reset()
    assert monitor.get_stats() == {}
    monitor.end_timer("y")
    assert set(monitor.get_stats()) == {"y"}


def test_threads_may_use_it_at_once():
    monitor = PerformanceMonitor()

    def work() -> None:
        for _ in range(500):
            with monitor.timer("a"):
                monitor.start_timer("b")
                monitor.record("c", 1)
                monitor.end_timer("b")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = monitor.get_stats()
    assert [stats[name]["count"] for name in "abc"] == [4000, 4000, 4000]
    assert stats["c"]["total"] == 4000
    assert not monitor._series["b"].started


@pytest.mark.parametrize("call", [lambda: PerformanceMonitor(0), lambda: PerformanceMonitor().get_stats(0)])
def test_sizes_that_make_no_sense_are_refused(call):
    with pytest.raises(ValueError, match="expected a whole number of at least 1"):
        call()
