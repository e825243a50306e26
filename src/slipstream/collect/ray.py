"""`RayDataCollector`: rollouts that other machines collect, each trained on exactly once."""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from slipstream.batches import stamp
from slipstream.checkpoint.buffers import pack_state, unpack_state
from slipstream.checks import require_count, require_positive
from slipstream.collect.actor import BeforeRollout, pack_weights
from slipstream.collect.answers import unpack_answer
from slipstream.collect.cluster import connect, disconnect, import_ray
from slipstream.collect.crew import Crew
from slipstream.collect.members import Lost
from slipstream.collect.orders import MAX_RESTARTS, Order, OrderLedger
from slipstream.errors import ConfigurationError, CorruptFileError, FormatVersionError, StateMismatchError

if TYPE_CHECKING:
    from tensordict import TensorDictBase

logger = logging.getLogger(__name__)


class RayDataCollector:
    """Collect rollouts on the actors of a Ray cluster.

    The environments are divided into *shards*, which belong to the run. Actors may come and go: each collects the
    rollouts of some shards, packs them, and returns them together with the state in which it left the environment. If
    an actor, a process, a node or a result is lost, another actor continues from the state before. Each rollout is
    yielded exactly once, and once more only if a learner that was killed resumes from an older checkpoint.

    If the environment has a ``state_dict``, rollouts are the same bits whatever is lost, on any number of actors.
    Random numbers depend on the seed, the shard and the number of the rollout: the global generators are seeded before
    each rollout. An environment without a ``state_dict`` begins new episodes when it continues on another actor.

    Iterating takes the policy's weights before each round and sends them once to each node. Rollouts are collected with
    exploration, as by TorchRL's collectors.

    Args:
        make_env: Returns the TorchRL environment of a shard, with one batch axis. Called on the actors with the number
            of the shard, which its seed should depend on: ``env.set_seed(shard_seed(0, shard))``.
        policy: Reads an observation from a TensorDict and writes an action into it. A module is copied to the CPU of
            each actor.
        num_steps: Number of steps of each environment per rollout.
        shards: How many shards, or their numbers if this process trains on some of them.
        actors: How many actors.
        address: Where Ray is; see `slipstream.collect.cluster.connect`. By default, Ray is started on this machine.
        resources: What each actor takes, as options of ``ray.remote``, such as ``{"num_cpus": 2, "num_gpus": 0.1}``;
            by default one CPU. As many threads as CPUs are used.
        max_restarts: How often an order may be lost before an error names it.
        staleness: How many rounds to collect ahead, during the updates; their weights are as many updates old. 0 is
            synchronous.
        seed: Seed of the run.
        total_rollouts: Number of rounds after which to stop, including those before a `load_state_dict`; None is
            unlimited.
        before_rollout: Called on the actor with the environment and the `Order` before each rollout. Use it for
            schedules that change the environment.
        max_bytes: Refuse answers that are larger than this when unpacked; by default the memory of this machine.
        order_timeout_s: Replace an actor that works on one rollout for longer than this, and collect the rollout again.
            It should be much longer than creating an environment and collecting a rollout take. By default, an actor
            that is alive may take any length of time.

    Raises:
        ImportError: If Ray is not installed.
        ConfigurationError: If an argument is invalid, or there is no cluster at the address.

    Example:
        >>> from slipstream import NavigationConfig, NavigationEnv, NavRLPolicy
        >>> def make_env(shard):
        ...     return NavigationEnv(NavigationConfig(num_envs=2, num_static_obstacles=10, seed=shard))
        >>> collector = RayDataCollector(make_env, NavRLPolicy(), 4, shards=2, actors=2)  # doctest: +SKIP
        >>> with collector:  # doctest: +SKIP
        ...     print(next(iter(collector)).batch_size)
        torch.Size([4, 4])
    """

    def __init__(
        self,
        make_env: Callable[[int], Any],
        policy: Any,
        num_steps: int,
        *,
        shards: int | Sequence[int],
        actors: int,
        address: str | None = None,
        resources: Mapping[str, Any] | None = None,
        max_restarts: int = MAX_RESTARTS,
        staleness: int = 0,
        seed: int = 0,
        total_rollouts: int | None = None,
        before_rollout: BeforeRollout | None = None,
        max_bytes: int | None = None,
        order_timeout_s: float | None = None,
    ) -> None:
        require_count("num_steps", num_steps)
        require_count("actors", actors)
        if order_timeout_s is not None:
            require_positive("order_timeout_s", order_timeout_s)
        if total_rollouts is not None:
            require_count("total_rollouts", total_rollouts)
        self.policy = policy
        self.num_steps = num_steps
        self.total_rollouts = total_rollouts
        self._max_bytes = max_bytes
        self._ledger = OrderLedger(shards, staleness=staleness, max_restarts=max_restarts, total_rounds=total_rollouts)
        options = dict(resources or {"num_cpus": 1})
        threads = max(1, int(options.get("num_cpus") or 1))
        arguments = (make_env, _portable(policy), num_steps, seed, threads, before_rollout)
        self._owns_ray = connect(address, num_cpus=actors * threads)
        self._ray = import_ray()
        try:
            self._crew = Crew(arguments, options, actors, self._ledger.shards, order_timeout_s)
        except BaseException:
            self._disconnect()
            raise
        self._pid = os.getpid()
        # Another thread may shut this down.
        self._lock = threading.RLock()
        # Those that orders may still ask for, by version: their bytes, and where Ray has them.
        self._weights: dict[int, tuple[bytes, Any]] = {}
        # Those that were given for the next round, by its version.
        self._given: dict[int, bytes] = {}
        self._arrived: dict[Order, TensorDictBase] = {}
        # Rounds that `collect` has not returned yet, by index.
        self._finished: dict[int, list[TensorDictBase]] = {}
        self._is_shut_down = False
        self._stats = {"bytes_received": 0, "bytes_sent": 0, "raw_bytes": 0, "wait_s": 0.0, "unpack_s": 0.0}

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield the rollouts of all shards as one TensorDict ``[shards * environments, time]``."""
        for rollouts in self.rounds():
            yield torch.cat(rollouts, 0)

    def rounds(self) -> Iterator[list[TensorDictBase]]:
        """Yield lists with the rollout of each shard."""
        while self.total_rollouts is None or self.num_rollouts < self.total_rollouts:
            yield self.collect()

    def collect(self) -> list[TensorDictBase]:
        """Return the next rollout of each shard, collected with the policy's weights of now (or older, if stale).

        After an exception, it can be called again.

        Raises:
            OrderError: If the environment or the policy failed, or an order was lost too often.
            ConfigurationError: If no actor can start.
            RuntimeError: If the collector is shut down, also while this waits, or this is a fork of its process.
        """
        self._require_open()
        with self._lock:
            # Another thread may have shut it down.
            self._require_open()
            # It is there already if Ctrl-C has interrupted the last call at its end.
            if self.num_rollouts - 1 not in self._finished:
                self._collect()
        return self._finished.pop(self.num_rollouts - 1)

    def _collect(self) -> None:
        """Collect a round, and add it to those that are finished."""
        began_s = time.perf_counter()
        self._crew.prepare()
        self._publish()
        index = self._ledger.num_rounds
        while True:
            self._submit()
            if self._ledger.is_complete:
                break
            for result in self._crew.wait():
                self._handle(result)
        orders = self._ledger.orders_of(index)
        rollouts = list(map(self._arrived.__getitem__, orders))
        if self._ledger.staleness:
            for rollout in rollouts:
                stamp(rollout, orders[0].version)
        self._stats["wait_s"] += time.perf_counter() - began_s
        # In this order: up to the second line, Ctrl-C lets the next call begin with this round again.
        self._finished[index] = rollouts
        self._ledger.advance()
        for order in list(self._arrived):
            if order.index <= index:
                del self._arrived[order]

    @property
    def shards(self) -> tuple[int, ...]:
        """The numbers of the shards."""
        return self._ledger.shards

    @property
    def num_rollouts(self) -> int:
        """How many rounds were yielded."""
        return self._ledger.num_rounds

    def staleness(self) -> int:
        """Return how many versions older than the newest the weights are that the last rollouts were collected with."""
        return min(self._ledger.staleness, max(0, self.num_rollouts - 1))

    def update_policy_weights_(self, policy_or_weights: Any = None, **_: Any) -> None:
        """Take the policy's weights now, for the next round. By default, they are taken when it is requested.

        Args:
            policy_or_weights: A module, or its state dict, to take them from instead.
        """
        self._given = {self.num_rollouts: self._pack_weights(policy_or_weights)}

    def describe_actors(self) -> list[dict[str, Any]]:
        """Return for each actor that is running its ``host``, ``pid``, ``node`` and ``handle``, and its ``orders``."""
        return self._crew.describe()

    def get_stats(self) -> dict[str, float]:
        """Return counts, bytes and seconds so far.

        Returns:
            ``num_rollouts``: rounds yielded. ``num_actors``: actors that are running. ``num_orders``: orders that they
            are working on. ``restarts``: actors replaced. ``redone``: orders lost and collected again.
            ``duplicates``: rollouts that arrived again and were dropped. ``bytes_received``: packed answers.
            ``bytes_sent``: weights, once for each node, and states. ``raw_bytes``: size of the rollouts.
            ``wait_s``: time the learner waited for rounds, ``unpack_s`` of it to unpack them.
        """
        return {
            "num_rollouts": self.num_rollouts,
            "num_actors": self._crew.num_ready,
            "num_orders": len(self._crew.in_flight),
            "restarts": self._crew.restarts,
            "redone": self._ledger.redone,
            "duplicates": self._ledger.duplicates,
            **self._stats,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last round: the state of every shard, and weights that are still needed.

        A collector that loads it continues with the next round, on any number of actors. Rollouts that were collected
        ahead are not part of it; they are collected again.
        """
        shards = {}
        for shard in self._ledger.shards:
            packed = self._ledger.state(Order(shard, self.num_rollouts, 0))
            shards[str(shard)] = None if packed is None else unpack_state(packed)
        weights = {}
        for version, (packed, _) in self._weights.items():
            if version >= self.num_rollouts - self._ledger.staleness:
                weights[str(version)] = unpack_state(packed)
        return {"num_rollouts": self.num_rollouts, "shards": shards, "weights": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position that `state_dict` returned. What actors are collecting is dropped.

        Raises:
            StateMismatchError: If it is the state of other shards.
        """
        states = {}
        packed = {}
        try:
            num_rounds = state["num_rollouts"]
            for shard, part in state["shards"].items():
                states[shard] = None if part is None else pack_state(part)
            for version, weights in state["weights"].items():
                packed[int(version)] = pack_state(weights, compress=False)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateMismatchError(f"this is not the state of a RayDataCollector ({error!r})") from error
        with self._lock:
            self._require_open()
            self._ledger.load_state_dict({"num_rounds": num_rounds, "states": states})
            for order in self._crew.in_flight:
                self._crew.discard(order)
            self._arrived.clear()
            self._finished.clear()
            self._weights.clear()
            for version, weights in packed.items():
                self._keep_weights(version, weights)

    def shutdown(self, **_: Any) -> None:
        """End all actors, and Ray if this collector started it and no other uses it. Idempotent and thread-safe.

        A `collect` in another thread raises `RuntimeError` within a second or two.
        """
        # A fork has none of the threads that Ray needs, and the actors belong to the other process.
        if os.getpid() != self._pid:
            return
        self._crew.interrupt()
        with self._lock:
            if self._is_shut_down:
                return
            self._is_shut_down = True
            if self._ray.is_initialized():
                self._crew.close()
                self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _disconnect(self) -> None:
        if self._owns_ray:
            disconnect()

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("this collector belongs to another process: make one after the fork")
        if self._is_shut_down:
            raise RuntimeError("this collector is shut down")
        # Ray would start a cluster by itself.
        if not self._ray.is_initialized():
            raise RuntimeError("Ray was shut down before this collector: make another collector")

    def _publish(self) -> None:
        """Give the weights of this round to Ray, unless an interrupted call has done so."""
        version = self._ledger.num_rounds
        if not isinstance(self.policy, nn.Module) or version in self._weights:
            return
        self._keep_weights(version, self._given.get(version) or self._pack_weights(None))
        for earlier in range(max(0, version - self._ledger.staleness), version):
            # The checkpoint is that of a collector that was less far ahead.
            self._weights.setdefault(earlier, self._weights[version])
        for old in list(self._weights):
            if old < version - self._ledger.staleness:
                del self._weights[old]

    def _keep_weights(self, version: int, packed: bytes) -> None:
        self._weights[version] = (packed, self._ray.put(packed))
        self._stats["bytes_sent"] += len(packed) * max(1, self._crew.num_nodes)

    def _renew_weights(self, version: int) -> None:
        """Give weights to Ray again: they may be what was lost."""
        if version in self._weights:
            self._keep_weights(version, self._weights[version][0])

    def _pack_weights(self, given: Any) -> bytes:
        """Return the weights of the policy, or those of a module or a state dict in their place."""
        if isinstance(given, nn.Module):
            given = given.state_dict()
        return pack_weights(self.policy, given)

    def _submit(self) -> None:
        """Give out all orders that nobody works on and whose beginning is known."""
        if not self._crew.num_ready:
            return
        in_flight = self._crew.in_flight
        for order in self._ledger.orders():
            if order in in_flight:
                continue
            if self._ledger.has_state(order):
                self._drop_followers(order)
            elif not self._crew.continues(order):
                # One that follows another goes to the actor that will be there, or waits.
                continue
            if self._crew.can_take(order):
                self._give(order)

    def _drop_followers(self, order: Order) -> None:
        """Take back what follows an order that nobody works on: Ctrl-C has interrupted its receipt."""
        if any(other.shard == order.shard for other in self._crew.in_flight):
            self._crew.discard(order)

    def _give(self, order: Order) -> None:
        """Give an order to the actor of its shard."""
        weights = None
        if order.version in self._weights:
            # In a list, so that the actor fetches the weights only if it needs them.
            weights = (order.version, [self._weights[order.version][1]])
        self._stats["bytes_sent"] += self._crew.submit(order, weights, self._ledger.state)

    def _handle(self, result: tuple[Order, bytes] | Lost) -> None:
        """Record a loss, or accept an answer."""
        if isinstance(result, Lost):
            if result.is_suspect:
                self._renew_weights(result.order.version)
                self._ledger.lose(result.order, result.reason)
            return
        order, packed = result
        began_s = time.perf_counter()
        try:
            answer = unpack_answer(packed, order, max_bytes=self._max_bytes)
        except (CorruptFileError, FormatVersionError, TypeError) as error:
            logger.warning("%s is collected again: its answer cannot be read (%s)", order, error)
            self._crew.discard(order)
            self._ledger.lose(order, str(error))
            return
        except BaseException:
            # It has not arrived, so what follows it must not.
            self._crew.discard(order)
            raise
        # In this order: if Ctrl-C arrives in between, the rollout is collected again.
        if order in self._ledger.orders():
            self._arrived[order] = answer.rollout
        self._ledger.accept(order, answer.state)
        self._stats["bytes_received"] += len(packed)
        self._stats["raw_bytes"] += answer.rollout.bytes()
        self._stats["unpack_s"] += time.perf_counter() - began_s


def _portable(policy: Any) -> Any:
    """Return a copy of a policy that can be sent to machines without this one's devices."""
    if not isinstance(policy, nn.Module):
        return policy
    if any(nn.parameter.is_lazy(tensor) for tensor in policy.parameters()):
        raise ConfigurationError("the policy has lazy parameters that are not initialised: run it once before")
    return copy.deepcopy(policy).cpu()
