"""Train a soft actor-critic from a packed replay buffer: python examples/packed_replay_sac.py [--tiny]."""

import copy
import sys

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import ReplayBuffer

from slipstream import NavigationConfig, NavigationEnv, PackedEpisodeStorage

NUM_ENVS, NUM_STEPS, BATCH, SPEED_M_S, ALPHA = 16, 100 if "--tiny" in sys.argv else 2000, 128, 2.0, 0.1
SIZES = {"state": 8, "lidar": 144, "direction": 3, "dynamic_obstacle": 50}

env = NavigationEnv(NavigationConfig(num_envs=NUM_ENVS, num_static_obstacles=60, dynamics="lag", dt_s=0.1))
buffer = ReplayBuffer(storage=PackedEpisodeStorage(NUM_ENVS * NUM_STEPS, ndim=2), batch_size=BATCH)


def features(observation: TensorDict) -> torch.Tensor:
    """Flatten what a drone sees."""
    return torch.cat([observation[name].flatten(1) for name in SIZES], -1)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Make a small network."""
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


torch.manual_seed(0)
actor, critics = mlp(sum(SIZES.values()), 6), nn.ModuleList(mlp(sum(SIZES.values()) + 3, 1) for _ in range(2))
targets = copy.deepcopy(critics).requires_grad_(requires_grad=False)
optimizers = [torch.optim.Adam(p, 1e-3) for p in (actor.parameters(), critics.parameters())]


def act(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw squashed Gaussian actions; returns them and their log-probabilities."""
    mean, log_std = actor(seen).chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-5, 1).exp())
    raw = normal.rsample()
    return raw.tanh(), (normal.log_prob(raw) - (1 - raw.tanh().square() + 1e-6).log()).sum(-1)  # type: ignore[no-untyped-call]


def value(networks: nn.ModuleList, seen: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Return what each critic thinks of actions."""
    return torch.stack([network(torch.cat([seen, action], -1)).squeeze(-1) for network in networks])


def learn(batch: TensorDict) -> None:
    """Take one step of all optimizers."""
    seen, after = (features(part["agents", "observation"]) for part in (batch, batch["next"]))
    with torch.no_grad():
        action, log_prob = act(after)
        future = value(targets, after, action).min(0).values - ALPHA * log_prob
        future *= ~batch["next", "terminated"].squeeze(-1)
        target = batch["next", "agents", "reward"].squeeze(-1) + 0.98 * future
    critic_loss = (value(critics, seen, batch["agents", "action"] / SPEED_M_S) - target).square().mean()
    action, log_prob = act(seen)
    actor_loss = (ALPHA * log_prob - value(critics, seen, action).min(0).values).mean()
    for optimizer, loss in zip(optimizers, (actor_loss, critic_loss), strict=True):
        optimizer.zero_grad()
        loss.backward(inputs=[p for group in optimizer.param_groups for p in group["params"]])
        optimizer.step()
    for target_weight, weight in zip(targets.parameters(), critics.parameters(), strict=True):
        target_weight.lerp_(weight.detach(), 0.01)


data, rewards = env.reset(), []
for number in range(NUM_STEPS):
    with torch.no_grad():
        data["agents", "action"] = SPEED_M_S * act(features(data["agents", "observation"]))[0]
    step, data = env.step_and_maybe_reset(data)
    buffer.extend(step.select("agents", ("next", "agents"), ("next", "done"), ("next", "terminated")).unsqueeze(1))
    rewards.append(step["next", "agents", "reward"].mean().item())
    if number >= 32:
        learn(buffer.sample())
first, last = (sum(part) / len(part) for part in (rewards[: NUM_STEPS // 10], rewards[-NUM_STEPS // 10 :]))
smaller = buffer.storage.get_stats()["compression_ratio"]
print(f"reward {first:.2f} at first, {last:.2f} at last; {len(buffer)} steps are {smaller:.1f} times smaller here")
