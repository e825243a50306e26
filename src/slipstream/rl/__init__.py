"""NavRL's network and PPO: policy, distribution, advantages, value normalisation, updates. Knows nothing of files.

`NavRLPolicy` is what collects and what is saved; `PPO` improves it from rollouts. `ImageJointEncoder` is for policies
that see through cameras.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from slipstream.errors import NonFiniteError
from slipstream.rl.config import ActorConfig, CriticConfig, FeatureExtractorConfig, PPOConfig
from slipstream.rl.distributions import IndependentBeta
from slipstream.rl.encoder import ImageJointEncoder
from slipstream.rl.gae import GAE, generalized_advantages
from slipstream.rl.value_norm import ValueNorm

if TYPE_CHECKING:
    from slipstream.rl.network import NavRLPolicy
    from slipstream.rl.ppo import PPO

_NEED_TENSORDICT = {"NavRLPolicy": "slipstream.rl.network", "PPO": "slipstream.rl.ppo"}

__all__ = [
    "GAE",
    "PPO",
    "ActorConfig",
    "CriticConfig",
    "FeatureExtractorConfig",
    "ImageJointEncoder",
    "IndependentBeta",
    "NavRLPolicy",
    "NonFiniteError",
    "PPOConfig",
    "ValueNorm",
    "generalized_advantages",
]


def __getattr__(name: str) -> Any:
    if name not in _NEED_TENSORDICT:
        raise AttributeError(f"module 'slipstream.rl' has no attribute {name!r}")
    return getattr(importlib.import_module(_NEED_TENSORDICT[name]), name)
