"""`Trainer`: collect, update, evaluate, log, save, and again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.state import TrainingState
from slipstream.collect.randomness import seed_global
from slipstream.dist.threads import numerics
from slipstream.nav.env import NavigationEnv
from slipstream.nav.frame import velocity_from_unit
from slipstream.rl.network import NavRLPolicy
from slipstream.rl.ppo import PPO, Minibatches
from slipstream.rollout.storage import RolloutStorage
from slipstream.run.folder import RunFolder
from slipstream.train.changes import Change
from slipstream.train.evaluation.flights import OnStep
from slipstream.train.evaluation.jobs import Job, describe_conditions, run_jobs
from slipstream.train.evaluation.pilots import policy_candidate
from slipstream.train.evaluation.results import save_evaluation
from slipstream.train.evaluation.scenarios import standard_scenarios
from slipstream.train.loggers import Logger, make_loggers
from slipstream.train.performance import PerformanceMonitor
from slipstream.train.processes import process_device
from slipstream.train.ranks import Ranks
from slipstream.train.resuming import load_state, log_changes, read_checkpoint
from slipstream.train.schedule import learning_rate_factor, teacher_coefficient
from slipstream.train.settings import TrainSettings, to_yaml
from slipstream.train.shards import Shards, Undivided, make_group
from slipstream.train.startup import make_storages, require_memory
from slipstream.train.stopping import stopping_on_signals
from slipstream.train.teacher import planner_teacher

logger = logging.getLogger(__name__)

SUMMARY_EVERY = 100  # iterations
BEST_BY = "train/stats.reach_goal"
Progress = Callable[[Mapping[str, float]], None]
T = TypeVar("T")


class Trainer:
    """Trains a policy in the embedded simulator, and saves everything that an exact resume needs.

    `run` does one thing after another. Checkpoints and rollouts are written in the background. A checkpoint contains
    weights, optimizers, counters, random number generators, the environment and the last observation. The line of an
    iteration is in ``metrics.jsonl`` before its checkpoint exists, so a run that is killed and resumed has every line
    once.

    Creating a trainer locks the folder and writes nothing else. `run` writes the settings, after a `restore` had the
    chance to refuse them.

    With ``dist.shards``, every process of a distributed run creates a trainer and calls the same methods. They share
    one run. The first process writes, logs and evaluates, and its errors are raised in all.

    Args:
        settings: What to train, and how.
        folder: The folder of the run; created if it is missing.
        on_iteration: Called with the metrics of each iteration.
        loggers: Additional loggers; closed at the end of `run`.

    Attributes:
        ppo: Policy and optimizers.
        iteration: How many iterations are done.
        monitor: How long each part of an iteration takes.
        group: The shards of the run, and the processes that share them; None if it is not divided.
        shards: What flies in this process.

    Raises:
        ConfigurationError: If the settings are invalid or need more memory than is free, or if another process trains
            in the folder.
        OSError: If the folder cannot be created.
    """

    def __init__(
        self,
        settings: TrainSettings,
        folder: RunFolder,
        on_iteration: Progress | None = None,
        *,
        loggers: Sequence[Logger] = (),
    ) -> None:
        settings.check()
        # A run that is resumed on another machine must not silently compute in another precision.
        algo = dataclasses.replace(settings.algo, precision=settings.precision())
        settings = dataclasses.replace(settings, algo=algo)
        self.group = make_group(settings)
        self.ranks = Ranks(self.group)
        if self.group is not None:
            settings = dataclasses.replace(settings, devices=self.group.world)
        self.settings = settings
        self.folder = folder
        self._on_iteration = on_iteration
        self._own_loggers = list(loggers)
        device = self.ranks.together(functools.partial(process_device, settings))
        self.ranks.together(functools.partial(require_memory, settings))
        with self.ranks.threads():
            self._make_parts(device)
        self.counters = {"iteration": 0, "env_frames": 0}
        # Shards have their own generators, and the global ones depend on the process.
        self.state = TrainingState(rng=self.group is None, ppo=self.ppo, **self.shards.parts, counters=self.counters)
        self.monitor = PerformanceMonitor()
        self.ranks.first(folder.claim)
        self.checkpoints = CheckpointManager(
            folder.checkpoints,
            keep_last=settings.keep_checkpoints,
            keep_best=(BEST_BY, "max"),
            max_queue_size=settings.async_checkpoint_queue_size,
            compress=settings.compress_checkpoint,
            # The first process saves, and so it uploads.
            checkpoint_url=settings.checkpoint_url if self.ranks.is_first else None,
        )
        self.checkpoints.guard(*self.ppo.optimizers().values())
        storages = functools.partial(make_storages, settings, folder, writes=self.ranks.is_first)
        self.rollouts, self.last_rollouts = self.ranks.together(storages)
        self._loggers: list[Logger] = []
        self._saved = 0
        self._changes: list[Change] = []

    def _make_parts(self, device: torch.device) -> None:
        """Create what learns and what flies."""
        settings = self.settings
        seed_global(settings.seed)
        policy = NavRLPolicy(action_map=velocity_from_unit).to(device)
        teacher = planner_teacher(settings.navigation().lidar)
        self.ppo = PPO(policy, settings.ppo(), teacher=teacher, compile=settings.algo.compile, group=self.group)
        self.shards: Shards | Undivided
        if self.group is None:
            self.shards = Undivided(settings, NavigationEnv(settings.navigation(), device), policy)
        else:
            self.shards = Shards(settings, policy, self.group, device)

    @property
    def iteration(self) -> int:
        """How many iterations are done."""
        return self.counters["iteration"]

    def run(self) -> signal.Signals | None:
        """Train until there are `max_frame_num` frames, or until a signal; returns that signal.

        A run that has that many frames already is left as it is.

        SIGINT and SIGTERM finish the current iteration and save a checkpoint. The second signal ends the process
        without finishing the iteration; checkpoints that are being written are completed.

        Raises:
            ConfigurationError: If the folder contains checkpoints and none was restored.
            WriteError: If the settings cannot be written.
            RankLostError: If another process has exited; says how to resume.
        """
        settings = self.settings
        self.ranks.first(functools.partial(self.folder.require_restored, self.iteration))
        if self.iteration >= settings.num_iterations:
            # Its files must not claim settings that nothing was trained with.
            if self.ranks.is_first:
                logger.warning(
                    "%s is already finished, after iteration %d: nothing is trained. To train longer, set a larger "
                    "max_frame_num",
                    self.folder.path,
                    self.iteration,
                )
            return None
        self.ranks.first(self._forget_later)
        with self.ranks.naming(self.folder.path), self.ranks.threads():
            with self._logging(), stopping_on_signals(self.stop, patience=self.ranks.patience):
                self._train()
            self.ranks.first(self._flush)
        return self.ranks.stopped()

    def _train(self) -> None:
        """Do one iteration after another."""
        timer = self.monitor.timer
        settings = self.settings
        rollouts = iter(self.shards)
        while self.iteration < settings.num_iterations and self.ranks.stopped() is None:
            with timer("iteration"):
                with timer("rollout"):
                    rollout = next(rollouts)
                self._follow_schedules()
                with timer("update"):
                    losses = self._update(rollout)
                self.counters["iteration"] += 1
                self.counters["env_frames"] += settings.frames_per_iteration
                self.shards.add(rollout)
                self.ranks.take(self.shards.agree(self.ranks.flags()))
                with timer("evaluate"):
                    scores = {}
                    if _is_due(self.iteration, settings.eval_interval):
                        scores = self._evaluate()
                with timer("log"):
                    self.ranks.write(functools.partial(self._log, {**losses, **scores}))
                with timer("save"):
                    self._save(rollout)
        if self.iteration > self._saved:
            self._save_checkpoint(rollout)
        # A signal may have arrived since the end of the last update, while one process evaluated.
        self.ranks.take(self.shards.agree(self.ranks.flags()))

    def restore(self) -> int:
        """Resume from the newest intact checkpoint of the run; returns its iteration.

        Settings that changed since then are logged, and recorded by `run`.

        Raises:
            ConfigurationError: If there is no checkpoint, if it has another network, or if a setting differs that must
                not change; see `slipstream.train.changes`.
        """
        read = functools.partial(read_checkpoint, self.checkpoints, self.folder.path, self.settings)
        restored, self._changes = self.ranks.first(read)
        self.ranks.together(functools.partial(load_state, self.state, restored, self.folder.path))
        self._saved = self.iteration
        if self.ranks.is_first:
            log_changes(self._changes, restored.metrics, self.settings, self.iteration)
        return self.iteration

    def _forget_later(self) -> None:
        """Delete what a killed run left of iterations after its last checkpoint: they are repeated."""
        self.folder.forget_after(self.iteration)
        for storage in self.storages():
            for iteration in storage.iterations():
                if iteration > self.iteration:
                    storage.path(iteration).unlink(missing_ok=True)

    def close(self) -> None:
        """Write what is queued, and release the folder and all threads."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.folder.release)
            stack.callback(self.shards.shutdown)
            for storage in self.storages():
                stack.callback(storage.close)
            stack.callback(self.checkpoints.close)

    def stop(self, number: int) -> None:
        """Stop after the current iteration, as if the signal had arrived."""
        self.ranks.stop(number)

    def checkpoint_stall_ms(self) -> float:
        """Return for how long a save held up training on average: the call, and the optimizers' wait for the copy."""
        stats = self.checkpoint_stats()
        return 1e3 * (stats["total_call_s"] + stats["total_barrier_s"]) / max(stats["save_count"], 1)

    def storages(self) -> list[RolloutStorage]:
        """Return where rollouts are kept, if anywhere."""
        return [storage for storage in (self.rollouts, self.last_rollouts) if storage is not None]

    def checkpoint_stats(self) -> dict[str, float]:
        """Return what saving has cost and saved so far; see `CheckpointManager.get_stats`."""
        return self.checkpoints.get_stats()

    def _update(self, rollout: Any) -> dict[str, float]:
        """Improve the policy from a rollout, or from one of each shard."""
        minibatches: Minibatches | None = None
        if self.settings.gpu_memory_limited:
            number = self.settings.algo.num_minibatches

            def minibatches(batch: Any, generator: torch.Generator | None = None) -> Any:
                return batch.minibatches(number, generator=generator)

        staleness = self.shards.staleness()
        return self.ppo.update(rollout, minibatches, staleness=staleness, generators=self.shards.generators())

    def _follow_schedules(self) -> None:
        """Set the learning rates and the weight of the teacher for this iteration."""
        self.ppo.teacher_coefficient = teacher_coefficient(self.settings, self.iteration)
        factor = learning_rate_factor(self.settings, self.iteration)
        for name, optimizer in self.ppo.optimizers().items():
            for group in optimizer.param_groups:
                group["lr"] = factor * getattr(self.ppo.config, name).learning_rate

    def _evaluate(self) -> dict[str, float]:
        """Fly through unseen maps, without touching training."""
        settings = self.settings
        scenario = standard_scenarios(settings)[0]
        jobs = [Job(policy_candidate(self.ppo.policy), scenario)]
        episodes = max(1, settings.eval_episodes // 2)

        def fly(on_step: OnStep) -> dict[str, float]:
            [result] = run_jobs(jobs, settings, episodes=episodes, start_progress=lambda _: on_step)
            about = {**self.about(), "conditions": describe_conditions(jobs, settings, episodes=episodes)}
            save_evaluation([result], self.folder.evaluations, f"iter_{self.iteration:06d}", about)
            return {f"eval/{scenario.name}/{name}": rate.mean for name, rate in result.rates.items()}

        return self.ranks.first_while_others_wait(fly)

    def about(self) -> dict[str, Any]:
        """Return what an evaluation says about the policy: its checkpoint, and how long it was trained."""
        return {
            "checkpoint": str(self.checkpoints.path(self.iteration).resolve()),
            "iteration": self.iteration,
            "env_frames": self.counters["env_frames"],
        }

    def _log(self, values: dict[str, float]) -> None:
        values["critic_loss"] = values.pop("value_loss")
        stats = self.monitor.get_stats(window=1)
        spent = sum(stats[name]["mean"] for name in ("rollout", "update"))
        metrics = {
            "env_frames": self.counters["env_frames"],
            "time": time.time(),
            "rollout_fps": self.settings.frames_per_iteration / spent,
            **values,
            **self.shards.means(),
            "schedule/learning_rate": self.ppo.optimizers()["actor"].param_groups[0]["lr"],
            "schedule/teacher_coefficient": self.ppo.teacher_coefficient,
            **{f"perf/{name}": value for name, value in self.monitor.report().items()},
            **{f"ckpt/{name}": value for name, value in self.checkpoint_stats().items()},
            **({f"rollouts/{n}": v for n, v in self.rollouts.get_stats().items()} if self.rollouts is not None else {}),
        }
        if self.settings.gpu_memory_limited:
            metrics |= {f"memory/{name}": value for name, value in self.shards.packing().items()}
        metrics |= {f"ray/{name}": value for name, value in self.shards.remote_stats().items()}
        for one in self._loggers:
            one.log(metrics, self.iteration)
        if self._on_iteration is not None:
            self._on_iteration({"iteration": self.iteration, **metrics})
        if self.iteration % SUMMARY_EVERY == 0:
            logger.info("where time goes, iteration %d:\n%s", self.iteration, self.monitor.get_summary())
            logger.info("checkpoints: %s", self._saving_in_words())
            if self.settings.checkpoint_url is not None:
                logger.info("%s", self.checkpoints.describe_uploads())

    def _saving_in_words(self) -> str:
        stats = self.checkpoint_stats()
        return (
            f"{stats['save_count']:.0f} saved, {stats['compression_ratio']:.2f} times smaller, "
            f"{self.checkpoint_stall_ms():.1f} ms of stall each, {stats['queue_size']:.0f} queued, "
            f"{stats['failed_count']:.0f} failed"
        )

    def _save(self, rollout: Any) -> None:
        """Save what is due: in the background, after the iteration's line has been written."""
        if _is_due(self.iteration, self.settings.rollout_save_interval):
            self._save_rollout(rollout, self.rollouts)
        if _is_due(self.iteration, self.settings.save_interval):
            self._save_checkpoint(rollout)

    def _save_rollout(self, rollout: Any, storage: RolloutStorage | None) -> None:
        """Save a rollout as it was collected. Only the first process has a storage, but all have parts."""
        whole = self.shards.whole_rollout(rollout)
        world = self.shards.world(self.iteration - 1)
        about: dict[str, Any] = {}
        if world is not None:
            about = {"metadata": world.metadata(), "extra": world.arrays()}
        if storage is not None:
            self.ranks.write(functools.partial(storage.save, whole, self.iteration, overwrite=True, **about))

    def _save_checkpoint(self, rollout: Any) -> None:
        if self.settings.compress_lidar:
            self._save_rollout(rollout, self.last_rollouts)
        # Before the first episode ends there is nothing to choose the best by.
        metrics: dict[str, Any] = {BEST_BY: None, **self.shards.means(), **self.counters}
        metrics["config"] = dataclasses.asdict(self.settings)
        metrics["numerics"] = numerics()
        gathered = self.shards.gather_states()

        def save() -> None:
            state = {**self.state.state_dict(), **gathered}
            self.checkpoints.save(self.iteration, state, metrics)

        self.ranks.write(save)
        self._saved = self.iteration

    def _flush(self) -> None:
        """Wait until everything is on disk."""
        self.ranks.raise_failure()
        self.checkpoints.flush()

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        try:
            self.ranks.first(self._begin)
            yield
        finally:
            for one in self._loggers:
                one.close()
            self._loggers = []

    def _begin(self) -> None:
        """Open the loggers, and write the settings."""
        config = dataclasses.asdict(self.settings)
        self._loggers = make_loggers(self.settings, config, self.folder, self.iteration + 1) + self._own_loggers
        # Last: until here, something could still refuse the settings.
        changes = {change.name: {"from": change.before, "to": change.after} for change in self._changes}
        self.folder.begin(to_yaml(self.settings), self.iteration, changes)


def _is_due(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0
