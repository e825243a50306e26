"""An embedded simulator of drone navigation: NavRL's task in batched torch, on any device.

`NavigationEnv` is it for TorchRL, `NavigationVectorEnv` for Gymnasium, `Simulation` for neither; the first two are
imported on first use, with the library they are for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from slipstream.nav.avoidance import ShieldConfig
from slipstream.nav.config import LidarConfig, NavigationConfig
from slipstream.nav.frame import MAX_SPEED_M_S, to_goal_frame, to_world_frame, velocity_from_unit
from slipstream.nav.lidar import Lidar
from slipstream.nav.observation import Observation
from slipstream.nav.planner import Planner
from slipstream.nav.shield import Shield
from slipstream.nav.simulation import Outcome, Simulation
from slipstream.nav.world import StaticMap, generate_map

if TYPE_CHECKING:
    from slipstream.nav.env import NavigationEnv as NavigationEnv
    from slipstream.nav.gym import NavigationVectorEnv as NavigationVectorEnv

__all__ = [
    "MAX_SPEED_M_S",
    "Lidar",
    "LidarConfig",
    "NavigationConfig",
    "NavigationEnv",
    "NavigationVectorEnv",
    "Observation",
    "Outcome",
    "Planner",
    "Shield",
    "ShieldConfig",
    "Simulation",
    "StaticMap",
    "generate_map",
    "to_goal_frame",
    "to_world_frame",
    "velocity_from_unit",
]

_LAZY = {"NavigationEnv": "slipstream.nav.env", "NavigationVectorEnv": "slipstream.nav.gym"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'slipstream.nav' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
