"""`SB3CheckpointCallback` and `restore_into`: checkpoints of Stable-Baselines3 models."""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from slipstream.adapters.base import Adapter, Checkpoints
from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.state import TrainingState
from slipstream.checks import require_count
from slipstream.errors import StateMismatchError

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.callbacks import BaseCallback
else:
    BaseCallback = object  # found when the first one is made

_COUNTERS = ("num_timesteps", "_episode_num", "_n_updates", "_n_calls", "_current_progress_remaining")
_EPISODE = ("r", "l", "t")


class SB3CheckpointCallback(Adapter, BaseCallback):  # type: ignore[misc, unused-ignore]
    """Saves a model every so many calls, in the background; `restore_into` reads it back.

    Saved and restored: the policy with its target networks, every optimizer, the entropy coefficient, the counters, the
    statistics of recent episodes and of ``VecNormalize``, and the random numbers of Python, NumPy and torch.
    ``model.save`` leaves out the last two, and blocks.

    Not saved, as SB3 cannot put it back: the environments and where in an episode they were, the action space's random
    numbers, and what was collected but not yet learnt from. So a resumed run begins with new episodes, and an
    on-policy one with an empty rollout. Replay buffers have a ``model.save_replay_buffer`` of their own.

    The step of a checkpoint is ``model.num_timesteps``; its metric ``reward`` is the mean over recent episodes, if
    environments are monitored. The end of ``learn`` waits for every save.

    Args:
        checkpoints: A manager, or the folder for one with default settings.
        save_freq: How many calls, which are steps of the vectorised environment, lie between two saves.
        training_state: Whether to save more than policy and optimizers.
        verbose: As for any callback.

    Raises:
        ImportError: If Stable-Baselines3 is not installed.
    """

    package = "stable-baselines3"
    bases = ("stable_baselines3.common.callbacks:BaseCallback",)

    def __init__(
        self,
        checkpoints: CheckpointManager | str | os.PathLike[str],
        save_freq: int,
        *,
        training_state: bool = True,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        self.save_freq = require_count("save_freq", save_freq)
        self.training_state = training_state
        self._checkpoints = Checkpoints(checkpoints)

    def _on_step(self) -> bool:
        if self.n_calls % self.save_freq == 0:
            state = _training_state(self.model, full=self.training_state).state_dict()
            rewards = [float(episode["r"]) for episode in self.model.ep_info_buffer or ()]
            metrics = {"reward": sum(rewards) / len(rewards)} if rewards else {}
            self._checkpoints.open().save(self.model.num_timesteps, state, metrics)
        return True

    def _on_training_end(self) -> None:
        self._checkpoints.finish()


def restore_into(model: BaseAlgorithm, checkpoints: CheckpointManager | str | os.PathLike[str]) -> int:
    """Load the newest sound checkpoint of a folder into a model; nothing is changed unless all of it fits.

    Go on with ``model.learn(remaining, reset_num_timesteps=False)``. See `SB3CheckpointCallback` for what is restored.

    Args:
        model: A model of the same algorithm, policy and environment as the one that was saved.
        checkpoints: The folder, or its manager.

    Returns:
        The number of timesteps at which it was saved.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        CorruptFileError: If every checkpoint is damaged.
        StateMismatchError: If the checkpoint is of another model; lists what differs.
    """
    opened = Checkpoints(checkpoints)
    try:
        restored = opened.open().restore()
    finally:
        opened.finish()
    _training_state(model, full="progress" in restored.state).load_state_dict(restored.state)
    model.num_timesteps = restored.step
    return restored.step


def _training_state(model: BaseAlgorithm, *, full: bool) -> TrainingState:
    parts: dict[str, Any] = {"progress": _Progress(model)} if full else {}  # first: it checks before it changes
    modules, variables = model._get_torch_save_params()
    for name in modules:
        part = operator.attrgetter(name)(model)
        parts[name] = getattr(part, "_orig_mod", part)  # of a compiled module
    if variables:
        parts["variables"] = _Variables({name: operator.attrgetter(name)(model) for name in variables})
    return TrainingState(rng=full, **parts)


class _Variables:
    """Tensors of a model that no module holds, such as the logarithm of SAC's entropy coefficient."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self._tensors.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        if set(state) != set(self._tensors):
            raise StateMismatchError(f"the checkpoint has the tensors {[*state]}, the model {[*self._tensors]}")
        for name, tensor in self._tensors.items():
            tensor.data.copy_(state[name])


class _Progress:
    """Counters, episode statistics and normalisation of a model."""

    def __init__(self, model: BaseAlgorithm) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        model = self._model
        return {
            "algorithm": type(model).__name__,
            "counters": {name: getattr(model, name) for name in _COUNTERS if hasattr(model, name)},
            "episodes": [{k: float(info[k]) for k in _EPISODE if k in info} for info in model.ep_info_buffer or ()],
            "successes": [bool(success) for success in model.ep_success_buffer or ()],
            "normalize": {
                name: {"mean": mean_std.mean, "var": mean_std.var, "count": float(mean_std.count)}
                for name, mean_std in self._mean_stds().items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        model, mean_stds = self._model, self._mean_stds()
        if state["algorithm"] != type(model).__name__:
            raise StateMismatchError(f"the checkpoint is of a {state['algorithm']}, the model a {type(model).__name__}")
        mine = {name: mean_std.mean.shape for name, mean_std in mean_stds.items()}
        theirs = {name: saved["mean"].shape for name, saved in state["normalize"].items()}
        if mine != theirs:
            raise StateMismatchError(f"the checkpoint normalises {theirs}, the model's environment {mine}")
        for name, saved in state["normalize"].items():
            mean_std = mean_stds[name]
            mean_std.mean, mean_std.var, mean_std.count = saved["mean"], saved["var"], saved["count"]
        for name, value in state["counters"].items():
            setattr(model, name, value)
        model.ep_info_buffer = deque(state["episodes"], maxlen=model._stats_window_size)
        model.ep_success_buffer = deque(state["successes"], maxlen=model._stats_window_size)

    def _mean_stds(self) -> dict[str, Any]:
        """Return the running statistics of the environment by name."""
        normalize: Any = self._model.get_vec_normalize_env()
        if normalize is None:
            return {}
        observations = getattr(normalize, "obs_rms", None) or {}
        if not isinstance(observations, dict):
            observations = {"": observations}
        return {"return": normalize.ret_rms, **{f"observation/{key}": value for key, value in observations.items()}}
