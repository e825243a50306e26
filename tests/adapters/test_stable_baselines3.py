"""`SB3CheckpointCallback` and `restore_into` with real models."""

import copy
import pickle
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import BackgroundError, CheckpointManager, StateMismatchError
from tests.adapters.shared import busy_background, run_script, same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    sb3 = pytest.importorskip("stable_baselines3")

import gymnasium
from stable_baselines3.common.callbacks import BaseCallback, EveryNTimesteps
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from slipstream.adapters import SB3CheckpointCallback, restore_into

OFF_POLICY: dict[str, tuple[str, dict[str, Any]]] = {
    "SAC": ("Pendulum-v1", {}),
    "SAC with a fixed entropy coefficient": ("Pendulum-v1", {"ent_coef": 0.1}),
    "TD3": ("Pendulum-v1", {}),
    "DQN": ("CartPole-v1", {"target_update_interval": 5}),
}


class FailAt(BaseCallback):  # type: ignore[misc, unused-ignore]
    """Raise an error at one of its calls."""

    def __init__(self, call: int, error: BaseException) -> None:
        super().__init__()
        self.call = call
        self.error = error

    def _on_step(self) -> bool:
        if self.n_calls == self.call:
            raise self.error
        return True


def make_ppo(seed: int = 0, width: int = 8, env: Any = "CartPole-v1", policy: str = "MlpPolicy") -> Any:
    def decay(remaining: float) -> float:
        return 1e-2 * remaining

    return sb3.PPO(
        policy,
        env,
        n_steps=32,
        batch_size=16,
        n_epochs=2,
        seed=seed,
        device="cpu",
        learning_rate=decay,
        policy_kwargs={"net_arch": [width]},
    )


def make_off_policy(name: str, seed: int) -> Any:
    env, settings = OFF_POLICY[name]
    algorithm = getattr(sb3, name.partition(" ")[0])
    network = {"net_arch": [8]}
    return algorithm(
        "MlpPolicy",
        env,
        learning_starts=8,
        batch_size=8,
        buffer_size=100,
        seed=seed,
        device="cpu",
        policy_kwargs=network,
        **settings,
    )


def save(model: Any, checkpoints: Any, **settings: Any) -> None:
    """Save a model as it is now."""
    callback = SB3CheckpointCallback(checkpoints, save_freq=1, **settings)
    callback.init_callback(model)
    callback.on_step()
    callback.on_training_end()


def steps_in(folder: Path) -> list[int]:
    with CheckpointManager(folder) as manager:
        return manager.steps()


def everything_of(model: Any) -> list[Any]:
    """Return a copy of what `restore_into` may change, global random numbers included."""
    counters = [model.num_timesteps, model._n_updates, model._episode_num, model._current_progress_remaining]
    episodes = [list(model.ep_info_buffer or ()), list(model.ep_success_buffer or ())]
    rng = [torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].tolist()]
    return copy.deepcopy([model.get_parameters(), counters, episodes, rng])


class TestSaving:
    def test_a_run_saves_at_every_multiple_and_resumes(self, tmp_path):
        make_ppo().learn(96, callback=SB3CheckpointCallback(tmp_path, save_freq=24))
        with CheckpointManager(tmp_path) as manager:
            assert manager.steps() == [24, 48, 72, 96]
            assert manager.restore().metrics["reward"] > 1
            other = make_ppo(seed=1)
            assert restore_into(other, tmp_path) == 96
            assert other.num_timesteps == 96
            assert len(other.ep_info_buffer) > 0
            other.learn(32, callback=SB3CheckpointCallback(manager, save_freq=16), reset_num_timesteps=False)
            assert manager.steps()[-2:] == [112, 128]

    def test_learn_waits_for_its_saves(self, tmp_path):
        make_ppo().learn(32, callback=SB3CheckpointCallback(tmp_path, save_freq=32))
        assert steps_in(tmp_path) == [32]

    def test_a_callback_serves_more_than_one_run(self, tmp_path):
        model = make_ppo()
        callback = SB3CheckpointCallback(tmp_path, save_freq=32)
        model.learn(32, callback=callback)
        model.learn(32, callback=callback, reset_num_timesteps=False)
        assert steps_in(tmp_path) == [32, 64]

    def test_a_manager_that_was_passed_stays_open_and_applies_its_policies(self, tmp_path):
        with CheckpointManager(tmp_path, keep_last=1) as manager:
            make_ppo().learn(64, callback=SB3CheckpointCallback(manager, save_freq=16))
            assert manager.steps() == [64]
            manager.save(65, {"weight": torch.zeros(1)})
        assert steps_in(tmp_path) == [65]

    def test_a_relative_folder_is_the_one_at_the_time_of_the_call(self, tmp_path, monkeypatch):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path)
        callback = SB3CheckpointCallback("checkpoints", save_freq=32)
        monkeypatch.chdir(tmp_path / "elsewhere")
        make_ppo().learn(32, callback=callback)
        assert steps_in(tmp_path / "checkpoints") == [32]

    def test_training_state_may_be_left_out(self, tmp_path):
        make_ppo().learn(32, callback=SB3CheckpointCallback(tmp_path, save_freq=32, training_state=False))
        with CheckpointManager(tmp_path) as manager:
            assert set(manager.restore().state) == {"policy", "policy.optimizer"}
        other = make_ppo(seed=1)
        before = torch.get_rng_state()
        assert restore_into(other, tmp_path) == other.num_timesteps == 32
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_frequency_of_zero_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="save_freq is 0, expected a whole number of at least 1"):
            SB3CheckpointCallback(tmp_path, save_freq=0)

    def test_making_a_callback_creates_no_folder(self, tmp_path):
        SB3CheckpointCallback(tmp_path / "checkpoints", save_freq=1)
        assert list(tmp_path.iterdir()) == []


class TestFailures:
    def test_a_failed_save_is_raised_by_a_later_one(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises((BackgroundError, OSError), match="file"):
            make_ppo().learn(64, callback=SB3CheckpointCallback(tmp_path / "file" / "folder", save_freq=8))

    def test_a_failed_last_save_is_raised_at_the_end_of_learn(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises((BackgroundError, OSError), match="file"):
            make_ppo().learn(32, callback=SB3CheckpointCallback(tmp_path / "file" / "folder", save_freq=32))

    def test_after_a_failed_save_the_callback_can_be_used_again(self, tmp_path):
        (tmp_path / "folder").touch()
        model = make_ppo()
        callback = SB3CheckpointCallback(tmp_path / "folder", save_freq=32)
        with pytest.raises((BackgroundError, OSError)):
            model.learn(32, callback=callback)
        (tmp_path / "folder").unlink()
        model.learn(32, callback=callback)
        assert steps_in(tmp_path / "folder") == [32]

    @pytest.mark.parametrize("error", [ZeroDivisionError("training failed"), KeyboardInterrupt("Ctrl-C")])
    def test_an_error_in_training_is_raised_and_the_callback_can_be_used_again(self, tmp_path, error):
        model = make_ppo()
        callback = SB3CheckpointCallback(tmp_path, save_freq=16)
        with busy_background(), pytest.raises(type(error)):
            model.learn(64, callback=[callback, FailAt(20, error)])
        model.learn(32, callback=callback, reset_num_timesteps=False)
        assert steps_in(tmp_path)[0] == 16
        assert len(steps_in(tmp_path)) == 3

    def test_ctrl_c_during_learn_loses_no_checkpoint(self, tmp_path):
        script = """
import os, signal
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from slipstream.adapters import SB3CheckpointCallback
class Interrupt(BaseCallback):
    def _on_step(self):
        if self.n_calls == 40:
            os.kill(os.getpid(), signal.SIGINT)
        return True
model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=64, device="cpu")
model.learn(64, callback=[SB3CheckpointCallback("checkpoints", save_freq=16), Interrupt()])
"""
        result = run_script(script, tmp_path)
        assert "KeyboardInterrupt" in result.stderr
        assert steps_in(tmp_path / "checkpoints") == [16, 32]

    def test_in_an_event_callback_a_manager_raises_the_error_when_it_is_closed(self, tmp_path):
        (tmp_path / "file").touch()
        callback: Any = None
        with pytest.raises((BackgroundError, OSError), match="file"):  # noqa: SIM117 - the manager raises at its end
            with CheckpointManager(tmp_path / "file" / "folder") as manager:
                callback = EveryNTimesteps(32, SB3CheckpointCallback(manager, save_freq=1))
                make_ppo().learn(32, callback=callback)


class TestRestoring:
    def test_a_restored_model_learns_the_same_from_the_same_rollout(self, tmp_path):
        model = make_ppo().learn(64)
        save(model, tmp_path)
        model.train()
        other = make_ppo(seed=1)
        other.set_logger(model.logger)
        other.rollout_buffer = copy.deepcopy(model.rollout_buffer)
        restore_into(other, tmp_path)
        other.train()
        assert same(other.get_parameters(), model.get_parameters())
        assert other._n_updates == model._n_updates

    @pytest.mark.parametrize("name", OFF_POLICY)
    def test_an_off_policy_model_learns_the_same_from_the_same_replay_buffer(self, tmp_path, name):
        model = make_off_policy(name, seed=0).learn(24)
        save(model, tmp_path)
        model.train(gradient_steps=2, batch_size=8)
        other = make_off_policy(name, seed=1)
        other.set_logger(model.logger)
        other.replay_buffer = copy.deepcopy(model.replay_buffer)
        restore_into(other, tmp_path)
        other.train(gradient_steps=2, batch_size=8)
        assert same(other.get_parameters(), model.get_parameters())
        assert other._n_updates == model._n_updates
        other.learn(16, reset_num_timesteps=False)
        assert other.num_timesteps == 40

    def test_the_learned_entropy_coefficient_of_sac_is_restored(self, tmp_path):
        model = make_off_policy("SAC", seed=0).learn(24)
        save(model, tmp_path)
        other = make_off_policy("SAC", seed=1)
        restore_into(other, tmp_path)
        assert torch.equal(other.log_ent_coef, model.log_ent_coef)
        assert other.log_ent_coef.item() != 0

    def test_the_call_count_that_times_the_target_updates_of_dqn_is_restored(self, tmp_path):
        model = make_off_policy("DQN", seed=0).learn(24)
        save(model, tmp_path)
        other = make_off_policy("DQN", seed=1)
        restore_into(other, tmp_path)
        assert other._n_calls == model._n_calls == 24

    def test_a_restored_dqn_explores_as_much_as_the_saved_one(self, tmp_path):
        model = make_off_policy("DQN", seed=0).learn(24)
        save(model, tmp_path)
        other = make_off_policy("DQN", seed=1)
        restore_into(other, tmp_path)
        assert other.exploration_rate == model.exploration_rate > 0

    def test_statistics_of_recent_episodes_are_restored(self, tmp_path):
        model = make_ppo().learn(64)
        model.ep_success_buffer.extend([True, False, np.bool_(True)])
        # A monitor may add entries that cannot be stored.
        model.ep_info_buffer[0]["anything"] = object()
        save(model, tmp_path)
        other = make_ppo(seed=1)
        restore_into(other, tmp_path)
        for mine, theirs in zip(other.ep_info_buffer, model.ep_info_buffer, strict=True):
            assert mine == {name: theirs[name] for name in ("r", "l", "t")}
        assert list(other.ep_success_buffer) == [True, False, True]
        assert other.ep_info_buffer.maxlen == model.ep_info_buffer.maxlen

    def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(self, tmp_path):
        make_ppo().learn(64, callback=SB3CheckpointCallback(tmp_path, save_freq=32))
        newest = tmp_path / "checkpoint_iter_64.slip"
        newest.write_bytes(newest.read_bytes()[:-100])
        assert restore_into(make_ppo(), tmp_path) == 32

    def test_an_empty_folder_is_an_error(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            restore_into(make_ppo(), tmp_path)

    def test_a_folder_that_does_not_exist_is_an_error_and_is_not_created(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            restore_into(make_ppo(), tmp_path / "mistyped")
        assert list(tmp_path.iterdir()) == []


class NumbersInADict(gymnasium.Env[Any, Any]):  # type: ignore[misc, unused-ignore]
    """Observations are dicts; episodes take ten steps."""

    observation_space = gymnasium.spaces.Dict(
        {"a": gymnasium.spaces.Box(-1, 1, (2,)), "b": gymnasium.spaces.Box(-1, 1, (3,))}
    )
    action_space = gymnasium.spaces.Discrete(2)

    def observe(self) -> Any:
        return {"a": self.np_random.random(2, np.float32), "b": self.np_random.random(3, np.float32)}

    def reset(self, **arguments: Any) -> Any:
        super().reset(**arguments)
        self.time = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return self.observe(), 1.0, self.time == 10, False, {}


def normalized(make_env: Any, **settings: Any) -> Any:
    return VecNormalize(DummyVecEnv([make_env]), **settings)


def make_cart_pole() -> Any:
    return gymnasium.make("CartPole-v1")


class TestVecNormalize:
    @staticmethod
    def assert_equal(first: Any, second: Any) -> None:
        np.testing.assert_array_equal(first.mean, second.mean)
        np.testing.assert_array_equal(first.var, second.var)
        assert first.count == second.count

    def test_its_statistics_are_restored(self, tmp_path):
        model = make_ppo(env=normalized(make_cart_pole)).learn(32)
        save(model, tmp_path)
        other = make_ppo(seed=1, env=normalized(make_cart_pole))
        restore_into(other, tmp_path)
        mine = other.get_vec_normalize_env()
        theirs = model.get_vec_normalize_env()
        self.assert_equal(mine.obs_rms, theirs.obs_rms)
        self.assert_equal(mine.ret_rms, theirs.ret_rms)
        assert mine.ret_rms.count > 1
        other.learn(32, reset_num_timesteps=False)

    def test_the_statistics_of_every_key_are_restored(self, tmp_path):
        model = make_ppo(env=normalized(NumbersInADict), policy="MultiInputPolicy").learn(32)
        save(model, tmp_path)
        other = make_ppo(seed=1, env=normalized(NumbersInADict), policy="MultiInputPolicy")
        restore_into(other, tmp_path)
        for key in ("a", "b"):
            mine = other.get_vec_normalize_env().obs_rms[key]
            self.assert_equal(mine, model.get_vec_normalize_env().obs_rms[key])

    def test_it_may_normalize_rewards_only(self, tmp_path):
        model = make_ppo(env=normalized(make_cart_pole, norm_obs=False)).learn(32)
        save(model, tmp_path)
        other = make_ppo(seed=1, env=normalized(make_cart_pole, norm_obs=False))
        restore_into(other, tmp_path)
        self.assert_equal(other.get_vec_normalize_env().ret_rms, model.get_vec_normalize_env().ret_rms)

    def test_a_model_without_it_is_refused_and_nothing_changes(self, tmp_path):
        save(make_ppo(env=normalized(make_cart_pole)).learn(32), tmp_path)
        other = make_ppo(seed=1)
        before = everything_of(other)
        with pytest.raises(StateMismatchError, match="VecNormalize statistics"):
            restore_into(other, tmp_path)
        assert same(everything_of(other), before)


class TestMismatches:
    @staticmethod
    def assert_refused(model: Any, checkpoints: Any, message: str) -> None:
        """Check that restoring raises, and that neither the model nor the global random numbers change."""
        before = everything_of(model)
        with pytest.raises(StateMismatchError, match=message):
            restore_into(model, checkpoints)
        assert same(everything_of(model), before)

    def test_another_network_is_refused(self, tmp_path):
        save(make_ppo(width=8).learn(32), tmp_path)
        self.assert_refused(make_ppo(width=9), tmp_path, "shape")

    def test_another_algorithm_is_refused(self, tmp_path):
        save(make_ppo().learn(32), tmp_path)
        other = sb3.A2C("MlpPolicy", "CartPole-v1", policy_kwargs={"net_arch": [8]}, device="cpu")
        self.assert_refused(other, tmp_path, "the checkpoint is of PPO, the model is A2C")

    def test_another_kind_of_entropy_coefficient_is_refused(self, tmp_path):
        save(make_off_policy("SAC", seed=0).learn(24), tmp_path)
        other = make_off_policy("SAC with a fixed entropy coefficient", seed=1)
        self.assert_refused(other, tmp_path, "the checkpoint has the variables {'log_ent_coef': \\[1\\]}")

    @pytest.mark.parametrize("state", [{"weight": torch.zeros(1)}, [1, 2], {"policy": {}, "progress": {"step": 1}}])
    def test_a_checkpoint_of_something_else_is_refused(self, tmp_path, state):
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, state)
        self.assert_refused(make_ppo(), tmp_path, "SB3CheckpointCallback")


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class TestCopies:
    @staticmethod
    def learn_with(callbacks: Iterable[Any]) -> None:
        for callback in callbacks:
            make_ppo().learn(32, callback=callback)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
    def test_a_callback_for_a_folder_can_be_copied_and_pickled(self, tmp_path, duplicate):
        callback = SB3CheckpointCallback(tmp_path, save_freq=16, training_state=False)
        copied = duplicate(callback)
        assert (copied.save_freq, copied.training_state) == (16, False)
        self.learn_with([callback, copied])
        assert steps_in(tmp_path) == [16, 32]

    def test_a_copy_of_a_callback_shares_the_manager_that_was_passed(self, tmp_path):
        with CheckpointManager(tmp_path, keep_last=1) as manager:
            callback = SB3CheckpointCallback(manager, save_freq=16)
            self.learn_with([copy.deepcopy(callback), callback])
            assert manager.steps() == [32]

    def test_pickling_a_callback_with_a_manager_says_what_to_do(self, tmp_path):
        with CheckpointManager(tmp_path) as manager, pytest.raises(TypeError, match="pass its folder"):
            pickle.dumps(SB3CheckpointCallback(manager, save_freq=16))
