"""Adapters, each against the real library."""

import copy
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream import (
    BackgroundError,
    CheckpointManager,
    CorruptFileError,
    StateMismatchError,
    TrainingState,
    load_checkpoint,
)
from slipstream.adapters import (
    LightningCheckpointIO,
    SB3CheckpointCallback,
    TorchRLCheckpointHook,
    restore_into,
)
from slipstream.store.worker import Worker


@contextmanager
def busy_background() -> Iterator[None]:
    """Keep the background from starting anything new inside the block."""
    release = threading.Event()
    with Worker(1) as worker:
        worker.submit(release.wait)
        try:
            yield
        finally:
            release.set()


def same(first: Any, second: Any) -> bool:
    """Compare nested states bit for bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def test_importing_the_adapters_imports_no_library_and_making_one_says_what_to_install():
    script = """
import sys
from slipstream.adapters import LightningCheckpointIO, SB3CheckpointCallback, TorchRLCheckpointHook
from slipstream.text import install_hint
libraries = ("lightning", "lightning_fabric", "stable_baselines3", "torchrl")
assert not {*libraries} & {*sys.modules}
sys.modules.update(dict.fromkeys(libraries))
for make, package in (
    (LightningCheckpointIO, "lightning"),
    (lambda: SB3CheckpointCallback("folder", 1), "stable-baselines3"),
    (lambda: TorchRLCheckpointHook("folder", 1), "torchrl"),
):
    try:
        make()
    except ImportError as error:
        assert str(error).endswith(f"{install_hint('adapters')}, or {package} by itself"), error
    else:
        raise AssertionError(package)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


class TestLightning:
    @pytest.fixture(autouse=True)
    def lightning(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("lightning.pytorch")

    @staticmethod
    def fit(folder: Path, plugin: Any, epochs: int, ckpt_path: Any = None, **settings: Any) -> Any:
        """Train a small model on a CPU; returns the trainer and the model."""
        import lightning.pytorch as pl
        from lightning.pytorch.callbacks import ModelCheckpoint

        class Model(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(1)
                self.net = torch.nn.Linear(3, 1)

            def training_step(self, batch: Any) -> torch.Tensor:
                return self.net(batch[0]).square().mean()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.Adam(self.parameters(), lr=0.1)

        trainer = pl.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ModelCheckpoint(dirpath=folder, filename="{epoch}", **settings)],
            plugins=[plugin] if plugin else [],
        )
        model = Model()
        numbers = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(8, 3) / 10)
        data = torch.utils.data.DataLoader(numbers, batch_size=4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(model, data, ckpt_path=ckpt_path)
        return SimpleNamespace(trainer=trainer, model=model, data=data)

    @pytest.mark.parametrize("compress", [False, True])
    def test_a_run_resumes_from_our_checkpoint_as_if_it_had_not_ended(self, tmp_path, compress):
        first = self.fit(tmp_path, LightningCheckpointIO(compress=compress), 2)
        path = first.trainer.checkpoint_callback.best_model_path
        resumed = self.fit(tmp_path, LightningCheckpointIO(compress=compress), 4, ckpt_path=path)
        uninterrupted = self.fit(tmp_path / "other", None, 4)
        assert resumed.trainer.global_step == 8
        assert same(resumed.model.state_dict(), uninterrupted.model.state_dict())
        optimizers = [run.trainer.optimizers[0].state_dict() for run in (resumed, uninterrupted)]
        assert same(*optimizers)

    def test_when_training_ends_every_file_is_where_lightning_expects_it(self, tmp_path):
        run = self.fit(tmp_path, LightningCheckpointIO(), 3, save_top_k=-1, save_last=True)
        assert {path.name for path in tmp_path.iterdir()} == {
            "epoch=0.ckpt",
            "epoch=1.ckpt",
            "epoch=2.ckpt",
            "last.ckpt",
        }
        state = torch.load(tmp_path / "last.ckpt", weights_only=True)
        assert same(state["state_dict"], dict(run.model.state_dict()))

    def test_only_the_newest_is_left_where_lightning_keeps_one(self, tmp_path):
        self.fit(tmp_path, LightningCheckpointIO(), 3)
        assert [path.name for path in tmp_path.iterdir()] == ["epoch=2.ckpt"]

    def test_the_same_trainer_fits_again_from_the_last_checkpoint(self, tmp_path):
        run = self.fit(tmp_path, LightningCheckpointIO(), 1, save_last=True)
        run.trainer.fit_loop.max_epochs = 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.trainer.fit(run.model, run.data, ckpt_path="last")
        assert run.trainer.global_step == 4
        assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4

    def test_a_link_to_a_compressed_checkpoint_is_followed(self, tmp_path):
        self.fit(tmp_path, LightningCheckpointIO(compress=True), 2, save_last="link")
        assert (tmp_path / "last.ckpt").is_symlink()
        assert LightningCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")["epoch"] == 1

    def test_fabric_saves_and_loads(self, tmp_path):
        from lightning.fabric import Fabric

        plugin = LightningCheckpointIO()
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        fabric.save(tmp_path / "a.ckpt", {"weight": torch.arange(3.0), "step": 7})
        state = fabric.load(tmp_path / "a.ckpt")
        plugin.teardown()
        assert same(state, {"weight": torch.arange(3.0), "step": 7})

    def test_a_checkpoint_is_the_state_at_the_moment_of_the_call(self, tmp_path):
        plugin, weight = LightningCheckpointIO(), torch.zeros(3)
        with busy_background():
            plugin.save_checkpoint({"weight": weight}, tmp_path / "a.ckpt")
            weight += 1
        assert same(plugin.load_checkpoint(tmp_path / "a.ckpt"), {"weight": torch.zeros(3)})
        plugin.teardown()

    def test_loading_waits_for_a_save_that_is_queued(self, tmp_path):
        plugin, loaded = LightningCheckpointIO(), []
        thread = threading.Thread(target=lambda: loaded.append(plugin.load_checkpoint(str(tmp_path / "a.ckpt"))))
        with busy_background():
            plugin.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
            assert not (tmp_path / "a.ckpt").exists()
            thread.start()
        thread.join()
        assert loaded == [{"step": 1}]
        plugin.teardown()

    def test_removing_what_is_still_queued_leaves_nothing(self, tmp_path):
        plugin = LightningCheckpointIO()
        with busy_background():
            plugin.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
            plugin.remove_checkpoint(tmp_path / "a.ckpt")
        plugin.teardown()
        assert list(tmp_path.iterdir()) == []

    def test_a_path_that_was_removed_and_saved_again_is_there(self, tmp_path):
        plugin = LightningCheckpointIO()
        with busy_background():
            plugin.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
            plugin.remove_checkpoint(tmp_path / "a.ckpt")
            plugin.save_checkpoint({"step": 2}, tmp_path / "a.ckpt")
        assert plugin.load_checkpoint(tmp_path / "a.ckpt") == {"step": 2}
        plugin.teardown()

    def test_the_old_checkpoint_stays_until_the_new_one_is_durable(self, tmp_path):
        plugin = LightningCheckpointIO()
        plugin.save_checkpoint({"step": 1}, tmp_path / "old.ckpt")
        plugin.teardown()
        with busy_background():
            plugin.save_checkpoint({"step": 2}, tmp_path / "new.ckpt")
            plugin.remove_checkpoint(tmp_path / "old.ckpt")
            assert [path.name for path in tmp_path.iterdir()] == ["old.ckpt"]
        plugin.teardown()
        assert [path.name for path in tmp_path.iterdir()] == ["new.ckpt"]

    def test_the_old_checkpoint_stays_if_the_new_one_fails_and_the_failure_is_raised(self, tmp_path):
        plugin = LightningCheckpointIO()
        plugin.save_checkpoint({"step": 1}, tmp_path / "old.ckpt")
        with busy_background():
            plugin.save_checkpoint({"step": 2}, tmp_path / "old.ckpt" / "not a folder.ckpt")
            plugin.remove_checkpoint(tmp_path / "old.ckpt")
        with pytest.raises(BackgroundError):
            plugin.teardown()
        assert plugin.load_checkpoint(tmp_path / "old.ckpt") == {"step": 1}

    def test_objects_are_saved_and_loaded_only_as_lightning_asks(self, tmp_path):
        plugin = LightningCheckpointIO()
        plugin.save_checkpoint({"settings": SimpleNamespace(width=3)}, tmp_path / "a.ckpt")
        for weights_only in (None, True):
            with pytest.raises(CorruptFileError, match="[Ww]eights.only|refused"):
                plugin.load_checkpoint(tmp_path / "a.ckpt", weights_only=weights_only)
        assert plugin.load_checkpoint(tmp_path / "a.ckpt", weights_only=False)["settings"].width == 3
        plugin.teardown()

    def test_a_flipped_bit_is_noticed(self, tmp_path):
        plugin = LightningCheckpointIO()
        plugin.save_checkpoint({"weight": torch.zeros(1000)}, tmp_path / "a.ckpt")
        plugin.teardown()
        content = bytearray((tmp_path / "a.ckpt").read_bytes())
        content[len(content) // 2] ^= 1
        (tmp_path / "a.ckpt").write_bytes(content)
        with pytest.raises(CorruptFileError, match="does not match its checksum"):
            plugin.load_checkpoint(tmp_path / "a.ckpt")

    def test_a_compressed_checkpoint_is_read_elsewhere_too(self, tmp_path):
        plugin = LightningCheckpointIO(compress=True)
        plugin.save_checkpoint({"weight": torch.zeros(1000)}, tmp_path / "a.ckpt")
        plugin.teardown()
        assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt.lz4"]
        assert same(load_checkpoint(tmp_path / "a.ckpt"), {"weight": torch.zeros(1000)})
        plugin.remove_checkpoint(tmp_path / "a.ckpt")
        assert list(tmp_path.iterdir()) == []

    def test_what_it_cannot_do_it_says(self, tmp_path):
        plugin = LightningCheckpointIO()
        with pytest.raises(TypeError, match="storage_options is {'a': 1}, expected None"):
            plugin.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"a": 1})
        with pytest.raises(ValueError, match="path is 's3://bucket/a.ckpt', expected a local file"):
            plugin.save_checkpoint({}, "s3://bucket/a.ckpt")
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            plugin.load_checkpoint(tmp_path / "a.ckpt")
        plugin.remove_checkpoint(tmp_path / "a.ckpt")

    def test_it_is_a_checkpoint_io_of_either_name_of_lightning_and_can_be_pickled(self):
        from lightning.pytorch.plugins.io import CheckpointIO

        other = pytest.importorskip("lightning_fabric.plugins.io.checkpoint_io")
        plugin = pickle.loads(pickle.dumps(LightningCheckpointIO(compress=True)))
        for kind in (LightningCheckpointIO, CheckpointIO, other.CheckpointIO):
            assert isinstance(plugin, kind)
        assert plugin.compress


class TestStableBaselines3:
    @pytest.fixture(autouse=True)
    def library(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("stable_baselines3")

    @staticmethod
    def ppo(seed: int = 0, width: int = 8, env: Any = "CartPole-v1") -> Any:
        from stable_baselines3 import PPO

        return PPO(
            "MlpPolicy", env, n_steps=32, batch_size=16, n_epochs=2, seed=seed, device="cpu",
            learning_rate=lambda left: 1e-2 * left, policy_kwargs={"net_arch": [width]},
        )  # fmt: skip

    @staticmethod
    def save(model: Any, folder: Path) -> None:
        """Save a model as it is."""
        callback: Any = SB3CheckpointCallback(folder, save_freq=1)
        callback.init_callback(model)
        callback.on_step()
        callback.on_training_end()

    def test_a_run_saves_every_so_many_calls_and_goes_on_where_it_was(self, tmp_path):
        model = self.ppo()
        model.learn(96, callback=SB3CheckpointCallback(tmp_path, save_freq=24))
        manager = CheckpointManager(tmp_path)
        assert manager.steps() == [24, 48, 72, 96]
        assert manager.restore().metrics["reward"] > 1
        other = self.ppo(seed=1)
        assert restore_into(other, tmp_path) == 96
        assert other.num_timesteps == 96
        assert len(other.ep_info_buffer) > 0
        other.learn(32, callback=SB3CheckpointCallback(manager, save_freq=16), reset_num_timesteps=False)
        assert manager.steps()[-2:] == [112, 128]
        manager.close()

    def test_a_restored_model_learns_the_same_from_the_same_rollout(self, tmp_path):
        model = self.ppo().learn(64)
        self.save(model, tmp_path)
        model.train()
        other = self.ppo(seed=1)
        other.set_logger(model.logger)
        other.rollout_buffer = copy.deepcopy(model.rollout_buffer)
        restore_into(other, tmp_path)
        other.train()
        assert same(other.get_parameters(), model.get_parameters())
        assert other._n_updates == model._n_updates

    def test_the_entropy_coefficient_and_target_networks_of_sac_are_restored(self, tmp_path):
        from stable_baselines3 import SAC

        def make(seed: int) -> Any:
            return SAC(
                "MlpPolicy", "Pendulum-v1", learning_starts=8, batch_size=8, buffer_size=100, seed=seed, device="cpu",
                policy_kwargs={"net_arch": [8]},
            )  # fmt: skip

        model = make(0).learn(24)
        self.save(model, tmp_path)
        other = make(1)
        restore_into(other, tmp_path)
        assert same(other.get_parameters(), model.get_parameters())
        assert torch.equal(other.log_ent_coef, model.log_ent_coef)
        assert other.log_ent_coef.item() != 0
        other.learn(16, reset_num_timesteps=False)
        assert other.num_timesteps == 40

    def test_the_statistics_of_a_normalized_environment_are_restored(self, tmp_path):
        import gymnasium
        from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

        def make(seed: int) -> Any:
            return self.ppo(seed, env=VecNormalize(DummyVecEnv([lambda: gymnasium.make("CartPole-v1")])))

        model = make(0).learn(32)
        self.save(model, tmp_path)
        other = make(1)
        restore_into(other, tmp_path)
        mine, theirs = other.get_vec_normalize_env(), model.get_vec_normalize_env()
        assert (mine.obs_rms.mean == theirs.obs_rms.mean).all()
        assert (mine.ret_rms.var, mine.ret_rms.count) == (theirs.ret_rms.var, theirs.ret_rms.count)
        with pytest.raises(StateMismatchError, match="the model's environment {}"):
            restore_into(self.ppo(), tmp_path)

    def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(self, tmp_path):
        model = self.ppo()
        model.learn(64, callback=SB3CheckpointCallback(tmp_path, save_freq=32))
        newest = tmp_path / "checkpoint_iter_64.slip"
        newest.write_bytes(newest.read_bytes()[:-100])
        assert restore_into(self.ppo(), tmp_path) == 32

    def test_a_checkpoint_of_another_model_changes_nothing(self, tmp_path):
        from stable_baselines3 import A2C

        self.save(self.ppo(width=8), tmp_path)
        wide = self.ppo(width=9)
        before = copy.deepcopy(wide.get_parameters())
        with pytest.raises(StateMismatchError, match="shape"):
            restore_into(wide, tmp_path)
        assert same(wide.get_parameters(), before)
        with pytest.raises(StateMismatchError, match="the checkpoint is of a PPO, the model a A2C"):
            restore_into(A2C("MlpPolicy", "CartPole-v1", policy_kwargs={"net_arch": [8]}, device="cpu"), tmp_path)

    def test_training_state_may_be_left_out(self, tmp_path):
        model = self.ppo()
        model.learn(32, callback=SB3CheckpointCallback(tmp_path, save_freq=32, training_state=False))
        assert set(CheckpointManager(tmp_path).restore().state) == {"policy", "policy.optimizer"}
        other = self.ppo(seed=1)
        before = torch.get_rng_state()
        assert restore_into(other, tmp_path) == other.num_timesteps == 32
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_frequency_of_nothing_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="save_freq is 0, expected a whole number of at least 1"):
            SB3CheckpointCallback(tmp_path, save_freq=0)

    def test_an_empty_folder_is_an_error(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            restore_into(self.ppo(), tmp_path)


@pytest.mark.filterwarnings("ignore:The env passed to Collector is missing transforms:FutureWarning")
class TestTorchRL:
    @pytest.fixture(autouse=True)
    def library(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("torchrl.trainers")

    @staticmethod
    def trainer(frames: int = 100) -> Any:
        """Return a trainer with a replay buffer, of 20 frames a batch."""
        from tensordict import TensorDict
        from tensordict.nn import TensorDictModule
        from torchrl.collectors import Collector
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        from torchrl.envs import GymEnv
        from torchrl.trainers import DefaultOptimizationStepper, ReplayBufferTrainer, Trainer

        env = GymEnv("Pendulum-v1", device="cpu")
        policy = TensorDictModule(torch.nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])

        class Loss(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.policy = policy

            def forward(self, batch: Any) -> Any:
                return TensorDict({"loss": self.policy(batch.clone())["action"].square().mean()})

        loss = Loss()
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

    def test_a_trainer_is_saved_every_interval_and_at_the_end(self, tmp_path):
        trainer = self.trainer(100)
        TorchRLCheckpointHook(tmp_path, interval=40).register(trainer)
        trainer.train()
        assert CheckpointManager(tmp_path).steps() == [40, 80, 100]

    def test_a_new_trainer_goes_on_where_the_saved_one_was(self, tmp_path):
        trainer = self.trainer(60)
        TorchRLCheckpointHook(tmp_path, interval=40).register(trainer)
        trainer.train()
        other = self.trainer(100)
        TorchRLCheckpointHook(tmp_path, interval=40).register(other)
        other.load_state_dict(CheckpointManager(tmp_path).restore().state)
        assert other.collected_frames == 60
        assert same(other.loss_module.state_dict(), trainer.loss_module.state_dict())
        assert same(other.optimizer.state_dict(), trainer.optimizer.state_dict())
        mine, theirs = (t._modules["replay_buffer"].replay_buffer for t in (other, trainer))
        assert len(mine) == 60
        assert torch.equal(mine[:]["observation"], theirs[:]["observation"])
        other.train()
        assert CheckpointManager(tmp_path).steps() == [40, 60, 100]

    def test_a_training_state_may_be_saved_instead(self, tmp_path):
        trainer = self.trainer(40)
        manager = CheckpointManager(tmp_path)
        TorchRLCheckpointHook(manager, interval=20, state=TrainingState(trainer=trainer)).register(trainer)
        trainer.train()
        after = torch.get_rng_state()
        other = self.trainer(80)
        TorchRLCheckpointHook(manager, interval=20).register(other)
        torch.manual_seed(99)
        TrainingState(trainer=other).load_state_dict(manager.restore().state)
        assert other.collected_frames == 40
        assert torch.equal(torch.get_rng_state(), after)
        manager.close()

    def test_an_early_stop_is_an_end_too(self, tmp_path):
        trainer = self.trainer(100)
        TorchRLCheckpointHook(tmp_path, interval=1000).register(trainer)
        trainer.register_op("post_steps", lambda: trainer.request_stop("enough"))
        trainer.train()
        assert CheckpointManager(tmp_path).steps() == [20]

    def test_misuse_is_refused_with_a_sentence(self, tmp_path):
        from torchrl.trainers import TrainerHookBase

        with pytest.raises(ValueError, match="interval is 0, expected a whole number of at least 1"):
            TorchRLCheckpointHook(tmp_path, interval=0)
        hook = TorchRLCheckpointHook(tmp_path, interval=1)
        assert isinstance(hook, TrainerHookBase)
        with pytest.raises(RuntimeError, match="the hook is not registered"):
            hook()
