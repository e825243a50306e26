"""What PPO is set to: frozen, checked when made, with NavRL's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast, get_args

import torch

from slipstream.checks import require_choice, require_count, require_number, require_positive
from slipstream.errors import ConfigurationError

Precision = Literal["float32", "bfloat16"]

# Functions of torch.cpu, which some versions do not have.
_BFLOAT16_CHECKS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


@dataclass(frozen=True)
class FeatureExtractorConfig:
    """How the feature extractor learns.

    Attributes:
        learning_rate: Of its Adam.

    Raises:
        ConfigurationError: If a value is out of range; says which and why.
    """

    learning_rate: float = 5e-4

    def __post_init__(self) -> None:
        require_positive("feature_extractor.learning_rate", self.learning_rate)


@dataclass(frozen=True)
class ActorConfig:
    """How the actor learns.

    Attributes:
        learning_rate: Of its Adam.
        clip_ratio: How far the probability ratio may leave 1 before there is nothing more to gain.

    Raises:
        ConfigurationError: If a value is out of range; says which and why.
    """

    learning_rate: float = 5e-4
    clip_ratio: float = 0.1

    def __post_init__(self) -> None:
        require_positive("actor.learning_rate", self.learning_rate)
        require_positive("actor.clip_ratio", self.clip_ratio)


@dataclass(frozen=True)
class CriticConfig:
    """How the critic learns.

    Attributes:
        learning_rate: Of its Adam.
        clip_ratio: How far a value may leave that of the rollout, in normalised units, before there is nothing more to
            gain.

    Raises:
        ConfigurationError: If a value is out of range; says which and why.
    """

    learning_rate: float = 5e-4
    clip_ratio: float = 0.1

    def __post_init__(self) -> None:
        require_positive("critic.learning_rate", self.learning_rate)
        require_positive("critic.clip_ratio", self.clip_ratio)


@dataclass(frozen=True)
class PPOConfig:
    """NavRL's PPO.

    Attributes:
        feature_extractor: How the feature extractor learns.
        actor: How the actor learns.
        critic: How the critic learns.
        entropy_loss_coefficient: How much entropy is worth.
        training_frame_num: Number of steps of each environment in a rollout; for collectors.
        training_epoch_num: How many times an update goes through a rollout.
        num_minibatches: In how many parts, each time.
        gamma: Discount of a step.
        lmbda: Of generalised advantage estimation: 0 trusts the critic, 1 the returns.
        huber_delta: From where on the value loss is linear.
        max_grad_norm: What the gradient of each of the three parts is clipped to.
        value_norm_beta: How much of the running value statistics stays from one update to the next.
        max_importance_weight: Where weights of data from an older policy are cut off.
        mirror: Whether to learn from the mirror images of half of the samples, so that the policy treats left and right
            alike.
        mirror_coefficient: Weight of the squared difference between the mean action in a mirrored observation and the
            mirrored mean action.
        teacher_coefficient: Initial weight of the squared difference between the mean action and a teacher's.
        teacher_interval: The teacher is asked about every N-th environment of a rollout.
        precision: What features are computed in: ``float32``, or ``bfloat16``, which is faster where the CPU has
            instructions for it. Parameters, losses and optimizers are float32 either way.
        update_threads: Number of parts of a minibatch that are computed at once, on a thread each; 1 leaves it to torch
            to divide single operations between its threads, which is slower for small minibatches. Results depend on
            it in their last bits. From 2 on, they do not depend on the number of torch's threads.
        navrl_compat: Whether to repeat the original's faults: advantages leak across truncation, the feature
            extractor's gradient is not clipped, and the larger of the two value losses is chosen for a whole minibatch.

    Raises:
        ConfigurationError: If a value is out of range; says which and why.

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
    mirror: bool = False
    mirror_coefficient: float = 3.0
    teacher_coefficient: float = 0.0
    teacher_interval: int = 4
    precision: Precision = "float32"
    update_threads: int = 1
    navrl_compat: bool = False

    def __post_init__(self) -> None:
        counts = ("training_frame_num", "training_epoch_num", "num_minibatches", "teacher_interval", "update_threads")
        for name in counts:
            require_count(name, getattr(self, name))
        for name in ("gamma", "lmbda"):
            require_number(name, getattr(self, name), 0, 1)
        for name in ("huber_delta", "max_grad_norm"):
            require_positive(name, getattr(self, name))
        require_number("mirror_coefficient", self.mirror_coefficient, 0)
        require_number("teacher_coefficient", self.teacher_coefficient, 0)
        require_choice("precision", self.precision, get_args(Precision))
        require_number("entropy_loss_coefficient", self.entropy_loss_coefficient, 0)
        require_number("value_norm_beta", self.value_norm_beta, 0, 1)
        if self.value_norm_beta == 1.0:
            raise ConfigurationError("value_norm_beta is 1, expected less than 1: nothing new would ever count")
        if self.navrl_compat and self.update_threads > 1:
            raise ConfigurationError(
                f"update_threads is {self.update_threads}, expected 1 with navrl_compat, whose value loss has no parts"
            )
        # Data of the policy itself has the weight 1 and must not be cut off.
        require_number("max_importance_weight", self.max_importance_weight, 1)


def resolve_precision(precision: str) -> Precision:
    """Return the precision of features; ``auto`` is bfloat16 if the CPU has instructions for it, else float32."""
    if precision != "auto":
        return cast("Precision", precision)
    for name in _BFLOAT16_CHECKS:
        check = getattr(torch.cpu, name, None)
        if check is not None and check():
            return "bfloat16"
    return "float32"
