"""tensordict's modes, which all threads of a process share, during collection: respected, or an error."""

import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict, utils
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type, set_skip_existing
from tensordict.nn.probabilistic import interaction_type
from torchrl.collectors import Collector
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from slipstream import PipelinedDataCollector
from slipstream.collect.serial import SerialCollector
from slipstream.errors import BackgroundError
from tests.collect.test_pipelined import FRAMES, PATIENCE_S, STEPS, CountingEnv, sampling_policy


class GatedEnv(CountingEnv):
    """Stops before one step until the test lets it continue."""

    def __init__(self, stop_at: int) -> None:
        super().__init__()
        self.stop_at = stop_at
        self.has_stopped = threading.Event()
        self.may_continue = threading.Event()

    def _step(self, tensordict):
        if self.num_steps == self.stop_at:
            self.has_stopped.set()
            assert self.may_continue.wait(PATIENCE_S)
        return super()._step(tensordict)


MIDDLE_OF_SECOND_BATCH = STEPS + STEPS // 2


def make_torchrl(env: Any, policy: Any) -> Any:
    return Collector(
        env, policy, frames_per_batch=FRAMES, total_frames=6 * FRAMES, auto_register_policy_transforms=False
    )


def make_serial(env: Any, policy: Any) -> Any:
    return SerialCollector(env, policy, num_steps=STEPS, total_rollouts=6)


@pytest.fixture(autouse=True)
def _modes_are_restored():
    with set_interaction_type(None), set_skip_existing(False):
        yield


@pytest.mark.parametrize("make_base", [make_torchrl, make_serial])
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (lambda: set_exploration_type(ExplorationType.DETERMINISTIC), "to Modes.*DETERMINISTIC"),
        (lambda: set_skip_existing(True), "to Modes.*skip_existing=True"),
    ],
    ids=["exploration_type", "skip_existing"],
)
def test_a_mode_that_changes_in_the_middle_of_a_batch_fails_this_batch(make_base, mode, message):
    env = GatedEnv(stop_at=MIDDLE_OF_SECOND_BATCH)
    with PipelinedDataCollector(make_base(env, sampling_policy()), "cpu", 1) as collector:
        next(collector)
        assert env.has_stopped.wait(PATIENCE_S)
        with mode():
            env.may_continue.set()
            with pytest.raises(BackgroundError, match=f"batch 1 .*{message}.*inside `with collector.paused"):
                next(collector)


@pytest.mark.parametrize("make_base", [make_torchrl, make_serial])
@pytest.mark.parametrize("prefetch_count", [1, 3])
def test_an_evaluation_inside_a_pause_has_its_own_modes(make_base, prefetch_count):
    policy = sampling_policy()
    observed = TensorDict({"observation": torch.ones(5, 1), "action": torch.full((5, 1), 9.0)}, [5])
    num_batches = 0
    with PipelinedDataCollector(make_base(CountingEnv(), policy), "cpu", prefetch_count) as collector:
        for batch in collector:
            num_batches += 1
            # TorchRL's collector samples. The other one does what the policy does by default.
            assert bool((batch["action"] == batch["loc"]).all()) is (make_base is make_serial)
            with collector.paused():
                assert interaction_type() is None, "no collection has left its mode behind"
                with set_interaction_type(InteractionType.DETERMINISTIC):
                    evaluated = policy(observed.clone())
                assert torch.equal(evaluated["action"], evaluated["loc"])
                with set_interaction_type(InteractionType.RANDOM):
                    evaluated = policy(observed.clone())
                assert (evaluated["action"] != evaluated["loc"]).all()
                with set_skip_existing(True):
                    assert torch.equal(policy(observed.clone())["action"], observed["action"])
    assert num_batches == 6


def test_a_base_without_an_exploration_type_collects_with_that_of_the_loop():
    for mode, is_mean in ((InteractionType.DETERMINISTIC, True), (InteractionType.RANDOM, False)):
        collector = PipelinedDataCollector(make_serial(CountingEnv(), sampling_policy()), "cpu", 2)
        with set_interaction_type(mode):
            for batch in collector:
                assert bool((batch["action"] == batch["loc"]).all()) is is_mean


def make_losses() -> tuple[Any, Any, Any]:
    """Return TorchRL's own actor, loss and advantage for PPO."""
    actor = ProbabilisticActor(
        sampling_policy()[0],
        in_keys=["loc", "scale"],
        distribution_class=torch.distributions.Normal,
        return_log_prob=True,
    )
    critic = ValueOperator(torch.nn.Linear(1, 1), in_keys=["observation"])
    return actor, ClipPPOLoss(actor, critic), GAE(gamma=0.9, lmbda=0.9, value_network=critic)


def collect_during(env: Any, collector: Any, module: Any, compute: Any) -> None:
    """Compute something, and let the collector finish its batch (or fail) in the middle of that."""
    assert env.has_stopped.wait(PATIENCE_S)

    def continue_collecting(*_: Any) -> None:
        env.may_continue.set()
        with collector.paused():  # waits for the batch in progress
            pass

    hook = module.register_forward_hook(continue_collecting)
    compute()
    hook.remove()


def test_a_loss_of_torchrl_that_follows_the_advice_does_not_disturb_collection():
    actor, loss, gae = make_losses()
    loss.deterministic_sampling_mode = ExplorationType.RANDOM
    env = GatedEnv(stop_at=MIDDLE_OF_SECOND_BATCH)
    with (
        set_exploration_type(ExplorationType.RANDOM),
        PipelinedDataCollector(make_torchrl(env, actor), "cpu", 1) as collector,
    ):
        batch = gae(next(collector))
        collect_during(env, collector, actor[0], lambda: loss(batch))
        batches = list(collector)
        assert len(batches) == 5
        for batch in batches:
            assert (batch["action"] != batch["loc"]).all()


@pytest.mark.parametrize("method", ["loss", "get_dist"])
def test_training_that_changes_modes_during_a_batch_gets_advice(method):
    actor, loss, gae = make_losses()
    env = GatedEnv(stop_at=MIDDLE_OF_SECOND_BATCH)
    with PipelinedDataCollector(make_torchrl(env, actor), "cpu", 1) as collector:
        batch = gae(next(collector))
        compute = {"loss": lambda: loss(batch), "get_dist": lambda: deterministic(actor.get_dist, batch)}[method]
        collect_during(env, collector, actor[0], compute)
        with pytest.raises(BackgroundError, match="loss.deterministic_sampling_mode = ExplorationType.RANDOM"):
            list(collector)


def deterministic(function: Any, batch: Any) -> Any:
    with set_interaction_type(InteractionType.DETERMINISTIC):
        return function(batch)


@pytest.mark.parametrize("make_base", [make_torchrl, make_serial])
def test_another_loop_may_have_other_modes(make_base):
    collector = PipelinedDataCollector(make_base(CountingEnv(), sampling_policy()), "cpu", 1)
    for mode in (InteractionType.DETERMINISTIC, InteractionType.RANDOM):
        with set_interaction_type(mode):
            for _ in collector:
                break
    collector.shutdown()


def test_tensordict_itself_is_not_changed():
    with PipelinedDataCollector(make_torchrl(CountingEnv(), sampling_policy()), "cpu", 1) as collector:
        next(collector)
        for method in (utils._ContextManager.get_mode, utils._ContextManager.set_mode):
            assert method.__module__ == "tensordict.utils"
    assert TensorDictModule.forward.__module__.startswith("tensordict")
