"""Intervals cover what they should, also if flights on one map depend on each other."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.run.evaluation import Interval
from slipstream.train.evaluation.statistics import (
    effective_count,
    paired_difference,
    rate_interval,
    ratio_interval,
    wilson_interval,
)

EIGHT_PER_MAP = np.arange(512) // 8


def width(interval: Interval | None) -> float:
    assert interval is not None
    return interval.high - interval.low


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=80))
def test_a_rate_is_within_its_interval_which_has_a_width_and_stays_between_0_and_1(flights):
    hits = np.array([hit for hit, _ in flights])
    clusters = np.array([cluster for _, cluster in flights])
    interval = rate_interval(hits, clusters)
    assert interval.mean == pytest.approx(hits.mean())
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1
    assert interval.low < interval.high


def test_wilsons_interval_has_the_values_of_the_textbook():
    interval = wilson_interval(0.8, 10)
    assert [interval.low, interval.high] == pytest.approx([0.490, 0.943], abs=1e-3)


def test_independent_flights_have_wilsons_interval():
    hits = np.arange(512) % 4 > 0
    assert rate_interval(hits, np.arange(512)) == wilson_interval(0.75, 512)


def test_maps_that_differ_make_the_interval_wider_than_flights_that_differ():
    by_flight = np.arange(512) % 8 < 4
    by_map = EIGHT_PER_MAP < 32
    assert width(rate_interval(by_map, EIGHT_PER_MAP)) > 2.5 * width(rate_interval(by_flight, EIGHT_PER_MAP))


@pytest.mark.parametrize("spread", [0.0, 0.25])
def test_the_interval_contains_the_true_rate_in_19_of_20_evaluations(spread):
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        by_map = 0.6 + spread * rng.choice([-1.0, 1.0], size=64)
        hits = rng.random(512) < by_map[EIGHT_PER_MAP]
        interval = rate_interval(hits, EIGHT_PER_MAP)
        covered += interval.low <= 0.6 <= interval.high
    assert 275 <= covered <= 297


@pytest.mark.parametrize("num_maps", [2, 4, 8, 12])
def test_the_interval_contains_the_true_rate_also_with_few_maps(num_maps):
    rng = np.random.default_rng(5)
    clusters = np.arange(64 * num_maps) // 64
    covered = 0
    for _ in range(300):
        by_map = 0.5 + 0.4 * rng.uniform(-1.0, 1.0, size=num_maps)
        hits = rng.random(len(clusters)) < by_map[clusters]
        interval = rate_interval(hits, clusters)
        covered += interval.low <= 0.5 <= interval.high
    assert covered >= 264


@pytest.mark.parametrize("count", [2, 3, 5, 8, 12])
def test_the_interval_of_a_mean_contains_the_true_one_also_with_few_flights(count):
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(400):
        values = rng.normal(5.0, 1.0, size=count)
        interval = ratio_interval(values, np.ones(count), np.arange(count))
        assert interval is not None
        covered += interval.low <= 5.0 <= interval.high
    assert 365 <= covered <= 395


def test_a_ratio_is_cut_off_where_it_is_impossible():
    single = ratio_interval(np.array([3.0]), np.array([4.0]), np.zeros(1), least=0.0, most=1.0)
    assert single == Interval(0.75, 0.0, 1.0)
    pair = ratio_interval(np.array([0.0, 1.0]), np.ones(2), np.arange(2), least=0.0)
    assert pair is not None
    assert pair.low == 0.0
    assert pair.high > 1.0


def test_pooling_flights_of_maps_that_differ_would_contain_the_true_rate_too_rarely():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        by_map = 0.6 + 0.25 * rng.choice([-1.0, 1.0], size=64)
        hits = rng.random(512) < by_map[EIGHT_PER_MAP]
        interval = wilson_interval(float(hits.mean()), 512)
        covered += interval.low <= 0.6 <= interval.high
    assert covered < 260


def test_successes_only_still_leave_room_for_failures_and_more_with_fewer_maps():
    many = rate_interval(np.ones(512), EIGHT_PER_MAP)
    few = rate_interval(np.ones(512), np.arange(512) // 128)
    single = rate_interval(np.ones(512), np.zeros(512))
    assert many.high == few.high == single.high == 1.0
    assert 0.98 < many.low < 0.99
    assert few.low < 0.93
    assert single.low < 0.75


def test_one_map_gets_a_wide_interval_because_it_says_nothing_about_others():
    hits = np.arange(512) % 2 == 0
    assert width(rate_interval(hits, np.zeros(512))) > 4 * width(rate_interval(hits, EIGHT_PER_MAP))


def test_correlated_flights_are_worth_fewer_independent_ones():
    assert effective_count(np.ones(10)) == 10
    assert effective_count(np.array([1000])) == pytest.approx(9.9, abs=0.1)


def test_the_same_flights_have_the_same_interval_every_time():
    hits = np.random.default_rng(1).random(512) < 0.3
    assert rate_interval(hits, EIGHT_PER_MAP) == rate_interval(hits, EIGHT_PER_MAP)


def test_a_mean_over_some_flights_counts_only_those():
    arrived = np.array([1.0, 0.0, 1.0, 1.0])
    interval = ratio_interval(np.array([10.0, 99.0, 20.0, 30.0]) * arrived, arrived, np.array([0, 0, 1, 1]))
    assert interval is not None
    assert interval.mean == 20
    assert interval.low < 20 < interval.high


def test_a_mean_of_nothing_is_none_and_one_value_says_nothing_about_its_error():
    assert ratio_interval(np.zeros(4), np.zeros(4), np.arange(4)) is None
    single = ratio_interval(np.array([7.0, 0.0]), np.array([1.0, 0.0]), np.arange(2))
    assert single == Interval(7.0, -math.inf, math.inf)
    assert single.to_json() == {"mean": 7.0, "low": None, "high": None}


def test_the_interval_of_a_mean_shrinks_with_the_root_of_the_number():
    few = ratio_interval(np.arange(100.0), np.ones(100), np.arange(100))
    many = ratio_interval(np.tile(np.arange(100.0), 100), np.ones(10_000), np.arange(10_000))
    assert width(few) / width(many) == pytest.approx(10, rel=0.02)


def test_a_difference_on_most_maps_is_significant_and_its_direction_is_known():
    first = np.arange(512) % 8 < 4
    second = np.arange(512) % 8 < 6
    difference = paired_difference(first, second, EIGHT_PER_MAP)
    assert difference.significant
    assert difference.mean == 0.25
    assert difference.low > 0
    assert not paired_difference(first, first, EIGHT_PER_MAP).significant


def test_equal_candidates_differ_significantly_in_one_of_20_comparisons_at_most():
    rng = np.random.default_rng(5)
    found = 0
    for _ in range(300):
        by_map = rng.random(64)[EIGHT_PER_MAP]
        first = rng.random(512) < by_map
        second = rng.random(512) < by_map
        found += paired_difference(first, second, EIGHT_PER_MAP).significant
    assert found <= 24


def test_five_flights_that_all_favour_one_are_too_few():
    second = np.zeros(512)
    second[::110] = 1
    difference = paired_difference(np.zeros(512), second, EIGHT_PER_MAP)
    assert second.sum() == 5
    assert difference.p_value == pytest.approx(2 / 2**5)
    assert not difference.significant


def test_a_single_map_cannot_show_a_significant_difference():
    difference = paired_difference(np.zeros(64), np.ones(64), np.zeros(64))
    assert difference.p_value == 1
    assert not difference.significant


def test_pairing_finds_what_separate_intervals_hide():
    rng = np.random.default_rng(7)
    first = rng.random(512) < rng.choice([0.1, 0.9], size=64)[EIGHT_PER_MAP]
    second = first | (rng.random(512) < 0.06)
    assert rate_interval(first, EIGHT_PER_MAP).high > rate_interval(second, EIGHT_PER_MAP).low
    assert paired_difference(first, second, EIGHT_PER_MAP).significant
