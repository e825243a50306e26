"""Checks of settings."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import ConfigurationError
from slipstream.checks import require_choice, require_count, require_number, require_positive


@given(value=st.integers(), least=st.integers(), most=st.none() | st.integers())
def test_a_count_is_returned_if_it_is_in_range_and_refused_if_not(value, least, most):
    if value >= least and (most is None or value <= most):
        assert require_count("n", value, least, most) == value
    else:
        with pytest.raises(ConfigurationError, match=rf"^n is {value}, expected a whole number "):
            require_count("n", value, least, most)


def test_a_count_may_be_a_numpy_integer_and_becomes_an_int():
    assert type(require_count("n", np.uint8(3))) is int


@pytest.mark.parametrize("value", [True, np.True_, 1.0, "1", None, math.nan, [1], np.arange(2)])
def test_a_count_is_nothing_but_an_integer(value):
    with pytest.raises(ConfigurationError, match="num_envs is .*, expected a whole number of at least 1"):
        require_count("num_envs", value)


def test_the_message_gives_both_ends_of_a_range():
    with pytest.raises(ConfigurationError, match="^level is 13, expected a whole number from 0 to 12$"):
        require_count("level", 13, 0, 12)
    with pytest.raises(ConfigurationError, match=r"^gamma is 1.5, expected a number from 0 to 1$"):
        require_number("gamma", 1.5, 0, 1)
    with pytest.raises(ConfigurationError, match=r"^beta is -0.5, expected a number of at least 0$"):
        require_number("beta", -0.5, 0)


@pytest.mark.parametrize("value", [0, 0.5, 1])
def test_a_number_may_be_at_either_end_of_its_range(value):
    require_number("gamma", value, 0, 1)


@pytest.mark.parametrize("value", [True, "1", None, math.nan, math.inf, -math.inf])
def test_a_number_is_finite_and_not_a_bool(value):
    with pytest.raises(ConfigurationError, match="dt_s is .*, expected a number above 0"):
        require_positive("dt_s", value)
    with pytest.raises(ConfigurationError, match="gamma is .*, expected a number of at least 0"):
        require_number("gamma", value, 0)


@pytest.mark.parametrize("value", [1, 1e-300, 2.5, np.float64(0.5)])
def test_numbers_above_zero_are_positive(value):
    require_positive("dt_s", value)


@pytest.mark.parametrize("value", [0, 0.0, -1e-300])
def test_zero_and_below_are_not(value):
    with pytest.raises(ConfigurationError, match="expected a number above 0"):
        require_positive("dt_s", value)


@pytest.mark.parametrize("value", ["Block", "", None, 3])
def test_a_choice_is_one_of_those_listed(value):
    require_choice("policy", "block", ("block", "raise"))
    with pytest.raises(ConfigurationError, match="^policy is .*, expected one of 'block', 'raise'$"):
        require_choice("policy", value, ("block", "raise"))
