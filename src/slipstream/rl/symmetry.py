"""The mirror image of a sample: left and right exchanged.

The task is symmetric: in the mirror image of a situation, the mirror image of an action has the same effect. A policy
does not know that, and tends to learn to dodge to one side only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from slipstream.rl.gradients import map_chunks
from slipstream.rl.network import ACTION_NORMALIZED, NavRLPolicy

_LATERAL = (1, 6)  # the y components of direction and velocity, in both the state and an obstacle's features


Seen = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""LiDAR, moving obstacles and state, in the order of the network's arguments."""


class Mirrored(NamedTuple):
    """What a policy makes of the mirror images of samples.

    Attributes:
        log_prob: Of the mirrored actions, ``[samples]``.
        value: Of the mirrored observations, ``[samples, 1]``.
        mean: The mirror image of the mean action in the original observations, ``[samples, 3]``.
    """

    log_prob: torch.Tensor
    value: torch.Tensor
    mean: torch.Tensor


def mirror_every_other(policy: NavRLPolicy, samples: Any, threads: int) -> tuple[torch.Tensor, Mirrored]:
    """Return the numbers of every other sample, and what a policy makes of their mirror images.

    Args:
        policy: The policy.
        samples: Observations and actions, ``[samples]``.
        threads: Number of threads to compute on.
    """
    index = torch.arange(0, samples.batch_size[0], 2)

    def evaluate(chunk: torch.Tensor) -> Mirrored:
        steps = samples[chunk]
        return evaluate_mirrored(policy, policy.observation(steps), steps.get(ACTION_NORMALIZED))

    images = map_chunks(evaluate, index, threads)
    log_probs, values, means = zip(*images, strict=True)
    return index, Mirrored(torch.cat(log_probs), torch.cat(values), torch.cat(means))


@torch.no_grad()
def evaluate_mirrored(policy: NavRLPolicy, seen: Seen, action: torch.Tensor) -> Mirrored:
    """Return what a policy makes of the mirror images of samples.

    Args:
        policy: The policy.
        seen: Observations.
        action: Actions in [0, 1] that were taken, ``[samples, 3]``.
    """
    mean = policy.heads(policy.features(*seen))[0].mean
    distribution, value = policy.heads(policy.features(*reflect_observation(*seen)))
    return Mirrored(distribution.log_prob(reflect_action(action)), value, reflect_action(mean))


def reflect_some(seen: Seen, action: torch.Tensor, mask: torch.Tensor) -> tuple[Seen, torch.Tensor]:
    """Return samples with the masked ones mirrored.

    Args:
        seen: Observations.
        action: Actions in [0, 1].
        mask: Which samples to mirror, ``[samples]``.
    """
    lidar, obstacle, state = (
        torch.where(mask.view(-1, *(1,) * (old.ndim - 1)), new, old)
        for new, old in zip(reflect_observation(*seen), seen, strict=True)
    )
    return (lidar, obstacle, state), reflect_action_where(action, mask)


def reflect_action_where(action: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return actions in [0, 1] with the masked ones mirrored, as a new tensor."""
    return torch.where(mask.unsqueeze(-1), reflect_action(action), action)


def reflect_observation(lidar: torch.Tensor, dynamic_obstacle: torch.Tensor, state: torch.Tensor) -> Seen:
    """Return mirror images of observations, as new tensors.

    Args:
        lidar: ``[..., azimuths, pitches]``, azimuths counted from the heading.
        dynamic_obstacle: ``[..., obstacles, 10]``.
        state: ``[..., 8]``.
    """
    azimuths = lidar.shape[-2]
    opposite = -torch.arange(azimuths, device=lidar.device) % azimuths
    return lidar.index_select(-2, opposite), _negate_lateral(dynamic_obstacle), _negate_lateral(state)


def reflect_action(action: torch.Tensor) -> torch.Tensor:
    """Return mirror images of actions in [0, 1], ``[..., 3]``, as a new tensor."""
    x, y, z = action.unbind(-1)
    return torch.stack([x, 1 - y, z], -1)


def _negate_lateral(features: torch.Tensor) -> torch.Tensor:
    sign = torch.ones(features.shape[-1], device=features.device, dtype=features.dtype)
    sign[list(_LATERAL)] = -1
    return features * sign
