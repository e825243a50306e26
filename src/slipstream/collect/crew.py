"""The actors of a `RayDataCollector`: which are alive, which shards they have, and which orders they are working on."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream import __version__
from slipstream.collect.actor import RolloutActor
from slipstream.collect.cluster import import_ray
from slipstream.collect.orders import Order
from slipstream.dist.threads import numerics
from slipstream.errors import ConfigurationError, OrderError
from slipstream.text import plural

logger = logging.getLogger(__name__)

_POLL_S = 1.0  # how often to look for what has no reference to wait for
_JOIN_S = 10.0  # how long to wait for the other actors once the first is ready
_MAX_START_FAILURES = 3  # in a row, while no actor works


@dataclass(eq=False)
class Member:
    """An actor.

    Attributes:
        handle: Ray's handle.
        introduction: Reference to what the actor says of itself once it has started.
        about: What it said; empty until it has started.
        positions: For each shard, the index of the rollout with which its environment will continue.
    """

    handle: Any
    introduction: Any
    about: dict[str, Any] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """Whether it takes orders."""
        return bool(self.about)


@dataclass(frozen=True)
class Lost:
    """An order that nobody works on any more.

    Attributes:
        order: The order.
        reason: What happened.
        is_suspect: Whether it was being collected, so that it may be the cause.
    """

    order: Order
    reason: str
    is_suspect: bool


class Crew:
    """Starts actors, replaces those that are lost, and gives each shard to one of them.

    Args:
        arguments: Those of `RolloutActor`.
        options: Options of ``ray.remote`` for each actor.
        number: How many actors.
        shards: The shards to divide among them.

    Attributes:
        restarts: How many actors were replaced.
    """

    def __init__(
        self, arguments: Sequence[Any], options: Mapping[str, Any], number: int, shards: Sequence[int]
    ) -> None:
        self._ray = import_ray()
        errors = self._ray.exceptions
        self._actor_errors = (
            errors.RayActorError, errors.NodeDiedError, errors.WorkerCrashedError, errors.OutOfMemoryError
        )  # fmt: skip
        # Orders are redone by the ledger. Ray must not repeat one behind its back.
        options = {**options, "max_restarts": 0, "max_task_retries": 0}
        self._kind = self._ray.remote(RolloutActor).options(**options)
        self._arguments = arguments
        self._number = number
        self._shards = tuple(shards)
        self._members: list[Member] = []
        self._homes: dict[int, Member] = {}
        # By reference, in the order of submission.
        self._calls: dict[Any, tuple[Member, Order]] = {}
        self._start_failures = 0
        self._is_complete = False
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
        return {order for _, order in self._calls.values()}

    def describe(self) -> list[dict[str, Any]]:
        """Return the host, the process and the orders of each actor that has started."""
        rows = {member: {**member.about, "orders": [], "handle": member.handle} for member in self._ready()}
        for member, order in self._calls.values():
            rows[member]["orders"].append(order)
        return list(rows.values())

    def prepare(self) -> None:
        """Replace lost actors, and divide the shards among those that are ready. Call it before each round.

        Blocks until an actor is ready. The first time, waits a while for the others.
        """
        self._start_missing()
        first_s: float | None = None
        while not self._is_complete:
            if self.num_ready == self._number:
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
        state = None
        if member.positions.get(order.shard) != order.index:
            state = find_state(order)
        reference = member.handle.collect.remote((order.shard, order.index, order.version), weights, state)
        self._calls[reference] = (member, order)
        member.positions[order.shard] = order.index + 1
        return len(state or b"")

    def continues(self, order: Order) -> bool:
        """Return whether the actor of a shard will be where an order begins when it has done what it was given."""
        member = self._homes.get(order.shard)
        return member is not None and member.positions.get(order.shard) == order.index

    def wait(self) -> list[tuple[Order, bytes] | Lost]:
        """Wait for an answer or a loss; returns what there is, which may be nothing after a while.

        Raises:
            OrderError: If an order failed in a way that is no loss.
            ConfigurationError: If actors cannot start.
        """
        starting = self._starting()
        # The rollouts of a shard must arrive in order, and Ray may report a later one first.
        first_calls: dict[int, Any] = {}
        for reference, (_, order) in self._calls.items():
            first_calls.setdefault(order.shard, reference)
        finished, _ = self._ray.wait([*first_calls.values(), *starting], num_returns=1, timeout=_POLL_S)
        results: list[tuple[Order, bytes] | Lost] = []
        for reference in finished:
            if reference in starting:
                self._greet(starting[reference])
            else:
                results += self._receive(reference)
        return results

    def discard(self, order: Order) -> list[Lost]:
        """Stop waiting for all orders of a shard that follow one whose answer cannot be used."""
        lost = []
        for reference, (member, other) in list(self._calls.items()):
            if other.shard == order.shard:
                del self._calls[reference]
                member.positions.pop(order.shard, None)
                lost.append(Lost(other, "the rollout before it was lost", is_suspect=False))
        home = self._homes.get(order.shard)
        if home is not None:
            home.positions.pop(order.shard, None)
        return lost

    def close(self) -> None:
        """End all actors. Idempotent."""
        for member in self._members:
            self._kill(member)
        self._members.clear()
        self._homes.clear()
        self._calls.clear()

    def _receive(self, reference: Any) -> list[tuple[Order, bytes] | Lost]:
        member, order = self._calls[reference]
        try:
            answer = self._ray.get(reference)
        except self._actor_errors as error:
            return list(self._lose(member, _reason(error)))
        except self._ray.exceptions.ObjectLostError as error:
            del self._calls[reference]
            return [Lost(order, _reason(error), is_suspect=True), *self.discard(order)]
        except self._ray.exceptions.RayError as error:
            del self._calls[reference]
            raise OrderError(f"{order} failed: {_reason(error)}") from error
        del self._calls[reference]
        return [(order, answer)]

    def _lose(self, member: Member, reason: str) -> list[Lost]:
        """Remove an actor that has died; returns the orders it had."""
        logger.warning("lost the actor on %s (process %s): %s", member.about["host"], member.about["pid"], reason)
        self._remove(member)
        lost: list[Lost] = []
        for reference, (holder, order) in list(self._calls.items()):
            if holder is member:
                del self._calls[reference]
                # It worked on the first, the others were waiting.
                lost.append(Lost(order, reason, is_suspect=not lost))
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
        finished, _ = self._ray.wait(list(starting), num_returns=1, timeout=_POLL_S)
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
            reason = _reason(error)
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
        _compare_numerics(about)
        self._divide()

    def _divide(self) -> None:
        """Give every shard to an actor that is ready: as evenly as possible, and to the one that has it if possible."""
        ready = self._ready()
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
            # What is being collected is not moved, because it would be done twice.
            if member in counts and (counts[member] < most or shard in busy):
                counts[member] += 1
            else:
                homeless.append(shard)
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


def _compare_numerics(about: Mapping[str, str]) -> None:
    """Warn about an actor whose results may have other last bits."""
    differences = []
    for name, value in numerics().items():
        if about[name] != value:
            differences.append(f"{name} {about[name]} instead of {value}")
    if differences:
        logger.warning("%s rounds differently (%s): runs are repeatable only if all actors are alike",
                       about["host"], ", ".join(differences))  # fmt: skip


def _reason(error: BaseException) -> str:
    """Return Ray's message in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # An error in an actor's constructor has a traceback, which ends with what happened.
    text = lines[0]
    if "Traceback" in str(error) or "ray::" in str(error):
        text = lines[-1]
    return text
