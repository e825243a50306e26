"""`EpisodeStore`: what is added comes back, step by step, in slices, and whole."""

import gc
import pickle
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import ConfigurationError, EpisodeStore, OutOfRangeError, ReplayError
from slipstream.replay.log import RowLog
from tests.replay.samples import assert_same, episode


def filled(lengths=(5, 1, 40, 17), **options):
    store = EpisodeStore(seed=0, **options)
    episodes = [episode(steps, number, image=True) for number, steps in enumerate(lengths)]
    for one in episodes:
        store.add(one)
    return store, episodes


def steps_of(episodes):
    """All steps of episodes as `get` returns them."""
    batch = {name: np.concatenate([one[name][: len(one["action"])] for one in episodes]) for name in episodes[0]}
    for name in ("position", "camera"):
        batch[f"next_{name}"] = np.concatenate([one[name][1:] for one in episodes])
    return batch


def test_every_step_comes_back_with_its_next_frame():
    store, episodes = filled()
    assert len(store) == 63
    assert store.num_frames == 67
    assert_same(store.get(np.arange(63)), steps_of(episodes))
    order = np.random.default_rng(1).permutation(63)
    assert_same(store.get(order), {name: values[order] for name, values in steps_of(episodes).items()})


def test_episodes_come_back_whole():
    store, episodes = filled()
    for position, one in enumerate(episodes):
        assert_same(store.episode(position), one)
    assert_same(store.episode(-1), episodes[-1])
    with pytest.raises(OutOfRangeError, match="episode 4 is out of range, there are 4"):
        store.episode(4)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=15), st.integers(61, 200))
def test_the_oldest_episodes_go_whole_when_there_are_too_many_frames(lengths, max_frames):
    store = EpisodeStore(max_frames)
    kept = []
    for number, steps in enumerate(lengths):
        kept.append(episode(steps, number))
        assert store.add(kept[-1]) == number
        while sum(len(one["position"]) for one in kept) > max_frames:
            kept.pop(0)
        assert store.num_frames == sum(len(one["position"]) for one in kept)
        assert store.num_episodes == len(kept)
    for position, one in enumerate(kept):
        assert_same(store.episode(position), one)
    stats = store.get_stats()
    assert stats["frames_added"] - stats["frames_evicted"] == stats["num_frames"]


def test_the_oldest_episodes_go_when_there_are_too_many_bytes():
    store = EpisodeStore(max_bytes=70_000)
    generator = np.random.default_rng(0)
    for _ in range(20):
        store.add({"noise": generator.integers(0, 256, (101, 100), dtype=np.uint8)})
        assert store.nbytes <= 70_000
    assert store.num_episodes == 5
    with pytest.raises(ReplayError, match="does not fit max_bytes=70000"):
        store.add({"noise": generator.integers(0, 256, (701, 100), dtype=np.uint8)})
    assert store.num_episodes == 5


def noise(steps, width):
    frames = np.random.default_rng(steps).normal(size=(steps + 1, width)).astype(np.float32)
    return {"o": frames, "a": np.zeros((steps, 1), np.float32)}


@pytest.mark.parametrize(
    ("count", "steps", "width"), [(300, 20, 1), (60, 50, 64), (600, 1, 4), (40, 100, 300)], ids=str
)
def test_the_memory_that_is_counted_is_what_is_allocated(count, steps, width):
    one = noise(steps, width)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        store = EpisodeStore(max_bytes=1 << 30, cache_bytes=0, threads=1)
        for _ in range(count):
            store.add(one)
        for stream in range(5):
            store.append({name: values[:100] for name, values in noise(150, width).items()}, stream)
        gc.collect()
        allocated = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert allocated < 1.1 * store.nbytes + 20_000
    assert store.nbytes < 2 * allocated


def test_samples_are_uniform_over_steps_and_reproducible():
    store, _ = filled((30, 10))
    counts = np.bincount((store.sample(8000)["action"][:, 0] * 7).round().astype(int) % 970, minlength=40)
    assert counts.min() > 120
    assert counts.max() < 290
    one, other = (filled()[0].sample(16) for _ in range(2))
    assert_same(one, other)
    drawn = store.sample(4, generator=np.random.default_rng(5))
    assert_same(drawn, store.sample(4, generator=np.random.default_rng(5)))


def test_a_batch_can_be_read_into_memory_that_is_there():
    store, _ = filled()
    out = store.sample(8)
    expected = store.get(np.arange(8))
    memory = {name: values.ctypes.data for name, values in out.items()}
    again = store.get(np.arange(8), out=out)
    assert_same(again, expected)
    assert {name: values.ctypes.data for name, values in again.items()} == memory
    with pytest.raises(ReplayError, match="out has no 'position' of"):
        store.sample(9, out=out)
    with pytest.raises(ReplayError, match="not contiguous"):
        store.sample(8, out={**out, "position": np.empty((8, 6), np.float32)[:, ::2]})


def test_what_is_returned_is_not_the_stores_memory():
    store, episodes = filled()
    batch = store.get(np.arange(10))
    for values in batch.values():
        values[:] = 0
    assert_same(store.get(np.arange(63)), steps_of(episodes))


@pytest.mark.parametrize("length", [1, 5, 17, 40])
def test_slices_never_cross_the_end_of_an_episode(length):
    store, _ = filled((5, 1, 40, 17))
    slices = store.sample_slices(200, length)
    assert slices["position"].shape == (200, length + 1, 3)
    assert slices["action"].shape == (200, length, 1)
    assert (np.diff(slices["position"][..., 0], axis=1) == 1).all()
    assert np.allclose(slices["action"][..., 0] * 7, slices["position"][:, :-1, 0])
    if length == 5:  # 1, 36 and 13 places to start at
        share = (slices["position"][:, 0, 0] // 1000 == 2).mean()
        assert 0.6 < share < 0.84


def test_slices_are_found_where_hardly_any_episode_is_long_enough():
    store = EpisodeStore(seed=0)
    for number in range(400):
        store.add(episode(2, number))
    store.add(episode(9, 400))
    slices = store.sample_slices(50, 9)
    assert (slices["position"][:, 0, 0] == 400_000).all()
    with pytest.raises(ReplayError, match="no episode has 10 steps, the longest has 9"):
        store.sample_slices(1, 10)


def test_unfinished_episodes_are_sampled_and_come_back_whole_when_they_end():
    store = EpisodeStore(max_frames=100, seed=0, frames=["position", "camera"])
    one = episode(30, 3, image=True)
    for t in range(30):
        store.append({name: values[t : t + 1] for name, values in one.items()})
        assert len(store) == t
    open_steps = store.get(np.arange(29))
    assert np.array_equal(open_steps["next_position"], one["position"][1:30])
    assert store.finish({"position": one["position"][30], "camera": one["camera"][30]}) == 0
    assert_same(store.episode(0), one)
    two = episode(20, 4, image=True)
    store.append({name: values[:12] for name, values in two.items()}, stream=7)
    store.append({name: values[:3] for name, values in two.items()}, stream=2)
    assert len(store) == 30 + 11 + 2
    batch = store.get(np.arange(43))
    assert np.array_equal(
        batch["position"], np.concatenate([one["position"][:30], two["position"][:11], two["position"][:2]])
    )
    assert np.array_equal(batch["next_camera"][30:41], two["camera"][1:12])
    assert store.discard(7) == 12
    assert len(store) == 32


def test_what_an_unfinished_episode_needs_is_taken_from_the_oldest_finished_one():
    store = EpisodeStore(max_frames=50)
    store.add(episode(20, 0))
    store.add(episode(20, 1))
    store.append({name: values[:15] for name, values in episode(20, 2).items()})
    assert (store.num_episodes, store.num_frames) == (1, 36)
    with pytest.raises(ReplayError, match="do not fit max_frames=50"):
        store.append({name: values[:60] for name, values in episode(70, 2).items()})
    assert store.num_frames == 36


BAD = {
    "empty": (
        {"position": np.zeros((1, 3), np.float32), "action": np.zeros((0, 1)), "done": np.zeros(0, bool)},
        "is empty",
    ),
    "no arrays": ({}, "has \\[\\], in this store"),
    "ragged": (episode(5) | {"action": np.zeros((4, 1))}, "ragged"),
    "other dtype": (
        episode(5) | {"action": np.zeros((5, 1), np.float32)},
        "'action' is float32\\[1\\].*float64\\[1\\]",
    ),
    "other shape": (episode(5) | {"position": np.zeros((6, 4), np.float32)}, "'position' is float32\\[4\\]"),
    "other keys": (episode(5) | {"more": np.zeros(5)}, "has \\['action', 'done', 'more'"),
    "objects": (episode(5) | {"action": np.array([None] * 5)}, "'action' is object"),
    "too long": (episode(300), "301 frames does not fit max_frames=200"),
    "a number": (episode(5) | {"action": 3.0}, "'action' is a single number"),
    "no name": (episode(5) | {7: np.zeros(5)}, "the name of an array is 7"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_episode_is_refused_and_nothing_has_changed(name):
    store = EpisodeStore(200, seed=0)
    store.add(episode(10))
    bad, message = BAD[name]
    with pytest.raises(ReplayError, match=message):
        store.add(bad)
    assert_same(store.episode(0), episode(10))
    assert (len(store), store.get_stats()["episodes_added"]) == (10, 1)
    store.add(episode(5, 1))


def test_the_first_episode_may_be_bad_too():
    store = EpisodeStore()
    for bad in ({}, {"a": np.zeros(3), "b": np.zeros(5)}, {"a": np.zeros(1)}, {"a": np.zeros(0)}):
        with pytest.raises(ReplayError):
            store.add(bad)
    with pytest.raises(ReplayError, match="'next_x' is what the next frame would be called"):
        store.add({"x": np.zeros(3), "next_x": np.zeros(3)})
    store.add(episode(3))


def test_reading_what_is_not_there_is_an_error():
    store = EpisodeStore(seed=0)
    with pytest.raises(ReplayError, match="nothing to sample"):
        store.sample(4)
    with pytest.raises(ReplayError, match="nothing to sample"):
        store.sample_slices(4, 2)
    store.add(episode(10))
    bad: list[Any] = [[10], [-1], [[1]], [1.5]]
    for index in bad:
        with pytest.raises(OutOfRangeError):
            store.get(index)
    sizes: list[Any] = [0, -1, 2.5, True]
    for size in sizes:
        with pytest.raises(ConfigurationError, match="batch_size"):
            store.sample(size)
    with pytest.raises(ReplayError, match="0 slices of 3 steps"):
        store.sample_slices(0, 3)


def test_all_batches_have_the_same_arrays():
    rows = {"o": np.zeros((5, 2)), "a": np.zeros((5, 1))}
    known, unknown = EpisodeStore(seed=0, frames=["o"]), EpisodeStore(seed=0)
    for store in (known, unknown):
        store.append(rows)
    first = set(known.sample(2))
    assert len(unknown) == 0
    with pytest.raises(ReplayError, match="does not know which arrays have a next frame"):
        unknown.sample(2)
    for store in (known, unknown):
        store.finish({"o": np.zeros(2)})
        store.append(rows)
        assert set(store.sample(2)) == first == {"o", "next_o", "a"}
        assert len(store) == 9


def test_bad_rows_of_an_unfinished_episode_are_refused():
    store = EpisodeStore()
    rows = {name: values[:4] for name, values in episode(9).items()}
    store.append(rows)
    for bad in (
        {},
        rows | {"action": rows["action"][:2]},
        {**rows, "x": rows["done"]},
        rows | {"done": rows["action"]},
    ):
        with pytest.raises(ReplayError):
            store.append(bad)
    for last in ({}, {"x": np.zeros(3)}, {"position": np.zeros(4, np.float32)}):
        with pytest.raises(ReplayError):
            store.finish(last)
    with pytest.raises(ReplayError, match="stream 3 has no unfinished episode"):
        store.finish({"position": np.zeros(3, np.float32)}, stream=3)
    assert store.finish({"position": np.full(3, 4, np.float32)}) == 0


@pytest.mark.parametrize(
    "options", [{"max_frames": 0}, {"max_bytes": -1}, {"jpeg": 0}, {"max_frames": 2.5}, {"cache_bytes": -1}]
)
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigurationError):
        EpisodeStore(**options)


def test_statistics_are_exact():
    store, _ = filled((40, 17))
    stats = store.get_stats()
    row = 3 * 4 + 8 + 1 + 24 * 20 * 3
    assert stats["raw_bytes"] == 59 * row
    # Objects and tables count, too.
    assert stats["packed_bytes"] < store.nbytes == stats["nbytes"] < stats["packed_bytes"] + 59 * 200
    assert stats["compression_ratio"] == stats["raw_bytes"] / stats["packed_bytes"] > 1.5
    store.get([0])
    store.get([0])
    assert store.get_stats()["hit_rate"] > 0.4
    store.clear()
    assert (len(store), store.nbytes, store.get_stats()["episodes_evicted"]) == (0, 0, 2)


def test_images_may_be_kept_as_they_are_or_as_jpeg():
    raw, _ = filled((20,), pack_images=False)
    assert raw.get_stats()["compression_ratio"] < 1.05
    packed, episodes = filled((20,), jpeg={"camera": 60})
    assert packed.nbytes < raw.nbytes / 2
    difference = packed.episode(0)["camera"].astype(int) - episodes[0]["camera"]
    assert 0 < np.abs(difference).mean() < 12
    assert np.array_equal(packed.episode(0)["position"], episodes[0]["position"])


def test_episodes_of_images_only_or_of_empty_vectors_come_back(tmp_path):
    for one in ({"camera": episode(12, 5, image=True)["camera"]}, {"nothing": np.zeros((13, 0), np.float32)}):
        store, twin = EpisodeStore(), EpisodeStore()
        store.add(one)
        store.save(tmp_path / next(iter(one)))
        assert twin.restore(tmp_path / next(iter(one))).lost == ()
        assert_same(twin.episode(0), one)
        assert_same(twin.get(np.arange(12)), store.get(np.arange(12)))


def test_tensors_are_taken_and_nan_and_minus_zero_kept():
    store = EpisodeStore()
    x = torch.tensor([[float("nan"), -0.0], [1e-45, float("inf")], [0.0, -float("inf")]])
    store.add({"x": x, "r": torch.tensor([1.0, 2.0], dtype=torch.float16)})
    assert store.episode(0)["x"].tobytes() == x.numpy().tobytes()


def test_a_store_can_be_pickled_and_goes_its_own_way():
    store, _ = filled()
    twin = pickle.loads(pickle.dumps(store))
    assert_same(twin.sample(9), store.sample(9))
    twin.add(episode(7, 9, image=True))
    assert (store.num_episodes, twin.num_episodes) == (4, 5)


def test_several_threads_sample_while_one_writes_and_evicts():
    store = EpisodeStore(max_frames=400)
    store.add(episode(50, 0, image=True))
    errors, stop = [], threading.Event()

    def read(seed):
        generator = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                batch = store.sample(16, generator=generator)
                assert (batch["next_position"] == batch["position"] + 1).all()
                assert np.allclose(batch["action"][:, 0] * 7, batch["position"][:, 0])
                base = batch["camera"].min(axis=(1, 2, 3)).astype(int)
                assert ((batch["position"][:, 0] % 200 - base) % 256 < 9).all()
                slices = store.sample_slices(3, 10, generator=generator)
                assert (np.diff(slices["position"][..., 0], axis=1) == 1).all()
        except Exception as error:  # noqa: BLE001 - the main thread shows it
            errors.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for number in range(1, 60):
        store.add(episode(20 + number % 30, number, image=True))
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_unfinished_episodes_of_all_streams_stay_within_the_limits():
    rows = {"o": np.zeros((4, 10))}
    by_frames, by_bytes = EpisodeStore(max_frames=10), EpisodeStore(max_bytes=4000)
    for store in (by_frames, by_bytes):
        with pytest.raises(ReplayError, match="do not fit max_"):
            for number in range(100):
                store.append(rows, stream=number % 3)
        assert store.num_frames
    assert by_frames.num_frames == 8
    assert by_bytes.nbytes <= 4000


def test_unfinished_first_episodes_have_the_same_names_and_are_read_into_memory_that_is_there():
    store = EpisodeStore(seed=0, frames=["o"])
    store.append({"o": np.arange(6.0).reshape(3, 2)})
    with pytest.raises(ReplayError, match="before they had"):
        store.append({"p": np.zeros((3, 2))}, stream=1)
    out = {"o": np.zeros((4, 2)), "next_o": np.zeros((4, 2))}
    batch = store.sample(4, out=out)
    assert batch["o"] is out["o"]
    assert (out["next_o"] == out["o"] + 2).all()
    with pytest.raises(ReplayError, match="out has no"):
        store.sample(5, out=out)
    assert not EpisodeStore().get([])


@pytest.mark.parametrize(
    "values",
    [torch.zeros(5, 3, dtype=torch.bfloat16), torch.zeros(5, 3).to_sparse(), [[1.0], [1.0, 2.0]]],
    ids=["bfloat16", "sparse", "ragged"],
)
def test_what_numpy_cannot_hold_is_refused_by_name(values):
    with pytest.raises(ReplayError, match="'o' cannot be an array of numbers"):
        EpisodeStore().add({"o": values})


def test_a_first_episode_that_cannot_be_packed_decides_nothing(monkeypatch):
    store = EpisodeStore(max_bytes=60_000)

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(RowLog, "pack", fail)
        with pytest.raises(MemoryError):
            store.add({"o": np.zeros((5, 3)), "a": np.zeros((4, 2))})
    assert store.names == ()
    noise = np.random.default_rng(0).random((4001, 6), np.float32)
    for row in noise[:100]:
        store.append({"o": row[None], "a": row[None, :2]}, stream=1)
    with pytest.raises(ReplayError, match="does not fit max_bytes"):
        store.add({"o": noise, "a": noise[1:, :2]})
    store.finish({"o": noise[100]}, stream=1)
    assert np.array_equal(store.get(np.arange(100))["o"], noise[:100])
