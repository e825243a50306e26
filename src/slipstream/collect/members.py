"""One actor of a `RayDataCollector`, the orders that it has, and how it is lost."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.collect.orders import Order
from slipstream.dist.threads import numerics

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Member:
    """An actor.

    Attributes:
        handle: Ray's handle.
        introduction: Reference to what the actor says of itself once it has started.
        about: What it said; empty until it has started.
        positions: For each shard, the index of the rollout with which its environment will continue.
        active_s: When it last answered, or was given something to do while it had nothing.
        is_verified: Whether it has answered since the last loss of an actor, so that it is probably alive.
        probe: Reference to a call whose answer will verify it; None if there is none.
    """

    handle: Any
    introduction: Any
    about: dict[str, Any] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    active_s: float = 0.0
    is_verified: bool = False
    probe: Any = None

    @property
    def is_ready(self) -> bool:
        """Whether it takes orders."""
        return bool(self.about)


@dataclass(frozen=True)
class Call:
    """An order that an actor has.

    Attributes:
        member: The actor.
        order: The order.
    """

    member: Member
    order: Order


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


def compare_numerics(about: Mapping[str, str]) -> None:
    """Warn about an actor whose results may have other last bits."""
    differences = []
    for name, value in numerics().items():
        if about[name] != value:
            differences.append(f"{name} {about[name]} instead of {value}")
    if differences:
        logger.warning("%s rounds differently (%s): runs are repeatable only if all actors are alike",
                       about["host"], ", ".join(differences))  # fmt: skip


def reason_of(error: BaseException) -> str:
    """Return Ray's message in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # An error in an actor's constructor has a traceback, which ends with what happened.
    text = lines[0]
    if "Traceback" in str(error) or "ray::" in str(error):
        text = lines[-1]
    return text
