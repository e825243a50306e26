"""Means and deviations of values that arrive in parts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slipstream import ConfigurationError
from slipstream.datasets.statistics import Statistics

numbers = st.floats(-1000, 1000, width=32)


@settings(max_examples=50, deadline=None)
@given(st.lists(hnp.arrays(np.float32, st.tuples(st.integers(0, 6), st.just(3)), elements=numbers), max_size=5))
def test_parts_give_the_statistics_of_the_whole(parts):
    statistics = Statistics.none(3)
    for part in parts:
        statistics = statistics.update(part)
    whole = np.concatenate([np.zeros((0, 3)), *parts])
    assert statistics.count == len(whole)
    if len(whole):
        np.testing.assert_allclose(statistics.mean, whole.mean(0), rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(statistics.std, np.maximum(whole.std(0), 1e-6), rtol=1e-4, atol=1e-3)
        assert np.array_equal(statistics.min, whole.min(0).astype(np.float32))


def test_a_mask_selects_rows():
    values = np.array([[1.0], [5.0], [3.0]])
    assert Statistics.none(1).update(values, np.array([True, False, True])).mean == [2]


@pytest.mark.parametrize(
    "mask", [np.array([0, 2]), np.array([1, 0, 1]), np.array([True, False]), np.ones((3, 1), bool)]
)
def test_a_mask_that_is_none_is_refused(mask):
    with pytest.raises(ConfigurationError, match=r"the mask is .*, expected bool\[3\], one per row"):
        Statistics.none(1).update(np.zeros((3, 1)), mask)


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 1, 1)])
def test_rows_of_another_width_are_refused(shape):
    with pytest.raises(ConfigurationError, match=r"expected \[rows, 1\] as before"):
        Statistics.none(1).update(np.zeros(shape))
