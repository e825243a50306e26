"""What losses compare a policy with: the policy at the start of an update, and the mirror images of samples."""

from __future__ import annotations

import math
from typing import Any

import torch

from slipstream.rl.config import PPOConfig
from slipstream.rl.gradients import in_chunks
from slipstream.rl.losses import importance_weight, kl_estimate
from slipstream.rl.network import ACTION_DIM, ACTION_NORMALIZED, LOG_PROB, VALUE, NavRLPolicy
from slipstream.rl.symmetry import mirror_every_other

PROXIMAL_LOG_PROB = "proximal_log_prob"
PROXIMAL_VALUE = "proximal_value"
IMPORTANCE = "importance"
MIRRORED = "mirrored"
MIRROR_MEAN = "mirror_mean"

_LEAST_MIRROR_RATIO = 0.1  # less likely mirror images make the KL estimate explode


@torch.no_grad()
def catch_up(policy: NavRLPolicy, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Write log-probabilities and values of the present policy into a rollout of an older one.

    Returns:
        The divergence of the older policy from the present one, and the importance weight of each sample.
    """
    behaviour = batch[LOG_PROB]
    flat = batch.reshape(-1)
    log_probs, values = [], []
    for index in in_chunks(torch.arange(flat.batch_size[0])):
        steps = flat[index]
        distribution, value = policy.evaluate(steps)
        log_probs.append(distribution.log_prob(steps.get(ACTION_NORMALIZED)))
        values.append(value)
    proximal = torch.cat(log_probs).reshape(behaviour.shape)
    batch.set(PROXIMAL_LOG_PROB, proximal)
    # Values of the older critic are in units of an older normalisation.
    batch.set(VALUE, torch.cat(values).reshape(*behaviour.shape, 1))
    return kl_estimate(proximal - behaviour), importance_weight(proximal, behaviour)


@torch.no_grad()
def set_proximal(policy: NavRLPolicy, batch: Any, config: PPOConfig, *, is_lagged: bool, threads: int) -> None:
    """Write what losses compare the policy with, where that differs from what the rollout contains.

    Samples of an older policy, and mirrored samples, have log-probabilities of the present policy, and an importance
    weight: how much more often the present policy would have acted that way.

    Args:
        policy: The policy.
        batch: Rollout, after `catch_up` if an older policy collected it.
        config: Of the update.
        is_lagged: Whether an older policy collected the rollout.
        threads: Number of threads to compute on.
    """
    if not is_lagged and not config.mirror:
        return
    behaviour = batch[LOG_PROB]
    proximal = batch[PROXIMAL_LOG_PROB] if is_lagged else behaviour.clone()
    value = batch[VALUE].clone()
    largest = torch.full_like(behaviour, config.max_importance_weight)
    if config.mirror:
        _mirror(policy, batch, proximal, value, largest, threads)
    batch.set(PROXIMAL_LOG_PROB, proximal)
    batch.set(PROXIMAL_VALUE, value)
    batch.set(IMPORTANCE, torch.minimum(importance_weight(proximal, behaviour), largest))


def _mirror(
    policy: NavRLPolicy,
    batch: Any,
    proximal: torch.Tensor,
    value: torch.Tensor,
    largest: torch.Tensor,
    threads: int,
) -> None:
    """Choose every other sample of a rollout to be mirrored, and replace its numbers by its mirror image's.

    A sample stays as it is if the present policy would hardly take the mirrored action: its importance weight would be
    next to nothing, and the estimate of the KL divergence would explode.
    """
    samples = batch.exclude("next").reshape(-1)
    index, image = mirror_every_other(policy, samples, threads)
    is_likely = image.log_prob - proximal.view(-1)[index] > math.log(_LEAST_MIRROR_RATIO)
    kept = index[is_likely.cpu()]
    mirrored = torch.zeros_like(proximal, dtype=torch.bool)
    mirrored.view(-1)[kept] = True
    proximal.view(-1)[kept] = image.log_prob[is_likely]
    value.view(-1, 1)[kept] = image.value[is_likely]
    mean = proximal.new_zeros(proximal.numel(), ACTION_DIM)
    mean[kept] = image.mean[is_likely]
    largest.masked_fill_(mirrored, 1.0)
    batch.set(MIRRORED, mirrored)
    batch.set(MIRROR_MEAN, mean.reshape(*proximal.shape, ACTION_DIM))
