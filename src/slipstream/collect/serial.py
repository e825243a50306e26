"""`SerialCollector`: rollouts of an environment, one after another, on the caller's thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch

from slipstream.batches import from_state, to_state
from slipstream.checks import require_count
from slipstream.errors import StateMismatchError

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from torchrl.envs import EnvBase


class SerialCollector:
    """Run a policy in an environment and yield rollouts.

    Each rollout begins where the last one ended; environments that are done are reset in between. A rollout has
    separate memory that never changes later. Unlike the state of TorchRL's collectors, `state_dict` is sufficient to
    resume exactly: it contains the environment's state and the last observation.

    Args:
        env: A TorchRL environment with one batch axis.
        policy: Reads an observation from a TensorDict and writes an action into it.
        num_steps: Number of steps of each environment per rollout.
        total_rollouts: Number of rollouts after which to stop, including those before a `load_state_dict`; None is
            unlimited.
        before_rollout: Called before each rollout with the number of rollouts so far, on the thread that collects. Use
            it for schedules that change the environment.

    Attributes:
        env: The environment.
        policy: The policy.
        num_rollouts: Number of rollouts so far.

    Raises:
        ConfigurationError: If a number is out of range.

    Example:
        >>> from slipstream.nav import NavigationConfig, NavigationEnv
        >>> env = NavigationEnv(NavigationConfig(num_envs=2, num_static_obstacles=10))
        >>> collector = SerialCollector(env, env.rand_action, num_steps=4, total_rollouts=1)
        >>> [rollout.batch_size for rollout in collector]
        [torch.Size([2, 4])]
    """

    # Tells PipelinedDataCollector that rollouts need not be copied.
    return_same_td = False

    def __init__(
        self,
        env: EnvBase,
        policy: Any,
        num_steps: int,
        *,
        total_rollouts: int | None = None,
        before_rollout: Callable[[int], None] | None = None,
    ) -> None:
        require_count("num_steps", num_steps)
        if total_rollouts is not None:
            require_count("total_rollouts", total_rollouts)
        self.env = env
        self.policy = policy
        self.num_steps = num_steps
        self.total_rollouts = total_rollouts
        self.num_rollouts = 0
        self._before_rollout = before_rollout
        self._seen: TensorDictBase | None = None

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield rollouts ``[environment, time]``."""
        while self.total_rollouts is None or self.num_rollouts < self.total_rollouts:
            yield self.collect()

    @torch.no_grad()
    def collect(self) -> TensorDictBase:
        """Return the next rollout."""
        if self._before_rollout is not None:
            self._before_rollout(self.num_rollouts)
        seen = self.env.reset() if self._seen is None else self._seen
        steps = []
        for _ in range(self.num_steps):
            step, seen = self.env.step_and_maybe_reset(self.policy(seen))
            steps.append(step)
        self._seen = seen
        self.num_rollouts += 1
        rollout: TensorDictBase = torch.stack(steps, 1)
        return rollout

    def set_seed(self, seed: int, static_seed: bool = False) -> Any:
        """Seed the environment, and restart all its episodes with the next rollout."""
        self._seen = None
        return self.env.set_seed(seed, static_seed=static_seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: copies of the environment's state and of the last observation."""
        return {
            "num_rollouts": self.num_rollouts,
            "env": _state_of(self.env),
            "seen": None if self._seen is None else to_state(self._seen),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position that `state_dict` returned.

        Raises:
            StateMismatchError: If the state is incomplete, or belongs to another environment.
        """
        missing = {"num_rollouts", "env", "seen"} - set(state)
        if missing:
            raise StateMismatchError(f"the collector's state lacks {', '.join(sorted(missing))}")
        _load_state(self.env, state["env"])
        self._seen = None if state["seen"] is None else from_state(state["seen"])
        self.num_rollouts = int(state["num_rollouts"])

    def shutdown(self, **_: Any) -> None:
        """Close the environment."""
        if not self.env.is_closed:
            self.env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def has_state(env: EnvBase) -> bool:
    """Return whether an environment has a state to continue from: whether its class defines ``state_dict``.

    Every environment of TorchRL has a method of this name, which most inherit from ``torch.nn.Module``: it knows
    nothing of the simulator.
    """
    transform, base = _take_apart(env)
    if transform is not None:
        return has_state(base)
    for kind in type(env).__mro__:
        if "state_dict" in vars(kind):
            # A batch of environments has the states of its parts, which may be incomplete.
            return not kind.__module__.startswith(("torch.", "torchrl."))
    return False


def _state_of(env: EnvBase) -> dict[str, Any]:
    """Return the state of an environment, that of its transforms and what they transform."""
    transform, base = _take_apart(env)
    if transform is None:
        return dict(env.state_dict())
    return {"transform": dict(transform.state_dict()), "base": _state_of(base)}


def _load_state(env: EnvBase, state: Mapping[str, Any]) -> None:
    transform, base = _take_apart(env)
    if transform is None:
        env.load_state_dict(state)
        return
    if set(state) != {"transform", "base"}:
        raise StateMismatchError("the collector's state is that of an environment without transforms")
    transform.load_state_dict(state["transform"])
    _load_state(base, state["base"])


def _take_apart(env: EnvBase) -> tuple[Any, EnvBase]:
    """Return the transforms of an environment and what they transform; None for an environment without transforms."""
    torchrl: Any = sys.modules.get("torchrl.envs")
    if torchrl is not None and isinstance(env, torchrl.TransformedEnv):
        # Its own method returns the state of the transforms alone.
        return env.transform, env.base_env
    return None, env
