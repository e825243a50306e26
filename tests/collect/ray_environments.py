"""Environments that actors create: small, and able to kill their process in the middle of a rollout."""

import functools
import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, GymEnv, SerialEnv

from slipstream import OrderLedger, SerialCollector, run_order, unpack_answer
from slipstream.dist import shard_seed

NUM_ENVS = 3
NUM_STEPS = 5


class WalkEnv(EnvBase):  # type: ignore[misc, unused-ignore]
    """Walkers that drift at random and are done now and then. Its state is all that it needs to continue.

    Args:
        shard: Number of the shard.
        deaths: A folder. In the step of a file ``SHARD-STEP`` in it, the process kills itself, and the file is gone.
    """

    def __init__(self, shard: int, deaths: Path | None = None) -> None:
        super().__init__(batch_size=[NUM_ENVS])
        self.shard = shard
        self.deaths = deaths
        self.steps = 0
        self.generator = torch.Generator().manual_seed(shard_seed(0, shard))
        self.position = torch.zeros(NUM_ENVS, 2)
        self.observation_spec = Composite(position=Unbounded((NUM_ENVS, 2)), shape=(NUM_ENVS,))
        self.action_spec = Bounded(-1, 1, (NUM_ENVS, 2))
        self.reward_spec = Unbounded((NUM_ENVS, 1))

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        mask = torch.ones(NUM_ENVS, dtype=torch.bool)
        if tensordict is not None and "_reset" in tensordict.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            mask = tensordict["_reset"].reshape(-1)
        start = torch.rand(NUM_ENVS, 2, generator=self.generator)
        self.position = torch.where(mask[:, None], start, self.position)
        return TensorDict({"position": self.position.clone()}, [NUM_ENVS])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        if self.deaths is not None and (self.deaths / f"{self.shard}-{self.steps}").exists():
            (self.deaths / f"{self.shard}-{self.steps}").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        drift = torch.randn(NUM_ENVS, 2, generator=self.generator)
        self.position = self.position + 0.1 * tensordict["action"] + 0.01 * drift
        done = (self.position.norm(dim=1, keepdim=True) > 1.2) | (torch.rand(NUM_ENVS, 1) < 0.05)
        members = {"position": self.position.clone(), "reward": self.position[:, :1].clone(), "done": done}
        return TensorDict(members, [NUM_ENVS])

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(seed or 0)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return all that changes."""
        return {"position": self.position.clone(), "generator": self.generator.get_state(), "steps": self.steps}

    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> None:
        """Continue from a state."""
        self.position = state_dict["position"].clone()
        self.generator.set_state(state_dict["generator"])
        self.steps = state_dict["steps"]


class Policy(nn.Module):
    """Acts at random around a linear function of the position."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        with torch.no_grad():
            self.linear.weight.fill_(0.1)
            self.linear.bias.fill_(0.2)

    def forward(self, seen: TensorDictBase) -> TensorDictBase:
        """Write actions."""
        mean = self.linear(seen["position"])
        return seen.set("action", (mean + 0.1 * torch.randn_like(mean)).clamp(-1, 1))


def make_walk(shard: int, deaths: Path | None = None) -> WalkEnv:
    """Return the environment of a shard."""
    return WalkEnv(shard, deaths)


def make_pendulum(shard: int) -> EnvBase:
    """Return an environment that has no state which could be loaded."""
    env = SerialEnv(2, functools.partial(GymEnv, "Pendulum-v1"))
    env.set_seed(shard)
    return env


class PendulumPolicy(nn.Module):
    """Pushes at random."""

    def forward(self, seen: TensorDictBase) -> TensorDictBase:
        """Write actions."""
        return seen.set("action", 4 * torch.rand(*seen.batch_size, 1) - 2)


def make_broken(shard: int) -> EnvBase:
    """Return an environment that fails in its third rollout, on shard 1."""
    env = WalkEnv(shard)
    step = env._step

    def fail(tensordict: TensorDictBase) -> TensorDictBase:
        if shard == 1 and env.steps == 2 * NUM_STEPS + 1:
            raise ArithmeticError("the simulator exploded")
        return step(tensordict)

    env._step = fail  # type: ignore[method-assign]
    return env


def make_waiting(shard: int, folder: Path) -> EnvBase:
    """Return an environment that never finishes a step, and makes a file in a folder when it begins one."""
    env = WalkEnv(shard)

    def wait(tensordict: TensorDictBase) -> TensorDictBase:
        (folder / str(shard)).touch()
        while True:
            signal.pause()

    env._step = wait  # type: ignore[method-assign]
    return env


def learn(policy: Policy, rollouts: Sequence[TensorDictBase]) -> None:
    """Change the weights in a way that depends on every bit of the rollouts."""
    with torch.no_grad():
        for rollout in rollouts:
            policy.linear.weight.add_(0.01 * rollout["next", "position"].mean())
            policy.linear.bias.sub_(0.01 * rollout["action"].mean())


def digest(rollouts: Sequence[TensorDictBase]) -> str:
    """Return a digest of all that is in the rollouts, but not of which weights collected them."""
    found = hashlib.sha256()
    for rollout in rollouts:
        flat = rollout.exclude("collector").flatten_keys()
        for name in sorted(flat.keys()):
            found.update(name.encode() + flat[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def train(rounds: Iterator[list[TensorDictBase]], policy: Policy, number: int) -> list[str]:
    """Train for a number of rounds; returns a digest of each."""
    digests = []
    for _, rollouts in zip(range(number), rounds, strict=False):
        digests.append(digest(rollouts))
        learn(policy, rollouts)
    return digests


def serial_rounds(
    policy: Policy, shards: int, staleness: int = 0, make_env: Callable[[int], EnvBase] = make_walk
) -> Iterator[list[TensorDictBase]]:
    """Yield rounds that this process collects by itself, one order after another."""
    ledger = OrderLedger(shards, staleness=staleness)
    # A copy, whose weights are those of the order.
    acting = type(policy)()
    versions: dict[int, dict[str, torch.Tensor]] = {}
    collectors = {}
    for shard in range(shards):
        collectors[shard] = SerialCollector(make_env(shard), acting, NUM_STEPS)
    rollouts: dict[tuple[int, int], TensorDictBase] = {}
    while True:
        versions[ledger.num_rounds] = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        for order in ledger.orders():
            acting.load_state_dict(versions[order.version])
            answer = unpack_answer(run_order(order, collectors[order.shard]), order)
            assert ledger.accept(answer.order, answer.state)
            rollouts[order.shard, order.index] = answer.rollout
        index = ledger.num_rounds
        ledger.advance()
        yield [rollouts.pop((shard, index)) for shard in range(shards)]
