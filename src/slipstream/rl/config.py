"""What PPO is set to: frozen, checked when made, with NavRL's names and defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from slipstream.errors import ConfigurationError


@dataclass(frozen=True)
class FeatureExtractorConfig:
    """How the feature extractor learns.

    Attributes:
        learning_rate: Of its Adam.

    Raises:
        ConfigurationError: If a value makes no sense; says which and why.
    """

    learning_rate: float = 5e-4

    def __post_init__(self) -> None:
        _require_positive("feature_extractor.learning_rate", self.learning_rate)


@dataclass(frozen=True)
class ActorConfig:
    """How the actor learns.

    Attributes:
        learning_rate: Of its Adam.
        clip_ratio: How far the probability ratio may leave 1 before there is nothing more to gain.

    Raises:
        ConfigurationError: If a value makes no sense; says which and why.
    """

    learning_rate: float = 5e-4
    clip_ratio: float = 0.1

    def __post_init__(self) -> None:
        _require_positive("actor.learning_rate", self.learning_rate)
        _require_positive("actor.clip_ratio", self.clip_ratio)


@dataclass(frozen=True)
class CriticConfig:
    """How the critic learns.

    Attributes:
        learning_rate: Of its Adam.
        clip_ratio: How far a value may leave that of the rollout, in normalised units, before there is nothing more to
            gain.

    Raises:
        ConfigurationError: If a value makes no sense; says which and why.
    """

    learning_rate: float = 5e-4
    clip_ratio: float = 0.1

    def __post_init__(self) -> None:
        _require_positive("critic.learning_rate", self.learning_rate)
        _require_positive("critic.clip_ratio", self.clip_ratio)


@dataclass(frozen=True)
class PPOConfig:
    """NavRL's PPO.

    Attributes:
        feature_extractor: How the feature extractor learns.
        actor: How the actor learns.
        critic: How the critic learns.
        entropy_loss_coefficient: How much entropy is worth.
        training_frame_num: How many steps of each environment make a rollout; for whoever collects.
        training_epoch_num: How many times an update goes through a rollout.
        num_minibatches: In how many parts, each time.
        gamma: Discount of a step.
        lmbda: Of generalised advantage estimation: 0 trusts the critic, 1 the returns.
        huber_delta: From where on the value loss is linear.
        max_grad_norm: What the gradient of each of the three parts is clipped to.
        value_norm_beta: How much of the running value statistics stays from one update to the next.
        max_importance_weight: Where weights of data from an older policy are cut off.
        navrl_compat: Whether to repeat the original's faults: advantages leak across truncation, the feature
            extractor's gradient is not clipped, and the larger of the two value losses is chosen for a whole minibatch.

    Raises:
        ConfigurationError: If a value makes no sense; says which and why.

    Example:
        >>> PPOConfig(gamma=0.95, actor=ActorConfig(clip_ratio=0.2)).actor.learning_rate
        0.0005
    """

    feature_extractor: FeatureExtractorConfig = field(default_factory=FeatureExtractorConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    entropy_loss_coefficient: float = 1e-3
    training_frame_num: int = 32
    training_epoch_num: int = 4
    num_minibatches: int = 16
    gamma: float = 0.99
    lmbda: float = 0.95
    huber_delta: float = 10.0
    max_grad_norm: float = 5.0
    value_norm_beta: float = 0.995
    max_importance_weight: float = 2.0
    navrl_compat: bool = False

    def __post_init__(self) -> None:
        for name in ("training_frame_num", "training_epoch_num", "num_minibatches"):
            _require_count(name, getattr(self, name))
        for name in ("gamma", "lmbda"):
            _require_within(name, getattr(self, name), 1.0)
        for name in ("huber_delta", "max_grad_norm"):
            _require_positive(name, getattr(self, name))
        _require_within("entropy_loss_coefficient", self.entropy_loss_coefficient, math.inf)
        _require_within("value_norm_beta", self.value_norm_beta, 1.0)
        if self.value_norm_beta == 1.0:
            raise ConfigurationError("value_norm_beta is 1, expected less than 1: nothing new would ever count")
        _require_positive("max_importance_weight", self.max_importance_weight)
        if self.max_importance_weight < 1.0:
            raise ConfigurationError(
                f"max_importance_weight is {self.max_importance_weight}, expected at least 1: data of the policy "
                "itself has the weight 1"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{name} is {value!r}, expected a whole number of at least 1")


def _require_positive(name: str, value: float) -> None:
    if not _is_number(value) or value <= 0:
        raise ConfigurationError(f"{name} is {value!r}, expected a number above 0")


def _require_within(name: str, value: float, most: float) -> None:
    if not _is_number(value) or not 0 <= value <= most:
        expected = "a number from 0 on" if most == math.inf else f"a number from 0 to {most:g}"
        raise ConfigurationError(f"{name} is {value!r}, expected {expected}")
