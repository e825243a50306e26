"""Orders for rollouts, and the ledger that lets each be trained on exactly once, whatever is lost or repeated.

Nothing here knows how orders and rollouts travel: `slipstream.collect.ray` uses Ray, and any other transport may be
used in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.errors import ConfigurationError, OrderError, StateMismatchError

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5


@dataclass(frozen=True, order=True)
class Order:
    """An order for one rollout.

    Attributes:
        shard: Which part of the environments.
        index: The number of the rollout among those of its shard.
        version: Which weights to collect it with: how many rounds were trained on before.
    """

    shard: int
    index: int
    version: int

    def seed(self, seed: int) -> int:
        """Return the seed of everything that is drawn for this rollout; it does not depend on who collects it.

        Args:
            seed: Seed of the run.

        Example:
            >>> Order(0, 0, 0).seed(1) == Order(0, 0, 0).seed(1) != Order(0, 1, 1).seed(1)
            True
        """
        sequence = np.random.SeedSequence([seed, self.shard], spawn_key=(self.index,))
        # The top bit is dropped, because torch takes seeds as signed numbers.
        return int(sequence.generate_state(1, np.uint64)[0]) >> 1

    def __str__(self) -> str:
        return f"rollout {self.index} of shard {self.shard}"


class OrderLedger:
    """Knows which rollouts are ordered, which have arrived, and where each shard continues.

    A *round* is one rollout of each shard. The learner gives out `orders`, accepts each rollout with the state in which
    the environment was left, and calls `advance` when a round `is_complete`. An order that is lost is given out again,
    from the state before it, and a rollout that arrives again is recognised. The state of the ledger belongs into the
    learner's checkpoint: a learner that resumes from it continues with the round after the last that it trained on.

    Which weights a rollout is collected with follows from its index alone, so a run in which orders were lost is the
    same as one without losses, if environments can continue from a state.

    Not thread-safe.

    Args:
        shards: How many shards, or their numbers.
        staleness: How many rounds are ordered ahead: a rollout is collected with weights that many updates old. 0 is
            synchronous.
        max_restarts: How often an order may be given out again.
        total_rounds: After how many rounds to order nothing; None is unlimited.

    Attributes:
        shards: The numbers of the shards.
        num_rounds: How many rounds were completed, which is the version of the learner's weights.
        redone: How often an order was lost and given out again.
        duplicates: How many rollouts arrived more than once.

    Raises:
        ConfigurationError: If a number is out of range, or a shard is listed twice.

    Example:
        >>> ledger = OrderLedger(2)
        >>> for order in ledger.orders():
        ...     _ = ledger.accept(order, state=b"where it ended")
        >>> ledger.is_complete
        True
        >>> ledger.advance()
        >>> [str(order) for order in ledger.orders()]
        ['rollout 1 of shard 0', 'rollout 1 of shard 1']
    """

    def __init__(
        self,
        shards: int | Sequence[int],
        *,
        staleness: int = 0,
        max_restarts: int = MAX_RESTARTS,
        total_rounds: int | None = None,
    ) -> None:
        if isinstance(shards, int):
            shards = range(require_count("shards", shards))
        self.shards = tuple(shards)
        if not self.shards or len(set(self.shards)) < len(self.shards) or min(self.shards) < 0:
            raise ConfigurationError(f"shards is {list(self.shards)}, expected different numbers of at least 0")
        self.staleness = require_count("staleness", staleness, least=0)
        self.max_restarts = require_count("max_restarts", max_restarts, least=0)
        self.total_rounds = total_rounds
        self.num_rounds = 0
        self.redone = 0
        self.duplicates = 0
        self._begin(0, dict.fromkeys(self.shards))

    def _begin(self, num_rounds: int, states: Mapping[int, bytes | None]) -> None:
        """Begin with a round, and with the state that each shard has then."""
        self.num_rounds = num_rounds
        # By shard, and by the index of the rollout that begins there.
        self._states: dict[int, dict[int, bytes | None]] = {}
        for shard in self.shards:
            self._states[shard] = {num_rounds: states[shard]}
        self._attempts: dict[Order, int] = {}

    def orders(self) -> list[Order]:
        """Return the orders that have not been fulfilled: those of this round, and of `staleness` rounds ahead.

        Those of one shard must be collected in the order of the list.
        """
        stop = self.num_rounds + self.staleness + 1
        if self.total_rounds is not None:
            stop = min(stop, self.total_rounds)
        found = []
        for index in range(self.num_rounds, stop):
            for order in self.orders_of(index):
                if index >= self._next_index(order.shard):
                    found.append(order)  # noqa: PERF401 - a loop is easier to read
        return found

    def orders_of(self, index: int) -> list[Order]:
        """Return all orders of a round, fulfilled or not."""
        version = self._version_of(index)
        return [Order(shard, index, version) for shard in self.shards]

    def has_state(self, order: Order) -> bool:
        """Return whether it is known where an order begins, because the rollout before it has arrived."""
        return order.index in self._states.get(order.shard, {})

    def state(self, order: Order) -> bytes | None:
        """Return the state that a rollout begins with; None if the environment begins new episodes.

        Raises:
            OrderError: If the rollout before it has not arrived.
        """
        if not self.has_state(order):
            raise OrderError(f"{order} cannot be collected yet, because the rollout before it has not arrived")
        return self._states[order.shard][order.index]

    def accept(self, order: Order, state: bytes | None = None) -> bool:
        """Record that a rollout has arrived; returns False if it had arrived before, so that it must not be used.

        Args:
            order: Which rollout.
            state: In what state it left the environment; None if the environment has no state that can be loaded.

        Raises:
            OrderError: If it was not ordered.
        """
        if order.shard not in self._states or order.version != self._version_of(order.index):
            raise OrderError(f"{order}, collected with version {order.version} of the weights, was not ordered")
        expected = self._next_index(order.shard)
        if order.index < expected:
            self.duplicates += 1
            logger.warning("%s has arrived more than once; it is used once", order)
            return False
        if order.index > expected or order.index > self.num_rounds + self.staleness:
            raise OrderError(f"{order} has arrived, expected rollout {expected} first")
        self._states[order.shard][order.index + 1] = state
        self._attempts.pop(order, None)
        return True

    def lose(self, order: Order, reason: str) -> None:
        """Record that an order was lost while it was being collected: `orders` still contains it.

        Raises:
            OrderError: If that happened more than `max_restarts` times.
        """
        attempts = self._attempts.get(order, 0) + 1
        self._attempts[order] = attempts
        if attempts > self.max_restarts:
            raise OrderError(
                f"{order} was lost {attempts} times, expected at most max_restarts={self.max_restarts}; the last time: "
                f"{reason}"
            )
        self.redone += 1

    @property
    def is_complete(self) -> bool:
        """Whether every rollout of this round has arrived."""
        return all(self._next_index(shard) > self.num_rounds for shard in self.shards)

    def advance(self) -> None:
        """Begin the next round. Call it when the learner takes the rollouts of this one.

        Raises:
            OrderError: If one of them has not arrived.
        """
        if not self.is_complete:
            raise OrderError(f"round {self.num_rounds} is not complete: {self.orders()[0]} has not arrived")
        # First, so that Ctrl-C cannot leave half of this.
        self.num_rounds += 1
        for states in self._states.values():
            for index in list(states):
                if index < self.num_rounds:
                    del states[index]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rounds, and the state in which each shard begins the next one.

        Rollouts that have arrived ahead of their round are not part of it: they are collected again.
        """
        states: dict[str, NDArray[np.uint8] | None] = {}
        for shard in self.shards:
            packed = self._states[shard][self.num_rounds]
            states[str(shard)] = None
            if packed is not None:
                states[str(shard)] = np.frombuffer(packed, np.uint8).copy()
        return {"num_rounds": self.num_rounds, "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the round after the last that was completed when `state_dict` was called.

        Raises:
            StateMismatchError: If it is the state of other shards, or no such state.
        """
        states: dict[int, bytes | None] = {}
        try:
            num_rounds = require_count("num_rounds", state["num_rounds"], least=0)
            for shard, packed in state["states"].items():
                states[int(shard)] = None
                if packed is not None:
                    states[int(shard)] = bytes(packed)
        except (KeyError, TypeError, ValueError, AttributeError, ConfigurationError) as error:
            raise StateMismatchError(f"this is not the state of a ledger of orders ({error!r})") from error
        if set(states) != set(self.shards):
            raise StateMismatchError(f"this is the state of shards {sorted(states)}, expected {sorted(self.shards)}")
        self._begin(num_rounds, states)

    def _next_index(self, shard: int) -> int:
        """Return the index of the first rollout of a shard that has not arrived."""
        return max(self._states[shard])

    def _version_of(self, index: int) -> int:
        return max(0, index - self.staleness)
