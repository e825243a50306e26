"""Run folders as a trainer leaves them, and a real browser to look at their pages."""

import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from slipstream import save_rollout_compressed
from slipstream.run.world import World

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ("static_collision", "dynamic_collision", "out_of_bounds", "reached_goal")
# How the flight of each drone ends; the first one flies until the end of the rollout.
ENDINGS = ("", "reached_goal", "static_collision", "dynamic_collision", "out_of_bounds", "truncated")
SCENARIOS = (("through", "Through the field"), ("empty", "Empty field"))


def quantity(mean: float, half: float = 0.04) -> dict[str, float]:
    return {"mean": mean, "low": mean - half, "high": mean + half}


def metrics_line(iteration: int, saves: int | None = None) -> dict[str, Any]:
    """Return the line of an iteration; everything in it can be told from its number."""
    saves = iteration // 2 if saves is None else saves
    line: dict[str, Any] = {
        "iteration": iteration,
        "env_frames": 4096 * iteration,
        "time": 1_790_000_000.0 + 3 * iteration,
        "rollout_fps": 5000 + iteration,
        "train/stats.reach_goal": None if iteration == 1 else 1 - 1 / iteration,
        "train/stats.collision": 1 / iteration,
        "train/stats.truncated": 0.01,
        "train/stats.return": 10.0 * iteration,
        "train/stats.episode_len": 100 + iteration,
        "ckpt/save_count": saves,
        "ckpt/total_saved_bytes": 8_000_000 * saves,
        "ckpt/total_compressed_bytes": 4_000_000 * saves,
        "ckpt/total_call_s": 0.002 * saves,
        "ckpt/total_barrier_s": 0.001 * saves,
        "ckpt/total_write_s": 0.1 * saves,
        "rollouts/save_count": saves,
        "rollouts/raw_bytes": 60_000_000 * saves,
        "rollouts/stored_bytes": 3_000_000 * saves,
        "memory/batch_count": iteration,
        "memory/raw_bytes": 1000 * iteration,
        "memory/packed_bytes": 100 * iteration,
        "schedule/learning_rate": 1e-3 / iteration,
        "schedule/num_obstacles": 100,
        "schedule/num_dynamic_obstacles": 8,
    }
    for name in ("actor_loss", "critic_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance"):
        line[name] = 1 / iteration
    for name in ("feature_extractor_grad_norm", "actor_grad_norm", "critic_grad_norm", "staleness", "ess"):
        line[name] = 2 / iteration
    for name, seconds in {"iteration": 3.0, "rollout": 1.0, "update": 1.5, "save": 0.01, "evaluate": 0.1}.items():
        line |= {f"perf/{name}_mean": seconds, f"perf/{name}_std": seconds / 10}
    return line


def evaluation(iteration: int, flights: bool = False) -> dict[str, Any]:
    def scenario(name: str, title: str) -> dict[str, Any]:
        rates = {"static_collision": quantity(0.1), "dynamic_collision": quantity(0.08), "timeout": None}
        amounts = {
            "inside_share": quantity(0.625),
            "time_to_goal_s": quantity(21.5, 0.5),
            "path_length_m": quantity(43.2, 1),
            "return": quantity(812, 9),
        }
        counts = {"num_static_obstacles": 350, "num_dynamic_obstacles": 80, "episodes": 512}
        where = {"map_seeds": list(range(1000, 1064)), "sensors": {"dropout": 0.0}, "candidate": "policy"}
        files = {"flights": f"final_{name}.slip" if flights else None}
        success = {"success": quantity(0.7125)}
        return {"scenario": name, "title": title, **success, **rates, **amounts, **counts, **where, **files}

    facts = {"iteration": iteration, "env_frames": 4096 * iteration, "time": 1_790_000_100.0}
    conditions = {"action": "mean", "faithful": False, "overrides": []}
    results = [scenario(*names) for names in SCENARIOS]
    return {"format": "slipstream.evaluation", "version": 2, **facts, "conditions": conditions, "results": results}


def flights(num_drones: int = 6, num_steps: int = 60, num_obstacles: int = 8) -> tuple[TensorDict, World]:
    """Return drones that fly side by side towards +x, each to another outcome, past boxes and moving obstacles."""
    size = (num_drones, num_steps)
    time_s = torch.arange(num_steps + 1) * 0.1
    position = torch.zeros(num_drones, num_steps + 1, 3)
    lidar = torch.zeros(num_drones, num_steps + 1, 1, 36, 4)
    ended = dict.fromkeys((*FLAGS, "truncated"), torch.zeros(*size, 1, dtype=torch.bool))
    ended = {name: flags.clone() for name, flags in ended.items()}
    for drone in range(num_drones):
        end = num_steps - 3 * drone
        position[drone, :, 0] = -9 + 3 * time_s.clamp(max=0.1 * end)
        position[drone, :, 1] = -5 + 2.0 * drone
        position[drone, :, 2] = 1.5
        lidar[drone, :, 0, ::3, 1] = 4 - 1.0 - 0.05 * drone
        if drone % 6:
            ended[ENDINGS[drone % 6]][drone, end - 1] = True
    state = torch.zeros(num_drones, num_steps + 1, 8)
    state[..., 0] = 1.0
    state[..., 3] = 9.0 - position[..., 0]
    direction = torch.tensor([18.0, 0.0, 0.0]).expand(num_drones, num_steps + 1, 1, 3)
    done = torch.stack(list(ended.values())).any(0)
    moving = torch.zeros(1, num_steps + 1, num_obstacles, 3)
    moving[0, :, :, 0] = torch.sin(time_s)[:, None] + torch.arange(num_obstacles) - 4
    moving[0, :, :, 1] = 7.0

    def seen(steps: slice) -> dict[str, Any]:
        observation = {"state": state[:, steps], "lidar": lidar[:, steps], "direction": direction[:, steps]}
        return {"agents": {"observation": observation}, "info": {"position": position[:, steps]}}

    after = seen(slice(1, None))
    after["info"] |= {name: ended[name] for name in FLAGS}
    after |= {"truncated": ended["truncated"], "done": done}
    batch = TensorDict({**seen(slice(-1)), "next": after}, batch_size=size)
    boxes = [[x, 2.6, x + 0.7, 3.3, 1 + x / 2] for x in range(8)]
    world = World(
        dt_s=0.1,
        half_extent_m=10.0,
        lidar_range_m=4.0,
        map_seeds=[10_000],
        obstacle_widths_m=[0.25 * (1 + index % 4) for index in range(num_obstacles)],
        obstacle_is_cylinder=[index % 2 == 0 for index in range(num_obstacles)],
        boxes=np.array([boxes], np.float32),
        obstacles=moving.numpy(),
    )
    return batch, world


def save_flights(batch: TensorDict, world: World, path: Path) -> Path:
    return save_rollout_compressed(batch, path, metadata=world.metadata(), extra=world.arrays())


class RunBuilder:
    """Writes run folders under a folder of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self, *documents: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(document) + "\n" for document in documents)

    def evaluation(self, name: str, document: Any) -> None:
        (self.folder / "eval").mkdir(parents=True, exist_ok=True)
        (self.folder / "eval" / f"{name}.json").write_text(json.dumps(document))

    def flights(self, scenario: str, *made: Any, **sizes: int) -> Path:
        batch, world = made or flights(**sizes)
        return save_flights(batch, world, self.folder / "eval" / f"final_{scenario}.slip")

    def rollout(self, iteration: int, **sizes: int) -> Path:
        """Write a rollout of the training, with crashes if there are more than two drones."""
        (self.folder / "rollouts").mkdir(parents=True, exist_ok=True)
        return save_flights(*flights(**sizes), self.folder / "rollouts" / f"rollout_{iteration:06d}.slip")

    def everything(self, iterations: int = 12) -> Path:
        """Write a run that has all that a run can have."""
        self.lines(*(metrics_line(iteration) for iteration in range(1, iterations + 1)))
        self.evaluation("iter_000006", evaluation(6))
        self.evaluation("final", evaluation(iterations, flights=True))
        for number, (scenario, _) in enumerate(SCENARIOS):
            self.flights(scenario, num_drones=6 - number)
        for file in ("checkpoints/checkpoint_iter_6.slip", "checkpoints/copies/b.slip", "rollouts/notes.slip"):
            (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / file).write_bytes(bytes(1500))
        (self.folder / "checkpoints/.lock").touch()
        os.link(self.folder / "checkpoints/checkpoint_iter_6.slip", self.folder / "checkpoints/copies/a.slip")
        (self.folder / "config.yaml").write_text("seed: 7\nenv:\n  num_envs: 1024\nversions:\n  torch: 2.13.0\n")
        return self.folder


@pytest.fixture
def builder(tmp_path: Path) -> Callable[..., RunBuilder]:
    def build(name: str = "quick") -> RunBuilder:
        return RunBuilder(tmp_path / "runs" / name)

    return build


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has all that a run can have; not to be changed."""
    return RunBuilder(tmp_path_factory.mktemp("runs") / "whole").everything()


@pytest.fixture(scope="module")
def flights_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with flights and nothing to draw a chart of, which makes for a page that loads in no time."""
    run = RunBuilder(tmp_path_factory.mktemp("runs") / "flights")
    document = evaluation(12, flights=True)
    for scenario in document["results"]:
        scenario["success"] = None
    run.evaluation("final", document)
    for number, (scenario, _) in enumerate(SCENARIOS):
        run.flights(scenario, num_drones=6 - number)
    return run.folder


@pytest.fixture
def line() -> Callable[..., dict[str, Any]]:
    return metrics_line


@pytest.fixture
def make_evaluation() -> Callable[..., dict[str, Any]]:
    return evaluation


@pytest.fixture
def make_flights() -> Callable[..., tuple[TensorDict, World]]:
    return flights


class Browser:
    """A headless Chromium that is spoken to over two pipes, in the language of its developer tools."""

    def __init__(self, executable: str, profile: Path) -> None:
        command = [executable, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run", "--hide-scrollbars"]
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # They go to descriptors 3 and 4, so neither may be there already.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out)]
        silent = os.open(os.devnull, os.O_RDWR)
        moves = [(os.POSIX_SPAWN_DUP2, silent, stream) for stream in (0, 1, 2)]
        moves += [(os.POSIX_SPAWN_DUP2, end, number) for end, number in zip(ends, (3, 4), strict=True)]
        self.process = os.posix_spawn(executable, command, os.environ, file_actions=moves, setpgroup=0)
        for end in (theirs_in, theirs_out, *ends, silent):
            os.close(end)
        self._numbers, self._rest = itertools.count(1), b""
        self._session: str | None = None
        self._target: str | None = None
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command, and wait for its answer; what happens meanwhile goes to `events`."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
        raise AssertionError(f"the browser ended before it answered {method}")

    def _messages(self) -> Iterator[dict[str, Any]]:
        while received := os.read(self._in, 1 << 20):
            *messages, self._rest = (self._rest + received).split(b"\0")
            parsed = [json.loads(message) for message in messages]
            self.events += [message for message in parsed if "id" not in message]
            yield from (message for message in parsed if "id" in message)

    def open(self, page: Path, width: int = 1280, height: int = 900, **media: str) -> None:
        """Load a page in a new tab, and wait until its scripts have run."""
        before = self._target
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        if before is not None:
            self.call("Target.closeTarget", targetId=before)
        self._session = self.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        self.events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait_until("location.protocol === 'file:' && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return what a JavaScript expression gives."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_until(self, expression: str) -> None:
        while not self.evaluate(expression):
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press a key where the focus is."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """Return what the console and the log said, whatever its level, and exceptions that nothing caught."""
        self.evaluate("1")  # what was said before this answer has arrived with it
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        self.evaluate("1")
        return [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)  # its own group, helpers included
        os.waitpid(self.process, 0)
        os.close(self._in)
        os.close(self._out)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed, and CHROMIUM names none")
    browser = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
