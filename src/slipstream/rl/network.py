"""NavRL's network, to the key: a state dict of the original loads with ``strict=True``, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import nn
from torch.nn import functional

from slipstream.checks import require_choice
from slipstream.errors import ConfigurationError
from slipstream.rl.config import Precision
from slipstream.rl.distributions import IndependentBeta
from slipstream.rl.folding import fold, folded_convolution, folded_linear, placement
from slipstream.rl.gae import GAE
from slipstream.rl.value_norm import ValueNorm
from slipstream.text import install_hint

try:
    from tensordict.nn import TensorDictModuleBase
    from tensordict.nn.probabilistic import InteractionType, interaction_type
except ImportError as error:
    raise ImportError(
        f"slipstream.rl needs tensordict, which is not installed: {install_hint('train')}, or tensordict by itself"
    ) from error

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Choice = Literal["sample", "mean", "mode"]

ACTION_DIM = 3
OBSERVATION_SHAPES = {"lidar": (1, 36, 4), "dynamic_obstacle": (1, 5, 10), "state": (8,)}
ACTION_NORMALIZED = ("agents", "action_normalized")
ACTION = ("agents", "action")
LOG_PROB = "sample_log_prob"
VALUE = "state_value"

_OBSERVATION_KEYS = [("agents", "observation", name) for name in OBSERVATION_SHAPES]
_CONVOLUTIONS = (0, 2, 4)
_LEAST_CONCENTRATION = 1.0 + 1e-6
_CHOICES: dict[InteractionType | None, Choice] = {
    None: "sample",
    InteractionType.RANDOM: "sample",
    InteractionType.MODE: "mode",
    InteractionType.MEAN: "mean",
    InteractionType.DETERMINISTIC: "mean",
}


class _Level(nn.Module):
    """A level of the original's parameter names, where it has a module of TensorDicts around another."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, values: torch.Tensor) -> Any:
        return self.module(values)


class LidarNetwork(nn.Sequential):
    """Three convolutions over azimuth and pitch, ``[batch, 1, 36, 4]`` to 128 features.

    Args:
        folded: Whether to compute them with the pitch axis folded into channels: the same within rounding, faster.
    """

    def __init__(self, folded: bool) -> None:
        super().__init__(
            nn.Conv2d(1, 4, (5, 3), padding=(2, 1)),
            nn.ELU(),
            nn.Conv2d(4, 16, (5, 3), stride=(2, 1), padding=(2, 1)),
            nn.ELU(),
            nn.Conv2d(16, 16, (5, 3), stride=(2, 2), padding=(2, 1)),
            nn.ELU(),
            nn.Flatten(),
            nn.Linear(288, 128),
            nn.LayerNorm(128),
        )
        self.folded = folded
        width = OBSERVATION_SHAPES["lidar"][2]
        for number in _CONVOLUTIONS:
            places = placement(width, self._convolution(number))
            self.register_buffer(f"places_{number}", places, persistent=False)
            width = places.shape[1]

    def forward(self, lidar: torch.Tensor) -> torch.Tensor:
        """Return features ``[batch, 128]``."""
        if not self.folded:
            return cast("torch.Tensor", super().forward(lidar))  # type: ignore[no-untyped-call]
        values = fold(lidar)
        for number in _CONVOLUTIONS:
            places = self.get_buffer(f"places_{number}")
            # In place, the gradient comes from the result, without a second exponential.
            values = functional.elu_(folded_convolution(values, self._convolution(number), places))
        linear = cast("nn.Linear", self[7])
        return cast("torch.Tensor", self[8](folded_linear(values, linear, self._convolution(4).out_channels)))

    def _convolution(self, number: int) -> nn.Conv2d:
        return cast("nn.Conv2d", self[number])


class FeatureExtractor(nn.Module):
    """Turns an observation into 256 features, from which both actor and critic are one linear layer away.

    Args:
        folded: See `LidarNetwork`.
    """

    def __init__(self, folded: bool) -> None:
        super().__init__()
        dynamic = nn.Sequential(nn.Flatten(), _mlp(50, 128, 64))
        # The third has no parameters in the original (it concatenates), but it has a number.
        parts = [_Level(LidarNetwork(folded)), _Level(dynamic), nn.Identity(), _Level(_mlp(200, 256, 256))]
        self.module = nn.ModuleList(parts)

    def forward(self, lidar: torch.Tensor, dynamic_obstacle: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return features ``[batch, 256]`` of observations with one batch axis."""
        # In this order, that of sorted keys; any other loads as well, and flies into everything.
        parts = [self.module[0](lidar), self.module[1](dynamic_obstacle), state]
        return cast("torch.Tensor", self.module[3](torch.cat(parts, -1)))


class BetaHead(nn.Module):
    """The concentrations of an `IndependentBeta`, both above 1."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_layer = nn.Linear(256, ACTION_DIM)
        self.beta_layer = nn.Linear(256, ACTION_DIM)

    def forward(self, features: torch.Tensor) -> IndependentBeta:
        """Return the distribution of actions for features ``[..., 256]``."""
        alpha = functional.softplus(self.alpha_layer(features)) + _LEAST_CONCENTRATION
        beta = functional.softplus(self.beta_layer(features)) + _LEAST_CONCENTRATION
        return IndependentBeta(alpha, beta)


class _Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.ModuleList([_Level(BetaHead())])

    def forward(self, features: torch.Tensor) -> IndependentBeta:
        return cast("IndependentBeta", self.module[0](features))


class NavRLPolicy(TensorDictModuleBase):  # type: ignore[misc, unused-ignore]
    """Actor, critic, value normalisation and discount of NavRL; a policy for TorchRL's collectors.

    Its ``state_dict`` has the original's keys and shapes and nothing else. Actor and critic begin orthogonal with gain
    0.01 and zero biases, as NavRL's: first actions are Beta(1.69, 1.69) nearly everywhere, first values nearly 0. The
    feature extractor begins as torch makes its layers, which is what the original has too.

    Args:
        action_map: Makes the environment's action of one in [0, 1]; without it, ``("agents", "action")`` is not
            written.
        folded: Whether the LiDAR's convolutions run folded: the same within rounding, in less time on a CPU.
        precision: What features are computed in, and then returned as float32.

    Example:
        >>> from tensordict import TensorDict
        >>> shapes = {"lidar": (1, 36, 4), "state": (8,), "dynamic_obstacle": (1, 5, 10)}
        >>> seen = {name: torch.zeros(2, *shape) for name, shape in shapes.items()}
        >>> policy = NavRLPolicy(action_map=lambda unit: 4 * unit - 2)
        >>> policy(TensorDict({"agents": {"observation": seen}}, [2]))["agents", "action"].shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        action_map: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        folded: bool = True,
        precision: Precision = "float32",
    ) -> None:
        super().__init__()
        self.action_map = action_map
        self.precision = precision
        actions = [ACTION_NORMALIZED] if action_map is None else [ACTION_NORMALIZED, ACTION]
        self.in_keys, self.out_keys = list(_OBSERVATION_KEYS), [*actions, LOG_PROB, VALUE]
        self.feature_extractor = FeatureExtractor(folded)
        self.actor = _Actor()
        self.critic = _Level(nn.Linear(256, 1))
        self.value_norm = ValueNorm(1)
        self.gae = GAE()
        for layer in (*self.actor.modules(), *self.critic.modules()):
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight, 0.01)
                nn.init.zeros_(layer.bias)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act as `act` does; TorchRL's ``set_exploration_type`` decides how actions are chosen, sampled if unset.

        Raises:
            ConfigurationError: If the exploration type is the median, for which there is no formula.
        """
        kind = interaction_type()
        if kind not in _CHOICES:
            raise ConfigurationError(
                f"the exploration type is {kind}, expected one of RANDOM, MEAN, MODE, DETERMINISTIC"
            )
        return self.act(tensordict, _CHOICES[kind])

    @torch.no_grad()
    def act(
        self, tensordict: TensorDictBase, choose: Choice = "sample", *, generator: torch.Generator | None = None
    ) -> TensorDictBase:
        """Choose actions for observations, without gradients.

        Writes ``("agents", "action_normalized")`` in [0, 1], ``("agents", "action")`` if there is an `action_map`,
        ``sample_log_prob`` and ``state_value`` (normalised), into the same TensorDict.

        Args:
            tensordict: Observations, with any batch shape; everything else in it stays as it is.
            choose: ``sample`` to explore; ``mean`` or ``mode`` to repeat itself. NavRL evaluates ``mean``.
            generator: Where samples come from; torch's global generator by default.

        Returns:
            The same TensorDict.

        Raises:
            ConfigurationError: If observations are of another shape, or `choose` is something else.
        """
        require_choice("choose", choose, get_args(Choice))
        distribution, value = self.evaluate(tensordict)
        action = distribution.sample(generator) if choose == "sample" else getattr(distribution, choose)
        tensordict.set(ACTION_NORMALIZED, action)
        if self.action_map is not None:
            tensordict.set(ACTION, self.action_map(action))
        tensordict.set(LOG_PROB, distribution.log_prob(action))
        tensordict.set(VALUE, value)
        return tensordict

    def evaluate(self, tensordict: TensorDictBase) -> tuple[IndependentBeta, torch.Tensor]:
        """Return the distribution of actions, and normalised values ``[..., 1]``, for observations of any batch shape.

        Raises:
            ConfigurationError: If observations are of another shape than the network's.
        """
        return self.heads(self.features(*self.observation(tensordict)))

    def observation(self, tensordict: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return LiDAR, dynamic obstacles and state from a TensorDict, checked.

        Raises:
            ConfigurationError: If they are of another shape than the network's.
        """
        lidar, dynamic, state = (tensordict.get(key) for key in _OBSERVATION_KEYS)
        for (name, shape), tensor in zip(OBSERVATION_SHAPES.items(), (lidar, dynamic, state), strict=True):
            if tensor.shape[-len(shape) :] != shape:
                raise ConfigurationError(
                    f"the observation {name!r} has shape {list(tensor.shape)}, expected it to end in {list(shape)}"
                )
        return lidar, dynamic, state

    def features(self, lidar: torch.Tensor, dynamic_obstacle: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return features ``[..., 256]`` for observations of any batch shape; made to be compiled."""
        batch = state.shape[:-1]
        flat = (lidar.reshape(-1, 1, 36, 4), dynamic_obstacle.reshape(-1, 1, 5, 10), state.reshape(-1, 8))
        with torch.autocast(state.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            features: torch.Tensor = self.feature_extractor(*flat)
        return features.float().reshape(*batch, features.shape[-1])

    def heads(self, features: torch.Tensor) -> tuple[IndependentBeta, torch.Tensor]:
        """Return the distribution of actions, and normalised values ``[..., 1]``, for features ``[..., 256]``."""
        return self.actor(features), self.critic(features)


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    first = (nn.Linear(inputs, hidden), nn.LeakyReLU(), nn.LayerNorm(hidden))
    return nn.Sequential(*first, nn.Linear(hidden, outputs), nn.LeakyReLU(), nn.LayerNorm(outputs))
