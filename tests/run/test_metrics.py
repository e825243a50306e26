"""Metrics as columns: read around damage, one value an iteration, thinned."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.report.counters import added, find_stalls, running_time_s, total
from slipstream.run.metrics import MAX_COLUMNS, MAX_LINE_BYTES, MAX_POINTS, read_metrics, thin


@pytest.fixture
def read(tmp_path):
    def written(*lines):
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(
            b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        )
        return read_metrics(path)

    return written


def test_values_that_a_line_lacks_are_nan_and_columns_may_come_later(read):
    metrics = read({"iteration": 1, "entropy": 2.5}, {"iteration": 2, "late": 7}, {"iteration": 3, "entropy": None})
    np.testing.assert_array_equal(metrics["entropy"], [2.5, np.nan, np.nan])
    np.testing.assert_array_equal(metrics["late"], [np.nan, 7, np.nan])
    assert metrics["unheard of"].shape == (3,)
    assert metrics.last("entropy") == 2.5
    assert metrics.last("unheard of") is None


def test_a_last_line_that_a_crash_cut_off_is_skipped_and_known_as_such(read):
    metrics = read({"iteration": 1}, b'{"iteration": 2, "entr')
    assert (metrics.num_lines, metrics.num_skipped, metrics.cut_off) == (1, 1, True)


def test_a_last_line_without_a_newline_counts_if_it_is_whole(read):
    metrics = read({"iteration": 1}, b'{"iteration": 2}')
    assert (metrics.num_lines, metrics.num_skipped, metrics.cut_off) == (2, 0, False)


@pytest.mark.parametrize(
    "garbage",
    [b"\x00\xff\xfe\n", b"[1, 2]\n", b'"text"\n', b"[" * 100_000 + b"\n", b"x" * (2 * MAX_LINE_BYTES + 9) + b"\n"],
    ids=["bytes", "list", "text", "nested", "long"],
)
def test_garbage_lines_are_read_around(read, garbage):
    metrics = read({"iteration": 1}, garbage, {"iteration": 2}, garbage, {"iteration": 3})
    np.testing.assert_array_equal(metrics["iteration"], [1, 2, 3])
    assert (metrics.num_skipped, metrics.cut_off) == (2, False)


def test_what_is_not_a_finite_number_is_no_value(read):
    metrics = read(
        b'{"a": NaN, "b": Infinity, "c": "<b>", "d": true, "e": 1' + b"0" * 400 + b', "f": {"g": 1}, "h": 4}\n'
    )
    assert set(metrics.columns) == {"h"}


def test_numbers_so_large_that_their_sum_is_not_finite_are_no_values(read):
    metrics = read(*({"iteration": number, "entropy": 1e308} for number in range(5000)))
    assert metrics.curve("entropy") is None


def test_there_is_a_limit_to_how_many_columns_a_file_can_make(read):
    metrics = read(*({f"key {line} {number}": 1 for number in range(150)} for line in range(10)))
    assert len(metrics.columns) == MAX_COLUMNS
    assert all(len(column) == 10 for column in metrics.columns.values())


def test_an_empty_file_has_no_lines(read):
    metrics = read()
    assert metrics.num_lines == 0
    assert metrics.curve("entropy") is None
    assert find_stalls(metrics) is None
    assert running_time_s(metrics) is None


def test_iterations_run_again_after_a_resume_count_once_and_the_later_line_wins(read):
    metrics = read(*({"iteration": number, "env_frames": 10 * number, "entropy": value} for number, value in
                     [(1, 0.1), (2, 0.2), (3, 0.3), (2, 2.2), (3, 3.3), (4, 4.4)]))  # fmt: skip
    curve = metrics.curve("entropy")
    np.testing.assert_array_equal(curve.x, [10, 20, 30, 40])
    np.testing.assert_array_equal(curve.y, [0.1, 2.2, 3.3, 4.4])
    np.testing.assert_array_equal(metrics.starts, [True, False, False, True, False, False])


def test_counters_that_begin_again_with_a_process_are_added_up(read):
    counts = [1, 1, 3, None, 4, 1, 2]
    metrics = read(*({"ckpt/save_count": count, "ckpt/total_call_s": count and count / 10} for count in counts))
    np.testing.assert_array_equal(added(metrics, "ckpt/save_count"), [1, 0, 2, 0, 1, 1, 1])
    assert total(metrics, "ckpt/save_count") == 6
    assert total(metrics, "rollouts/save_count") is None


def test_a_queue_that_empties_is_no_sign_of_another_process(read):
    metrics = read(*({"iteration": at, "ckpt/save_count": at, "rollouts/queue_size": 3 - at} for at in (1, 2, 3)))
    assert total(metrics, "ckpt/save_count") == 3


def test_a_process_that_saved_no_less_than_the_one_before_it_is_told_by_its_iterations(read):
    metrics = read(
        *({"iteration": iteration, "ckpt/save_count": count} for iteration, count in [(1, 0), (2, 1), (2, 1)])
    )
    assert total(metrics, "ckpt/save_count") == 2


def test_an_optimizer_that_waits_in_the_iteration_after_a_save_waits_for_that_save(read):
    rows = [(1, 1, 0.010, 0.000), (2, 1, 0.010, 0.004), (3, 2, 0.016, 0.004), (4, 2, 0.016, 0.006)]
    names = ("iteration", "ckpt/save_count", "ckpt/total_call_s", "ckpt/total_barrier_s")
    stalls = find_stalls(read(*(dict(zip(names, row, strict=True)) for row in rows)))
    assert stalls
    assert stalls.call_ms
    assert stalls.barrier_ms
    np.testing.assert_allclose(stalls.call_ms.y, [10, 6])
    np.testing.assert_allclose(stalls.barrier_ms.y, [4, 2])
    assert stalls.per_save_ms == pytest.approx(11.0)


def test_a_pause_before_a_resume_is_not_running_time(read):
    times = [(1, 100.0), (2, 110.0), (3, 120.0), (3, 9000.0), (4, 9010.0)]
    assert running_time_s(read(*({"iteration": number, "time": time} for number, time in times))) == 50.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9000))
def test_thinning_keeps_extremes_and_order_and_is_bounded(values):
    y = np.array(values)
    curve = thin(np.arange(float(len(y))), y)
    assert len(curve.x) <= 2 * MAX_POINTS
    assert (np.diff(curve.x) > 0).all()
    low = curve.y if curve.low is None else curve.low
    high = curve.y if curve.high is None else curve.high
    assert low.min() == y.min()
    assert high.max() == y.max()
    assert curve.low is None or len(curve.x) <= MAX_POINTS
