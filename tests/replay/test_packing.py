"""Rows in small segments: every row comes back, whatever the segments are."""

import tracemalloc

import lz4.block
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import CodecError, OutOfRangeError
from slipstream.replay.log import RowLog, Segment, UnitCache
from slipstream.replay.packing import ImageRows, Units, VectorRows, split_evenly


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(1, 20))
def test_runs_are_split_evenly_and_never_joined(lengths, target):
    sizes = split_evenly(np.array(lengths, np.int64), target).tolist()
    for length in (length for length in lengths if length):
        mine: list[int] = []
        while sum(mine) < length:
            mine.append(sizes.pop(0))
        assert sum(mine) == length
        assert max(mine) - min(mine) <= 1
        assert max(mine) <= max(2 * target, 1)
    assert not sizes


def rows_like(kind, count, width, seed):
    generator = np.random.default_rng(seed)
    if kind == "noise":
        return generator.integers(0, 256, (count, width)).astype(np.uint8)
    if kind == "zeros":
        return np.zeros((count, width), np.uint8)
    return np.cumsum(generator.integers(0, 2, (count, width)), axis=0).astype(np.uint8)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6),
    st.integers(1, 40),
    st.sampled_from(["noise", "zeros", "slow"]),
    st.integers(0, 2**32 - 1),
)
def test_rows_come_back_in_any_order_as_often_as_asked_for(runs, width, kind, seed):
    total = sum(runs)
    vectors, images = rows_like(kind, total, width, seed), rows_like(kind, total, 4 * width, seed + 1)
    cache = UnitCache(seed % 2 * 4096)
    logs = [RowLog(VectorRows(width), cache, 0), RowLog(ImageRows(4 * width, width), cache, 1)]
    half = len(runs) // 2
    for part in (slice(0, half), slice(half, None)):
        chosen = np.array(runs[part], np.int64)
        start = sum(runs[:half]) if part.start else 0
        stop = start + int(chosen.sum())
        if stop > start:
            for log, rows in zip(logs, (vectors, images), strict=True):
                log.append(log.pack(rows[start:stop], chosen), stop - start)
    wanted = np.random.default_rng(seed).integers(0, total, 64)
    for _ in range(2):
        for log, rows in zip(logs, (vectors, images), strict=True):
            assert np.array_equal(log.fetch(log.locate(wanted)), rows[wanted])
    first = sum(runs[:half])
    for log, rows in zip(logs, (vectors, images), strict=True):
        log.release(np.arange(first))
        rest = np.arange(first, total)
        assert np.array_equal(log.fetch(log.locate(rest)), rows[rest])
        if first:
            with pytest.raises(OutOfRangeError, match="not all in the log"):
                log.locate(np.array([first - 1]))


def test_a_segment_is_dropped_when_no_slot_shows_it_and_what_was_located_is_still_read():
    log = RowLog(VectorRows(64), UnitCache(0), 0)
    rows = rows_like("noise", 400, 64, 0)
    for first in range(0, 400, 100):
        log.append(log.pack(rows[first : first + 100], np.array([100])), 100)
    before = log.packed_bytes
    located = log.locate(np.arange(10))
    log.release(np.arange(299))
    assert log.packed_bytes == before / 2
    assert log.num_sparse_rows == 100
    assert log.sparse_ranges().tolist() == [[200, 300]]
    assert np.array_equal(log.fetch(located), rows[:10])
    log.release(np.array([299]))
    assert log.num_sparse_rows == 0
    assert log.packed_bytes == before / 4
    assert np.array_equal(log.fetch(log.locate(np.arange(300, 400))), rows[300:])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(0, 2**16))
def test_rows_of_sparse_segments_are_counted_on_the_way(sizes, seed):
    log = RowLog(VectorRows(8), UnitCache(0), 0)
    order = np.random.default_rng(seed)
    for size in sizes:
        log.append(log.pack(rows_like("noise", size, 8, seed), np.array([size])), size)
    for rows in np.array_split(order.permutation(log.end), 20):
        log.release(rows)
        ranges = log.sparse_ranges()
        assert log.num_sparse_rows == int((ranges[:, 1] - ranges[:, 0]).sum())
        twin = RowLog(VectorRows(8), UnitCache(0), 0)
        twin.restore(log.segments(), log.end)
        assert twin.num_rows == log.num_rows
    assert log.num_rows == log.num_sparse_rows == 0


def test_many_rows_are_decoded_on_several_threads_just_the_same():
    log = RowLog(VectorRows(2000), UnitCache(0), 0, threads=3)
    log2 = RowLog(ImageRows(50_000, 200), UnitCache(0), 1, threads=3)
    vectors, images = rows_like("slow", 6000, 2000, 1), rows_like("slow", 120, 50_000, 2)
    log.append(log.pack(vectors, np.array([6000])), 6000)
    log2.append(log2.pack(images, np.array([120])), 120)
    assert np.array_equal(log.fetch(log.locate(np.arange(6000))), vectors)
    # Few enough for one thread, too many to be decoded at once.
    wanted = np.random.default_rng(3).integers(0, 6000, 700)
    assert np.array_equal(log.fetch(log.locate(wanted)), vectors[wanted])
    assert np.array_equal(log2.fetch(log2.locate(np.arange(119, -1, -1))), images[::-1])
    repeated = np.repeat(np.arange(40), 3)
    assert np.array_equal(log2.fetch(log2.locate(repeated)), images[repeated])


@pytest.mark.parametrize("packer", [VectorRows(100), ImageRows(100, 10)])
def test_a_damaged_segment_is_an_error_or_at_least_not_a_crash(packer):
    rows = rows_like("slow", 16, 100, 0)
    units = packer.pack(rows, np.array([16]), 1)
    for damage in (units.payloads[0][:-1], b"\xff" + units.payloads[0][1:], units.payloads[0] + b"x"):
        log = RowLog(packer, UnitCache(0), 0)
        log.append(Units.join(units.sizes, [damage, *units.payloads[1:]]), 16)
        with pytest.raises(CodecError):
            log.fetch(log.locate(np.array([0])))


def test_the_cache_is_bounded_and_counts_hits():
    cache = UnitCache(3 * 16 * 64)
    log = RowLog(VectorRows(64), cache, 0)
    log.append(log.pack(rows_like("slow", 160, 64, 0), np.array([160])), 160)
    log.fetch(log.locate(np.array([0, 1, 2])))
    log.fetch(log.locate(np.array([3])))
    assert (cache.hits, cache.misses) == (1, 1)
    log.fetch(log.locate(np.arange(160)))
    assert cache.nbytes <= 3 * 16 * 64


VECTOR_DTYPES = ["bool", "uint8", "int8", "int16", "uint16", "float16", "int32", "float32", "int64", "float64"]


def special_values(dtype):
    """Return bit patterns that a codec which looks at values would change: NaN payloads, -0.0, infinities, extremes."""
    if dtype == "bool":
        return np.array([False, True])
    itemsize = np.dtype(dtype).itemsize
    ones = (1 << (8 * itemsize)) - 1
    top = 1 << (8 * itemsize - 1)
    patterns = [0, 1, top, top - 1, ones, ones - 1, top + 1, ones >> 2]
    if dtype.startswith("float"):
        infinity = int(np.array(np.inf, dtype).view(f"u{itemsize}"))
        # Infinity with lower bits set is a NaN; these bits are its payload.
        patterns += [infinity, infinity + 1, infinity | top, (infinity | top) + 2]
    return np.array(patterns, f"u{itemsize}").view(dtype)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(VECTOR_DTYPES),
    st.integers(0, 70),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(0, 2**32 - 1),
)
def test_every_bit_of_numbers_comes_back(dtype, width, runs, seed):
    generator = np.random.default_rng(seed)
    values = generator.choice(special_values(dtype), (sum(runs), width))
    # Some rows repeat, as those of slow sensors do.
    repeats = generator.random(len(values)) < 0.5
    values[1:][repeats[1:]] = values[:-1][repeats[1:]]
    rows = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), width * values.dtype.itemsize)
    log = RowLog(VectorRows(rows.shape[1]), UnitCache(0), 0)
    log.append(log.pack(rows, np.array(runs)), len(rows))
    wanted = generator.integers(0, len(rows), 50)
    assert np.array_equal(log.fetch(log.locate(wanted)), rows[wanted])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 9), st.integers(1, 60))
def test_hostile_units_of_vectors_raise_or_give_rows_of_the_right_size(payload, num_rows, width):
    try:
        content = VectorRows(width).decode([payload], np.array([num_rows]))
    except CodecError:
        return
    assert len(content) == num_rows * width


def test_a_unit_with_fewer_rows_than_it_should_have_is_an_error():
    packer = VectorRows(8)
    short = packer.pack(np.zeros((2, 8), np.uint8), np.array([2]), 1).content
    noise = np.random.default_rng(0).integers(0, 256, (4, 8)).astype(np.uint8)
    stored = packer.pack(noise, np.array([4]), 1).content
    assert len(stored) == noise.size
    for payloads in ([short, stored], [short, short]):
        with pytest.raises(CodecError):
            packer.decode(payloads, np.array([4, 4]))


def test_a_segment_with_units_larger_than_their_rows_is_refused():
    log = RowLog(VectorRows(8), UnitCache(0), 0)
    with pytest.raises(CodecError, match="a packed unit of 2 rows has 17 bytes, expected at most 16"):
        log.restore([Segment.join(0, np.array([4, 2]), [b"x" * 9, b"y" * 17])], 6)


def test_rows_of_a_lost_unit_are_not_there_and_its_neighbours_are():
    rows = rows_like("slow", 12, 64, 0)
    units = VectorRows(64).pack(rows, np.array([12]), 1)
    log = RowLog(VectorRows(64), UnitCache(0), 0)
    log.restore([Segment.join(100, units.sizes, [units.payloads[0], None, units.payloads[2]])], 112)
    log.count_shown(np.array([100, 111]))
    assert (np.flatnonzero(log.has(np.arange(98, 114))) + 98).tolist() == [*range(100, 104), *range(108, 112)]
    assert np.array_equal(log.fetch(log.locate(np.array([111, 100]))), rows[[11, 0]])
    for lost in (99, 104, 107, 112):
        with pytest.raises(OutOfRangeError, match="not all in the log"):
            log.locate(np.array([101, lost]))
    assert [payload is None for payload in log.segments()[0].payloads] == [False, True, False]


def test_rows_between_segments_are_not_there():
    rows = rows_like("slow", 8, 16, 0)
    parts = [VectorRows(16).pack(part, np.array([4]), 1) for part in (rows[:4], rows[4:])]
    log = RowLog(VectorRows(16), UnitCache(0), 0)
    log.restore([Segment(10, parts[0]), Segment(20, parts[1])], 30)
    log.count_shown(np.array([10, 20]))
    assert np.flatnonzero(log.has(np.arange(40))).tolist() == [*range(10, 14), *range(20, 24)]
    assert np.array_equal(log.fetch(log.locate(np.array([23, 10, 20, 13]))), rows[[7, 0, 4, 3]])
    for gap in (0, 9, 14, 19, 24, 29):
        with pytest.raises(OutOfRangeError, match="not all in the log"):
            log.locate(np.array([gap, 10]))


def test_memory_of_tables_is_counted_until_segments_are_dropped():
    log = RowLog(VectorRows(64), UnitCache(0), 0)
    rows = rows_like("noise", 40, 64, 0)
    for _ in range(2):
        log.append(log.pack(rows, np.array([40])), 40)
    whole = log.held_bytes
    assert log.packed_bytes == 2 * rows.size < whole < 2 * rows.size + 2 * 500
    log.release(np.arange(40))
    assert log.held_bytes == whole // 2
    log.release(np.arange(40, 80))
    assert log.held_bytes == 0


@pytest.mark.parametrize("width", [1, 8_000, 70_000, 5_000_000])
def test_rows_of_any_size_come_back(width):
    rows = rows_like("slow", 7, width, 3)
    rows[3] = rows_like("noise", 1, width, 4)[0]
    log = RowLog(VectorRows(width), UnitCache(0), 0)
    log.append(log.pack(rows, np.array([5, 2])), 7)
    wanted = np.array([6, 0, 3, 3])
    assert np.array_equal(log.fetch(log.locate(wanted)), rows[wanted])


def test_a_block_of_a_hostile_unit_takes_bounded_memory():
    # Claims 16 MB in 64 kB; as a unit of 4 rows it may hold 32 bytes.
    bomb = lz4.block.compress(bytes(16 << 20), store_size=False)
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            VectorRows(8).decode([bomb] * 20, np.full(20, 4))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
