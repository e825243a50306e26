"""Candidates whose flights can be foretold, and worlds small enough for a test."""

import torch

from slipstream.nav.observation import Observation
from slipstream.train.evaluation.pilots import Candidate
from slipstream.train.evaluation.scenarios import Scenario
from slipstream.train.settings import TrainSettings
from tests.train.conftest import small

EMPTY = Scenario("empty", "Empty world", "through", 1000, 1, 0, 0)
FEW_BOXES = Scenario("static", "Few boxes", "through", 1000, 16, 10, 0)
CROWDED = Scenario("through", "Through", "through", 1000, 4, 60, 80)


def long_enough(*overrides: str) -> TrainSettings:
    """Return settings with episodes that are long enough to cross the field."""
    return small("env.max_episode_length=400", *overrides)


def fly_straight(observation: Observation) -> torch.Tensor:
    """Fly to the goal at full speed, through whatever is in the way."""
    return 2.0 * observation.state[:, :3]


def stay(observation: Observation) -> torch.Tensor:
    """Stay where the drone is."""
    return torch.zeros_like(observation.state[:, :3])


STRAIGHT = Candidate("policy", "policy", lambda _: fly_straight)
STILL = Candidate("still", "still", lambda _: stay)
