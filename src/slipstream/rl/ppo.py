"""`PPO`: improve a policy from rollouts, correctly by default, as NavRL does on request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slipstream.checks import require_number
from slipstream.errors import ConfigurationError, RolloutError, StateMismatchError
from slipstream.rl.config import PPOConfig
from slipstream.rl.finite import require_finite
from slipstream.rl.gradients import in_chunks, sum_gradients
from slipstream.rl.losses import (
    effective_sample_share,
    explained_variance,
    importance_weight,
    kl_estimate,
    policy_loss,
    value_loss,
)
from slipstream.rl.network import (
    ACTION_DIM,
    ACTION_NORMALIZED,
    LOG_PROB,
    VALUE,
    Choice,
    NavRLPolicy,
)
from slipstream.rl.symmetry import mirror_every_other, reflect_action_where, reflect_some
from slipstream.rl.teacher import Teacher, ask, imitation_loss

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Minibatches = Callable[[Any], Iterable["TensorDictBase"]]
"""Yields the steps of a rollout in parts, as TensorDicts; called once per epoch."""

ADVANTAGE = "adv"
RETURN = "ret"
PROXIMAL_LOG_PROB = "proximal_log_prob"
PROXIMAL_VALUE = "proximal_value"
IMPORTANCE = "importance"
MIRRORED = "mirrored"
MIRROR_MEAN = "mirror_mean"
TEACHER_ACTION = "teacher_action"
TEACHER_WEIGHT = "teacher_weight"

SCRATCH_KEYS: tuple[str, ...] = (ADVANTAGE, RETURN, PROXIMAL_LOG_PROB, PROXIMAL_VALUE, IMPORTANCE)
SCRATCH_KEYS += (MIRRORED, MIRROR_MEAN, TEACHER_ACTION, TEACHER_WEIGHT)
"""What `PPO.update` writes into a rollout."""

_LEAST_MIRROR_RATIO = 0.1  # less likely mirror images make the KL estimate explode


class PPO:
    """Proximal policy optimisation of a `NavRLPolicy`, with an Adam each for feature extractor, actor and critic.

    A rollout is a TensorDict ``[environment, time]``, or anything with its ``batch_size``, ``[key]``,
    ``set(key, value)``, ``exclude(key)``, ``reshape(-1)`` and, of that, ``[index]``: a ``CompressedTensorDict`` trains
    unchanged, and with the same minibatches bit for bit the same.

    Values are those that the policy gave when it acted. Those of next observations are computed only where they are not
    those of the next step: at the end of the rollout and of episodes.

    The configuration decides on discount, decay and value normalisation, whatever a loaded state dict says.

    Args:
        policy: What to improve; a new one by default.
        config: How.
        teacher: Whose actions to imitate besides, with the weight `teacher_coefficient`; see `slipstream.rl.teacher`.
        compile: Whether to compile the feature extractor for updates with ``torch.compile``: the same within rounding,
            faster once the first minibatch has been waited for. Minibatches should then be of equal size.

    Attributes:
        policy: What is improved.
        config: How.
        num_updates: How many updates there were.
        teacher_coefficient: Weight of the imitation loss, initially the configuration's. May be changed between
            updates; it is not part of the state. The teacher is not asked while it is 0.

    Raises:
        ConfigurationError: If the configuration gives weight to a teacher, and there is none.

    Example:
        >>> ppo = PPO(config=PPOConfig(training_epoch_num=2))
        >>> sorted(ppo.optimizers())
        ['actor', 'critic', 'feature_extractor']
    """

    def __init__(
        self,
        policy: NavRLPolicy | None = None,
        config: PPOConfig | None = None,
        *,
        teacher: Teacher | None = None,
        compile: bool = False,  # noqa: A002 - torch's own name for it
    ) -> None:
        self.policy = NavRLPolicy() if policy is None else policy
        self.config = PPOConfig() if config is None else config
        self.num_updates = 0
        self._teacher = teacher
        self.teacher_coefficient = self.config.teacher_coefficient
        self._apply_config()
        rates = {name: getattr(self.config, name).learning_rate for name in self._parts()}
        self._optimizers: dict[str, torch.optim.Optimizer] = {
            name: torch.optim.Adam(part.parameters(), lr=rates[name], fused=True)
            for name, part in self._parts().items()
        }
        self._features: Callable[..., torch.Tensor] = self.policy.features
        if compile:
            self._features = torch.compile(self.policy.features, dynamic=False)

    @property
    def teacher_coefficient(self) -> float:
        """Weight of the imitation loss."""
        return self._teacher_coefficient

    @teacher_coefficient.setter
    def teacher_coefficient(self, value: float) -> None:
        require_number("teacher_coefficient", value, 0)
        if self._teacher is None and value:
            raise ConfigurationError(f"teacher_coefficient is {value}, expected 0 without a teacher")
        self._teacher_coefficient = value

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return the optimizers by the part they are for: ``feature_extractor``, ``actor``, ``critic``."""
        return dict(self._optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Return all that an exact resume needs besides random numbers; tensors in it are its own, not copies."""
        optimizers = {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()}
        return {"policy": self.policy.state_dict(), "optimizers": optimizers, "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises:
            StateMismatchError: If it is of something else. What is checked first is names; shapes are up to torch.
        """
        missing = sorted({"policy", "optimizers", "num_updates"} - set(state))
        missing += [f"optimizers/{name}" for name in self._optimizers if name not in state.get("optimizers", {})]
        if missing:
            raise StateMismatchError(f"the state of PPO lacks {', '.join(missing)}")
        self.policy.load_state_dict(state["policy"])
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.num_updates = int(state["num_updates"])

    def act(self, tensordict: TensorDictBase, choose: Choice = "sample") -> TensorDictBase:
        """Choose actions; see `NavRLPolicy.act`."""
        return self.policy.act(tensordict, choose)

    def update(
        self,
        batch: Any,
        minibatches: Minibatches | None = None,
        *,
        staleness: int = 0,
        generator: torch.Generator | None = None,
    ) -> dict[str, float]:
        """Improve the policy from a rollout.

        Writes ``adv`` (normalised) and ``ret`` (normalised) into the rollout. If the policy that collected it is older
        than this one, ``proximal_log_prob`` and ``state_value`` of this one are written as well; ratios are clipped
        against this one, and each sample is weighted by how much more often than the older one it would have acted so.

        Args:
            batch: Rollout with what `act` and an environment write.
            minibatches: Makes the parts of an epoch; by default all steps shuffled, in `num_minibatches` parts. For a
                ``CompressedTensorDict``, ``lambda batch: batch.minibatches(16)`` decodes least.
            staleness: How many updates older the policy that collected the rollout is than this one.
            generator: Where the default order comes from; torch's own by default.

        Returns:
            ``actor_loss, value_loss, entropy, approx_kl, clip_fraction``, and of each part its ``_grad_norm`` before
            clipping: means over minibatches; ``explained_variance`` of the values in the rollout; ``staleness``; and of
            that lag ``behaviour_kl`` (0 without) and ``ess``, the effective share of the samples (1 without). While
            the teacher has a weight, ``imitation_loss``.

        Raises:
            NonFiniteError: If a target, a loss or a gradient is not finite. Bad targets leave the policy as it was; a
                bad minibatch is not applied, those before it are.
            ConfigurationError: If there are not enough steps for the minibatches.
            RolloutError: If the batch is not ``[environment, time]``.
        """
        self._apply_config()
        lag = self._catch_up(batch) if staleness > 0 else {"behaviour_kl": 0.0, "ess": 1.0}
        explained = self._set_targets(batch)
        self._set_proximal(batch, is_lagged=staleness > 0)
        self._set_lesson(batch)
        parts = self._shuffled(generator) if minibatches is None else minibatches
        rows: list[dict[str, torch.Tensor]] = []
        for epoch in range(self.config.training_epoch_num):
            for number, minibatch in enumerate(parts(batch)):
                where = f"update {self.num_updates}, epoch {epoch}, minibatch {number}"
                rows.append(self._step(minibatch, where))
        if not rows:
            raise ConfigurationError("there was no minibatch, expected at least one")
        self.num_updates += 1
        means = torch.stack([torch.stack(list(row.values())) for row in rows]).mean(0).tolist()
        metrics = dict(zip(rows[0], means, strict=True))
        return {**metrics, "explained_variance": explained, "staleness": float(staleness), **lag}

    def _parts(self) -> dict[str, nn.Module]:
        policy = self.policy
        return {"feature_extractor": policy.feature_extractor, "actor": policy.actor, "critic": policy.critic}

    def _apply_config(self) -> None:
        self.policy.value_norm.beta = self.config.value_norm_beta
        self.policy.gae.set_to(self.config.gamma, self.config.lmbda)
        self.policy.precision = self.config.precision

    def _shuffled(self, generator: torch.Generator | None) -> Minibatches:
        def parts(batch: Any) -> Iterator[TensorDictBase]:
            # No loss needs next observations, so minibatches should not copy them.
            flat = batch.exclude("next").reshape(-1)
            size, number = flat.batch_size[0], self.config.num_minibatches
            if size < number:
                raise ConfigurationError(f"the batch has {size} steps, expected at least one for {number} minibatches")
            for index in torch.randperm(size, generator=generator).tensor_split(number):
                yield flat[index]

        return parts

    @torch.no_grad()
    def _catch_up(self, batch: Any) -> dict[str, float]:
        """Write log-probabilities and values of the present policy into a rollout of an older one."""
        behaviour = batch[LOG_PROB]
        flat = batch.reshape(-1)
        log_probs, values = [], []
        for index in in_chunks(torch.arange(flat.batch_size[0])):
            steps = flat[index]
            distribution, value = self.policy.evaluate(steps)
            log_probs.append(distribution.log_prob(steps.get(ACTION_NORMALIZED)))
            values.append(value)
        proximal = torch.cat(log_probs).reshape(behaviour.shape)
        batch.set(PROXIMAL_LOG_PROB, proximal)
        # Values of the older critic are in units of an older normalisation.
        batch.set(VALUE, torch.cat(values).reshape(*behaviour.shape, 1))
        share = effective_sample_share(importance_weight(proximal, behaviour))
        return {"behaviour_kl": float(kl_estimate(proximal - behaviour)), "ess": float(share)}

    @torch.no_grad()
    def _set_targets(self, batch: Any) -> float:
        """Write advantages and returns into a rollout; returns the explained variance of its values."""
        norm, reward = self.policy.value_norm, batch["next", "agents", "reward"]
        if len(batch.batch_size) != 2:
            raise RolloutError(f"the batch has the shape {list(batch.batch_size)}, expected [environment, time]")
        terminated, done = batch["next", "terminated"], batch["next", "done"]
        value = batch[VALUE]
        next_value = norm.denormalize(self._next_values(batch, value, terminated, done))
        value = norm.denormalize(value)
        end = terminated if self.config.navrl_compat else done
        advantage, target = self.policy.gae(reward, terminated, end, value, next_value)
        advantage = (advantage - advantage.mean()) / advantage.std().clamp(min=1e-7)
        quantities = {"reward": reward, "value": value, "advantage": advantage, "return": target}
        require_finite(f"update {self.num_updates}", quantities, "the policy is as it was")
        norm.update(target)
        batch.set(ADVANTAGE, advantage)
        batch.set(RETURN, norm.normalize(target))
        return float(explained_variance(value, target))

    def _next_values(
        self, batch: Any, value: torch.Tensor, terminated: torch.Tensor, done: torch.Tensor
    ) -> torch.Tensor:
        """Return values of next observations; those of terminated steps mean nothing."""
        seen, seen_next = (batch[(*prefix, "agents", "observation", "state")] for prefix in ((), ("next",)))
        is_new = torch.ones_like(done[..., 0])
        is_new[:, :-1] = done[:, :-1, 0] | (seen[:, 1:] != seen_next[:, :-1]).any(-1)
        is_new &= ~terminated[..., 0]
        values = value.roll(-1, 1)
        flat, flat_values = batch.reshape(-1), values.view(-1, 1)
        for index in in_chunks(is_new.reshape(-1).nonzero().squeeze(1)):
            flat_values[index] = self.policy.evaluate(flat[index]["next"])[1]
        return values

    @torch.no_grad()
    def _set_proximal(self, batch: Any, *, is_lagged: bool) -> None:
        """Write what losses compare the policy with, where that differs from what the rollout contains.

        Samples of an older policy, and mirrored samples, have log-probabilities of the present policy, and an
        importance weight: how much more often the present policy would have acted that way.
        """
        if not is_lagged and not self.config.mirror:
            return
        behaviour = batch[LOG_PROB]
        proximal = batch[PROXIMAL_LOG_PROB] if is_lagged else behaviour.clone()
        value = batch[VALUE].clone()
        largest = torch.full_like(behaviour, self.config.max_importance_weight)
        if self.config.mirror:
            self._mirror(batch, proximal, value, largest)
        batch.set(PROXIMAL_LOG_PROB, proximal)
        batch.set(PROXIMAL_VALUE, value)
        batch.set(IMPORTANCE, torch.minimum(importance_weight(proximal, behaviour), largest))

    def _mirror(self, batch: Any, proximal: torch.Tensor, value: torch.Tensor, largest: torch.Tensor) -> None:
        """Choose every other sample of a rollout to be mirrored, and replace its numbers by its mirror image's.

        A sample stays as it is if the present policy would hardly take the mirrored action: its importance weight
        would be next to nothing, and the estimate of the KL divergence would explode.
        """
        samples = batch.exclude("next").reshape(-1)
        index, image = mirror_every_other(self.policy, samples, self.config.update_threads)
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

    def _set_lesson(self, batch: Any) -> None:
        """Write into a rollout what the teacher would do, about other environments in each update."""
        if self._teacher is None or not self.teacher_coefficient:
            return
        interval = self.config.teacher_interval
        first = self.num_updates % interval
        lesson = ask(self._teacher, batch, first=first, interval=interval, threads=self.config.update_threads)
        batch.set(TEACHER_ACTION, lesson.action)
        batch.set(TEACHER_WEIGHT, lesson.weight)

    def _step(self, minibatch: TensorDictBase, where: str) -> dict[str, torch.Tensor]:
        """Take a step of all optimizers, or none."""
        metrics = self._set_gradients(minibatch)
        for name, part in self._parts().items():
            is_free = self.config.navrl_compat and name == "feature_extractor"
            limit = float("inf") if is_free else self.config.max_grad_norm
            metrics[f"{name}_grad_norm"] = nn.utils.clip_grad_norm_(part.parameters(), limit)
        try:
            require_finite(where, metrics, "this step was not taken, and parameters are as after the step before")
        except ArithmeticError:
            for optimizer in self._optimizers.values():
                optimizer.zero_grad()
            raise
        for optimizer in self._optimizers.values():
            optimizer.step()
        return metrics

    def _set_gradients(self, minibatch: TensorDictBase) -> dict[str, torch.Tensor]:
        """Set the gradients of all parameters; return the metrics of the minibatch."""
        parameters = list(self.policy.parameters())
        metrics, gradients = sum_gradients(self._losses, minibatch, parameters, self.config.update_threads)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return metrics

    def _losses(self, minibatch: TensorDictBase) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the metrics of some samples, and the loss to minimise."""
        config = self.config
        seen, action = self.policy.observation(minibatch), minibatch.get(ACTION_NORMALIZED)
        mirrored = minibatch.get(MIRRORED) if config.mirror else None
        if mirrored is not None:
            seen, action = reflect_some(seen, action, mirrored)
        distribution, value = self.policy.heads(self._features(*seen))
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
        if self._teacher is not None and self.teacher_coefficient:
            target = minibatch.get(TEACHER_ACTION)
            if mirrored is not None:
                target = reflect_action_where(target, mirrored)
            imitation = imitation_loss(distribution.mean, target, minibatch.get(TEACHER_WEIGHT))
            loss = loss + self.teacher_coefficient * imitation
            metrics["imitation_loss"] = imitation
        return metrics, loss


def _asymmetry(mean: torch.Tensor, target: torch.Tensor, mirrored: torch.Tensor) -> torch.Tensor:
    """Return the mean squared distance of actions in mirrored observations from the mirrored actions."""
    squared = (mean - target).square().sum(-1)
    # A mean over all samples, of which half may be mirrored, so that parts of a minibatch add up.
    return 2 * (squared * mirrored).mean()
