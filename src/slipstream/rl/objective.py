"""`Objective`: what PPO minimises for some samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from slipstream.rl.config import PPOConfig
from slipstream.rl.gradients import Metrics
from slipstream.rl.losses import policy_loss, value_loss
from slipstream.rl.network import ACTION_DIM, ACTION_NORMALIZED, LOG_PROB, VALUE, NavRLPolicy
from slipstream.rl.proximal import IMPORTANCE, MIRROR_MEAN, MIRRORED, PROXIMAL_LOG_PROB, PROXIMAL_VALUE
from slipstream.rl.symmetry import reflect_action_where, reflect_some
from slipstream.rl.teacher import imitation_loss

if TYPE_CHECKING:
    from tensordict import TensorDictBase

ADVANTAGE = "adv"
RETURN = "ret"
TEACHER_ACTION = "teacher_action"
TEACHER_WEIGHT = "teacher_weight"

SCRATCH_KEYS: tuple[str, ...] = (ADVANTAGE, RETURN, PROXIMAL_LOG_PROB, PROXIMAL_VALUE, IMPORTANCE)
SCRATCH_KEYS += (MIRRORED, MIRROR_MEAN, TEACHER_ACTION, TEACHER_WEIGHT)
"""What `PPO.update` writes into a rollout."""


class Objective:
    """The losses of PPO, of mirror images and of a teacher, for samples that an update has prepared.

    Called on several threads at once.

    Args:
        policy: What learns.
        config: Weights and limits.
        features: Computes the policy's features, compiled or not.
        teacher_coefficient: Weight of the imitation loss; 0 without a teacher.
    """

    def __init__(
        self,
        policy: NavRLPolicy,
        config: PPOConfig,
        features: Callable[..., torch.Tensor],
        teacher_coefficient: float,
    ) -> None:
        self._policy = policy
        self._config = config
        self._features = features
        self._teacher_coefficient = teacher_coefficient

    def __call__(self, minibatch: TensorDictBase) -> tuple[Metrics, torch.Tensor]:
        """Return the metrics of some samples, and the loss to minimise: means over samples."""
        config = self._config
        seen, action = self._policy.observation(minibatch), minibatch.get(ACTION_NORMALIZED)
        mirrored = minibatch.get(MIRRORED) if config.mirror else None
        if mirrored is not None:
            seen, action = reflect_some(seen, action, mirrored)
        distribution, value = self._policy.heads(self._features(*seen))
        advantage = minibatch.get(ADVANTAGE).squeeze(-1)
        old_log_prob, old_value = minibatch.get(LOG_PROB), minibatch.get(VALUE)
        if minibatch.get(IMPORTANCE, None) is not None:
            advantage = advantage * minibatch.get(IMPORTANCE)
            old_log_prob, old_value = minibatch.get(PROXIMAL_LOG_PROB), minibatch.get(PROXIMAL_VALUE)
        log_prob = distribution.log_prob(action)
        policy = policy_loss(log_prob, old_log_prob, advantage, config.actor.clip_ratio)
        actor_loss = ACTION_DIM * policy.loss
        targets = (old_value, minibatch.get(RETURN), config.critic.clip_ratio, config.huber_delta)
        critic_loss = value_loss(value, *targets, whole=config.navrl_compat)
        entropy = distribution.entropy().mean()
        loss = actor_loss + critic_loss - config.entropy_loss_coefficient * entropy
        if mirrored is not None:
            loss = loss + config.mirror_coefficient * _asymmetry(
                distribution.mean, minibatch.get(MIRROR_MEAN), mirrored
            )
        metrics = {
            "actor_loss": actor_loss,
            "value_loss": critic_loss,
            "entropy": entropy,
            "approx_kl": policy.approx_kl,
            "clip_fraction": policy.clip_fraction,
        }
        if self._teacher_coefficient:
            target = minibatch.get(TEACHER_ACTION)
            if mirrored is not None:
                target = reflect_action_where(target, mirrored)
            imitation = imitation_loss(distribution.mean, target, minibatch.get(TEACHER_WEIGHT))
            loss = loss + self._teacher_coefficient * imitation
            metrics["imitation_loss"] = imitation
        return metrics, loss


def _asymmetry(mean: torch.Tensor, target: torch.Tensor, mirrored: torch.Tensor) -> torch.Tensor:
    """Return the mean squared distance of actions in mirrored observations from the mirrored actions."""
    squared = (mean - target).square().sum(-1)
    # A mean over all samples, of which half may be mirrored, so that parts of a minibatch add up.
    return 2 * (squared * mirrored).mean()
