"""`PPO`: improve a policy from rollouts, correctly by default, as NavRL does on request."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slipstream.checks import require_number
from slipstream.dist.group import ShardGroup
from slipstream.dist.threads import one_thread
from slipstream.errors import ConfigurationError, NonFiniteError, StateMismatchError
from slipstream.rl.config import PPOConfig
from slipstream.rl.finite import require_finite
from slipstream.rl.gradients import Metrics, gradients_of, sum_gradients
from slipstream.rl.losses import effective_sample_share, explained_variance
from slipstream.rl.network import Choice, NavRLPolicy
from slipstream.rl.objective import ADVANTAGE, RETURN, TEACHER_ACTION, TEACHER_WEIGHT, Objective
from slipstream.rl.proximal import catch_up, set_proximal
from slipstream.rl.targets import Moments, Targets, estimate_targets
from slipstream.rl.teacher import Teacher, ask

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Minibatches = Callable[..., Iterable["TensorDictBase"]]
"""Yields the steps of a rollout in parts, as TensorDicts; called once per epoch.

With a group, it is also called with the keyword ``generator``: that of the shard.
"""

_LEAST_DEVIATION = 1e-7


class PPO:
    """Proximal policy optimisation of a `NavRLPolicy`, with an Adam each for feature extractor, actor and critic.

    A rollout is a TensorDict ``[environment, time]``, or anything with its ``batch_size``, ``[key]``,
    ``set(key, value)``, ``exclude(key)``, ``reshape(-1)`` and, of that, ``[index]``: a ``CompressedTensorDict`` trains
    unchanged, and with the same minibatches bit for bit the same.

    Values are those that the policy gave when it acted. Those of next observations are computed only where they are not
    those of the next step: at the end of the rollout and of episodes.

    The configuration decides on discount, decay and value normalisation, whatever a loaded state dict says.

    With a `group`, an update takes a list with a rollout for each shard of this process, and every process of the group
    takes part in it. All processes end with the same parameters, and these are the same bits for any number of
    processes: shards are computed separately, on one thread each, and their gradients, statistics and metrics are added
    by `ShardGroup.sum`. Gradients are clipped, and optimizers step, after that.

    Args:
        policy: What to improve; a new one by default.
        config: How.
        teacher: Whose actions to imitate besides, with the weight `teacher_coefficient`; see `slipstream.rl.teacher`.
        compile: Whether to compile the feature extractor for updates with ``torch.compile``: the same within rounding,
            faster once the first minibatch has been waited for. Minibatches should then be of equal size.
        group: The shards that learn together; None for a single rollout per update.

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
        group: ShardGroup | None = None,
    ) -> None:
        self._group = group
        self.policy = NavRLPolicy() if policy is None else policy
        self.config = PPOConfig() if config is None else config
        self.num_updates = 0
        self._teacher = teacher
        self.teacher_coefficient = self.config.teacher_coefficient
        self._apply_config()
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        # The fused step divides tensors among threads, and rounds differently where the parts meet.
        foreach = None if group is None else False
        for name, part in self._parts().items():
            rate = getattr(self.config, name).learning_rate
            self._optimizers[name] = torch.optim.Adam(part.parameters(), lr=rate, fused=group is None, foreach=foreach)
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
        generators: Sequence[torch.Generator] = (),
    ) -> dict[str, float]:
        """Improve the policy from a rollout.

        Writes ``adv`` (normalised) and ``ret`` (normalised) into the rollout. If the policy that collected it is older
        than this one, ``proximal_log_prob`` and ``state_value`` of this one are written as well; ratios are clipped
        against this one, and each sample is weighted by how much more often than the older one it would have acted so.

        Args:
            batch: Rollout with what `act` and an environment write; with a group, a list with one for each shard of
                this process, all of the same shape.
            minibatches: Makes the parts of an epoch; by default all steps shuffled, in `num_minibatches` parts. For a
                ``CompressedTensorDict``, ``lambda batch: batch.minibatches(16)`` decodes least.
            staleness: How many updates older the policy that collected the rollout is than this one.
            generator: Where the default order comes from; torch's own by default.
            generators: With a group, where the order of each shard of this process comes from.

        Returns:
            ``actor_loss, value_loss, entropy, approx_kl, clip_fraction``, and of each part its ``_grad_norm`` before
            clipping: means over minibatches; ``explained_variance`` of the values in the rollout; ``staleness``; and of
            that lag ``behaviour_kl`` (0 without) and ``ess``, the effective share of the samples (1 without). While
            the teacher has a weight, ``imitation_loss``.

        Raises:
            NonFiniteError: If a target, a loss or a gradient is not finite. Bad targets leave the policy as it was; a
                bad minibatch is not applied, those before it are.
            ConfigurationError: If there are not enough steps for the minibatches, or, with a group, not
                `num_minibatches` of them.
            RolloutError: If the batch is not ``[environment, time]``.
            RankLostError: If another process of the group has exited.
        """
        self._apply_config()
        if self._group is not None:
            return self._update_shards(self._group, batch, minibatches, staleness, generators)
        lag = {"behaviour_kl": 0.0, "ess": 1.0}
        if staleness > 0:
            divergence, weight = catch_up(self.policy, batch)
            lag = {"behaviour_kl": float(divergence), "ess": float(effective_sample_share(weight))}
        explained = self._set_targets(batch)
        threads = self.config.update_threads
        set_proximal(self.policy, batch, self.config, is_lagged=staleness > 0, threads=threads)
        self._set_lesson(batch, threads)
        if minibatches is None:
            minibatches = functools.partial(shuffle, num_minibatches=self.config.num_minibatches, generator=generator)
        parameters = list(self.policy.parameters())
        objective = self._objective()
        rows: list[Metrics] = []
        for epoch in range(self.config.training_epoch_num):
            for number, minibatch in enumerate(minibatches(batch)):
                metrics, gradients = sum_gradients(objective, minibatch, parameters, threads)
                rows.append(self._step(metrics, gradients, f"epoch {epoch}, minibatch {number}"))
        return {**self._finish(rows), "explained_variance": explained, "staleness": float(staleness), **lag}

    def _parts(self) -> dict[str, nn.Module]:
        policy = self.policy
        return {"feature_extractor": policy.feature_extractor, "actor": policy.actor, "critic": policy.critic}

    def _apply_config(self) -> None:
        self.policy.value_norm.beta = self.config.value_norm_beta
        self.policy.gae.set_to(self.config.gamma, self.config.lmbda)
        self.policy.precision = self.config.precision

    def _objective(self) -> Objective:
        return Objective(self.policy, self.config, self._features, self.teacher_coefficient)

    def _finish(self, rows: Sequence[Metrics]) -> dict[str, float]:
        """Count an update, and return the means of its metrics."""
        if not rows:
            raise ConfigurationError("there was no minibatch, expected at least one")
        self.num_updates += 1
        means = torch.stack([torch.stack(list(row.values())) for row in rows]).mean(0).tolist()
        return dict(zip(rows[0], means, strict=True))

    def _set_targets(self, batch: Any) -> float:
        """Write advantages and returns into a rollout; returns the explained variance of its values."""
        targets = estimate_targets(self.policy, batch, navrl_compat=self.config.navrl_compat)
        raw = targets.advantage
        advantage = (raw - raw.mean()) / raw.std().clamp(min=_LEAST_DEVIATION)
        checked = Targets(targets.reward, targets.value, advantage, targets.target)
        require_finite(f"update {self.num_updates}", checked.named(), "the policy is as it was")
        norm = self.policy.value_norm
        norm.update(targets.target)
        batch.set(ADVANTAGE, advantage)
        batch.set(RETURN, norm.normalize(targets.target))
        return float(explained_variance(targets.value, targets.target))

    def _set_lesson(self, batch: Any, threads: int) -> None:
        """Write into a rollout what the teacher would do, about other environments in each update."""
        if self._teacher is None or not self.teacher_coefficient:
            return
        interval = self.config.teacher_interval
        first = self.num_updates % interval
        lesson = ask(self._teacher, batch, first=first, interval=interval, threads=threads)
        batch.set(TEACHER_ACTION, lesson.action)
        batch.set(TEACHER_WEIGHT, lesson.weight)

    def _step(self, metrics: Metrics, gradients: Sequence[torch.Tensor], where: str) -> Metrics:
        """Take a step of all optimizers, or none; returns the metrics with the norms of gradients."""
        for parameter, gradient in zip(self.policy.parameters(), gradients, strict=True):
            parameter.grad = gradient
        metrics = dict(metrics)
        for name, part in self._parts().items():
            is_free = self.config.navrl_compat and name == "feature_extractor"
            limit = float("inf") if is_free else self.config.max_grad_norm
            metrics[f"{name}_grad_norm"] = nn.utils.clip_grad_norm_(part.parameters(), limit)
        outcome = "this step was not taken, and parameters are as after the step before"
        try:
            require_finite(f"update {self.num_updates}, {where}", metrics, outcome)
        except ArithmeticError:
            for optimizer in self._optimizers.values():
                optimizer.zero_grad()
            raise
        for optimizer in self._optimizers.values():
            optimizer.step()
        return metrics

    # Shards

    def _update_shards(
        self,
        group: ShardGroup,
        rollouts: Sequence[Any],
        minibatches: Minibatches | None,
        staleness: int,
        generators: Sequence[torch.Generator],
    ) -> dict[str, float]:
        """Improve the policy from a rollout of each shard; see the class."""
        _require_one_each(group, "rollouts", rollouts)
        _require_one_each(group, "generators", generators)
        first = group.local_shards.start
        with one_thread():
            lag = {"behaviour_kl": 0.0, "ess": 1.0}
            if staleness > 0:
                lag = self._catch_up_shards(group, rollouts)
            explained = self._set_shard_targets(group, rollouts)

            def prepare(shard: int) -> None:
                rollout = rollouts[shard - first]
                set_proximal(self.policy, rollout, self.config, is_lagged=staleness > 0, threads=1)
                self._set_lesson(rollout, 1)

            group.map(prepare)
            if minibatches is None:
                minibatches = functools.partial(shuffle, num_minibatches=self.config.num_minibatches)
            rows: list[Metrics] = []
            for epoch in range(self.config.training_epoch_num):
                iterators = []
                for rollout, generator in zip(rollouts, generators, strict=True):
                    iterators.append(iter(minibatches(rollout, generator=generator)))
                for number in range(self.config.num_minibatches):
                    metrics, gradients = self._sum_shards(group, iterators)
                    rows.append(self._step(metrics, gradients, f"epoch {epoch}, minibatch {number}"))
                for iterator in iterators:
                    if next(iterator, None) is not None:
                        raise ConfigurationError(
                            f"a shard has more than num_minibatches={self.config.num_minibatches} minibatches"
                        )
            return {**self._finish(rows), "explained_variance": explained, "staleness": float(staleness), **lag}

    def _sum_shards(
        self, group: ShardGroup, iterators: Sequence[Iterator[TensorDictBase]]
    ) -> tuple[Metrics, list[torch.Tensor]]:
        """Return metrics and gradients of a minibatch: the union of the next parts of all shards."""
        parameters = list(self.policy.parameters())
        objective = self._objective()
        first = group.local_shards.start
        names: list[str] = []

        def compute(shard: int) -> torch.Tensor:
            part = next(iterators[shard - first], None)
            if part is None:
                raise ConfigurationError(f"shard {shard} has fewer than {self.config.num_minibatches} minibatches")
            # All shards have as many samples, and a power of two divides without rounding.
            metrics, gradients = gradients_of(objective, part, parameters, 1 / group.shards)
            if shard == first:
                names.extend(metrics)
            return torch.cat([torch.stack(list(metrics.values())), *[one.reshape(-1) for one in gradients]])

        total = group.sum(group.map(compute))
        metrics = dict(zip(names, total[: len(names)].unbind(), strict=True))
        gradients = []
        place = len(names)
        for parameter in parameters:
            gradients.append(total[place : place + parameter.numel()].view_as(parameter))
            place += parameter.numel()
        return metrics, gradients

    def _catch_up_shards(self, group: ShardGroup, rollouts: Sequence[Any]) -> dict[str, float]:
        """Write what the present policy thinks of the actions of an older one; returns how far they are apart."""
        first = group.local_shards.start

        def compute(shard: int) -> torch.Tensor:
            divergence, weight = catch_up(self.policy, rollouts[shard - first])
            weight = weight.double()
            sums = (divergence.double(), weight.sum(), weight.square().sum(), torch.ones_like(weight).sum())
            return torch.stack(sums)

        divergence, weights, squares, count = group.sum(group.map(compute)).tolist()
        return {"behaviour_kl": divergence / group.shards, "ess": weights**2 / (squares * count)}

    def _set_shard_targets(self, group: ShardGroup, rollouts: Sequence[Any]) -> float:
        """Write advantages and returns into the rollouts, normalised by the moments of all shards."""
        first = group.local_shards.start

        def estimate(shard: int) -> Targets:
            return estimate_targets(self.policy, rollouts[shard - first], navrl_compat=self.config.navrl_compat)

        estimates = group.map(estimate)
        # A shard that is not finite makes the sum not finite, so every process notices.
        moments = Moments(group.sum([Moments.row(targets) for targets in estimates]))
        if not moments.are_finite():
            for targets in estimates:
                require_finite(f"update {self.num_updates}", targets.named(), "the policy is as it was")
            raise NonFiniteError(
                f"update {self.num_updates}: the targets of a shard of another process are not finite; the policy is "
                "as it was"
            )
        norm = self.policy.value_norm
        norm.update_moments(*moments.target())
        mean, deviation = moments.advantage()
        for rollout, targets in zip(rollouts, estimates, strict=True):
            rollout.set(ADVANTAGE, (targets.advantage - mean) / deviation.clamp(min=_LEAST_DEVIATION))
            rollout.set(RETURN, norm.normalize(targets.target))
        return moments.explained_variance()


def shuffle(batch: Any, *, num_minibatches: int, generator: torch.Generator | None = None) -> Iterator[TensorDictBase]:
    """Yield all steps of a rollout once, in random order, in parts of nearly equal size.

    Args:
        batch: Rollout ``[environment, time]``.
        num_minibatches: How many parts.
        generator: Where the order comes from; torch's own by default.

    Raises:
        ConfigurationError: If there are fewer steps than parts.
    """
    # No loss needs next observations, so minibatches should not copy them.
    flat = batch.exclude("next").reshape(-1)
    size = flat.batch_size[0]
    if size < num_minibatches:
        raise ConfigurationError(f"the batch has {size} steps, expected at least one for {num_minibatches} minibatches")
    for index in torch.randperm(size, generator=generator).tensor_split(num_minibatches):
        yield flat[index]


def _require_one_each(group: ShardGroup, name: str, values: Sequence[Any]) -> None:
    if not isinstance(values, Sequence) or len(values) != len(group.local_shards):
        raise ConfigurationError(f"expected a list of {len(group.local_shards)} {name}, one for each shard")
