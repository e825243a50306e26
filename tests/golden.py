"""What the golden files in tests/data contain. The files are never written again; their content is built here.

Everything comes from NumPy's seeded generators and from arithmetic, so it is the same with every version of torch.
Running this module writes files that do not exist yet: ``python -m tests.golden FOLDER``.
"""

import json
import math
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from slipstream import (
    CheckpointManager,
    EpisodeStore,
    PackedEpisodeStorage,
    compress_image,
)
from slipstream.nav import NavigationConfig
from slipstream.run.evaluation import Interval
from slipstream.train.evaluation.flights import FlightLog, Flown
from slipstream.train.evaluation.pilots import Sensors
from slipstream.train.evaluation.results import ScenarioResult, save_evaluation
from slipstream.train.evaluation.scenarios import Scenario
from tests.replay.samples import episode

STEPS = (1, 2, 3)


def checkpoint(step: int) -> dict[str, Any]:
    """Return the training state after one to three steps: a little of everything that a checkpoint may hold."""
    rng = np.random.default_rng(20261118)
    weight = rng.normal(scale=0.05, size=(40, 24)).astype(np.float32)
    first = np.zeros_like(weight)
    second = np.zeros_like(weight)
    # Adam by hand, so that the moments and the weights are related as in a real run.
    for number in range(1, step + 1):
        gradient = rng.normal(scale=0.01, size=weight.shape).astype(np.float32)
        first = (np.float32(0.9) * first + np.float32(0.1) * gradient).astype(np.float32)
        second = (np.float32(0.999) * second + np.float32(0.001) * gradient * gradient).astype(np.float32)
        size = 1e-3 * np.sqrt(1 - 0.999**number) / (1 - 0.9**number)
        weight = (weight - np.float32(size) * first / (np.sqrt(second) + np.float32(1e-8))).astype(np.float32)
    actor = torch.from_numpy(weight)
    frozen = torch.from_numpy(np.random.default_rng(7).normal(size=(64, 32)).astype(np.float32))
    # Large enough for an entry by itself, and easy to compress.
    table = torch.arange(70_000, dtype=torch.int64) // 1000
    model = OrderedDict({"actor.weight": actor, "actor.tied": actor, "encoder.weight": frozen})
    model._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    special = torch.tensor([0.0, -0.0, float("nan"), float("-inf"), 5e-324, 1.5], dtype=torch.float64)
    return {
        "model": model,
        "optimizer": {
            "state": {
                0: {
                    "step": torch.tensor(float(step)),
                    "exp_avg": torch.from_numpy(first),
                    "exp_avg_sq": torch.from_numpy(second),
                }
            },
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": [0]}],
        },
        "views": {
            "transposed": frozen.t()[:5],
            "channels last": torch.arange(2 * 3 * 4 * 5.0).reshape(2, 4, 5, 3).permute(0, 3, 1, 2),
            "empty": torch.zeros(0, 4),
            "scalar": torch.tensor(step),
            "table": table,
        },
        "dtypes": {
            "bfloat16": torch.arange(-40, 40).to(torch.bfloat16) / 8,
            "float16": torch.linspace(-2, 2, 100).half(),
            "float8": torch.arange(-16.0, 16.0).to(torch.float8_e4m3fn),
            "complex": torch.complex(special, special.flip(0)),
            "bool": torch.arange(70) % 3 == 0,
            "int8": torch.arange(-60, 60, dtype=torch.int8),
            "int64": torch.arange(300) * step,
        },
        "parameter": torch.nn.Parameter(torch.full((3,), float(step)), requires_grad=True),
        "tensordict": TensorDict({"a": torch.arange(6.0).reshape(2, 3), "b": {"c": torch.ones(2, 1)}}, [2]),
        "numpy": {"array": np.arange(600, dtype=np.uint16).reshape(20, 30), "scalar": np.float32(1.25)},
        "plain": [None, True, -(2**70), 0.1, float("inf"), -0.0, 1 + 2j, "名前 \n", b"\x00\xff", (1, (2,)), {"k": []}],
        "keys": {1: "int", 2.5: "float", (3, "a"): "tuple", False: "bool", "$": "dollar"},
        "kinds": [torch.float32, torch.device("cpu"), torch.Size([2, 3]), range(1, 9, 2), slice(None, 4), {5}],
    }


def replay_buffer() -> TensorDictReplayBuffer:
    """Return a buffer of packed steps: two environments, episodes that end here and there, images."""
    buffer = TensorDictReplayBuffer(storage=PackedEpisodeStorage(64, ndim=2))
    rng = np.random.default_rng(3)
    state = np.cumsum(rng.normal(scale=0.1, size=(2, 25, 5)), axis=1).astype(np.float32)
    pixels = rng.integers(0, 9, (2, 25, 3, 20, 24)).astype(np.uint8)
    # Numbers that are bytes divided by 255, which are packed as bytes.
    camera = rng.integers(0, 9, (2, 25, 32, 40)).astype(np.float32) / np.float32(255)
    done = np.zeros((2, 24, 1), bool)
    done[0, 9] = True
    done[1, 17] = True
    after = state[:, 1:].copy()
    after[done[..., 0]] += 100
    batch = TensorDict(
        {
            "state": torch.from_numpy(state[:, :-1].copy()),
            "pixels": torch.from_numpy(pixels[:, :-1].copy()),
            "camera": torch.from_numpy(camera[:, :-1].copy()),
            "action": torch.from_numpy(rng.normal(size=(2, 24, 2)).astype(np.float32)),
            "next": {
                "state": torch.from_numpy(after),
                "pixels": torch.from_numpy(pixels[:, 1:].copy()),
                "camera": torch.from_numpy(camera[:, 1:].copy()),
                "done": torch.from_numpy(done),
                "terminated": torch.from_numpy(done.copy()),
                "reward": torch.from_numpy(rng.normal(size=(2, 24, 1)).astype(np.float32)),
            },
        },
        batch_size=[2, 24],
    )
    buffer.extend(batch)
    return buffer


def episodes() -> EpisodeStore:
    """Return finished episodes with images, and the beginning of one."""
    store = EpisodeStore(seed=5)
    for number in range(3):
        store.add(episode(6 + number, number, image=True))
    store.append({name: values[:4] for name, values in episode(9, 9, image=True).items()})
    return store


def images() -> dict[str, Any]:
    """Return images of every kind that `compress_image` packs."""
    rng = np.random.default_rng(11)
    smooth = np.add.outer(np.arange(24), np.arange(32)).astype(np.uint8)
    return {
        "smooth": smooth,
        "colours": np.stack([smooth, smooth.T.reshape(24, 32), 255 - smooth], axis=-1),
        "noise": rng.integers(0, 256, (3, 9, 7)).astype(np.uint8),
        "constant": np.full((8, 8, 3), 7, np.uint8),
        "depth": (smooth.astype(np.float32) / 7),
        "distance": smooth.astype(np.uint16) * 257,
        "mask": smooth % 5 == 0,
    }


def single_values() -> dict[str, Any]:
    """Return arrays without axes, which version 1 of packed images could not hold."""
    return {"byte": np.array(7, np.uint8), "flag": np.array(True), "number": np.array(-2.5, np.float64)}


ABOUT_EVALUATION = {"iteration": 120, "env_frames": 2_000_000, "conditions": {"seed": 1, "overrides": []}}


def evaluation() -> list[ScenarioResult]:
    """Return the results of two candidates, one of which never reached a goal."""
    rates = ("success", "static_collision", "dynamic_collision", "out_of_bounds", "timeout")
    good = dict(zip(rates, (0.75, 0.125, 0.0625, 0.0, 0.0625), strict=True))
    bad = dict(zip(rates, (0.0, 1.0, 0.0, 0.0, 0.0), strict=True))
    through = Scenario("through", "Through the field", "through", 1000, 2, 350, 80)
    return [
        ScenarioResult(
            flown(through, "policy", Sensors(), 16),
            {name: Interval(rate, rate / 2, (1 + rate) / 2) for name, rate in good.items()},
            {
                "inside_share": Interval(0.75, 0.5, 0.875),
                "time_to_goal_s": Interval(12.5, 11.0, 14.0),
                "path_length_m": Interval(30.25, -math.inf, math.inf),
                "return": Interval(455.0, 440.0, 470.0),
            },
            2,
            "clusters",
        ),
        ScenarioResult(
            flown(Scenario("empty", "Empty world", "through", 1000, 1, 0, 0), "planner", Sensors(0.05, 0.1, 0.2), 4),
            {name: Interval(rate, rate, rate) for name, rate in bad.items()},
            {"inside_share": None, "time_to_goal_s": None, "path_length_m": None, "return": Interval(-3.0, -4.0, -2.0)},
            4,
            "flights",
        ),
    ]


def flown(scenario: Scenario, candidate: str, sensors: Sensors, episodes: int) -> Flown:
    """Return flights of which only the number is recorded."""
    log = FlightLog(*(np.zeros(episodes) for _ in range(6)))
    config = NavigationConfig(num_envs=episodes, num_maps=scenario.num_maps)
    return Flown(scenario, candidate, scenario.title, sensors, config, log, 1234.5)


def write_checkpoints(folder: Path) -> None:
    """Write two whole checkpoints and a delta, always with the same bytes."""
    with CheckpointManager(folder, keep_last=None, differential=True) as manager, patch("time.time", lambda: 1.8e9):
        for step in STEPS:
            manager.save(step, checkpoint(step), {"reward": step / 4})
            manager.flush()


def main() -> None:
    """Write every golden file that does not exist."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "checkpoints_v1").exists():
        write_checkpoints(folder / "checkpoints_v1")
    if not (folder / "replay_episodes_v2").exists():
        episodes().save(folder / "replay_episodes_v2")
    if not (folder / "replay_storage_v2").exists():
        replay_buffer().storage.dumps(folder / "replay_storage_v2")
    if not (folder / "images_v2.json").exists():
        packed = {name: compress_image(image).hex() for name, image in (images() | single_values()).items()}
        packed["jpeg"] = compress_image(images()["colours"], jpeg=90).hex()
        (folder / "images_v2.json").write_text(json.dumps(packed, indent=1) + "\n")
    if not (folder / "evaluation_v2.json").exists():
        save_evaluation(evaluation(), folder, "evaluation_v2", ABOUT_EVALUATION)


if __name__ == "__main__":
    main()
