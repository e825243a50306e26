"""Entrants: a policy from a file, or the planner, with the settings of the world it flies in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.checks import require_choice
from slipstream.errors import ConfigurationError
from slipstream.rl.network import Choice
from slipstream.train.evaluation.pilots import Candidate, planner_candidate, policy_candidate, with_shield
from slipstream.train.evaluation.scenarios import SCENARIO_NAMES, Scenario, standard_scenarios
from slipstream.train.overrides import flatten, parse_overrides
from slipstream.train.policy import load_policy
from slipstream.train.settings import TrainSettings, compose_settings, override_settings

PLANNER = "planner"
FAITHFUL = ("sim.dynamics=hummingbird", "sim.dt=0.016", "sim.response_delay=0.0", "env.max_episode_length=2200")

# An evaluation sets these itself. An override would have no effect, or make a result look like another one.
_FIXED = {
    "env.start": "--scenario chooses the starts",
    "env.map_seed": "--scenario chooses the maps",
    "env.num_maps": "use --maps",
    "env.num_envs": "use --episodes",
    "env.inside_starts": "--scenario chooses the starts",
    "env.goal_truncates": "a flight always ends at the goal",
    "env.random_clocks": "every flight has the full time",
    "env.centred_reward": "the return is NavRL's",
    "env.collision_penalty": "the return is NavRL's",
    "env.collision_penalty_start": "the return is NavRL's",
    "env.collision_penalty_ramp": "the return is NavRL's",
    "env.danger_weight": "the return is NavRL's",
    "sim.response_delay": "evaluations fly without a random delay; use --faithful or --latency",
    "seed": "use --seed",
}


# What a policy senses and how its drone responds. Delays vary in training only.
_WORLD = ("sensor.", "sim.dynamics", "sim.dt", "env.num_obstacles", "env_dyn.")


@dataclass(frozen=True)
class Entrant:
    """What takes part in an evaluation.

    Attributes:
        candidate: What flies.
        settings: Of the evaluation.
        trained: Of the training; None for the planner, and for files that do not say.
        about: The policy's file, and how long it was trained.
        folder: Where evaluations are written by default.
    """

    candidate: Candidate
    settings: TrainSettings
    trained: TrainSettings | None
    about: dict[str, Any]
    folder: Path


def load_entrant(
    policy: str | None,
    overrides: Sequence[str] = (),
    *,
    planner: bool = False,
    faithful: bool = False,
    shield: bool = False,
    choose: Choice = "mean",
) -> Entrant:
    """Load a policy, or take the planner.

    Args:
        policy: A run's folder, one of its checkpoints, or a ``.pt`` of the original NavRL. The planner needs none, and
            flies in the world of that run if there is one.
        overrides: Settings in place of those of the training.
        planner: Whether the planner flies.
        faithful: Whether to fly NavRL's quadrotor with NavRL's step and episode length, whatever the settings say.
        shield: Whether commands pass through a shield.
        choose: How a policy's actions are chosen from their distribution.

    Raises:
        ConfigurationError: If there is no policy, or an override contradicts the evaluation.
        FileNotFoundError: If the file does not exist.
        CorruptFileError: If the file is damaged.
    """
    _check_overrides(overrides, faithful=faithful)
    if policy is not None:
        loaded = load_policy(policy, overrides)
        settings = loaded.settings
        trained = loaded.trained
        about = loaded.about()
        folder = Path()
        if loaded.run is not None:
            folder = loaded.run / "eval"
        candidate = policy_candidate(loaded.policy, choose)
    elif planner:
        settings = compose_settings(overrides)
        trained = None
        about = {"checkpoint": None, "iteration": None, "env_frames": None}
        folder = Path()
    else:
        raise ConfigurationError("no policy is given, expected a run, a checkpoint, or --policy planner")
    if planner:
        candidate = planner_candidate()
    if shield:
        candidate = with_shield(candidate)
    if faithful:
        settings = override_settings(settings, FAITHFUL)
    return Entrant(candidate, settings, trained, about, folder)


def choose_scenarios(
    entrants: Sequence[Entrant], names: Sequence[str] | None = None, num_maps: int = 64
) -> list[Scenario]:
    """Return scenarios by name, in the standard order.

    Args:
        entrants: What flies. All fly with the settings of the first one, and none has trained on an unseen map.
        names: Names of scenarios; all by default. ``training`` is among them only if there is a training map that all
            entrants share and that overrides leave as it was.
        num_maps: The number of unseen maps.

    Raises:
        ConfigurationError: If there is no scenario of a name, or ``training`` is requested and there is no such map.
    """
    trained = [entrant.trained for entrant in entrants if entrant.trained is not None]
    known = standard_scenarios(entrants[0].settings, num_maps, trained)
    if names is None:
        return known
    for name in names:
        require_choice("--scenario", name, SCENARIO_NAMES)
    chosen = [scenario for scenario in known if scenario.name in names]
    if "training" in names and all(scenario.name != "training" for scenario in chosen):
        raise ConfigurationError(
            "--scenario is 'training', but the training map is unknown, differs between policies, or is changed by "
            "env.num_obstacles; expected another scenario"
        )
    return chosen


def world_differences(settings: TrainSettings, trained: TrainSettings) -> list[str]:
    """Return in which settings of sensor, dynamics and obstacles a training differs from others, as ``key=value``.

    Args:
        settings: The others.
        trained: Settings of the training, whose values are returned.
    """
    before = flatten(dataclasses.asdict(trained))
    found = []
    for name, value in flatten(dataclasses.asdict(settings)).items():
        if name.startswith(_WORLD) and before[name] != value:
            found.append(f"{name}={before[name]}")
    return found


def _check_overrides(overrides: Sequence[str], *, faithful: bool) -> None:
    faithful_keys = [setting.partition("=")[0] for setting in FAITHFUL]
    for override in parse_overrides(overrides):
        key = override.key_or_group
        if key in _FIXED:
            raise ConfigurationError(f"{key} cannot be overridden in an evaluation: {_FIXED[key]}")
        if faithful and key in faithful_keys:
            raise ConfigurationError(f"{key} cannot be overridden with --faithful, which sets it")
