"""A collector whose batches stay packed in memory."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector

from slipstream import CompressedDataCollector, CompressedTensorDict, NavigationConfig, NavigationEnv


def batches(count: int = 3) -> list[TensorDict]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        state = torch.randn(8, 17, 40, generator=generator).cumsum(1).round()
        content = {"state": state[:, :-1], "next": {"state": state[:, 1:]}}
        found.append(TensorDict(content, batch_size=[8, 16]))
    return found


class Reusing:
    """Yields the same TensorDict again and again, as `return_same_td=True` does."""

    def __init__(self, source: list[TensorDict]) -> None:
        self.source, self.memory, self.stopped, self.seed = source, source[0].clone(), False, 0

    def __iter__(self):
        for batch in self.source:
            self.memory.update_(batch)
            yield self.memory

    def __len__(self):
        return len(self.source)

    def set_seed(self, seed):
        self.seed = seed
        return seed + 1

    def shutdown(self):
        self.stopped = True


def test_batches_are_those_of_the_base_collector_though_it_reuses_its_memory():
    expected = batches()
    with CompressedDataCollector(Reusing(expected)) as collector:
        found = list(collector)
    assert all(isinstance(batch, CompressedTensorDict) for batch in found)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one["state"], other["state"])
        assert torch.equal(one["next", "state"], other["next", "state"])
    stats = collector.get_stats()
    assert stats["batch_count"] == 3
    assert stats["compression_ratio"] > 2


def test_everything_else_is_the_base_collectors():
    base = Reusing(batches())
    with CompressedDataCollector(base) as collector:
        assert len(collector) == 3
        assert collector.set_seed(4) == 5
        assert base.seed == 4
        with pytest.raises(AttributeError, match="nothing"):
            _ = collector.nothing
    assert base.stopped


def test_options_reach_the_batches_and_mistakes_are_heard_of():
    (batch,) = CompressedDataCollector(batches(1), compress_keys=["state"], group_envs=2, cache_bytes=0)
    assert batch.content.group == 2
    with pytest.raises(KeyError, match="compress_keys has 'lidar'"):
        list(CompressedDataCollector(batches(1), compress_keys=["lidar"]))


def test_batches_are_yielded_unchanged_without_compression():
    source = batches()
    with CompressedDataCollector(base_collector=source, compress=False) as collector:
        found = list(collector)
    assert all(one is other for one, other in zip(found, source, strict=True))
    assert collector.get_stats()["batch_count"] == 0
    assert isinstance(next(iter(CompressedDataCollector(source, compress=True))), CompressedTensorDict)
    with pytest.raises(TypeError, match="compress is a bool and compression_level a whole number"):
        CompressedDataCollector(source, True)
    with pytest.raises(TypeError, match="compress is a bool and compression_level a whole number"):
        CompressedDataCollector(source, compress=3)  # type: ignore[arg-type]


def test_codecs_are_chosen_once_for_similar_batches(monkeypatch):
    from slipstream.rollout import files, packed

    chosen = []
    choose = files.codec_for

    def count(rollout, name, level):
        chosen.append(name)
        return choose(rollout, name, level)

    monkeypatch.setattr(packed, "codec_for", count)
    expected = batches(20)
    for one, other in zip(CompressedDataCollector(expected), expected, strict=True):
        assert torch.equal(one["next", "state"], other["next", "state"])
    assert chosen == ["state", "state"]


def test_it_works_over_the_collector_of_torchrl():
    def collector() -> Collector:
        config = NavigationConfig(num_envs=8, num_static_obstacles=20, num_dynamic_obstacles=8, compile="false")
        env = NavigationEnv(config)
        torch.manual_seed(0)
        env.set_seed(0)
        return Collector(env, frames_per_batch=8 * 5, total_frames=8 * 15)

    plain = [batch.clone() for batch in collector()]
    with CompressedDataCollector(collector()) as packed:
        for one, other in zip(packed, plain, strict=True):
            assert one.batch_size == other.batch_size == (8, 5)
            for key, value in other.items(True, True):
                assert torch.equal(one[key], value), key
