"""The losses of PPO as pure functions of tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

# Far beyond any clip ratio, and still finite as a ratio: an action that became impossible is no reason to stop.
_LARGEST_LOG_RATIO = 20.0


class PolicyLoss(NamedTuple):
    """What a step of the policy is judged by; all scalars.

    Attributes:
        loss: To minimise.
        approx_kl: From the old policy to the new one, estimated without bias and never negative.
        clip_fraction: Of the samples, where the ratio is beyond what is rewarded.
    """

    loss: torch.Tensor
    approx_kl: torch.Tensor
    clip_fraction: torch.Tensor


def policy_loss(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, advantage: torch.Tensor, clip_ratio: float
) -> PolicyLoss:
    """Return the clipped surrogate loss of actions.

    Args:
        log_prob: Of the actions under the policy that learns, ``[batch]``.
        old_log_prob: Under the one it must stay near to.
        advantage: Of the actions, importance weights included, ``[batch]``.
        clip_ratio: How far the ratio may leave 1.
    """
    ratio = _bounded(log_prob - old_log_prob).exp()
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    loss = -torch.minimum(advantage * ratio, advantage * clipped).mean()
    with torch.no_grad():
        outside = ((ratio - 1).abs() > clip_ratio).float().mean()
        return PolicyLoss(loss, kl_estimate(log_prob - old_log_prob), outside)


def value_loss(
    value: torch.Tensor,
    old_value: torch.Tensor,
    target: torch.Tensor,
    clip_ratio: float,
    huber_delta: float,
    *,
    whole: bool = False,
) -> torch.Tensor:
    """Return the clipped Huber loss of values: the larger of that of the value and that of the value kept near the old.

    Args:
        value: Of the critic that learns.
        old_value: Of the one that the rollout was judged by.
        target: Normalised returns.
        clip_ratio: How far a value may leave the old one.
        huber_delta: From where on the loss is linear.
        whole: Whether to choose the larger of the two for the whole batch, as the original does, not for each sample.
    """
    clipped = old_value + (value - old_value).clamp(-clip_ratio, clip_ratio)
    free = functional.huber_loss(value, target, reduction="none", delta=huber_delta)
    near = functional.huber_loss(clipped, target, reduction="none", delta=huber_delta)
    return torch.maximum(free.mean(), near.mean()) if whole else torch.maximum(free, near).mean()


def importance_weight(proximal_log_prob: torch.Tensor, behaviour_log_prob: torch.Tensor) -> torch.Tensor:
    """Return how much more often the proximal policy than the behaviour policy would have acted so."""
    return _bounded(proximal_log_prob - behaviour_log_prob).exp()


def effective_sample_share(weight: torch.Tensor) -> torch.Tensor:
    """Return the effective sample size of weighted samples, as a share of their number: 1 if all weigh the same."""
    return weight.sum().square() / (weight.square().sum() * weight.numel())


def kl_estimate(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the divergence of the old policy from the new, by the logarithms of new over old at the old's samples."""
    log_ratio = _bounded(log_ratio)
    return (log_ratio.expm1() - log_ratio).mean()


def explained_variance(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return which part of the variance of targets values foretell: 1 all, 0 no better than a constant, less: worse."""
    return 1 - (target - value).var(correction=0) / target.var(correction=0).clamp(min=1e-8)


def _bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
