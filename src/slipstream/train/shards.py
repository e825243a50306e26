"""What flies in a run: all drones at once, or divided into shards.

`Undivided` and `Shards` have the same methods. What belongs to a shard does not depend on the number of processes: its
drones, its random numbers, its collector and its episodes are the same in whichever process it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist

from slipstream.dist.group import ShardGroup
from slipstream.errors import StateMismatchError
from slipstream.nav.env import STATS, NavigationEnv
from slipstream.rl.network import NavRLPolicy
from slipstream.rl.objective import SCRATCH_KEYS
from slipstream.run.world import World, join_worlds
from slipstream.train.drones import (
    LocalDrones,
    RemoteDrones,
    learner_seed,
    make_collector,
    make_tracks,
    world_of_rollout,
)
from slipstream.train.episodes import EpisodeStats, named_means
from slipstream.train.settings import TrainSettings

# Statistics of packed rollouts that can be added up.
_PACKING = ("batch_count", "raw_bytes", "packed_bytes", "pack_s")


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
        self._tracks = make_tracks(settings, env)
        self._collector = make_collector(settings, env, policy, tracks=self._tracks)
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

    def world(self, rollout: int) -> World | None:
        """Return the world of a rollout; None if the positions of its obstacles are unknown."""
        return world_of_rollout(self._tracks, rollout)

    def gather_states(self) -> dict[str, Any]:
        """Return nothing: all that changes is in `parts`."""
        return {}

    def remote_stats(self) -> dict[str, float]:
        """Return nothing: there are no actors."""
        return {}

    def shutdown(self) -> None:
        """End the thread that collects."""
        self._collector.shutdown()


class Shard:
    """What a learner keeps of one shard, besides the drones.

    Args:
        settings: The settings of the run.
        number: Number of the shard.

    Attributes:
        generator: Where the order of its minibatches comes from.
        episodes: How its episodes went.
    """

    def __init__(self, settings: TrainSettings, number: int) -> None:
        self.generator = torch.Generator().manual_seed(learner_seed(settings, number))
        self.episodes = EpisodeStats(settings.env.num_envs // settings.dist.shards)

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes, as copies."""
        return {"episodes": self.episodes.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.episodes.load_state_dict(state["episodes"])
        self.generator.set_state(state["generator"].cpu())


class Shards:
    """The shards of this process: a list of rollouts takes the place of one.

    Args:
        settings: The settings of the run.
        policy: What acts.
        group: Which shards belong to this process.
        device: Where they are simulated.

    Attributes:
        parts: What a checkpoint contains of this.
    """

    def __init__(self, settings: TrainSettings, policy: NavRLPolicy, group: ShardGroup, device: torch.device) -> None:
        self._group = group
        self._is_packed = settings.gpu_memory_limited
        self._totals = torch.zeros(0, dtype=torch.float64)
        self._shards = [Shard(settings, number) for number in group.local_shards]
        self._drones: LocalDrones | RemoteDrones
        if settings.rollouts == "ray":
            self._drones = RemoteDrones(settings, policy, group)
        else:
            self._drones = LocalDrones(settings, policy, group, device)
        self.parts: dict[str, Any] = {"collector": self}

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield a rollout of each shard."""
        while True:
            yield self._drones.collect()

    def generators(self) -> list[torch.Generator]:
        """Return where the order of minibatches comes from, for each shard."""
        return [shard.generator for shard in self._shards]

    def staleness(self) -> int:
        """Return how many versions older than the newest the weights are that the last rollouts were collected with."""
        return self._drones.staleness()

    def add(self, rollouts: Sequence[Any]) -> None:
        """Take the episodes that ended in the rollouts."""
        for shard, rollout in zip(self._shards, rollouts, strict=True):
            shard.episodes.add(rollout)

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """Add up the statistics of all shards of the run; returns which flags are set in any process.

        Everything goes into one sum, so that processes wait for each other once.

        Args:
            flags: As many in every process.

        Raises:
            RankLostError: If another process has exited.
        """
        rows = []
        packing = self._drones.packing()
        for place, shard in enumerate(self._shards):
            # The flags of a process are in the row of its first shard.
            row = [0.0] * len(flags)
            if place == 0:
                row = list(map(float, flags))
            row += shard.episodes.sums()
            if self._is_packed:
                row += map(packing[place].__getitem__, _PACKING)
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

    def world(self, rollout: int) -> World | None:
        """Return the world of all shards in a rollout in the first process, and None in the others.

        None also if the positions of obstacles are unknown, such as those that Ray's actors fly around.

        Raises:
            RankLostError: If another process has exited.
        """
        gathered = self._group.gather(self._drones.worlds(rollout))
        if gathered is None:
            return None
        worlds = [world for world in gathered if world is not None]
        if len(worlds) < len(gathered):
            return None
        return join_worlds(worlds)

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
        states = {}
        for number, shard, flown in zip(self._group.local_shards, self._shards, self._drones.states(), strict=True):
            states[str(number)] = {"collector": flown, **shard.state_dict()}
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Continue from the states of the shards of this process; those of others may be among them.

        Raises:
            StateMismatchError: If there is none for a shard.
        """
        names = list(map(str, self._group.local_shards))
        for name in names:
            if name not in states:
                raise StateMismatchError(f"the state has no shard {name}")
        self._drones.load_states([states[name]["collector"] for name in names])
        for name, shard in zip(names, self._shards, strict=True):
            shard.load_state_dict(states[name])

    def remote_stats(self) -> dict[str, float]:
        """Return what the actors of this process do; nothing if it flies its drones itself."""
        return self._drones.remote_stats()

    def shutdown(self) -> None:
        """End all threads and actors that collect."""
        self._drones.shutdown()


def _as_collected(rollout: Any) -> Any:
    """Return a rollout without what an update has written into it, as a TensorDict."""
    collected = rollout.exclude(*SCRATCH_KEYS)
    if hasattr(rollout, "minibatches"):
        return collected.to_tensordict()
    return collected
