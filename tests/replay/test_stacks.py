"""Stacks of frames: every frame is kept once, every stack comes back."""

import copy
import signal
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer

from slipstream import CodecError, EpisodeStore, PackedEpisodeStorage
from slipstream.replay.log import RowLog, UnitCache
from slipstream.replay.packing import ImageRows, Units, Where
from tests.replay.samples import assert_same

SIDE = 40


def film(count, seed=0, planes=1):
    """Return frames ``[count, planes, height, width]`` of noise on a slope: they pack, and none is like another."""
    noise = np.random.default_rng(seed).integers(0, 8, (count, planes, SIDE, SIDE))
    return (noise + 2 * np.arange(SIDE)).astype(np.uint8)


def stacked(frames, depth=4):
    """Return the stacks of `depth` frames that end with each frame but the first few."""
    count = len(frames) - depth + 1
    return np.stack(
        [frames[place : place + count].reshape(count, -1, SIDE, SIDE) for place in range(depth)], 1
    ).reshape(count, -1, SIDE, SIDE)


def packer_of(images, **options):
    return ImageRows(images[0].size, SIDE, shape=images.shape[1:], **options)


def log_of(images, runs, **options):
    log = RowLog(packer_of(images, **options), UnitCache(1 << 20), 0)
    log.append(log.pack(images.reshape(len(images), -1), np.array(runs)), 1)
    return log


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=5),
    st.integers(2, 5),
    st.sampled_from([1, 3]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_stacks_come_back_in_any_order_whatever_the_runs_are(runs, depth, planes, stored, seed):
    images = np.concatenate([stacked(film(run + depth - 1, seed + n, planes), depth) for n, run in enumerate(runs)])
    log = log_of(images, runs, stored=stored)
    rows = images.reshape(len(images), -1)
    wanted = np.random.default_rng(seed).integers(0, len(images), 50)
    now, after = np.empty((20, rows.shape[1]), np.uint8), np.empty((30, rows.shape[1]), np.uint8)
    log.fetch(log.locate(wanted), now, after)
    assert np.array_equal(np.concatenate([now, after]), rows[wanted])


def test_frames_of_a_stack_are_kept_once():
    frames = film(203)
    alone, together = log_of(frames, [203]), log_of(stacked(frames), [200])
    assert together.packed_bytes < 1.15 * alone.packed_bytes
    assert log_of(stacked(frames), [200], stored=True).packed_bytes < 1.15 * frames.size


def test_what_repeats_now_and_then_only_comes_back_too():
    """An episode that starts anew in the middle of a run, a frame that was skipped, one that was shown twice."""
    images = stacked(film(120))
    images = np.concatenate([images[:10], images[40:60], images[61:90], images[89:]])
    log = log_of(images, [len(images)])
    assert log.locate(np.array([0])).stacked
    assert np.array_equal(log.fetch(log.locate(np.arange(len(images)))).reshape(images.shape), images)


def test_colours_are_not_taken_for_a_stack_nor_lines_for_frames():
    colours = film(40, planes=3)
    for images in (colours, np.ascontiguousarray(colours.transpose(0, 2, 3, 1)), film(40)[:, 0]):
        log = log_of(images, [40])
        assert not log.locate(np.array([0])).stacked
        assert np.array_equal(log.fetch(log.locate(np.arange(40))).reshape(images.shape), images)


def test_segments_of_stacks_and_of_other_images_are_read_together():
    images, others = stacked(film(60)), film(57, 5, planes=4)
    log = log_of(images, [57])
    log.append(log.pack(others.reshape(57, -1), np.array([57])), 1)
    both = np.concatenate([images, others]).reshape(114, -1)
    wanted = np.random.default_rng(0).permutation(114)
    outs = [np.empty((length, both.shape[1]), np.uint8) for length in (1, 100, 13)]
    log.fetch(log.locate(wanted), *outs)
    assert np.array_equal(np.concatenate(outs), both[wanted])


def test_stacks_that_repeat_other_numbers_of_planes_are_read_together():
    """A camera of three colours that shows black for a while: there, one plane is new in each stack, else three."""
    images = stacked(film(60, planes=3))
    dark, others = np.zeros_like(images[:40]), film(40, 5, planes=12)
    log = log_of(images, [57])
    for more in (dark, others):
        log.append(log.pack(more.reshape(40, -1), np.array([40])), 1)
    both = np.concatenate([images, dark, others]).reshape(137, -1)
    wanted = np.random.default_rng(0).permutation(137)
    assert np.array_equal(log.fetch(log.locate(wanted)), both[wanted])


@pytest.mark.parametrize("steps", [8, 40], ids=["not packed yet", "packed"])
def test_a_batch_of_nothing_is_empty(steps):
    images = stacked(film(steps + 4))
    store = EpisodeStore(max_frames=100)
    store.add({"pixels": images, "action": np.zeros((steps, 2), np.float32)})
    assert {name: values.shape for name, values in store.get([]).items()} == {
        "pixels": (0, 4, SIDE, SIDE),
        "next_pixels": (0, 4, SIDE, SIDE),
        "action": (0, 2),
    }
    storage = PackedEpisodeStorage(100)
    now, after = torch.from_numpy(images[:-1]), torch.from_numpy(images[1:])
    rows = TensorDict({"pixels": now, "next": {"pixels": after, "v": torch.rand(steps, 3)}}, [steps])
    storage.set(range(steps), rows)
    for nothing in (torch.zeros(0, dtype=torch.int64), slice(3, 3), torch.zeros(steps, dtype=torch.bool)):
        assert_same(storage.get(nothing), rows[nothing])
        assert_same(storage[nothing], rows[nothing])


def damaged(payload):
    """Yield a segment with every kind of lie in its head."""
    rows, frames = struct.unpack_from("<HH", payload, 2)
    yield payload[:-1]
    yield payload + b"x"
    yield payload[:3]
    yield payload[:20]
    for place, form, value in (
        (1, "B", 0),
        (1, "B", 3),
        (1, "B", 255),
        (2, "H", 0),
        (2, "H", 65535),
        (4, "H", 0),
        (4, "H", frames - 1),
        (4, "H", 65535),
        (6, "H", frames),
        (6, "H", 65535),
        (6 + 2 * rows, "I", 0),
        (6 + 2 * rows, "I", 1 << 31),
        (6 + 2 * rows + 4 * frames, "B", 9),
        (6 + 2 * rows + 4 * frames, "B", 0),
    ):
        lie = bytearray(payload)
        struct.pack_into(f"<{form}", lie, place, value)
        yield bytes(lie)


def test_a_damaged_segment_of_stacks_is_an_error():
    images = stacked(film(23))
    packer = packer_of(images)
    units = packer.pack(images.reshape(20, -1), np.array([20]), 1)
    for lie in damaged(units.content):
        log = RowLog(packer, UnitCache(0), 0)
        log.append(Units.join(units.sizes, [lie]), 20)
        with pytest.raises(CodecError):
            log.fetch(log.locate(np.arange(20)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4000), st.integers(0, 255))
def test_a_changed_byte_is_an_error_or_changes_pixels_only(place, value):
    images = stacked(film(23))
    packer = packer_of(images)
    units = packer.pack(images.reshape(20, -1), np.array([20]), 1)
    lie = bytearray(units.content)
    lie[place] = value
    log = RowLog(packer, UnitCache(0), 0)
    log.append(Units.join(units.sizes, [bytes(lie)]), 20)
    try:
        assert log.fetch(log.locate(np.arange(20))).shape == (20, images[0].size)
    except CodecError:
        pass


def flight(steps, seed=0):
    """Return steps of a camera with stacked frames, two episodes in a row."""
    parts = []
    for number, length in enumerate((steps // 3, steps - steps // 3)):
        images = torch.from_numpy(stacked(film(length + 4, seed + number)))
        done = torch.zeros(length, 1, dtype=torch.bool)
        done[-1] = True
        parts.append(
            TensorDict(
                {
                    "pixels": images[:-1],
                    "action": torch.randn(length, 2, generator=torch.Generator().manual_seed(number)),
                    "next": {"pixels": images[1:], "done": done},
                },
                batch_size=[length],
            )
        )
    return torch.cat(parts)


def test_a_storage_of_stacks_samples_what_a_lazy_one_does():
    batches = []
    for storage in (PackedEpisodeStorage(150), LazyTensorStorage(150)):
        buffer = ReplayBuffer(storage=storage, batch_size=64)
        for number in range(3):
            buffer.extend(flight(70, 10 * number))
        buffer.extend(flight(70)[:3])  # some that are not packed
        torch.manual_seed(0)
        batches.append([buffer.sample() for _ in range(4)])
    for one, other in zip(*batches, strict=True):
        assert_same(one, other)


def test_only_what_is_asked_for_of_a_storage_of_stacks_is_right_too():
    storage, data = PackedEpisodeStorage(100), flight(90)
    storage.set(range(90), data)
    index = torch.tensor([5, 88, 29, 30, 5])
    assert torch.equal(storage[index]["next", "pixels"], data["next", "pixels"][index])
    rows = storage[index]
    rows["pixels"].zero_()
    assert torch.equal(rows["next", "pixels"], data["next", "pixels"][index])
    assert torch.equal(storage.get(index)["pixels"], data["pixels"][index])


def test_stacks_survive_a_folder_and_packing_anew(tmp_path):
    storage, data = PackedEpisodeStorage(90), flight(90)
    storage.set(range(90), data)
    storage.dumps(tmp_path / "storage")
    restored = PackedEpisodeStorage(90)
    restored.loads(tmp_path / "storage")
    assert restored.get_stats()["compression_ratio"] > 6
    assert_same(restored.get(slice(None)), data)
    # Overwriting most steps leaves a sparse segment, which is packed again.
    others = flight(90)
    for _ in range(4):
        restored.set(torch.arange(1, 90), others[1:], set_cursor=False)
    assert_same(restored.get(slice(None))[1:], others[1:])
    assert_same(restored.get(slice(None))[:1], data[:1])


def test_an_episode_store_of_stacks_gives_back_steps_slices_and_episodes(tmp_path):
    images = {"pixels": stacked(film(54)), "action": np.arange(50, dtype=np.float32)[:, None]}
    store = EpisodeStore(max_frames=120, seed=0)
    store.add(images)
    store.add({**images, "pixels": stacked(film(54, 1))})
    store.add({"pixels": stacked(film(9, 2)), "action": np.zeros((5, 1), np.float32)})
    store.save(tmp_path / "store")
    twin = EpisodeStore(max_frames=120)
    twin.restore(tmp_path / "store")
    for one in (store, copy.deepcopy(store), twin):
        batch = one.get(np.arange(50))
        assert np.array_equal(batch["pixels"], images["pixels"][:50])
        assert np.array_equal(batch["next_pixels"], images["pixels"][1:])
        again = one.get(np.arange(49, -1, -1), out=batch)
        assert again["pixels"] is batch["pixels"]
        assert np.array_equal(batch["next_pixels"], images["pixels"][:0:-1])
        assert np.array_equal(one.episode(0)["pixels"], images["pixels"])
        slices = one.sample_slices(3, 7)
        assert np.array_equal(slices["pixels"][:, 1:, :3], slices["pixels"][:, :-1, 1:])


def test_images_of_steps_beside_stacks_of_frames_come_back():
    store = EpisodeStore()
    episode = {"pixels": stacked(film(24)), "goal": film(20, 3)[:, 0]}
    store.add(episode)
    batch = store.get([3, 19])
    assert np.array_equal(batch["goal"], episode["goal"][[3, 19]])
    assert np.array_equal(batch["next_pixels"], episode["pixels"][[4, 20]])


def test_stacks_may_be_unpacked_while_the_same_thread_is_unpacking_others():
    """As a signal handler or a finalizer does, which comes in between."""
    images = stacked(film(203))
    packer, rows = packer_of(images), images.reshape(200, -1)
    units = packer.pack(rows, np.array([200]), 1)
    sizes = units.sizes
    payloads = units.payloads
    segment, row = np.repeat(np.arange(len(sizes)), sizes), np.concatenate([np.arange(size) for size in sizes])
    inner: list[bool] = []
    inside = False

    def unpacked(chosen):
        out = np.empty((len(chosen), rows.shape[1]), np.uint8)
        packer.gather(payloads, Where(segment[chosen], row[chosen]), [out])
        return np.array_equal(out, rows[chosen])

    def come_between(*_):
        nonlocal inside
        if not inside:
            inside = True
            inner.append(unpacked(np.arange(100, 200)))
            inside = False

    before = signal.signal(signal.SIGALRM, come_between)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.004)
    try:
        for _ in range(150):
            assert unpacked(np.arange(100))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(inner) >= 5
    assert all(inner)
