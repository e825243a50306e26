"""Batches collected ahead: in order, whole, each with one set of weights, repeatable, and no thread left behind."""

import copy
import gc
import subprocess
import sys
import threading
import time
import traceback
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from torchrl.envs import EnvBase

from slipstream import PipelinedDataCollector
from slipstream.collect.randomness import PrivateRandomness
from slipstream.errors import BackgroundError, ConfigurationError, StateMismatchError, UnsupportedStateError

NUM_ENVS = 3
STEPS = 4
FRAMES = NUM_ENVS * STEPS
AHEAD = [1, 3]
PATIENCE_S = 60.0  # for what happens soon, on any machine


class CountingEnv(EnvBase):  # type: ignore[misc, unused-ignore]
    """Observes how many steps there were; `fail_at` raises, `noise` draws from torch's global generator."""

    def __init__(self, fail_at: int | None = None, noise: bool = False) -> None:
        super().__init__(batch_size=[NUM_ENVS])
        self.observation_spec = Composite(observation=Unbounded((NUM_ENVS, 1)), shape=(NUM_ENVS,))
        self.action_spec = Unbounded((NUM_ENVS, 1))
        self.reward_spec = Unbounded((NUM_ENVS, 1))
        self.fail_at = fail_at
        self.noise = noise
        self.num_steps = 0
        self.stepped = threading.Condition()
        self.seeds: list[Any] = []

    def wait_for_batch(self, index: int) -> None:
        """Block until the last step of a batch has been taken."""
        with self.stepped:
            assert self.stepped.wait_for(lambda: self.num_steps >= (index + 1) * STEPS, PATIENCE_S)

    def _reset(self, tensordict=None, **_):
        self.num_steps = 0
        return TensorDict({"observation": torch.zeros(NUM_ENVS, 1)}, self.batch_size)

    def _step(self, tensordict):
        with self.stepped:
            self.num_steps += 1
            self.stepped.notify_all()
        if self.num_steps == self.fail_at:
            raise_in_the_simulator()
        observation = torch.full((NUM_ENVS, 1), float(self.num_steps))
        reward = torch.rand(NUM_ENVS, 1) if self.noise else observation.clone()
        done = torch.zeros(NUM_ENVS, 1, dtype=torch.bool)
        return TensorDict({"observation": observation, "reward": reward, "done": done}, self.batch_size)

    def _set_seed(self, seed):
        self.seeds.append(seed)


def raise_in_the_simulator():
    raise ArithmeticError("the drone left the map")


class Uniform(nn.Module):
    """Weights that are all the same number; acts with how far they are apart and with what they are."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, observation):
        spread = self.weight.max() - self.weight.min()
        return (self.weight[0] + 1000 * spread).expand_as(observation).clone()


def uniform_policy(size: int = 4) -> Any:
    return TensorDictModule(Uniform(size), in_keys=["observation"], out_keys=["action"])


def sampling_policy() -> Any:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, observation):
            mean = self.linear(observation)
            return mean, torch.ones_like(mean)

    return ProbabilisticTensorDictSequential(
        TensorDictModule(Head(), in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"], out_keys=["action"], distribution_class=torch.distributions.Normal
        ),
    )


def make_base(policy: Any = None, batches: int = 6, env: EnvBase | None = None, **options: Any) -> Any:
    return Collector(
        env or CountingEnv(),
        policy if policy is not None else uniform_policy(),
        frames_per_batch=FRAMES,
        total_frames=batches * FRAMES,
        auto_register_policy_transforms=False,
        **options,
    )


class Numbers:
    """Yields dicts of its position, of a draw, and of its policy's weight; can be continued."""

    def __init__(self, length: int = 12) -> None:
        self.length = length
        self.position = 0
        self.moved = threading.Condition()
        self.policy = Uniform()
        self.generator = torch.Generator().manual_seed(3)

    def wait_for(self, position: int) -> None:
        with self.moved:
            assert self.moved.wait_for(lambda: self.position >= position, PATIENCE_S)

    def __iter__(self):
        while self.position < self.length:
            with self.moved:
                self.position += 1
                self.moved.notify_all()
            yield {
                "position": torch.tensor([self.position]),
                "drawn": {"global": torch.rand(2), "own": torch.rand(2, generator=self.generator)},
                "weight": self.policy.weight.detach()[:1],
            }

    def state_dict(self):
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.position = state["position"]
        self.generator.set_state(state["generator"])


def collecting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "slipstream-collect"]


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind():
    yield
    if collecting_threads():
        gc.collect()  # which is slow, so only if it matters
    assert collecting_threads() == []


def observations(batch: Any) -> list[float]:
    return batch["observation"][0, :, 0].tolist()


def expected_observations(index: int) -> list[float]:
    return [float(step) for step in range(index * STEPS, (index + 1) * STEPS)]


# What is handed out.


@pytest.mark.parametrize("same_memory", [False, True])
@pytest.mark.parametrize("prefetch_count", [0, *AHEAD])
def test_every_batch_arrives_once_and_in_order(prefetch_count, same_memory):
    collector = PipelinedDataCollector(make_base(return_same_td=same_memory), "cpu", prefetch_count)
    seen = [observations(batch) for batch in collector]
    assert seen == [expected_observations(index) for index in range(6)]


@pytest.mark.parametrize("same_memory", [False, True])
def test_without_prefetching_it_is_the_plain_collector(same_memory):
    def batches(wrap):
        torch.manual_seed(0)
        base = make_base(sampling_policy(), env=CountingEnv(noise=True), return_same_td=same_memory)
        base.set_seed(1)
        for batch in wrap(base):
            torch.rand(1)  # training draws from the same generator
            yield batch.clone()

    plain = list(batches(lambda base: base))
    wrapped = list(batches(lambda base: PipelinedDataCollector(base, None, 0)))
    assert len(plain) == len(wrapped) == 6
    for one, other in zip(plain, wrapped, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert (one == other).all()


def test_without_prefetching_there_is_no_thread_no_copy_and_the_policy_is_used_as_it_is():
    policy = uniform_policy()
    base = make_base(policy, return_same_td=True)
    collector = PipelinedDataCollector(base, "cpu", 0)
    batch = next(collector)
    assert collecting_threads() == []
    assert base.policy is policy
    assert batch["observation"].data_ptr() == base._final_rollout["observation"].data_ptr()
    assert collector.staleness() == 0
    collector.shutdown()


def test_a_pipelined_batch_is_the_plain_one_and_a_stamp():
    plain = list(make_base())
    pipelined = list(PipelinedDataCollector(make_base(), "cpu", 2))
    for one, other in zip(plain, pipelined, strict=True):
        assert other["collector", "policy_version"].shape == one.batch_size
        assert other["collector", "policy_version"].dtype == torch.int64
        assert other.device == torch.device("cpu")
        del other["collector", "policy_version"]
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert (one == other).all()


@pytest.mark.parametrize("prefetch_count", AHEAD)
@pytest.mark.parametrize("same_memory", [False, True])
def test_a_batch_is_never_overwritten(same_memory, prefetch_count):
    collector = PipelinedDataCollector(make_base(return_same_td=same_memory), "cpu", prefetch_count)
    kept = list(collector)
    assert [observations(batch) for batch in kept] == [expected_observations(index) for index in range(6)]
    for batch in kept:
        batch["observation"].fill_(-1)
    assert len({batch["observation"].data_ptr() for batch in kept}) == 6


@pytest.mark.parametrize("prefetch_count", AHEAD)
def test_reused_memory_is_left_alone_until_the_next_batch_is_asked_for(prefetch_count):
    env = CountingEnv()
    base = make_base(batches=12, env=env, return_same_td=True)
    addresses = set()
    for index, batch in enumerate(PipelinedDataCollector(base, "cpu", prefetch_count, reuse_buffers=True)):
        batch["advantage"] = batch["observation"] * 2  # what the consumer adds and takes away does not matter
        del batch["action"]
        env.wait_for_batch(min(index + prefetch_count, 11))
        assert observations(batch) == expected_observations(index)
        addresses.add(batch["observation"].data_ptr())
    assert len(addresses) <= prefetch_count + 1


def test_nested_dicts_are_stamped_and_copied():
    shared = torch.zeros(2)

    def generate():
        for step in range(3):
            shared.fill_(step)
            yield {"a": {"b": shared}, "list": [shared, "name"]}

    kept = list(PipelinedDataCollector(generate(), "cpu", 2))
    assert [batch["a"]["b"].tolist() for batch in kept] == [[0, 0], [1, 1], [2, 2]]
    assert [batch["list"][0].tolist() for batch in kept] == [[0, 0], [1, 1], [2, 2]]
    assert [batch["list"][1] for batch in kept] == ["name"] * 3
    assert all(batch["collector"]["policy_version"] == 0 for batch in kept)


def test_tensordicts_of_all_kinds_pass_whole():
    stacked = LazyStackedTensorDict(*(TensorDict({"x": torch.ones(2) * i}, [2]) for i in range(3)), stack_dim=0)
    nested = TensorDict({"agents": TensorDict({"x": torch.ones(2, 5)}, [2, 5]), "empty": TensorDict({}, [2])}, [2])
    nested.set_non_tensor("name", "a label")
    first, second = PipelinedDataCollector([stacked, nested], None, 1)
    assert (first["x"] == stacked["x"]).all()
    assert first["collector", "policy_version"].shape == (3, 2)
    assert second["name"] == "a label"
    assert second["agents"].batch_size == (2, 5)
    assert "empty" in second
    assert "collector" not in nested


def test_an_iterable_that_can_be_iterated_again_is_iterated_again():
    collector = PipelinedDataCollector([{"x": torch.tensor(0)}, {"x": torch.tensor(1)}], "cpu", 2)
    assert [int(batch["x"]) for batch in collector] == [0, 1]
    assert [int(batch["x"]) for batch in collector] == [0, 1]


# Weights.


@pytest.mark.parametrize("prefetch_count", AHEAD)
@pytest.mark.parametrize("same_memory", [False, True])
def test_weights_that_change_all_the_time_never_tear(prefetch_count, same_memory):
    policy = uniform_policy(size=20_000)
    weight = policy.module.weight
    env = CountingEnv()
    base = make_base(policy, batches=15, env=env, return_same_td=same_memory)
    for index, batch in enumerate(PipelinedDataCollector(base, "cpu", prefetch_count)):
        actions = batch["action"].unique()
        assert actions.numel() == 1, "one set of weights in a batch"
        assert float(actions) < 1000, "and that all of one moment"
        # A step of the optimizer that lasts until the next batch is collected, and a little longer.
        num_steps = min(index + 2, 15) * STEPS
        is_collected = False
        while not is_collected:
            is_collected = env.num_steps >= num_steps
            for part in weight.data.chunk(7):
                part.add_(1e-3)


@pytest.mark.parametrize("prefetch_count", AHEAD)
def test_a_batch_is_as_many_updates_old_as_batches_are_collected_ahead(prefetch_count):
    policy = uniform_policy()
    env = CountingEnv()
    collector = PipelinedDataCollector(make_base(policy, batches=10, env=env), "cpu", prefetch_count)
    for index, batch in enumerate(collector):
        version = max(0, index - prefetch_count)
        assert batch["collector", "policy_version"].unique().tolist() == [version]
        assert batch["action"].unique().tolist() == [version]
        assert collector.staleness() == index - version
        with torch.no_grad():
            policy.module.weight += 1
        if index % 2:
            env.wait_for_batch(min(index + prefetch_count, 9))


def test_the_trained_policy_is_not_touched_and_the_collector_has_another():
    policy = uniform_policy()
    base = make_base(policy)
    with PipelinedDataCollector(base, "cpu", 1) as collector:
        next(collector)
        shared = {tensor.data_ptr() for tensor in policy.parameters()}
        for module in (base.policy, base._wrapped_policy, base._policy_w_state_dict):
            assert not shared & {tensor.data_ptr() for tensor in module.parameters()}
        assert policy.module.weight.requires_grad


def test_weights_are_copied_only_on_request_if_so_wanted():
    policy = uniform_policy()
    collector = PipelinedDataCollector(make_base(policy, batches=9), "cpu", 2, auto_update=False)
    actions = []
    for index, batch in enumerate(collector):
        actions.append(float(batch["action"].unique()))
        policy.module.weight.data += 1
        if index == 3:
            collector.update_policy_weights_()
            policy.module.weight.data += 100  # after the copy
    assert actions == [0, 0, 0, 0, 0, 0, 4, 4, 4]
    assert collector.get_stats()["policy_version"] == 1
    assert collector.staleness() == 0


@pytest.mark.parametrize("kind", ["module", "state", "tensordict"])
def test_weights_can_be_given(kind):
    policy = uniform_policy()
    other = copy.deepcopy(policy)
    other.module.weight.data.fill_(7)
    given = {"module": other, "state": other.state_dict(), "tensordict": TensorDict.from_module(other)}[kind]
    with PipelinedDataCollector(make_base(policy), "cpu", 1) as collector:
        collector.update_policy_weights_(given)
        actions = [float(next(collector)["action"].unique()) for _ in range(4)]
        assert actions == [7, 7, 0, 0]
        with pytest.raises(StateMismatchError, match=r"unexpected \['bias'\]"):
            collector.update_policy_weights_({"bias": torch.zeros(1)})
        with pytest.raises(StateMismatchError, match=r"the shape of 'module.weight' is \(1,\), expected \(4,\)"):
            collector.update_policy_weights_({"module.weight": torch.zeros(1)})
        assert collector.policy_version == 3, "refused weights have no version"
        policy.module.weight.data.fill_(9)
        assert [float(next(collector)["action"].unique()) for _ in range(2)] == [0, 9]


def test_the_trained_policy_may_be_another_than_the_collectors():
    trained, collecting = uniform_policy(), uniform_policy()
    trained.module.weight.data.fill_(5)
    base = make_base(collecting)
    with PipelinedDataCollector(base, "cpu", 1, policy=trained) as collector:
        assert float(next(collector)["action"].unique()) == 5
        assert base.policy is collecting


def test_modules_collect_in_the_mode_they_are_trained_in():
    policy = TensorDictModule(nn.Dropout(0.5), in_keys=["observation"], out_keys=["action"])
    base = make_base(policy, batches=8)
    with PipelinedDataCollector(base, "cpu", 1) as collector:
        policy.eval()
        next(collector)
        batch = next(collector)
        assert (batch["action"] == batch["observation"]).all()
        policy.train()
        next(collector)
        batch = next(collector)
        assert set(batch["action"].div(batch["observation"]).unique().tolist()) == {0, 2}


def test_a_random_policy_has_no_versions():
    base = Collector(CountingEnv(), frames_per_batch=FRAMES, total_frames=3 * FRAMES)
    for batch in PipelinedDataCollector(base, "cpu", 1):
        assert batch["collector", "policy_version"].unique().tolist() == [0]


# Repeatability.


def busy_run(rng: str, noise: bool, waits: list[bool]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Collect while training draws too; return what each of them drew.

    For each batch, in turn, `waits` says whether training lets the collector finish the next ones between its draws.
    """
    torch.manual_seed(0)
    policy = sampling_policy()
    env = CountingEnv(noise=noise)
    collector = PipelinedDataCollector(
        make_base(policy, batches=8, env=env),
        "cpu",
        2,
        rng=rng,  # type: ignore[arg-type]
    )
    collector.set_seed(5)
    collected, drawn = [], []
    for index, batch in enumerate(collector):
        collected.append(torch.cat([batch["action"].flatten(), batch["next", "reward"].flatten()]))
        for draw in range(20):
            drawn.append(torch.randn(3))
            if draw == 10 and waits[index % len(waits)]:
                env.wait_for_batch(min(index + 2, 7))
        with torch.no_grad():
            policy[0].module.linear.weight += drawn[-1][0]
    return collected, drawn


@pytest.mark.parametrize(("rng", "noise"), [("all", True), ("all", False), ("policy", False)])
def test_collecting_and_training_draw_the_same_whatever_their_pace(rng, noise):
    runs = [busy_run(rng, noise, waits) for waits in ([False], [True], [True, False, False])]
    for collected, drawn in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(collected, runs[0][0], strict=True))
        assert all(torch.equal(one, other) for one, other in zip(drawn, runs[0][1], strict=True))
    flat = torch.cat(runs[0][0])
    assert flat.unique().numel() > flat.numel() / 3, "they are random"


@pytest.mark.parametrize(
    ("rng", "noise", "touched"),
    [
        ("all", True, False),
        ("policy", False, False),
        ("policy", True, True),
        ("shared", False, True),
    ],
)
def test_collecting_leaves_the_global_generator_alone_as_far_as_stated(rng, noise, touched, caplog):
    base = make_base(sampling_policy(), env=CountingEnv(noise=noise))
    collector = PipelinedDataCollector(base, "cpu", 2, rng=rng)
    before = torch.get_rng_state()
    assert len(list(collector)) == 6
    assert torch.equal(before, torch.get_rng_state()) is not touched
    assert ("The environment draws from torch's global generator" in caplog.text) is (rng == "policy" and noise)


DRAWS: dict[str, Any] = {
    "rand": lambda: torch.rand(8),
    "randn": lambda: torch.randn(8, dtype=torch.float64),
    "randint": lambda: torch.randint(100, (8,)),
    "randint_low": lambda: torch.randint(5, 100, (8,)),
    "randperm": lambda: torch.randperm(40),
    "rand_like": lambda: torch.rand_like(torch.ones(8)),
    "randn_like": lambda: torch.randn_like(torch.ones(8)),
    "randint_like": lambda: torch.randint_like(torch.ones(8), 100),
    "normal": lambda: torch.normal(torch.zeros(8), torch.ones(8)),
    "normal_of_floats": lambda: torch.normal(0.0, 1.0, (8,)),
    "normal_": lambda: torch.empty(8).normal_(),
    "uniform_": lambda: torch.empty(8).uniform_(),
    "exponential_": lambda: torch.empty(8).exponential_(),
    "random_": lambda: torch.empty(8).random_(),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(100), 8),
    "poisson": lambda: torch.poisson(torch.full((8,), 50.0)),
    "binomial": lambda: torch.binomial(torch.full((8,), 90.0), torch.full((8,), 0.5)),
    "gamma": lambda: torch.distributions.Gamma(torch.ones(8), torch.ones(8)).sample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(8)).sample(),
    "categorical": lambda: torch.distributions.Categorical(logits=torch.zeros(8, 50)).sample(),
    "dropout": lambda: nn.functional.dropout(torch.ones(64)),
    "rrelu": lambda: nn.functional.rrelu(-torch.ones(8), training=True),
    "gumbel_softmax": lambda: nn.functional.gumbel_softmax(torch.zeros(8)),
    "attention": lambda: nn.MultiheadAttention(8, 2, dropout=0.5)(*[torch.ones(4, 1, 8)] * 3)[0] + 0,
    "linear": lambda: nn.Linear(4, 4).weight + 0,
    "given_generator": lambda: torch.rand(8, generator=torch.Generator().manual_seed(4)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_way_to_draw_comes_from_the_private_generator(draw):
    before = torch.get_rng_state()
    with PrivateRandomness(1) as randomness:
        first = draw()
        second = draw()
    assert torch.equal(before, torch.get_rng_state())
    with PrivateRandomness(1):
        assert torch.equal(draw(), first)
    torch.rand(7)
    continued = PrivateRandomness(2)
    continued.load_state_dict(randomness.state_dict())
    with randomness:
        third = draw()
    with continued:
        assert torch.equal(draw(), third)
    assert draw is DRAWS["given_generator"] or not torch.equal(first, second)


def test_seeding_changes_what_is_not_ordered_yet_and_reaches_the_environment():
    def actions(seed):
        torch.manual_seed(0)
        env = CountingEnv()
        collector = PipelinedDataCollector(make_base(sampling_policy(), env=env), "cpu", 1)
        first = next(collector)["action"]
        collector.set_seed(seed)
        assert env.seeds == [seed]
        return [first, *(batch["action"] for batch in collector)]

    one, other, same = actions(1), actions(2), actions(1)
    assert [torch.equal(a, b) for a, b in zip(one, same, strict=True)] == [True] * 6
    assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [True] * 2 + [False] * 4


def test_a_base_that_ends_while_batches_are_ordered_ends_the_loop(monkeypatch):
    collector = PipelinedDataCollector(make_base(sampling_policy(), batches=1), "cpu", 3)
    prefetcher = collector._prefetcher
    order = prefetcher.order

    def order_slowly(request: Any) -> None:
        order(request)
        while prefetcher.num_ahead > 1 and not prefetcher.has_ended:
            time.sleep(0.001)

    monkeypatch.setattr(prefetcher, "order", order_slowly)
    assert len(list(collector)) == 1


# Errors.


@pytest.mark.parametrize("prefetch_count", AHEAD)
def test_an_error_comes_in_place_of_the_batch_that_failed_with_its_traceback(prefetch_count):
    base = make_base(env=CountingEnv(fail_at=2 * STEPS + 2))
    collector = PipelinedDataCollector(base, "cpu", prefetch_count)
    seen = []
    with pytest.raises(BackgroundError, match="batch 2 could not be collected: ArithmeticError: the drone") as caught:
        for batch in collector:
            seen.append(observations(batch))
    assert seen == [expected_observations(0), expected_observations(1)]
    cause = caught.value.__cause__
    assert isinstance(cause, ArithmeticError)
    assert "raise_in_the_simulator" in "".join(traceback.format_exception(cause))
    with pytest.raises(BackgroundError, match="the drone left the map"):
        next(collector)
    collector.shutdown()


def test_an_error_in_starting_to_iterate_is_passed_on():
    with pytest.raises(BackgroundError, match="not iterable"):
        next(PipelinedDataCollector(3, "cpu", 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch_count": -1}, "prefetch_count is -1, expected a whole number of at least 0"),
        ({"rng": "private"}, "rng is 'private', expected one of 'all', 'policy', 'shared'"),
        ({"rng": "policy"}, "rng is 'policy', but the policy of list is a NoneType"),
        ({"policy": nn.Linear(1, 1)}, "a policy to train was given, but the policy of list is a NoneType"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        PipelinedDataCollector([], "cpu", **options)


def test_collectors_that_cannot_be_pipelined_are_refused():
    filling = make_base(replay_buffer=ReplayBuffer(storage=LazyTensorStorage(100)))
    with pytest.raises(ConfigurationError, match="fills a replay buffer and yields no batches"):
        PipelinedDataCollector(filling, "cpu")
    filling.shutdown()
    processes = MultiSyncCollector.__new__(MultiSyncCollector)
    processes.procs = []
    with pytest.raises(ConfigurationError, match="collects in separate processes already"):
        PipelinedDataCollector(processes, "cpu")
    compiled = make_base()
    compiled.compiled_policy = True
    with pytest.raises(ConfigurationError, match="compiles its policy"):
        PipelinedDataCollector(compiled, "cpu")
    lazy = Numbers()
    lazy.policy = nn.LazyLinear(2)  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="lazy parameters"):
        PipelinedDataCollector(lazy, "cpu")


# Stopping.


@pytest.mark.parametrize("prefetch_count", [0, *AHEAD])
@pytest.mark.parametrize("asked", [0, 1, 3, 6])
def test_shutdown_works_in_every_state_and_twice(prefetch_count, asked):
    base = make_base()
    collector = PipelinedDataCollector(base, "cpu", prefetch_count)
    for _ in range(asked):
        next(collector)
    collector.shutdown()
    assert collecting_threads() == []
    assert base.closed
    collector.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        next(collector)
    with pytest.raises(RuntimeError, match="shut down"):
        list(collector)


@pytest.mark.parametrize("prefetch_count", AHEAD)
def test_breaking_out_of_a_loop_ends_the_thread_and_loses_no_batch(prefetch_count):
    collector = PipelinedDataCollector(make_base(), "cpu", prefetch_count)
    seen = []
    for batch in collector:
        seen.append(observations(batch))
        if len(seen) == 2:
            break
    assert collecting_threads() == []
    seen += [observations(batch) for batch in collector]
    assert seen == [expected_observations(index) for index in range(6)]
    collector.shutdown()


def test_an_interrupt_in_the_loop_leaves_no_thread():
    def train():
        with PipelinedDataCollector(make_base(), "cpu", 2) as collector:
            for _ in collector:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert collecting_threads() == []


def test_garbage_collection_of_a_collector_ends_its_thread():
    collector = PipelinedDataCollector(make_base(), "cpu", 2)
    next(collector)
    assert len(collecting_threads()) == 1
    del collector
    gc.collect()
    assert collecting_threads() == []


def test_a_loop_that_is_forgotten_does_not_stop_the_one_that_runs():
    collector = PipelinedDataCollector(make_base(), "cpu", 1)
    forgotten: Any = iter(collector)
    seen = [observations(next(forgotten))]
    for batch in collector:
        seen.append(observations(batch))
        forgotten.close()  # as the garbage collector would, at any time
    assert seen == [expected_observations(index) for index in range(6)]


def test_a_loop_that_is_forgotten_on_the_collecting_thread_does_not_make_it_wait_for_itself():
    forgotten: list[Any] = []

    def generate():
        for step in range(4):
            for loop in forgotten:
                loop.close()  # as the garbage collector would, on any thread
            yield {"x": torch.tensor(step)}

    collector = PipelinedDataCollector(generate(), "cpu", 1)
    loop = iter(collector)
    seen = [int(next(loop)["x"])]
    forgotten.append(loop)
    seen += [int(batch["x"]) for batch in collector]
    assert seen == [0, 1, 2, 3]


def test_a_base_that_hangs_does_not_hang_the_shutdown():
    released = threading.Event()

    def generate():
        yield {"x": torch.zeros(1)}
        released.wait()
        yield {"x": torch.ones(1)}

    collector = PipelinedDataCollector(generate(), "cpu", 1)
    next(collector)
    with pytest.raises(TimeoutError, match="not done after 0.05 s"):
        collector.shutdown(timeout=0.05)
    released.set()
    collector.shutdown()


def test_a_program_may_end_while_batches_are_collected():
    script = """
import torch
from slipstream import PipelinedDataCollector

def generate():
    while True:
        yield {"x": torch.rand(1000).sort().values}

collector = PipelinedDataCollector(generate(), "cpu", 2)
print(len(next(collector)["x"]))
"""
    run = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "1000\n", "")


def test_nothing_is_collected_during_a_pause():
    may_collect = threading.Event()
    may_collect.set()

    class Watchful(Numbers):
        def __iter__(self):
            for batch in super().__iter__():
                assert may_collect.is_set(), "collected during a pause"
                yield batch

    with PipelinedDataCollector(Watchful(length=100), "cpu", 2) as collector:
        for _ in range(50):
            next(collector)
            with collector.paused():
                may_collect.clear()
                torch.rand(1000).sort()
                may_collect.set()
        with collector.paused(), pytest.raises(RuntimeError, match="production is paused"):
            for _ in range(4):
                next(collector)
        assert int(next(collector)["position"]) > 50


# State.


def run_on(collector: Any, count: int) -> list[Any]:
    seen = []
    for _ in range(count):
        batch = next(collector)
        seen.append((int(batch["position"]), batch["drawn"]["global"], batch["drawn"]["own"], float(batch["weight"])))
        collector.base_trained.weight.data += 1
    return seen


def make_resumable(prefetch_count: int, seed: int) -> Any:
    torch.manual_seed(seed)
    base = Numbers()
    trained = base.policy
    collector: Any = PipelinedDataCollector(base, "cpu", prefetch_count, rng="all")
    collector.base_trained = trained
    return collector


def assert_same_batches(seen: list[Any], expected: list[Any]) -> None:
    assert [(batch[0], batch[3]) for batch in seen] == [(batch[0], batch[3]) for batch in expected]
    for one, other in zip(seen, expected, strict=True):
        assert torch.equal(one[1], other[1])
        assert torch.equal(one[2], other[2])


@pytest.mark.parametrize("settle", [False, True])
@pytest.mark.parametrize("handed_out", [0, 1, 2, 5, 12])
@pytest.mark.parametrize("prefetch_count", AHEAD)
def test_a_run_that_is_resumed_is_the_run_that_was_not(prefetch_count, handed_out, settle, tmp_path):
    whole = make_resumable(prefetch_count, seed=0)
    expected = run_on(whole, 12)
    whole.shutdown()

    first = make_resumable(prefetch_count, seed=0)
    assert_same_batches(run_on(first, handed_out), expected[:handed_out])
    if settle and handed_out:
        first.base_collector.wait_for(min(handed_out + prefetch_count, 12))  # however far the thread has come
    torch.save({"collector": first.state_dict(), "policy": first.base_trained.state_dict()}, tmp_path / "state.pt")
    assert_same_batches(run_on(first, 12 - handed_out), expected[handed_out:])
    first.shutdown()

    second = make_resumable(prefetch_count, seed=99)
    run_on(second, 3)  # what it did before is forgotten
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    second.load_state_dict(state["collector"])
    second.base_trained.load_state_dict(state["policy"])
    assert_same_batches(run_on(second, 12 - handed_out), expected[handed_out:])
    assert second.next() is None
    second.shutdown()


@pytest.mark.parametrize("prefetch_count", AHEAD)
def test_frames_of_a_torchrl_collector_are_neither_lost_nor_counted_twice(prefetch_count):
    first = PipelinedDataCollector(make_base(batches=8), "cpu", prefetch_count)
    seen = [next(first) for _ in range(3)]
    state = first.state_dict()
    num_ready = len(state["batches"])
    first.shutdown()
    second = PipelinedDataCollector(make_base(batches=8), "cpu", prefetch_count)
    second.load_state_dict(state)
    resumed = list(second)
    assert len(seen) + len(resumed) == 8
    # TorchRL starts the environment anew, so only those that were collected before can be compared.
    for index in range(num_ready):
        assert observations(resumed[index]) == expected_observations(3 + index)
        assert resumed[index].names == seen[0].names
        assert resumed[index]["next"].batch_size == seen[0]["next"].batch_size


def test_a_state_may_be_of_another_prefetch_count_or_of_the_base_alone():
    deep = make_resumable(4, seed=0)
    positions = [batch[0] for batch in run_on(deep, 3)]
    shallow = make_resumable(1, seed=1)
    shallow.load_state_dict(deep.state_dict())
    positions += [batch[0] for batch in run_on(shallow, 9)]
    assert positions == list(range(1, 13))
    plain = make_resumable(0, seed=2)
    with pytest.raises(StateMismatchError, match="prefetch_count is 0"):
        plain.load_state_dict(deep.state_dict())
    run_on(plain, 4)
    shallow.load_state_dict(plain.state_dict())
    assert [batch[0] for batch in run_on(shallow, 2)] == [5, 6]
    for collector in (deep, shallow, plain):
        collector.shutdown()


def test_the_state_is_not_changed_by_what_comes_after():
    collector = make_resumable(2, seed=0)
    run_on(collector, 2)
    state = collector.state_dict()
    kept = copy.deepcopy(state)
    for _ in range(5):
        next(collector)["position"].fill_(-1)
    assert_equal_trees(state, kept)
    collector.shutdown()


def assert_equal_trees(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal_trees(one[key], other[key])
    elif isinstance(one, list):
        for left, right in zip(one, other, strict=True):
            assert_equal_trees(left, right)
    else:
        assert one == other


def test_a_base_without_state_says_so():
    with pytest.raises(UnsupportedStateError, match="list has no state_dict"):
        PipelinedDataCollector([], "cpu").state_dict()


# The rest of the base.


def test_what_describes_the_base_is_passed_on():
    base = make_base()
    with PipelinedDataCollector(base, "cpu", 1) as collector:
        assert len(collector) == 6
        assert collector.frames_per_batch == base.frames_per_batch
        assert collector.total_frames == 6 * FRAMES
        assert collector.env is base.env
        with pytest.raises(AttributeError, match="has no attribute 'rollout'; base_collector may have it"):
            collector.rollout()


def test_statistics_say_where_time_went():
    collector = PipelinedDataCollector(make_base(), "cpu", 2)
    for _ in collector:
        pass
    stats = collector.get_stats()
    assert stats["num_batches"] == 6
    assert stats["policy_version"] == 6
    assert stats["staleness"] == collector.staleness() == 2
    assert stats["collect_s"] > 0
    assert stats["wait_s"] > 0
    assert stats["update_s"] > 0
