"""`SB3CheckpointCallback` and `restore_into`: checkpoints of Stable-Baselines3 models."""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slipstream.text import install_hint

try:
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.callbacks import BaseCallback
except ImportError as error:
    raise ImportError(
        f"SB3CheckpointCallback needs stable-baselines3, which is not installed: {install_hint('adapters')}, or "
        "stable-baselines3 by itself"
    ) from error

from slipstream.adapters.manager import LazyManager
from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.restoring import Restored
from slipstream.checkpoint.state import TrainingState
from slipstream.checks import require_count
from slipstream.errors import StateMismatchError

# What an algorithm counts, and what it derives from that; each has some of these.
COUNTERS = (
    "num_timesteps",
    "_episode_num",
    "_n_updates",
    "_n_calls",
    "_current_progress_remaining",
    "exploration_rate",
)


class SB3CheckpointCallback(BaseCallback):  # type: ignore[misc, unused-ignore]
    """Save a model in the background every `save_freq` calls; `restore_into` loads it.

    Saved and restored: the policy with its target networks, every optimizer, the entropy coefficient, the counters, the
    statistics of recent episodes and of ``VecNormalize``, and the global random number generators of Python, NumPy and
    torch. ``model.save`` leaves out the last two, and blocks.

    Not saved, because SB3 cannot restore it: the environments and their episodes, the random numbers of action spaces,
    action noise, and samples that were collected but not trained on yet. A resumed run therefore starts new episodes,
    and an on-policy one starts a new rollout. Replay buffers are saved by ``model.save_replay_buffer``.

    The step of a checkpoint is ``model.num_timesteps``. Its metric ``reward`` is the mean over recent episodes, if the
    environments are monitored.

    A failed save is raised by the next one, or at the end of ``learn``, which waits for every save. SB3 does not report
    that end to the child of an event callback such as ``EveryNTimesteps``, nor after an exception. Queued saves are
    still written; pass a manager, and close it to wait for them and to get their errors.

    Args:
        checkpoints: A manager, or the folder for one with default settings.
        save_freq: Number of calls between two saves. A call is one step of the vectorized environment.
        training_state: Whether to save more than policy and optimizers.
        verbose: As for any callback.

    Raises:
        ImportError: If Stable-Baselines3 is not installed. Raised when the class is imported.
    """

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
        self._manager = LazyManager(checkpoints)

    def _on_step(self) -> bool:
        if self.n_calls % self.save_freq == 0:
            state = _state_of(self.model, full=self.training_state)
            self._manager.open().save(self.model.num_timesteps, state, _metrics_of(self.model))
        return True

    def _on_training_end(self) -> None:
        self._manager.finish()


def restore_into(model: BaseAlgorithm, checkpoints: CheckpointManager | str | os.PathLike[str]) -> int:
    """Load the newest intact checkpoint of a folder into a model; changes nothing unless all of it fits.

    Continue with ``model.learn(remaining, reset_num_timesteps=False)``. `SB3CheckpointCallback` lists what is restored.

    Args:
        model: A model with the algorithm, policy and environment of the one that was saved.
        checkpoints: The folder, or its manager.

    Returns:
        The number of timesteps at the time of the save.

    Raises:
        FileNotFoundError: If there is no checkpoint. The folder is not created.
        CorruptFileError: If every checkpoint is damaged.
        StateMismatchError: If the checkpoint does not fit the model; lists the differences.
    """
    restored = _restore(checkpoints)
    if not isinstance(restored.state, Mapping) or "policy" not in restored.state:
        raise StateMismatchError(
            f"the checkpoint of step {restored.step} has no 'policy', expected one that SB3CheckpointCallback saved"
        )
    state = dict(restored.state)
    # Check these parts first: TrainingState then loads the others, all or nothing, and the rest cannot fail.
    progress = state.pop("progress", None)
    if progress is not None:
        _check_progress(model, progress)
    saved_variables = state.pop("variables", {})
    variables = _variables_of(model)
    _check_variables(variables, saved_variables)
    TrainingState(rng=progress is not None, **_parts_of(model)).load_state_dict(state)
    for name, variable in variables.items():
        variable.copy_(saved_variables[name])
    if progress is not None:
        _load_progress(model, progress)
    model.num_timesteps = restored.step
    return restored.step


def _restore(checkpoints: CheckpointManager | str | os.PathLike[str]) -> Restored:
    if isinstance(checkpoints, CheckpointManager):
        return checkpoints.restore()
    with CheckpointManager(checkpoints) as manager:
        return manager.restore()


def _state_of(model: BaseAlgorithm, *, full: bool) -> dict[str, Any]:
    """Return what a checkpoint of a model contains; tensors are not copied."""
    state = TrainingState(rng=full, **_parts_of(model)).state_dict()
    variables = _variables_of(model)
    if variables:
        state["variables"] = variables
    if full:
        state["progress"] = _progress_of(model)
    return state


def _metrics_of(model: BaseAlgorithm) -> dict[str, float]:
    rewards = [float(episode["r"]) for episode in model.ep_info_buffer or ()]
    if not rewards:
        return {}
    return {"reward": sum(rewards) / len(rewards)}


def _parts_of(model: BaseAlgorithm) -> dict[str, Any]:
    """Return the modules and optimizers of a model, by the names that SB3 gives them."""
    names, _ = model._get_torch_save_params()  # what `model.save` uses; there is no public list
    parts = {}
    for name in names:
        part = operator.attrgetter(name)(model)
        # Save a compiled module under the names that it has without compilation.
        parts[name] = getattr(part, "_orig_mod", part)
    return parts


def _variables_of(model: BaseAlgorithm) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that belong to no module, such as the entropy coefficient of SAC; not copied."""
    _, names = model._get_torch_save_params()
    return {name: operator.attrgetter(name)(model).detach() for name in names}


def _check_variables(mine: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Raise unless the variables of a checkpoint fit those of the model."""
    shapes = {name: list(tensor.shape) for name, tensor in mine.items()}
    saved_shapes = {name: list(tensor.shape) for name, tensor in saved.items()}
    if shapes != saved_shapes:
        raise StateMismatchError(f"the checkpoint has the variables {saved_shapes}, the model has {shapes}")


def _progress_of(model: BaseAlgorithm) -> dict[str, Any]:
    """Return counters, episode statistics and normalization of a model, as plain values and arrays."""
    counters = {}
    for name in COUNTERS:
        if hasattr(model, name):
            counters[name] = getattr(model, name)
    normalization = {}
    for name, statistics in _statistics_of(model).items():
        normalization[name] = {
            "mean": np.asarray(statistics.mean, np.float64),
            "var": np.asarray(statistics.var, np.float64),
            "count": float(statistics.count),
        }
    return {
        "algorithm": type(model).__name__,
        "counters": counters,
        "episodes": [_plain_episode(info) for info in model.ep_info_buffer or ()],
        "successes": [float(success) for success in model.ep_success_buffer or ()],
        "normalize": normalization,
    }


def _plain_episode(info: Mapping[str, Any]) -> dict[str, float]:
    """Return reward, length and time of an episode. A monitor may add other entries, of any type; SB3 ignores those."""
    episode = {}
    for name in ("r", "l", "t"):
        if name in info:
            episode[name] = float(info[name])
    return episode


def _check_progress(model: BaseAlgorithm, saved: Any) -> None:
    """Raise unless `_load_progress` can load `saved` into the model."""
    mine = _progress_of(model)
    if not isinstance(saved, Mapping) or saved.keys() != mine.keys():
        raise StateMismatchError("the checkpoint was not saved by SB3CheckpointCallback: its 'progress' differs")
    if saved["algorithm"] != mine["algorithm"]:
        raise StateMismatchError(f"the checkpoint is of {saved['algorithm']}, the model is {mine['algorithm']}")
    shapes = {name: statistics["mean"].shape for name, statistics in mine["normalize"].items()}
    saved_shapes = {name: statistics["mean"].shape for name, statistics in saved["normalize"].items()}
    if shapes != saved_shapes:
        raise StateMismatchError(
            f"the checkpoint has VecNormalize statistics of the shapes {saved_shapes}, the model's environment {shapes}"
        )


def _load_progress(model: BaseAlgorithm, saved: Mapping[str, Any]) -> None:
    for name in COUNTERS:
        if name in saved["counters"]:
            setattr(model, name, saved["counters"][name])
    window = model._stats_window_size
    model.ep_info_buffer = deque(saved["episodes"], maxlen=window)
    model.ep_success_buffer = deque(saved["successes"], maxlen=window)
    for name, statistics in _statistics_of(model).items():
        statistics.mean = saved["normalize"][name]["mean"]
        statistics.var = saved["normalize"][name]["var"]
        statistics.count = saved["normalize"][name]["count"]


def _statistics_of(model: BaseAlgorithm) -> dict[str, Any]:
    """Return the running statistics of ``VecNormalize`` by name; none if the environment is not normalized."""
    normalize: Any = model.get_vec_normalize_env()
    if normalize is None:
        return {}
    found = {"return": normalize.ret_rms}
    # Absent with norm_obs=False, and one per key for observations that are dicts.
    observations = getattr(normalize, "obs_rms", {})
    if not isinstance(observations, dict):
        observations = {"": observations}
    for key, statistics in observations.items():
        found[f"observation/{key}"] = statistics
    return found
