"""Collection ahead of training, repeated from a seed: the same bits, whatever the threads do meanwhile."""

import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from slipstream import PipelinedDataCollector
from tests.collect.test_pipelined import PATIENCE_S, STEPS, CountingEnv, make_base, sampling_policy

NUM_BATCHES = 6
PACES = ["free", "training_waits", "collecting_waits", "in_turn"]


class PacedEnv(CountingEnv):
    """Draws from torch's global generator, and waits before each step for what a test demands."""

    def __init__(self) -> None:
        super().__init__(noise=True)
        self.before_step: Any = None

    def _step(self, tensordict):
        if self.before_step is not None:
            self.before_step(self.num_steps)
        return super()._step(tensordict)


class Consumer:
    """Trains on batches: draws random numbers, and changes the weights in a way that does not depend on them."""

    def __init__(self, prefetch_count: int, pace: str, num_draws: int) -> None:
        self.prefetch_count = prefetch_count
        self.pace = pace
        self.num_draws = num_draws
        self.trained = [threading.Event() for _ in range(NUM_BATCHES)]
        self.half_trained = [threading.Event() for _ in range(NUM_BATCHES)]

    def before_step(self, step: int) -> None:
        """Called by the collecting thread."""
        previous = step // STEPS - 1
        if previous < 0:
            return
        if self.pace == "collecting_waits":
            assert self.trained[previous].wait(PATIENCE_S)
        if self.pace == "in_turn" and step % STEPS < STEPS // 2:
            assert self.half_trained[previous].wait(PATIENCE_S)

    def train(self, index: int, env: PacedEnv, policy: Any) -> None:
        if self.pace == "training_waits":
            env.wait_for_batch(min(index + self.prefetch_count, NUM_BATCHES - 1))
        torch.rand(self.num_draws)
        self.half_trained[index].set()
        for _ in range(self.num_draws):
            torch.randn(3).normal_()
        with torch.no_grad():
            policy[0].module.linear.weight.add_(0.1)
        self.trained[index].set()


def collect(consumer: Consumer, *, global_seed: int = 0, seed: int | None = None, **options: Any) -> list[TensorDict]:
    """Collect all batches.

    Args:
        consumer: What happens beside collection.
        global_seed: Given to ``torch.manual_seed`` before everything.
        seed: Given to ``set_seed``, if any.
        options: For the collector.
    """
    torch.manual_seed(1)
    policy = sampling_policy()
    torch.manual_seed(global_seed)
    env = PacedEnv()
    env.before_step = consumer.before_step
    base = make_base(policy, batches=NUM_BATCHES, env=env)
    collector = PipelinedDataCollector(base, "cpu", consumer.prefetch_count, **options)
    if seed is not None:
        collector.set_seed(seed)
    batches = []
    for index, batch in enumerate(collector):
        batches.append(batch)
        consumer.train(index, env, policy)
    collector.shutdown()
    assert len(batches) == NUM_BATCHES
    return batches


def are_identical(one: list[Any], other: list[Any]) -> list[bool]:
    """Tell, for each batch, whether all its tensors are."""
    same = []
    for left, right in zip(one, other, strict=True):
        assert set(left.keys(True, True)) == set(right.keys(True, True))
        same.append(all(torch.equal(left[key], right[key]) for key in left.keys(True, True)))
    return same


@pytest.mark.parametrize("seeds", [{"global_seed": 5}, {"seed": 5}], ids=["manual_seed", "set_seed"])
@pytest.mark.parametrize("prefetch_count", [1, 3])
def test_a_seed_determines_all_batches_whatever_the_pace_and_whatever_training_draws(prefetch_count, seeds):
    expected = collect(Consumer(prefetch_count, "free", 0), **seeds)
    for pace in PACES:
        for num_draws in (0, 1, 50):
            repeated = collect(Consumer(prefetch_count, pace, num_draws), **seeds)
            assert are_identical(repeated, expected) == [True] * NUM_BATCHES
    drawn = torch.cat([batch["next", "reward"].flatten() for batch in expected])
    assert drawn.unique().numel() == drawn.numel(), "they are random"
    other = collect(Consumer(prefetch_count, "free", 0), **dict.fromkeys(seeds, 6))
    assert are_identical(other, expected) == [False] * NUM_BATCHES


def test_set_seed_overrides_the_global_seed():
    one = collect(Consumer(2, "free", 1), global_seed=1, seed=5)
    other = collect(Consumer(2, "training_waits", 7), global_seed=2, seed=5)
    assert are_identical(one, other) == [True] * NUM_BATCHES


def test_training_draws_what_it_would_draw_without_the_collector():
    def draw(pace: str) -> torch.Tensor:
        torch.manual_seed(3)
        env = PacedEnv()
        consumer = Consumer(2, pace, 0)
        env.before_step = consumer.before_step
        policy = sampling_policy()
        collector = PipelinedDataCollector(make_base(policy, batches=NUM_BATCHES, env=env), "cpu", 2)
        drawn = []
        for index, _ in enumerate(collector):
            drawn.append(torch.rand(4))
            consumer.train(index, env, policy)
        return torch.cat(drawn)

    expected = draw("free")
    for pace in PACES[1:]:
        assert torch.equal(draw(pace), expected)


@pytest.mark.parametrize("prefetch_count", [1, 3])
def test_a_plain_iterable_is_seeded_too(prefetch_count):
    def draw(seed: int) -> torch.Tensor:
        batches = ({"x": torch.rand(5)} for _ in range(4))
        collector = PipelinedDataCollector(batches, "cpu", prefetch_count)
        collector.set_seed(seed)
        drawn = []
        for batch in collector:
            torch.rand(3)
            drawn.append(batch["x"])
        return torch.cat(drawn)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("handed_out", [0, 2, 5])
@pytest.mark.parametrize("prefetch_count", [1, 3])
def test_a_saved_position_continues_the_random_numbers(prefetch_count, handed_out):
    class Draws:
        def __init__(self) -> None:
            self.position = 0

        def __iter__(self):
            while self.position < NUM_BATCHES:
                self.position += 1
                yield {"x": torch.rand(5)}

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state):
            self.position = state["position"]

    torch.manual_seed(0)
    first = PipelinedDataCollector(Draws(), "cpu", prefetch_count)
    batches = [next(first)["x"] for _ in range(handed_out)]
    state = first.state_dict()
    torch.rand(9)
    batches += [batch["x"] for batch in first]
    second = PipelinedDataCollector(Draws(), "cpu", prefetch_count)
    second.load_state_dict(state)
    assert torch.equal(torch.stack([batch["x"] for batch in second]), torch.stack(batches[handed_out:]))
