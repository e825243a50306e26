"""Learn from a teacher as well as from rewards.

A short run of PPO spends most of its time finding out that obstacles can be avoided at all. A teacher that already
knows shortens this: for some observations of each rollout, it says what it would do, and the policy is drawn towards
that action (kickstarting). The weight of the teacher should fall to zero during training. The policy then ends where
its rewards are highest, not where it resembles the teacher most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from slipstream.errors import ConfigurationError
from slipstream.rl.gradients import map_chunks
from slipstream.rl.network import ACTION_DIM

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Teacher = Callable[["TensorDictBase"], torch.Tensor]
"""Returns actions in [0, 1], ``[samples, 3]``, for observations ``[samples]``. Called on several threads at once."""


class Lesson(NamedTuple):
    """What a teacher says about a rollout.

    Attributes:
        action: What the teacher would do, ``[environment, time, 3]``; 0 where it was not asked.
        weight: Weight of each step in the imitation loss, ``[environment, time]``: 0 where the teacher was not asked,
            and 1 on average over all steps.
    """

    action: torch.Tensor
    weight: torch.Tensor


def ask(teacher: Teacher, batch: Any, *, first: int, interval: int, threads: int) -> Lesson:
    """Ask a teacher about every `interval`-th environment of a rollout.

    Args:
        teacher: Whom to ask.
        batch: Rollout ``[environment, time]``, as for `PPO`.
        first: The first environment. Vary it from rollout to rollout, so that every environment gets its turn.
        interval: Distance to the next environment.
        threads: Number of threads to ask on.

    Raises:
        ConfigurationError: If the teacher does not return an action in [0, 1] for every sample.
    """
    num_envs, num_steps = batch.batch_size
    # Next observations would only be copied.
    flat = batch.exclude("next").reshape(-1)
    # With fewer environments than the interval, there is nothing to skip.
    first = first % min(num_envs, interval)
    index = torch.arange(num_envs * num_steps).view(num_envs, num_steps)[first::interval].flatten()

    def ask_about(chunk: torch.Tensor) -> torch.Tensor:
        # Each thread has its own setting.
        with torch.no_grad():
            return _checked(teacher(flat[chunk]), len(chunk))

    answer = torch.cat(map_chunks(ask_about, index, threads))
    action = answer.new_zeros(num_envs * num_steps, ACTION_DIM)
    action[index] = answer
    # One weight for the whole rollout. Dividing by the number of taught samples in each minibatch, or in each part of
    # one, would weight samples by chance.
    weight = answer.new_zeros(num_envs * num_steps)
    weight[index] = num_envs * num_steps / len(index)
    return Lesson(action.view(num_envs, num_steps, ACTION_DIM), weight.view(num_envs, num_steps))


def imitation_loss(mean: torch.Tensor, action: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the weighted squared distance of mean actions from the teacher's.

    Args:
        mean: The policy's mean actions, ``[samples, 3]``.
        action: The teacher's.
        weight: Of each sample, ``[samples]``; see `Lesson`.
    """
    squared = (mean - action).square().sum(-1)
    return (squared * weight).mean()


def _checked(action: torch.Tensor, count: int) -> torch.Tensor:
    """Return a teacher's answer. An answer of another shape would be broadcast without an error."""
    if tuple(action.shape) != (count, ACTION_DIM):
        raise ConfigurationError(f"the teacher returned {list(action.shape)}, expected {[count, ACTION_DIM]}")
    if not bool(((action >= 0) & (action <= 1)).all()):
        raise ConfigurationError("the teacher returned an action outside [0, 1]")
    return action
