"""Rows in small segments: every row comes back, whatever the segments are."""

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
    assert log.sparse_rows()[0] == 100
    assert np.array_equal(log.fetch(located), rows[:10])
    log.release(np.array([299]))
    assert log.packed_bytes == before / 4
    assert np.array_equal(log.fetch(log.locate(np.arange(300, 400))), rows[300:])


def test_many_rows_are_decoded_on_several_threads_just_the_same():
    log = RowLog(VectorRows(2000), UnitCache(0), 0, threads=3)
    log2 = RowLog(ImageRows(50_000, 200), UnitCache(0), 1, threads=3)
    vectors, images = rows_like("slow", 6000, 2000, 1), rows_like("slow", 120, 50_000, 2)
    log.append(log.pack(vectors, np.array([6000])), 6000)
    log2.append(log2.pack(images, np.array([120])), 120)
    assert np.array_equal(log.fetch(log.locate(np.arange(6000))), vectors)
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
