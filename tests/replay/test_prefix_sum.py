"""`PrefixSum` against a list of lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import ConfigurationError, OutOfRangeError, PrefixSum, ReplayError


class Model:
    """The same, naively."""

    def __init__(self, max_len):
        self.lengths, self.max_len = [], max_len

    def add(self, length):
        self.lengths.append(length)
        surplus = 0 if self.max_len is None else max(0, len(self.lengths) - self.max_len)
        self.evict(surplus)
        return surplus

    def evict(self, count):
        gone, self.lengths = self.lengths[:count], self.lengths[count:]
        return sum(gone)

    def owners(self):
        return [(number, offset) for number, length in enumerate(self.lengths) for offset in range(length)]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(0, 3)),
        st.tuples(st.just("extend"), st.lists(st.integers(0, 4), max_size=40)),
    ),
    max_size=60,
)


@given(operations, st.one_of(st.none(), st.integers(1, 12)))
def test_it_is_what_a_list_of_lengths_is(steps, max_len):
    sums, model = PrefixSum(max_len), Model(max_len)
    for name, value in steps:
        if name == "add":
            assert sums.add(value) == model.add(value)
        elif name == "extend":
            assert sums.extend(value) == sum(model.add(length) for length in value)
        else:
            count = min(value, len(model.lengths))
            assert sums.evict(count) == model.evict(count)
        owners = model.owners()
        assert (len(sums), sums.total) == (len(model.lengths), len(owners))
        assert sums.lengths.tolist() == model.lengths
        every = np.arange(len(owners))
        ranges = sums.get_range_idx(every)
        assert list(zip(ranges, sums.get_range_relative_idx(every, ranges), strict=True)) == owners


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_one_index_and_an_array_of_them_agree(lengths):
    sums = PrefixSum()
    sums.extend(lengths)
    ranges = sums.get_range_idx(np.arange(sums.total))
    for index, number in enumerate(ranges.tolist()):
        assert sums.get_range_idx(index) == number
        assert isinstance(sums.get_range_idx(index), int)
        assert sums.get_range_relative_idx(index, number) == index - int(sums.starts[number])


def test_sums_are_of_64_bits():
    sums = PrefixSum()
    for _ in range(4):
        sums.add(2**40)
    assert sums.total == 2**42
    assert sums.get_range_idx(2**42 - 1) == 3
    with pytest.raises(ReplayError, match="would add up to"):
        sums.add(2**63 - 1)
    assert len(sums) == 4


def test_memory_follows_what_is_left_and_not_what_was_added():
    sums = PrefixSum(max_len=10)
    for _ in range(10_000):
        sums.add(3)
    assert sums._bounds.size <= 64
    assert (len(sums), sums.total, sums.num_evicted) == (10, 30, 9990)


@pytest.mark.parametrize("index", [-1, 7, [0, 7], np.array([-2, 3])])
def test_an_index_that_is_not_there_is_an_error_that_says_how_many_there_are(index):
    sums = PrefixSum()
    sums.extend([3, 4])
    with pytest.raises(OutOfRangeError, match=r"index (-1|-2|7) is out of range, there are 7"):
        sums.get_range_idx(index)
    with pytest.raises(IndexError):
        sums.get_range_idx(index)


def test_an_empty_one_has_no_index():
    with pytest.raises(OutOfRangeError, match="index 0 is out of range, there are 0"):
        PrefixSum().get_range_idx(0)
    assert PrefixSum().get_range_idx([]).tolist() == []


def test_the_wrong_range_for_an_index_is_an_error():
    sums = PrefixSum()
    sums.extend([3, 4])
    with pytest.raises(OutOfRangeError, match="not in the range"):
        sums.get_range_relative_idx(1, 1)
    with pytest.raises(OutOfRangeError, match="range 2 is out of range, there are 2 ranges"):
        sums.get_range_relative_idx(1, 2)


@pytest.mark.parametrize("length", [-1, 1.5, "3", [1, -4]])
def test_a_length_that_is_none_is_refused(length):
    sums = PrefixSum()
    sums.add(2)
    with pytest.raises(ReplayError):
        sums.extend(length) if isinstance(length, list) else sums.add(length)
    assert sums.total == 2


@pytest.mark.parametrize("max_len", [0, -3, 2.5, True])
def test_a_limit_that_makes_no_sense_is_refused(max_len):
    with pytest.raises(ConfigurationError, match="max_len"):
        PrefixSum(max_len)


def test_more_cannot_be_evicted_than_there_is():
    sums = PrefixSum()
    sums.add(1)
    with pytest.raises(OutOfRangeError, match="cannot evict 2 ranges, there are 1"):
        sums.evict(2)


def test_sums_up_to_the_last_number_of_64_bits_are_exact_and_larger_ones_are_refused():
    most = 2**63 - 1
    sums = PrefixSum()
    sums.extend([2**62, 2**62 - 1, 0])
    assert (sums.total, sums.get_range_idx(2**62), sums.get_range_idx(most - 1)) == (most, 1, 1)
    with pytest.raises(ReplayError, match=f"would add up to {most + 1}"):
        sums.add(1)
    sums.evict(1)
    # What was evicted no longer counts.
    sums.add(2**62)
    assert (sums.total, sums.get_range_idx(most - 1)) == (most, 2)
    sums.clear()
    sums.add(5)
    assert (sums.total, sums.lengths.tolist()) == (5, [5])
    with pytest.raises(ReplayError, match="below 2\\*\\*63"):
        sums.extend(np.array([2**63], np.uint64))


def test_ranges_that_go_do_not_count():
    sums = PrefixSum(max_len=2)
    for _ in range(20):
        sums.add(2**62 - 1)
    assert sums.total == 2**63 - 2
    assert sums.get_range_idx(2**63 - 3) == 1
    assert sums.extend([2**60] * 5) == 5
    assert (sums.lengths.tolist(), sums.num_evicted) == ([2**60] * 2, 23)
    with pytest.raises(ReplayError, match="would add up to"):
        sums.extend([2**62, 2**62])
    assert sums.lengths.tolist() == [2**60] * 2
