"""The planner as the teacher of a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.nav.avoidance import ShieldConfig
from slipstream.nav.config import LidarConfig
from slipstream.nav.frame import unit_from_velocity
from slipstream.nav.observation import Observation
from slipstream.nav.planner import Planner
from slipstream.rl.teacher import Teacher

if TYPE_CHECKING:
    from tensordict import TensorDictBase

_MARGIN = 0.02  # the mean of a Beta distribution comes close to 0 and 1, but reaching them takes infinite weights


def planner_teacher(lidar: LidarConfig) -> Teacher:
    """Return a teacher that flies as the planner does; it sees what the policy sees and nothing else.

    Args:
        lidar: The rays of the observation.
    """
    planner = Planner(ShieldConfig(lidar=lidar))

    def teach(samples: TensorDictBase) -> torch.Tensor:
        seen = samples.get(("agents", "observation"))
        observation = Observation(
            state=seen.get("state"),
            lidar=seen.get("lidar"),
            direction=seen.get("direction"),
            dynamic_obstacle=seen.get("dynamic_obstacle"),
        )
        command_m_s = planner(observation)
        return unit_from_velocity(command_m_s).clamp(_MARGIN, 1.0 - _MARGIN)

    return teach
