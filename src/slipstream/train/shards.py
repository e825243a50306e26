"""What flies in a run: all drones at once, or divided into shards.

`Undivided` and `Shards` have the same methods. What belongs to a shard does not depend on the number of processes: its
drones, its random numbers, its collector and its episodes are the same in whichever process it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as torch_dist

from slipstream.collect.compressed import CompressedDataCollector
from slipstream.collect.pipelined import PipelinedDataCollector
from slipstream.collect.serial import SerialCollector
from slipstream.dist.group import ShardGroup, shard_seed
from slipstream.errors import StateMismatchError
from slipstream.nav.config import NavigationConfig
from slipstream.nav.env import STATS, NavigationEnv
from slipstream.rl.network import NavRLPolicy
from slipstream.rl.objective import SCRATCH_KEYS
from slipstream.train.episodes import EpisodeStats, named_means
from slipstream.train.schedule import collision_penalty
from slipstream.train.settings import TrainSettings

if TYPE_CHECKING:
    from tensordict import TensorDictBase

# Statistics of packed rollouts that can be added up.
_PACKING = ("batch_count", "raw_bytes", "packed_bytes", "pack_s")
# From here on, collecting two shards on two threads is faster than one after another.
_DRONES_PER_THREAD = 512
_ACTIONS = 1  # mixed into the seed of a shard: actions and the order of minibatches need other numbers than its drones


def make_group(settings: TrainSettings) -> ShardGroup | None:
    """Return the shards of a run and the processes that share them, or None if the run is not divided.

    Raises:
        ConfigurationError: If there are several processes, and they cannot divide the run.
    """
    if not settings.dist.shards:
        # Each would train by itself, and they would write to the same folder.
        if torch_dist.is_available() and torch_dist.is_initialized():
            settings.dist.check(torch_dist.get_world_size(), settings.env, settings.algo)
        return None
    return ShardGroup(settings.dist.shards, threads=settings.num_threads or None)


def shard_navigation(settings: TrainSettings, shard: int) -> NavigationConfig:
    """Return the simulation of one shard: some of the drones of the undivided run, on the maps that they have there.

    Args:
        settings: The settings of the run.
        shard: Number of the shard.
    """
    env = settings.env
    shards = settings.dist.shards
    changes: dict[str, Any] = {"num_envs": env.num_envs // shards, "seed": shard_seed(settings.seed, shard)}
    if env.num_maps >= shards:
        changes["num_maps"] = env.num_maps // shards
        changes["map_seed"] = env.map_seed + shard * changes["num_maps"]
    else:
        per_map = shards // env.num_maps
        changes["num_maps"] = 1
        changes["map_seed"] = env.map_seed + shard // per_map
        changes["line_part"] = (shard % per_map, per_map)
    return settings.navigation(**changes)


def make_collector(settings: TrainSettings, env: NavigationEnv, policy: Any, *, threads: int | None = None) -> Any:
    """Return what yields rollouts, by the plan that the settings ask for.

    Args:
        settings: The settings of the run.
        env: Where to collect.
        policy: What acts.
        threads: How many threads torch uses where rollouts are collected; None leaves that as it is.
    """

    def prepare(rollout: int) -> None:
        if threads is not None:
            # A collector that is ahead has its own thread, for which nobody else sets this.
            torch.set_num_threads(threads)
        env.simulation.collision_penalty = collision_penalty(settings, rollout)

    collector: Any = SerialCollector(env, policy, settings.algo.training_frame_num, before_rollout=prepare)
    if settings.use_pipelined_collector:
        # The environment has private generators, so only the policy needs separate random numbers.
        collector = PipelinedDataCollector(collector, prefetch_count=settings.prefetch_count, rng="policy")
    if settings.gpu_memory_limited:
        collector = CompressedDataCollector(collector)
    return collector


class Undivided:
    """All drones of a run in one environment, with its collector and its episodes.

    Args:
        settings: The settings of the run.
        env: The environment.
        policy: What acts.

    Attributes:
        env: The environment.
        parts: What a checkpoint contains of this.
    """

    def __init__(self, settings: TrainSettings, env: NavigationEnv, policy: NavRLPolicy) -> None:
        self.env = env
        self._is_ahead = settings.use_pipelined_collector
        self._collector = make_collector(settings, env, policy)
        self._episodes = EpisodeStats(settings.env.num_envs)
        self.parts: dict[str, Any] = {"collector": self._collector, "episodes": self._episodes}

    def __iter__(self) -> Iterator[Any]:
        """Yield rollouts."""
        return iter(self._collector)

    def generators(self) -> list[torch.Generator]:
        """Return nothing: the order of minibatches comes from torch's global generator."""
        return []

    def staleness(self) -> int:
        """Return how many versions older than the newest the weights are that the last rollout was collected with."""
        if not self._is_ahead:
            return 0
        return int(self._collector.staleness())

    def add(self, rollout: Any) -> None:
        """Take the episodes that ended in a rollout."""
        self._episodes.add(rollout)

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags are set in any process: there is no other."""
        return list(flags)

    def means(self) -> dict[str, float]:
        """Return ``train/stats.<name>`` over the latest episodes."""
        return self._episodes.means()

    def packing(self) -> dict[str, float]:
        """Return what packing rollouts has cost and saved."""
        stats: dict[str, float] = self._collector.get_stats()
        return stats

    def whole_rollout(self, rollout: Any) -> Any:
        """Return a rollout as it was collected, as a TensorDict."""
        return _as_collected(rollout)

    def gather_states(self) -> dict[str, Any]:
        """Return nothing: all that changes is in `parts`."""
        return {}

    def shutdown(self) -> None:
        """End the thread that collects."""
        self._collector.shutdown()


class Shard:
    """A part of the drones, with everything that changes while they fly.

    Args:
        settings: The settings of the run.
        policy: What acts; shared by all shards.
        number: Number of the shard.
        device: Where it is simulated.

    Attributes:
        env: The environment.
        collector: Yields its rollouts.
        generator: Where the order of its minibatches comes from, and its actions unless they are collected ahead.
        episodes: How its episodes went.
    """

    def __init__(self, settings: TrainSettings, policy: NavRLPolicy, number: int, device: torch.device) -> None:
        config = shard_navigation(settings, number)
        self.env = NavigationEnv(config, device)
        seed = shard_seed(config.seed, _ACTIONS)
        self.generator = torch.Generator().manual_seed(seed)
        self._on_device = self.generator
        if device.type != "cpu":
            self._on_device = torch.Generator(device).manual_seed(seed)
        self.episodes = EpisodeStats(config.num_envs)

        def act(seen: TensorDictBase) -> TensorDictBase:
            return policy.act(seen, generator=self._on_device)

        # Collected ahead, a policy has to be a module, of which the collector makes a copy with its own generators.
        is_ahead = settings.use_pipelined_collector
        with torch.random.fork_rng(devices=[]):
            # It takes the seed of these from the global generator.
            torch.default_generator.manual_seed(seed)
            self.collector = make_collector(settings, self.env, policy if is_ahead else act, threads=1)

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes, as copies."""
        state = {
            "collector": self.collector.state_dict(),
            "episodes": self.episodes.state_dict(),
            "generator": self.generator.get_state(),
        }
        if self._on_device is not self.generator:
            state["device_generator"] = self._on_device.get_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.collector.load_state_dict(state["collector"])
        self.episodes.load_state_dict(state["episodes"])
        self.generator.set_state(state["generator"].cpu())
        if self._on_device is not self.generator and "device_generator" in state:
            self._on_device.set_state(state["device_generator"].cpu())


class Shards:
    """The shards of this process: a list of rollouts takes the place of one.

    Args:
        settings: The settings of the run.
        policy: What acts.
        group: Which shards belong to this process.
        device: Where they are simulated.

    Attributes:
        members: The shards, in the order of their numbers.
        env: The environment of the first of them.
        parts: What a checkpoint contains of this.
    """

    def __init__(self, settings: TrainSettings, policy: NavRLPolicy, group: ShardGroup, device: torch.device) -> None:
        self._group = group
        self._first = group.local_shards.start
        self._is_ahead = settings.use_pipelined_collector
        self._is_packed = settings.gpu_memory_limited
        self._totals = torch.zeros(0, dtype=torch.float64)
        # One after another: while they are created, they borrow the global generator.
        self.members = [Shard(settings, policy, shard, device) for shard in group.local_shards]
        self.env = self.members[0].env
        self.parts: dict[str, Any] = {"collector": self}

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield a rollout of each shard."""
        iterators = [iter(member.collector) for member in self.members]
        threads = None
        if self.env.config.num_envs < _DRONES_PER_THREAD:
            # Steps of few drones are mostly Python, for which threads would wait in turns.
            threads = 1

        def collect(shard: int) -> Any:
            return next(iterators[shard - self._first])

        while True:
            yield self._group.map(collect, threads=threads)

    def generators(self) -> list[torch.Generator]:
        """Return where the order of minibatches comes from, for each shard."""
        return [member.generator for member in self.members]

    def staleness(self) -> int:
        """Return how many versions older than the newest the weights are that the last rollouts were collected with."""
        if not self._is_ahead:
            return 0
        return int(self.members[0].collector.staleness())

    def add(self, rollouts: Sequence[Any]) -> None:
        """Take the episodes that ended in the rollouts."""
        for member, rollout in zip(self.members, rollouts, strict=True):
            member.episodes.add(rollout)

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """Add up the statistics of all shards of the run; returns which flags are set in any process.

        Everything goes into one sum, so that processes wait for each other once.

        Args:
            flags: As many in every process.

        Raises:
            RankLostError: If another process has exited.
        """
        rows = []
        for place, member in enumerate(self.members):
            # The flags of a process are in the row of its first shard.
            row = [0.0] * len(flags)
            if place == 0:
                row = list(map(float, flags))
            row += member.episodes.sums()
            if self._is_packed:
                row += map(member.collector.get_stats().__getitem__, _PACKING)
            rows.append(torch.tensor(row, dtype=torch.float64, device=self._group.device))
        total = self._group.sum(rows).cpu()
        self._totals = total[len(flags) :]
        is_set: list[bool] = (total[: len(flags)] > 0).tolist()
        return is_set

    def means(self) -> dict[str, float]:
        """Return ``train/stats.<name>`` over the latest episodes of all shards, as of the last `agree`."""
        if not len(self._totals) or not self._totals[0]:
            return {}
        return named_means((self._totals[1 : 1 + len(STATS)] / self._totals[0]).tolist())

    def packing(self) -> dict[str, float]:
        """Return what packing the rollouts of all shards has cost and saved, as of the last `agree`."""
        stats = dict(zip(_PACKING, self._totals[1 + len(STATS) :].tolist(), strict=True))
        return {**stats, "compression_ratio": stats["raw_bytes"] / max(stats["packed_bytes"], 1.0)}

    def whole_rollout(self, rollouts: Sequence[Any]) -> Any:
        """Return the rollout of all shards of the run in the first process, and None in the others.

        Raises:
            RankLostError: If another process has exited.
        """
        parts = self._group.gather([_as_collected(rollout).cpu() for rollout in rollouts])
        if parts is None:
            return None
        return torch.cat(parts, 0)

    def gather_states(self) -> dict[str, Any]:
        """Return the states of all shards of the run in the first process, and nothing in the others.

        Raises:
            RankLostError: If another process has exited.
        """
        gathered = self._group.gather(list(self.state_dict().items()))
        if gathered is None:
            return {}
        return {"collector": dict(gathered)}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the shards of this process."""
        return {str(self._first + place): member.state_dict() for place, member in enumerate(self.members)}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Continue from the states of the shards of this process; those of others may be among them.

        Raises:
            StateMismatchError: If there is none for a shard.
        """
        names = list(map(str, self._group.local_shards))
        for name in names:
            if name not in states:
                raise StateMismatchError(f"the state has no shard {name}")
        for name, member in zip(names, self.members, strict=True):
            member.load_state_dict(states[name])

    def shutdown(self) -> None:
        """End all threads that collect."""
        for member in self.members:
            member.collector.shutdown()


def _as_collected(rollout: Any) -> Any:
    """Return a rollout without what an update has written into it, as a TensorDict."""
    collected = rollout.exclude(*SCRATCH_KEYS)
    if hasattr(rollout, "minibatches"):
        return collected.to_tensordict()
    return collected
