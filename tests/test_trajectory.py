"""An observation and its `next`, stored once, against loops over every step."""

import subprocess
import sys

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.trajectory import (
    SharedNext,
    copy_next,
    exception_numbers,
    exception_rows,
    find_breaks,
    frame_positions,
    gather_next,
    is_transposed,
)

# bfloat16 and float8 are carried as u2 and u1.
DTYPES = ["?", "u1", "i1", "u2", "i2", "u4", "i8", "f2", "f4", "f8", "c8", "c16"]
SPECIAL = np.array([np.nan, -0.0, 0.0, np.inf, -np.inf, 1e-40])


def bits(value):
    return np.ascontiguousarray(value).tobytes()


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def naive_breaks(root, after):
    num_envs, num_steps = root.shape[:2]
    breaks = np.zeros((num_envs, max(0, num_steps - 1)), bool)
    for env in range(num_envs):
        for step in range(num_steps - 1):
            breaks[env, step] = bits(after[env, step]) != bits(root[env, step + 1])
    return breaks


@st.composite
def pairs(draw, max_breaks=4):
    """Draw an observation of any bits and its `next`, which differs from what follows in a few places."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    num_envs = draw(st.integers(0, 4))
    num_steps = draw(st.integers(1, 9))
    inner = draw(st.sampled_from([(), (1,), (3,), (2, 3), (9,), (17,), (0,), (2, 0)]))
    shape = (num_envs, num_steps + 1, *inner)
    words = draw(npst.arrays(np.uint8, (*shape, dtype.itemsize), elements=st.integers(0, 255), fill=st.just(0)))
    if dtype == np.bool_:
        words &= 1
    whole = np.ascontiguousarray(words).reshape(-1).view(dtype).reshape(shape)
    root = whole[:, :-1].copy()
    after = whole[:, 1:].copy()
    for _ in range(draw(st.integers(0, max_breaks)) if whole.size else 0):
        env = draw(st.integers(0, num_envs - 1))
        step = draw(st.integers(0, num_steps - 1))
        place = draw(st.integers(0, max(0, after[env, step].nbytes - 1)))
        changed = bytearray(after[env, step].tobytes())
        changed[place] ^= 1
        after[env, step] = np.frombuffer(bytes(changed), dtype).reshape(inner)
    return root, after


def share(root, after) -> SharedNext:
    shared = SharedNext.of(root, after)
    assert shared is not None
    return shared


@settings(max_examples=150, deadline=None)
@given(pairs())
def test_breaks_are_the_steps_where_any_bit_differs(pair):
    root, after = pair
    expected = naive_breaks(root, after)
    assert same(find_breaks(root, after), expected)
    # The same steps in other memory: time first, elements apart, and of another byte alignment.
    for arrange in (time_first, every_second, misaligned):
        assert same(find_breaks(arrange(root), arrange(after)), expected)


def time_first(array):
    return np.ascontiguousarray(array.swapaxes(0, 1)).swapaxes(0, 1)


def every_second(array):
    if array.ndim < 3:
        return array
    return np.repeat(array, 2, axis=-1)[..., ::2]


def misaligned(array):
    memory = np.zeros(array.nbytes + 1, np.uint8)
    copy = memory[1:].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@settings(max_examples=150, deadline=None)
@given(pairs(), st.data())
def test_shared_steps_come_back_bit_for_bit_for_any_part(pair, data):
    root, after = pair
    breaks = naive_breaks(root, after)
    if not root.size or breaks.sum() > 0.25 * breaks.size:
        assert SharedNext.of(root, after) is None
        return
    shared = share(root, after)
    assert same(shared.whole[:, :-1], root)
    assert same(shared.next(), after)
    num_envs, num_steps = root.shape[:2]
    first, last = sorted(data.draw(st.tuples(st.integers(0, num_envs), st.integers(0, num_envs))))
    begin, end = sorted(data.draw(st.tuples(st.integers(0, num_steps), st.integers(0, num_steps))))
    rows = exception_rows(shared.breaks, slice(first, last))
    part = SharedNext(shared.whole[first:last], shared.breaks[first:last], shared.exceptions[rows])
    assert same(part.next(slice(begin, end)), after[first:last, begin:end])


@settings(max_examples=100, deadline=None)
@given(pairs(), st.data())
def test_scattered_steps_are_those_of_next(pair, data):
    root, after = pair
    shared = SharedNext.of(root, after)
    if shared is None:
        return
    num_envs, num_steps = root.shape[:2]
    place = st.tuples(st.integers(0, num_envs - 1), st.integers(0, num_steps - 1))
    places = np.array(data.draw(st.lists(place, max_size=6)), np.intp).reshape(-1, 2)
    numbers = exception_numbers(shared.breaks)
    found = gather_next(shared.whole, numbers, shared.exceptions, places[:, 0], places[:, 1])
    assert same(found, after[places[:, 0], places[:, 1]])


@settings(max_examples=100, deadline=None)
@given(pairs(), st.data())
def test_whole_environments_are_copied_as_next(pair, data):
    root, after = pair
    shared = SharedNext.of(root, after)
    if shared is None:
        return
    first, last = sorted(data.draw(st.tuples(st.integers(0, len(root)), st.integers(0, len(root)))))
    numbers = exception_numbers(shared.breaks)[first:last]
    out = np.zeros_like(after[first:last])
    copy_next(shared.whole[first:last], numbers, shared.exceptions, out)
    assert same(out, after[first:last])


@settings(max_examples=100, deadline=None)
@given(pairs())
def test_the_next_of_every_position_is_the_position_after_it(pair):
    root, after = pair
    num_envs, num_steps = root.shape[:2]
    breaks = np.ones((num_envs, num_steps), bool)
    breaks[:, :-1] = find_breaks(root, after)
    positions = frame_positions(breaks)
    total = num_envs * num_steps + int(breaks.sum())
    sequence = np.zeros((total, *root.shape[2:]), root.dtype)
    sequence[positions.steps] = root
    sequence[positions.extras] = after[breaks]
    assert same(sequence[positions.steps], root)
    assert same(sequence[positions.steps + 1], after)
    assert sorted([*positions.steps.reshape(-1), *positions.extras]) == list(range(total))
    assert positions.counts.tolist() == [num_steps + int(row.sum()) for row in breaks]


def test_nan_equals_the_same_nan_and_minus_zero_differs_from_zero():
    root = np.tile(SPECIAL.astype("f4"), (2, 5, 1))
    assert not find_breaks(root, root).any()
    after = root.copy()
    after[1, 2, 1] = 0.0
    assert np.argwhere(find_breaks(root, after)).tolist() == [[1, 2]]
    assert np.signbit(share(root, after).next()[0, 0, 1])


def test_both_parts_of_complex_numbers_count():
    root = np.zeros((1, 9, 2), np.complex128)
    after = root.copy()
    after[0, 3, 1] = 1j
    after[0, 5, 0] = 1.0
    assert np.flatnonzero(find_breaks(root, after)).tolist() == [3, 5]


@pytest.mark.parametrize(("num_breaks", "is_shared"), [(0, True), (2, True), (3, False)])
def test_sharing_stops_beyond_a_quarter_of_breaks(num_breaks, is_shared):
    root = np.arange(9.0)[None]
    after = root + 1
    after[0, :num_breaks] = -1.0
    assert (SharedNext.of(root, after) is not None) == is_shared


def test_one_step_is_shared_because_nothing_contradicts_it():
    shared = share(np.array([[1.0]]), np.array([[2.0]]))
    assert shared.whole.tolist() == [[1.0, 2.0]]
    assert shared.next().tolist() == [[2.0]]


def test_other_dtypes_shapes_and_empty_arrays_are_not_shared():
    root = np.zeros((2, 3, 4), np.float32)
    assert SharedNext.of(root, root.astype(np.float64)) is None
    assert SharedNext.of(root, root[:, :, :2]) is None
    assert SharedNext.of(root[:0], root[:0]) is None
    assert SharedNext.of(root[:, :, :0], root[:, :, :0]) is None


def test_shared_storage_is_new_memory():
    root = np.arange(12.0).reshape(1, 12)
    after = root + 1
    shared = share(root, after)
    root[:] = 0
    after[:] = 0
    shared.next()[:] = 0
    assert shared.whole.tolist() == [list(range(13))]


def test_parts_that_do_not_fit_together_are_refused():
    whole = np.zeros((2, 4, 3), np.float32)
    breaks = np.zeros((2, 2), bool)
    none = np.zeros((0, 3), np.float32)
    SharedNext(whole, breaks, none)
    with pytest.raises(ValueError, match=r"mask of exceptions is float64\[2, 2\], expected bool\[2, 2\]"):
        SharedNext(whole, breaks.astype(float), none)
    with pytest.raises(ValueError, match=r"mask of exceptions is bool\[2, 1\]"):
        SharedNext(whole, breaks[:, :1], none)
    with pytest.raises(ValueError, match=r"marks 0 exceptions, but their values are float32\[1, 3\]"):
        SharedNext(whole, breaks, np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match=r"values are float64\[0, 3\], expected float32\[0, 3\]"):
        SharedNext(whole, breaks, none.astype(float))
    with pytest.raises(ValueError, match=r"shape \[2\]"):
        SharedNext(whole[:, 0, 0], breaks, none)


def test_time_before_environments_is_recognised_unless_nothing_changes():
    generator = np.random.default_rng(0)
    whole = generator.normal(size=(20, 11, 3))
    root = whole[:, :-1]
    after = whole[:, 1:]
    assert not is_transposed(root, after)
    assert is_transposed(root.swapaxes(0, 1), after.swapaxes(0, 1))
    still = np.ones((10, 20, 3))
    assert not is_transposed(still, still)
    assert not is_transposed(root[:1], after[:1])


def test_importing_it_does_not_import_torch():
    script = "import sys, slipstream.trajectory; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
