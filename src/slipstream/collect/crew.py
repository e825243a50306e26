"""The actors of a `RayDataCollector`: which are alive, which shards they have, and which orders they are working on."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream import __version__
from slipstream.collect.actor import RolloutActor
from slipstream.collect.cluster import import_ray
from slipstream.collect.members import Call, Lost, Member, compare_numerics, reason_of
from slipstream.collect.orders import Order
from slipstream.errors import ConfigurationError, OrderError
from slipstream.text import plural

logger = logging.getLogger(__name__)

_POLL_S = 1.0  # how often to look for what has no reference to wait for
_JOIN_S = 10.0  # how long to wait for the other actors once the first is ready
_MAX_START_FAILURES = 3  # in a row, while no actor works


class Crew:
    """Starts actors, replaces those that are lost, and gives each shard to one of them.

    Args:
        arguments: Those of `RolloutActor`.
        options: Options of ``ray.remote`` for each actor.
        number: How many actors.
        shards: The shards to divide among them.
        timeout_s: Replace an actor that works on one order for longer than this; None waits for any length of time.

    Attributes:
        restarts: How many actors were replaced.

    Raises:
        ConfigurationError: If Ray does not know an option.
    """

    def __init__(
        self,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        number: int,
        shards: Sequence[int],
        timeout_s: float | None = None,
    ) -> None:
        self._ray = import_ray()
        errors = self._ray.exceptions
        self._actor_errors = (
            errors.RayActorError, errors.NodeDiedError, errors.WorkerCrashedError, errors.OutOfMemoryError
        )  # fmt: skip
        self._call_errors = (errors.ObjectLostError, errors.TaskCancelledError)
        # Orders are redone by the ledger. Ray must not repeat one behind its back, or begin with two at once.
        fixed = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 1}
        try:
            self._kind = self._ray.remote(RolloutActor).options(**{**options, **fixed})
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"resources is {dict(options)}, expected options of ray.remote: {error}"
            ) from error
        self._arguments = arguments
        self._number = number
        self._shards = tuple(shards)
        self._timeout_s = timeout_s
        self._members: list[Member] = []
        self._homes: dict[int, Member] = {}
        # Shards that move to another actor as soon as nothing of them is being collected.
        self._moving: set[int] = set()
        # By reference, in the order of submission.
        self._calls: dict[Any, Call] = {}
        # These may have killed an actor. To tell, they are only given to one that is known to be alive.
        self._lost_before: set[Order] = set()
        self._start_failures = 0
        self._is_complete = False
        self._is_closed = False
        self._quiet_since_s = time.monotonic()
        self.restarts = -number
        self._start_missing()

    @property
    def num_ready(self) -> int:
        """How many actors take orders."""
        return len(self._ready())

    @property
    def num_nodes(self) -> int:
        """On how many nodes they are."""
        return len({member.about["node"] for member in self._ready()})

    @property
    def in_flight(self) -> set[Order]:
        """The orders that actors are working on."""
        return {call.order for call in self._calls.values()}

    def describe(self) -> list[dict[str, Any]]:
        """Return the host, the process and the orders of each actor that has started."""
        rows = {member: {**member.about, "orders": [], "handle": member.handle} for member in self._ready()}
        for call in self._calls.values():
            # An actor whose loss was interrupted by Ctrl-C still has orders.
            if call.member in rows:
                rows[call.member]["orders"].append(call.order)
        return list(rows.values())

    def prepare(self) -> None:
        """Replace lost actors, and divide the shards among those that are ready. Call it before each round.

        Blocks until an actor is ready. The first time, waits a while for the others.
        """
        self._start_missing()
        first_s: float | None = None
        while not self._is_complete:
            if not self._starting():
                self._is_complete = True
            elif self.num_ready:
                first_s = first_s or time.monotonic()
                self._is_complete = time.monotonic() - first_s > _JOIN_S
            if not self._is_complete:
                self._greet_any()
        while not self.num_ready:
            self._greet_any()
        self._divide()

    def submit(self, order: Order, weights: Any, find_state: Callable[[Order], bytes | None]) -> int:
        """Give an order to the actor of its shard; returns how many bytes of state were sent with it.

        Args:
            order: The order.
            weights: The second argument of `RolloutActor.collect`.
            find_state: Returns the state where the order begins. Only called if the actor is elsewhere.
        """
        member = self._homes[order.shard]
        self._note_beginning(member)
        state = None
        # If Ctrl-C interrupts what follows, it is not known where the actor is.
        if member.positions.pop(order.shard, None) != order.index:
            state = find_state(order)
        reference = member.handle.collect.remote((order.shard, order.index, order.version), weights, state)
        self._calls[reference] = Call(member, order)
        member.positions[order.shard] = order.index + 1
        return len(state or b"")

    def can_take(self, order: Order) -> bool:
        """Return whether an order can be submitted now. If not, `wait` for answers.

        If many actors are lost at once, an order is not given to one after another of those not yet known to be dead.
        """
        if order.shard in self._moving:
            self._divide()
        member = self._homes.get(order.shard)
        if member is None:
            return False
        if member.is_verified or order not in self._lost_before:
            return True
        if member.probe is None:
            self._note_beginning(member)
            member.probe = member.handle.describe.remote()
        return False

    def continues(self, order: Order) -> bool:
        """Return whether the actor of a shard will be where an order begins when it has done what it was given."""
        member = self._homes.get(order.shard)
        if member is None or order.shard in self._moving:
            return False
        return member.positions.get(order.shard) == order.index

    def wait(self) -> list[tuple[Order, bytes] | Lost]:
        """Wait for an answer or a loss; returns what there is, which may be nothing after a while.

        Raises:
            RuntimeError: If another thread has closed this.
            OrderError: If an order failed in a way that is no loss.
            ConfigurationError: If actors cannot start.
        """
        starting = self._starting()
        probed = {member.probe: member for member in self._members if member.probe is not None}
        # The rollouts of a shard must arrive in order, and Ray may report a later one first.
        first_calls: dict[int, Any] = {}
        for reference, call in self._calls.items():
            first_calls.setdefault(call.order.shard, reference)
        finished = self._wait_for([*first_calls.values(), *starting, *probed])
        results: list[tuple[Order, bytes] | Lost] = []
        for reference in finished:
            if reference in starting:
                self._greet(starting[reference])
            elif reference in probed:
                results += self._verify(probed[reference])
            else:
                results += self._receive(reference)
        if not finished:
            results += self._lose_stuck()
        return results

    def discard(self, order: Order) -> list[Lost]:
        """Stop waiting for all orders of a shard that follow one whose answer cannot be used."""
        lost = []
        for reference, call in list(self._calls.items()):
            if call.order.shard == order.shard:
                del self._calls[reference]
                call.member.positions.pop(order.shard, None)
                lost.append(Lost(call.order, "the rollout before it was lost", is_suspect=False))
        home = self._homes.get(order.shard)
        if home is not None:
            home.positions.pop(order.shard, None)
        return lost

    def interrupt(self) -> None:
        """Let a thread that waits raise an exception soon. Thread-safe."""
        self._is_closed = True

    def close(self) -> None:
        """End all actors. Idempotent."""
        self._is_closed = True
        for member in self._members:
            self._kill(member)
        self._members.clear()
        self._homes.clear()
        self._calls.clear()

    def _wait_for(self, references: list[Any]) -> list[Any]:
        """Wait a while for one of some references; returns those that are ready."""
        if not self._is_closed:
            finished: list[Any] = self._ray.wait(references, num_returns=1, timeout=_POLL_S)[0]
        if self._is_closed:
            raise RuntimeError("this collector was shut down while it was waiting")
        return finished

    def _receive(self, reference: Any) -> list[tuple[Order, bytes] | Lost]:
        call = self._calls[reference]
        try:
            answer = self._ray.get(reference)
        except self._actor_errors as error:
            return list(self._lose(call.member, reason_of(error)))
        except self._call_errors as error:
            self._lost_before.add(call.order)
            self._calls.pop(reference)
            return [Lost(call.order, reason_of(error), is_suspect=True), *self.discard(call.order)]
        except self._ray.exceptions.RayError as error:
            self.discard(call.order)
            raise OrderError(f"{call.order} failed: {reason_of(error)}") from error
        call.member.active_s = time.monotonic()
        call.member.is_verified = True
        self._lost_before.discard(call.order)
        del self._calls[reference]
        return [(call.order, answer)]

    def _lose_stuck(self) -> list[Lost]:
        """Remove an actor that has worked on an order for too long; returns the orders it had."""
        if self._timeout_s is None:
            return []
        for member in self._members:
            if self._is_busy(member) and time.monotonic() - member.active_s > self._timeout_s:
                return self._lose(member, f"it has not answered for order_timeout_s={self._timeout_s:g}")
        return []

    def _is_busy(self, member: Member) -> bool:
        return member.probe is not None or any(call.member is member for call in self._calls.values())

    def _note_beginning(self, member: Member) -> None:
        """Note that an actor begins to work, if it has nothing to do."""
        if not self._is_busy(member):
            member.active_s = time.monotonic()

    def _verify(self, member: Member) -> list[Lost]:
        """Receive the answer to a probe; returns the orders of an actor that has died instead."""
        try:
            self._ray.get(member.probe)
        except self._ray.exceptions.RayError as error:
            return self._lose(member, reason_of(error))
        member.active_s = time.monotonic()
        member.is_verified = True
        member.probe = None
        return []

    def _lose(self, member: Member, reason: str) -> list[Lost]:
        """Remove an actor that has died; returns the orders it had."""
        logger.warning("lost the actor on %s (process %s): %s", member.about["host"], member.about["pid"], reason)
        self._remove(member)
        lost: list[Lost] = []
        for reference, call in list(self._calls.items()):
            if call.member is member:
                del self._calls[reference]
                self._lost_before.add(call.order)
                # It worked on the first, the others were waiting.
                lost.append(Lost(call.order, reason, is_suspect=not lost))
        for other in self._members:
            other.is_verified = False
        self._start_missing()
        self._divide()
        return lost

    def _ready(self) -> list[Member]:
        """Return the actors that take orders."""
        return [member for member in self._members if member.is_ready]

    def _starting(self) -> dict[Any, Member]:
        """Return the actors that do not take orders yet, by the references to their introductions."""
        return {member.introduction: member for member in self._members if not member.is_ready}

    def _start_missing(self) -> None:
        """Start as many actors as there are too few."""
        while len(self._members) < self._number:
            handle = self._kind.remote(*self._arguments)
            self._members.append(Member(handle, handle.describe.remote()))
            self.restarts += 1

    def _greet_any(self) -> None:
        """Wait a while for an actor to start."""
        starting = self._starting()
        finished = self._wait_for(list(starting))
        for reference in finished:
            self._greet(starting[reference])
        if not finished and not self.num_ready and time.monotonic() - self._quiet_since_s > _JOIN_S:
            self._quiet_since_s = time.monotonic()
            has = self._ray.cluster_resources().get("CPU", 0)
            logger.warning("no actor has started yet; the cluster has %s", plural(int(has), "CPU"))

    def _greet(self, member: Member) -> None:
        """Let an actor that has started take orders."""
        try:
            about = self._ray.get(member.introduction)
        except self._ray.exceptions.RayError as error:
            self._remove(member)
            self._start_failures += 1
            reason = reason_of(error)
            if self._start_failures >= _MAX_START_FAILURES and not self.num_ready:
                raise ConfigurationError(f"actors cannot start: {reason}") from error
            logger.warning("an actor could not start: %s", reason)
            # Others may do the work until the next round: a node on which none can start must not keep this one busy.
            if not self.num_ready:
                self._start_missing()
            return
        if about["slipstream"] != __version__:
            raise ConfigurationError(
                f"{about['host']} has slipstream {about['slipstream']}, expected {__version__} as on this machine"
            )
        self._start_failures = 0
        member.about = about
        member.is_verified = True
        compare_numerics(about)
        self._divide()

    def _divide(self) -> None:
        """Give every shard to an actor that is ready: as evenly as possible, and to the one that has it if possible."""
        ready = self._ready()
        self._moving.clear()
        if not ready:
            self._homes.clear()
            return
        most = -(-len(self._shards) // len(ready))
        counts = dict.fromkeys(ready, 0)
        homeless = []
        busy = set()
        for order in self.in_flight:
            busy.add(order.shard)
        for shard in self._shards:
            member = self._homes.get(shard)
            if member not in counts or (counts[member] >= most and shard not in busy):
                homeless.append(shard)
                continue
            if counts[member] >= most:
                # What is being collected is not moved, because it would be done twice.
                self._moving.add(shard)
            counts[member] += 1
        for shard in homeless:
            before = self._homes.get(shard)
            if before in counts:
                before.positions.pop(shard, None)
                before.handle.forget.remote(shard)
            member = min(ready, key=counts.__getitem__)
            counts[member] += 1
            self._homes[shard] = member

    def _remove(self, member: Member) -> None:
        # Unless this was interrupted before, and is repeated.
        if member in self._members:
            self._members.remove(member)
        # It may be alive and only out of reach.
        self._kill(member)

    def _kill(self, member: Member) -> None:
        with contextlib.suppress(Exception):
            # It may be dead already, and Ray has many errors for that.
            self._ray.kill(member.handle)
