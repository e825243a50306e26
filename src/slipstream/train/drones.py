"""Who flies the drones of the shards of a process: the process itself, or Ray's actors.

`LocalDrones` and `RemoteDrones` have the same methods, and yield the same rollouts, bit for bit on a CPU: the state of
one continues in the other.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slipstream.collect.compressed import CompressedDataCollector
from slipstream.collect.orders import Order
from slipstream.collect.pipelined import PipelinedDataCollector
from slipstream.collect.ray import RayDataCollector
from slipstream.collect.serial import SerialCollector
from slipstream.dist.group import ShardGroup, shard_seed
from slipstream.errors import StateMismatchError
from slipstream.nav.config import NavigationConfig
from slipstream.nav.env import NavigationEnv
from slipstream.rl.network import NavRLPolicy
from slipstream.run.world import World
from slipstream.train.schedule import collision_penalty
from slipstream.train.settings import TrainSettings
from slipstream.train.startup import BYTES_PER_STEP, prepare_process
from slipstream.train.worlds import ObstacleTracks

if TYPE_CHECKING:
    from tensordict import TensorDictBase

# From here on, collecting two shards on two threads is faster than one after another.
_DRONES_PER_THREAD = 512
_LEARNER = 1  # mixed into the seed of a shard: the order of minibatches needs other numbers than its drones
_MARGIN = 4  # how much larger than expected an answer may be before it is refused


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


def learner_seed(settings: TrainSettings, shard: int) -> int:
    """Return the seed of what is drawn for a shard where it is trained on."""
    return shard_seed(shard_seed(settings.seed, shard), _LEARNER)


def make_collector(
    settings: TrainSettings,
    env: NavigationEnv,
    policy: Any,
    *,
    threads: int | None = None,
    begin: Callable[[int], None] | None = None,
    tracks: ObstacleTracks | None = None,
) -> Any:
    """Return what yields rollouts, by the plan that the settings ask for.

    Args:
        settings: The settings of the run.
        env: Where to collect.
        policy: What acts.
        threads: How many threads torch uses where rollouts are collected; None leaves that as it is.
        begin: Called with the number of each rollout before it is collected.
        tracks: Keeps where the obstacles were.
    """

    def prepare(rollout: int) -> None:
        if threads is not None:
            # A collector that is ahead has its own thread, for which nobody else sets this.
            torch.set_num_threads(threads)
        if begin is not None:
            begin(rollout)
        if tracks is not None:
            tracks.begin(rollout)
        env.simulation.collision_penalty = collision_penalty(settings, rollout)

    collector: Any = SerialCollector(env, policy, settings.algo.training_frame_num, before_rollout=prepare)
    if settings.use_pipelined_collector:
        # The environment has private generators, so only the policy needs separate random numbers.
        collector = PipelinedDataCollector(collector, prefetch_count=settings.prefetch_count, rng="policy")
    if settings.gpu_memory_limited:
        collector = CompressedDataCollector(collector)
    return collector


def make_tracks(settings: TrainSettings, env: NavigationEnv) -> ObstacleTracks | None:
    """Return what keeps the positions of the obstacles for rollouts that are saved; None if none is."""
    if not settings.rollout_save_interval and not settings.compress_lidar:
        return None
    # The rollout that is saved, those that are ready, and the one that is being collected.
    num_kept = 2
    if settings.use_pipelined_collector:
        num_kept += settings.prefetch_count + 1
    return ObstacleTracks(env, num_kept)


class LocalDrones:
    """The drones of some shards, flown by this process.

    Args:
        settings: The settings of the run.
        policy: What acts; shared by all shards.
        group: Which shards belong to this process.
        device: Where they are simulated.
    """

    def __init__(self, settings: TrainSettings, policy: NavRLPolicy, group: ShardGroup, device: torch.device) -> None:
        self._group = group
        self._is_ahead = settings.use_pipelined_collector
        # One after another: while they are created, they borrow the global generator.
        self._collectors: list[Any] = []
        self._tracks: list[ObstacleTracks | None] = []
        for shard in group.local_shards:
            env = NavigationEnv(shard_navigation(settings, shard), device)
            tracks = make_tracks(settings, env)
            self._tracks.append(tracks)
            self._collectors.append(_make_shard_collector(settings, env, policy, shard, tracks))
        self._iterators: list[Iterator[Any]] = []
        self._threads: int | None = None
        if settings.env.num_envs // settings.dist.shards < _DRONES_PER_THREAD:
            # Steps of few drones are mostly Python, for which threads would wait in turns.
            self._threads = 1

    def collect(self) -> list[Any]:
        """Return the next rollout of each shard."""
        if not self._iterators:
            self._iterators = [iter(collector) for collector in self._collectors]

        def collect(shard: int) -> Any:
            return next(self._iterators[shard - self._group.local_shards.start])

        return self._group.map(collect, threads=self._threads)

    def staleness(self) -> int:
        """Return how many versions older than the newest the weights are that the last rollouts were collected with."""
        if not self._is_ahead:
            return 0
        return int(self._collectors[0].staleness())

    def worlds(self, rollout: int) -> list[World | None]:
        """Return the world of each shard in a rollout; None where the positions of its obstacles are unknown."""
        return [world_of_rollout(tracks, rollout) for tracks in self._tracks]

    def packing(self) -> list[dict[str, float]]:
        """Return for each shard what packing its rollouts has cost and saved; only if they are packed."""
        return [collector.get_stats() if _is_packed(collector) else {} for collector in self._collectors]

    def states(self) -> list[dict[str, Any]]:
        """Return where each shard continues, as copies."""
        return [collector.state_dict() for collector in self._collectors]

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from `states`."""
        for collector, state in zip(self._collectors, states, strict=True):
            collector.load_state_dict(state)

    def remote_stats(self) -> dict[str, float]:
        """Return nothing: there are no actors."""
        return {}

    def shutdown(self) -> None:
        """End all threads that collect."""
        for collector in self._collectors:
            collector.shutdown()


def _is_packed(collector: Any) -> bool:
    return isinstance(collector, CompressedDataCollector)


def world_of_rollout(tracks: ObstacleTracks | None, rollout: int) -> World | None:
    """Return the world of a rollout; None if the positions of its obstacles are unknown."""
    if tracks is None:
        return None
    return tracks.world(rollout)


def _make_shard_collector(
    settings: TrainSettings, env: NavigationEnv, policy: NavRLPolicy, shard: int, tracks: ObstacleTracks | None
) -> Any:
    """Return what yields the rollouts of one shard."""
    generator = torch.Generator(env.simulation.device)

    def begin(rollout: int) -> None:
        # As an actor would.
        generator.manual_seed(Order(shard, rollout, rollout).seed(settings.seed))

    def act(seen: TensorDictBase) -> TensorDictBase:
        return policy.act(seen, generator=generator)

    if not settings.use_pipelined_collector:
        return make_collector(settings, env, act, threads=1, begin=begin, tracks=tracks)
    # Collected ahead, a policy has to be a module, of which the collector makes a copy with its own generators.
    with torch.random.fork_rng(devices=[]):
        # It takes the seed of these from the global generator.
        torch.default_generator.manual_seed(learner_seed(settings, shard))
        return make_collector(settings, env, policy, threads=1, tracks=tracks)


class RemoteDrones:
    """The drones of some shards, flown by the actors of a Ray cluster.

    Args:
        settings: The settings of the run.
        policy: What acts; its weights are sent to the actors.
        group: Which shards belong to this process.
    """

    def __init__(self, settings: TrainSettings, policy: NavRLPolicy, group: ShardGroup) -> None:
        staleness = 0
        if settings.use_pipelined_collector:
            staleness = settings.prefetch_count
        steps = settings.frames_per_iteration // settings.dist.shards
        self._collector = RayDataCollector(
            functools.partial(_make_shard_env, settings),
            policy,
            settings.algo.training_frame_num,
            shards=group.local_shards,
            actors=max(1, settings.ray.num_actors // group.world),
            address=settings.ray.address,
            max_restarts=settings.ray.max_restarts,
            staleness=staleness,
            seed=settings.seed,
            before_rollout=functools.partial(_follow_schedule, settings),
            max_bytes=_MARGIN * steps * BYTES_PER_STEP,
        )
        self._received: list[Any] = []
        self._packers: list[Iterator[Any]] = []
        self._packed: list[CompressedDataCollector] = []
        if settings.gpu_memory_limited:
            for place in range(len(group.local_shards)):
                self._packed.append(CompressedDataCollector(self._received_at(place)))
            self._packers = [iter(packer) for packer in self._packed]
        self._before = (time.monotonic(), 0.0)

    def collect(self) -> list[Any]:
        """Return the next rollout of each shard."""
        self._received = self._collector.collect()
        if not self._packed:
            return self._received
        return [next(packer) for packer in self._packers]

    def staleness(self) -> int:
        """Return how many versions older than the newest the weights are that the last rollouts were collected with."""
        return self._collector.staleness()

    def worlds(self, rollout: int) -> list[World | None]:
        """Return nothing for each shard: actors do not send where their obstacles were."""
        return [None] * len(self._collector.shards)

    def packing(self) -> list[dict[str, float]]:
        """Return for each shard what packing its rollouts has cost and saved; only if they are packed."""
        return [packer.get_stats() for packer in self._packed]

    def states(self) -> list[dict[str, Any]]:
        """Return where each shard continues, as copies."""
        state = self._collector.state_dict()
        states = []
        for part in state["shards"].values():
            # Before the first rollout, there is no state yet.
            known = part or {"num_rollouts": 0}
            if state["weights"]:
                # Rollouts that are collected ahead need the weights of earlier updates.
                known["weights"] = state["weights"]
            states.append(known)
        return states

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from `states`.

        Raises:
            StateMismatchError: If they are those of a collector that ran ahead in another way.
        """
        first = states[0]
        shards: dict[str, Any] = {}
        for number, state in zip(self._collector.shards, states, strict=True):
            if "num_rollouts" not in state:
                raise StateMismatchError("rollouts that were collected ahead without Ray cannot be continued with Ray")
            shards[str(number)] = None
            if state["num_rollouts"]:
                shards[str(number)] = {name: state[name] for name in state if name != "weights"}
        self._collector.load_state_dict(
            {"num_rollouts": first["num_rollouts"], "shards": shards, "weights": first.get("weights", {})}
        )

    def remote_stats(self) -> dict[str, float]:
        """Return what the actors do; rates are since the last call."""
        stats = self._collector.get_stats()
        before_s, before_bytes = self._before
        now_s = time.monotonic()
        self._before = (now_s, stats["bytes_received"])
        return {
            "actors": stats["num_actors"],
            "orders": stats["num_orders"],
            "redone": stats["redone"],
            "restarts": stats["restarts"],
            "duplicates": stats["duplicates"],
            "mb_per_s": (stats["bytes_received"] - before_bytes) / max(now_s - before_s, 1e-9) / 1e6,
        }

    def shutdown(self) -> None:
        """End the actors."""
        self._collector.shutdown()

    def _received_at(self, place: int) -> Iterator[Any]:
        """Yield the rollouts of one shard."""
        while True:
            yield self._received[place]


def _make_shard_env(settings: TrainSettings, shard: int) -> NavigationEnv:
    """Return the environment of a shard, and prepare the process that it is in as the trainer does."""
    prepare_process(1)
    return NavigationEnv(shard_navigation(settings, shard))


def _follow_schedule(settings: TrainSettings, env: NavigationEnv, order: Order) -> None:
    env.simulation.collision_penalty = collision_penalty(settings, order.index)
