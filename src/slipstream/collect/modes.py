"""Detect that tensordict's modes change while a batch is collected.

``set_exploration_type`` and ``set_skip_existing`` set one variable for all threads of a process. Losses and policies
set and restore it in their methods, so two threads that do this at the same time can even leave a wrong mode behind. If
a mode changes during a rollout, then some of its actions are means instead of samples, or are not computed at all.
tensordict has no modes for single threads. They are safe if all threads set the same ones, and an error otherwise.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.collect.policy import called_policy

_ADVICE = (
    "all threads share them. Run the whole loop inside `with set_exploration_type(ExplorationType.RANDOM):`, evaluate "
    "inside `with collector.paused():`, and if you use a loss of TorchRL, which changes them in every call, set "
    "`loss.deterministic_sampling_mode = ExplorationType.RANDOM`"
)


@dataclass(frozen=True)
class Modes:
    """tensordict's modes at one moment.

    Attributes:
        exploration_type: How modules turn a distribution into an action; None is the default of each module.
        skip_existing: Whether modules skip the computation of entries that exist.
    """

    exploration_type: Any = None
    skip_existing: Any = False


def read_modes() -> Modes:
    """Return the modes of the process. Without tensordict, nothing can change them."""
    tensordict: Any = sys.modules.get("tensordict.nn")
    if tensordict is None:
        return Modes()
    return Modes(tensordict.probabilistic.interaction_type(), tensordict.skip_existing())


class ModeGuard:
    """Compare the modes before and after each call of a collector's policy with those at the start of the loop.

    The comparison is not a lock: it misses a change that is reverted during the same call of the policy. Policies that
    are not modules have no hooks, and are not checked.

    Args:
        base: The collector. Its ``exploration_type``, if it has one, is what its policy must see.
    """

    def __init__(self, base: Any) -> None:
        self._own_type = getattr(base, "exploration_type", None)
        self._expected: Modes | None = None
        self._is_collecting = False
        self.hooks: list[Any] = []
        policy = called_policy(base)
        if policy is not None:
            self.hooks = [policy.register_forward_pre_hook(self._check), policy.register_forward_hook(self._check)]

    def remember(self) -> None:
        """Expect the modes of this moment, unless others are remembered. Call it while nothing is collected."""
        if self._expected is not None:
            return
        modes = read_modes()
        if self._own_type is not None:
            # TorchRL's collectors set this one themselves while they collect.
            modes = Modes(self._own_type, modes.skip_existing)
        self._expected = modes

    def forget(self) -> None:
        """Let the next loop have other modes. Call it while nothing is collected."""
        self._expected = None

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Check the calls of the policy inside the block. Outside, training may call it with any modes."""
        self._is_collecting = True
        try:
            yield
        finally:
            self._is_collecting = False

    def _check(self, *_: Any) -> None:
        expected = self._expected
        if expected is None or not self._is_collecting:
            return
        found = read_modes()
        if found != expected:
            raise RuntimeError(f"tensordict's modes changed during collection, from {expected} to {found}: {_ADVICE}")
