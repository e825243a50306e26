"""What runs in a Ray actor: the environments of some shards, and a copy of the policy."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from slipstream import __version__
from slipstream.checkpoint.buffers import pack_state, unpack_state
from slipstream.codecs import Codec
from slipstream.collect.answers import pack_failure, run_order
from slipstream.collect.orders import Order
from slipstream.collect.randomness import seed_global
from slipstream.collect.serial import SerialCollector
from slipstream.dist.threads import numerics

BeforeRollout = Callable[[Any, Order], None]
"""Called with the environment and the order before each rollout, where it is collected."""

# Number of rollouts that are packed with the same codecs.
_SETTLED_FOR = 16


class RolloutActor:
    """Collects one order after another.

    Args:
        make_env: Returns the environment of a shard.
        policy: Acts; if it is a module, orders come with its weights.
        num_steps: Number of steps of each environment per rollout.
        seed: Seed of the run.
        threads: How many threads torch uses.
        before_rollout: Prepares an environment for an order.
    """

    def __init__(
        self,
        make_env: Callable[[int], Any],
        policy: Any,
        num_steps: int,
        seed: int,
        threads: int,
        before_rollout: BeforeRollout | None,
    ) -> None:
        self._make_env = make_env
        self._policy = policy
        self._num_steps = num_steps
        self._seed = seed
        self._threads = threads
        self._before_rollout = before_rollout
        self._collectors: dict[int, SerialCollector] = {}
        self._codecs: dict[int, dict[str, Codec]] = {}
        self._version: int | None = None

    def describe(self) -> dict[str, Any]:
        """Return where this process is, and what its results depend on besides its orders."""
        import ray  # noqa: PLC0415 - this process was started by it

        node = ray.get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "host": platform.node(), "node": node, "slipstream": __version__, **numerics()}

    def collect(self, order: tuple[int, int, int], weights: tuple[int, list[Any]] | None, state: bytes | None) -> bytes:
        """Return the answer to an order.

        Args:
            order: The numbers of an `Order`.
            weights: The version of the weights to collect with, and a reference to them; None if there are none.
            state: Where to begin; None to continue.
        """
        ordered = Order(*order)
        torch.set_num_threads(self._threads)
        # Not below: an error of Ray's is a loss, not a failure.
        self._load_weights(weights)
        try:
            collector = self._collector_of(ordered)
            if ordered.index % _SETTLED_FOR == 0:
                # Rollouts change as the policy learns.
                self._codecs[ordered.shard] = {}
            codecs = self._codecs.setdefault(ordered.shard, {})
            return run_order(ordered, collector, state=state, seed=self._seed, codecs=codecs, threads=self._threads)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it travels as text
            # An environment that stopped in the middle of a rollout is of no use, and may fail to close.
            with contextlib.suppress(Exception):
                self.forget(ordered.shard)
            return pack_failure(ordered, error)

    def forget(self, shard: int) -> None:
        """Close the environment of a shard that continues elsewhere."""
        collector = self._collectors.pop(shard, None)
        if collector is not None:
            collector.shutdown()

    def _load_weights(self, weights: tuple[int, list[Any]] | None) -> None:
        if weights is None or weights[0] == self._version:
            return
        import ray  # noqa: PLC0415 - this process was started by it

        self._version = None
        load_weights(self._policy, ray.get(weights[1][0]))
        self._version = weights[0]

    def _collector_of(self, order: Order) -> SerialCollector:
        collector = self._collectors.get(order.shard)
        # The first rollout begins where a new environment does.
        is_at_start = order.index == 0 and collector is not None and collector.num_rollouts == 0
        if collector is None or (order.index == 0 and not is_at_start):
            self.forget(order.shard)
            # What draws its seed from a global generator has the same one wherever it is created.
            seed_global(order.seed(self._seed))
            env = self._make_env(order.shard)
            collector = SerialCollector(env, self._policy, self._num_steps)
            self._collectors[order.shard] = collector
        if self._before_rollout is not None:
            self._before_rollout(collector.env, order)
        return collector


def pack_weights(policy: nn.Module, changes: Mapping[str, torch.Tensor] | None = None) -> bytes:
    """Return the weights of a policy, and which of its modules are in training mode, for `load_weights`.

    Args:
        policy: The policy.
        changes: Weights that replace those of the policy, by name.
    """
    weights = {**policy.state_dict(), **(changes or {})}
    training = [module.training for module in policy.modules()]
    # Floats of trained weights hardly shrink.
    return pack_state({"weights": weights, "training": training}, compress=False)


def load_weights(policy: nn.Module, packed: bytes) -> None:
    """Load the weights that `pack_weights` returned."""
    state = unpack_state(packed)
    policy.load_state_dict(state["weights"])
    for module, training in zip(policy.modules(), state["training"], strict=True):
        module.training = training
