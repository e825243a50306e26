"""Images of numbers whose pixels are those of bytes: as small as bytes, and the same bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from slipstream import CodecError, EpisodeStore, PackedEpisodeStorage
from slipstream.replay.packing import ImageRows
from slipstream.replay.scaled import from_pixels, to_pixels
from tests.replay.samples import assert_same


def film(count, seed=0):
    """Return camera frames ``[count, 40, 48]``: a picture that moves a little, with noise."""
    draw = np.random.default_rng(seed)
    picture = np.add.outer(np.arange(40), np.arange(48))[None] + np.arange(count)[:, None, None]
    return torch.from_numpy((picture + draw.integers(0, 6, (count, 40, 48))).astype(np.uint8))


def stacked(count, seed=0):
    frames = film(count + 3, seed)
    return torch.stack([frames[place : place + count] for place in range(4)], 1)


def flight(pixels):
    count = len(pixels) - 1
    done = torch.zeros(count, 1, dtype=torch.bool)
    return TensorDict({"pixels": pixels[:-1], "next": {"pixels": pixels[1:], "done": done}}, [count])


WAYS = {
    "divided": lambda pixels: pixels.float() / 255,
    "whole": lambda pixels: pixels.float(),
    "half": lambda pixels: pixels.half() / 255,
    "double": lambda pixels: pixels.double() / 255,
}


@pytest.mark.parametrize("way", WAYS)
def test_stacks_of_numbers_are_as_small_as_stacks_of_bytes(way):
    sizes = []
    for pixels in (stacked(161), WAYS[way](stacked(161))):
        storage = PackedEpisodeStorage(160)
        data = flight(pixels)
        storage.set(range(160), data)
        assert_same(storage.get(slice(None)), data)
        assert_same(storage.get(torch.tensor([7, 159, 7])), data[torch.tensor([7, 159, 7])])
        sizes.append(storage.get_stats()["packed_bytes"])
    assert sizes[1] < 1.01 * sizes[0]


def test_images_that_come_one_by_one_are_found_when_they_are_packed():
    storage = PackedEpisodeStorage(100)
    data = flight(film(71).float() / 255)
    for number, step in enumerate(data.unbind(0)):
        storage.set(number, step)
    assert_same(storage.get(slice(None))[:70], data)
    assert storage.get_stats()["packed_bytes"] < 70 * 40 * 48


@pytest.mark.parametrize("value", [float("nan"), -0.0, 0.5, 256.0, -1.0, 1e30, float("inf")])
def test_an_image_with_another_number_is_kept_as_it_is(value):
    storage = PackedEpisodeStorage(200)
    pixels = stacked(101).float() / 255
    data = flight(pixels)
    storage.set(range(100), data)
    odd = flight(pixels.clone())
    for place in (0, 1, 50, 99):
        odd["pixels"][place, 2, 3, 4] = value
    storage.set(range(100, 200), odd)
    assert_same(storage.get(slice(None)), TensorDict.cat([data, odd]))


def test_numbers_that_are_no_bytes_stay_vectors():
    storage = PackedEpisodeStorage(100)
    data = TensorDict({"depth": torch.randn(80, 40, 48)}, [80])
    storage.set(range(80), data)
    assert_same(storage.get(slice(None)), data)


def test_a_folder_gives_them_back(tmp_path):
    storage = PackedEpisodeStorage(100)
    data = flight(stacked(81).float() / 255)
    storage.set(range(80), data)
    storage.dumps(tmp_path)
    twin = PackedEpisodeStorage(100)
    twin.loads(tmp_path)
    assert_same(twin.get(slice(None)), data)
    twin.set(range(80, 100), data[:20])
    assert_same(twin.get(slice(80, 100)), data[:20])


def test_an_episode_store_finds_them_too(tmp_path):
    pixels = stacked(61)
    store = EpisodeStore(seed=0, jpeg=50)
    store.add({"pixels": pixels.float() / 255, "action": torch.zeros(60, 1)})
    # JPEG is for bytes: numbers stay exact.
    assert torch.equal(torch.from_numpy(store.episode(0)["pixels"]), pixels.float() / 255)
    assert store.nbytes < pixels.numel()
    store.append({"pixels": pixels.float() / 255, "action": torch.zeros(61, 1)})
    store.save(tmp_path)
    twin = EpisodeStore()
    twin.restore(tmp_path)
    assert_same(twin.get(np.arange(120)), store.get(np.arange(120)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_bit_comes_back(data):
    dtype = data.draw(st.sampled_from(["<f2", "<f4", "<f8"]))
    count = data.draw(st.integers(1, 5))
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    pixels = draw.integers(0, 256, (count, 1200)).astype(dtype)
    rows = pixels / np.array(255, dtype) if data.draw(st.booleans()) else pixels
    # Any bits at all in some places.
    for _ in range(data.draw(st.integers(0, 3))):
        rows.view(np.uint8)[draw.integers(count), draw.integers(rows[0].nbytes)] = draw.integers(256)
    packer = ImageRows(rows[0].nbytes, 40, None, (30, 40), dtype=dtype)
    payloads = packer.pack_images(rows.view(np.uint8), 1)
    out = np.empty((count, rows[0].nbytes), np.uint8)
    packer.unpack_images(payloads, out)
    assert out.tobytes() == rows.tobytes()
    found, ways = to_pixels(rows.view(np.uint8), dtype)
    again = np.zeros_like(out)
    from_pixels(found[ways != 0], ways, again, dtype)
    assert again[ways != 0].tobytes() == rows[ways != 0].tobytes()


def test_damaged_images_are_errors():
    rows = (film(3).float() / 255).numpy().reshape(3, -1).view(np.uint8)
    packer = ImageRows(rows.shape[1], 48, None, (40, 48), dtype="<f4")
    payload = packer.pack_images(rows, 1)[0]
    out = np.empty((1, rows.shape[1]), np.uint8)
    for lie in (b"", payload[:1], payload[:-3], b"\x0a" + payload[1:], b"\x02" + payload[1:], bytes(1) + payload[1:]):
        with pytest.raises(CodecError):
            packer.unpack_images([lie], out)
