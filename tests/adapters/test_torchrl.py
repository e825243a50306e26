"""`TorchRLCheckpointHook` with real trainers."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import BackgroundError, CheckpointManager, QueueFullError, TrainingState
from tests.adapters.shared import busy_background, same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl.trainers")

from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv
from torchrl.trainers import (
    DefaultOptimizationStepper,
    ReplayBufferTrainer,
    Trainer,
    TrainerHookBase,
)

from slipstream.adapters import TorchRLCheckpointHook

pytestmark = pytest.mark.filterwarnings("ignore:The env passed to Collector is missing transforms:FutureWarning")


class Loss(torch.nn.Module):
    def __init__(self, policy: torch.nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, batch: Any) -> Any:
        return TensorDict({"loss": self.policy(batch.clone())["action"].square().mean()})


def make_trainer(frames: int = 100) -> Any:
    """Return a trainer with a replay buffer that collects batches of 20 frames."""
    policy = TensorDictModule(torch.nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    env = GymEnv("Pendulum-v1", device="cpu")
    loss = Loss(policy)
    trainer = Trainer(
        collector=Collector(env, policy, frames_per_batch=20, total_frames=frames),
        total_frames=frames,
        frame_skip=1,
        optim_steps_per_batch=2,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=1e-2),
        optimization_stepper=DefaultOptimizationStepper(),
        progress_bar=False,
    )
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(200), batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ReplayBufferTrainer(buffer, flatten_tensordicts=True).register(trainer)
    return trainer


def buffer_of(trainer: Any) -> Any:
    return trainer._modules["replay_buffer"].replay_buffer


def steps_in(folder: Path) -> list[int]:
    with CheckpointManager(folder) as manager:
        return manager.steps()


def restored_from(folder: Path) -> Any:
    with CheckpointManager(folder) as manager:
        return manager.restore().state


class TestSaving:
    def test_a_trainer_is_saved_every_interval_and_at_the_end(self, tmp_path):
        trainer = make_trainer(100)
        TorchRLCheckpointHook(tmp_path, interval=40).register(trainer)
        trainer.train()
        assert steps_in(tmp_path) == [40, 80, 100]

    def test_a_trainer_that_stops_early_is_saved_too(self, tmp_path):
        trainer = make_trainer(100)
        TorchRLCheckpointHook(tmp_path, interval=1000).register(trainer)

        def stop() -> None:
            trainer.request_stop("enough")

        trainer.register_op("post_steps", stop)
        trainer.train()
        assert steps_in(tmp_path) == [20]

    def test_a_manager_that_was_passed_stays_open_and_applies_its_policies(self, tmp_path):
        with CheckpointManager(tmp_path, keep_last=1) as manager:
            trainer = make_trainer(60)
            TorchRLCheckpointHook(manager, interval=20).register(trainer)
            trainer.train()
            assert manager.steps() == [60]
            manager.save(61, {"weight": torch.zeros(1)})
        assert steps_in(tmp_path) == [61]

    def test_a_hook_that_served_another_trainer_starts_over(self, tmp_path):
        hook = TorchRLCheckpointHook(tmp_path, interval=40)
        first = make_trainer(100)
        hook.register(first)
        first.train()
        for path in tmp_path.glob("*.slip"):
            path.unlink()
        second = make_trainer(60)
        hook.register(second)
        second.train()
        assert steps_in(tmp_path) == [40, 60]


class TestResuming:
    def test_a_new_trainer_resumes_where_the_saved_one_was(self, tmp_path):
        trainer = make_trainer(60)
        TorchRLCheckpointHook(tmp_path, interval=40).register(trainer)
        trainer.train()
        other = make_trainer(100)
        TorchRLCheckpointHook(tmp_path, interval=40).register(other)
        other.load_state_dict(restored_from(tmp_path))
        assert other.collected_frames == 60
        assert same(other.loss_module.state_dict(), trainer.loss_module.state_dict())
        assert same(other.optimizer.state_dict(), trainer.optimizer.state_dict())
        assert len(buffer_of(other)) == 60
        assert torch.equal(buffer_of(other)[:]["observation"], buffer_of(trainer)[:]["observation"])
        other.train()
        assert steps_in(tmp_path) == [40, 60, 100]

    def test_a_training_state_adds_random_numbers(self, tmp_path):
        with CheckpointManager(tmp_path) as manager:
            trainer = make_trainer(40)
            TorchRLCheckpointHook(manager, interval=20, state=TrainingState(trainer=trainer)).register(trainer)
            trainer.train()
            after = torch.get_rng_state()
            other = make_trainer(80)
            TorchRLCheckpointHook(manager, interval=20).register(other)
            torch.manual_seed(99)
            TrainingState(trainer=other).load_state_dict(manager.restore().state)
            assert other.collected_frames == 40
            assert torch.equal(torch.get_rng_state(), after)


class TestFailures:
    def test_a_failed_save_is_raised_by_a_later_one(self, tmp_path):
        (tmp_path / "file").touch()
        trainer = make_trainer(100)
        TorchRLCheckpointHook(tmp_path / "file" / "folder", interval=20).register(trainer)
        with pytest.raises((BackgroundError, OSError), match="file"):
            trainer.train()

    def test_a_failed_last_save_is_raised_at_the_end_of_training(self, tmp_path):
        (tmp_path / "file").touch()
        trainer = make_trainer(20)
        TorchRLCheckpointHook(tmp_path / "file" / "folder", interval=1000).register(trainer)
        with pytest.raises((BackgroundError, OSError), match="file"):
            trainer.train()

    def test_close_saves_what_a_refused_save_left_out(self, tmp_path):
        with CheckpointManager(tmp_path, max_queue_size=1, policy="raise") as manager:
            trainer = make_trainer(100)
            hook = TorchRLCheckpointHook(manager, interval=20)
            hook.register(trainer)
            with busy_background(), pytest.raises(QueueFullError):
                trainer.train()
            manager.flush()
            assert manager.steps() == [20]
            hook.close()
            assert manager.steps() == [20, 40]

    def test_an_error_in_training_is_raised_and_what_was_queued_is_written(self, tmp_path):
        trainer = make_trainer(100)
        hook = TorchRLCheckpointHook(tmp_path, interval=20)
        hook.register(trainer)

        def fail() -> None:
            raise ZeroDivisionError("training failed")

        trainer.register_op("post_steps", fail)
        with busy_background(), pytest.raises(ZeroDivisionError, match="training failed"):
            trainer.train()
        hook.close()
        assert steps_in(tmp_path) == [20]


class TestTheHook:
    def test_it_is_a_hook_of_torchrl(self, tmp_path):
        assert isinstance(TorchRLCheckpointHook(tmp_path, interval=1), TrainerHookBase)

    def test_misuse_is_refused_with_a_sentence(self, tmp_path):
        with pytest.raises(ValueError, match="interval is 0, expected a whole number of at least 1"):
            TorchRLCheckpointHook(tmp_path, interval=0)
        hook = TorchRLCheckpointHook(tmp_path, interval=1)
        with pytest.raises(RuntimeError, match="the hook is not registered"):
            hook()
        with pytest.raises(RuntimeError, match="the hook is not registered"):
            hook.close()

    def test_registering_it_twice_is_refused(self, tmp_path):
        trainer = make_trainer()
        hook = TorchRLCheckpointHook(tmp_path, interval=1)
        hook.register(trainer)
        with pytest.raises(RuntimeError, match="already registered"):
            hook.register(trainer)

    def test_it_can_be_copied_and_pickled_before_it_is_registered(self, tmp_path):
        hook = TorchRLCheckpointHook(tmp_path, interval=20)
        for copied in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
            trainer = make_trainer(20)
            copied.register(trainer)
            trainer.train()
        assert steps_in(tmp_path) == [20]
