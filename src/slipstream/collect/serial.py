"""`SerialCollector`: rollouts of an environment, one after another, on the caller's thread."""

from __future__ import annotations

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
            "env": self.env.state_dict(),
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
        self.env.load_state_dict(state["env"])
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
