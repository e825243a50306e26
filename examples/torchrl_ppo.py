"""TorchRL's own PPO (ClipPPOLoss, GAE, Collector), its rollouts packed in memory, its checkpoints in the background.

Of Slipstream are the environment, `CompressedDataCollector` around TorchRL's collector, and `AsyncCheckpointSaver`.
To run it: python examples/torchrl_ppo.py [--iterations 20] [--envs 64] [--folder runs/torchrl_ppo]
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from slipstream import AsyncCheckpointSaver, CompressedDataCollector, NavigationConfig, NavigationEnv, load_checkpoint

SEEN = [("agents", "observation", name) for name in ("lidar", "dynamic_obstacle", "state")]
ACTION, REWARD, LIMITS_M_S = ("agents", "action"), ("agents", "reward"), {"low": -2.0, "high": 2.0}


class Network(nn.Module):
    """A small network over all that a drone sees."""

    def __init__(self, outputs: int, *tail: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(202, 256), nn.ELU(), nn.Linear(256, outputs), *tail)

    def forward(self, lidar: torch.Tensor, obstacle: torch.Tensor, state: torch.Tensor) -> Any:
        """Return the outputs for observations of any batch shape."""
        return self.layers(torch.cat([lidar.flatten(-3), obstacle.flatten(-3), state], -1))


def make_loss() -> tuple[ProbabilisticActor, ClipPPOLoss, GAE]:
    """Return what acts, what is minimised, and what estimates advantages."""
    head, params = TensorDictModule(Network(6, NormalParamExtractor()), SEEN, ["loc", "scale"]), ["loc", "scale"]
    drawn = {"distribution_class": TanhNormal, "distribution_kwargs": LIMITS_M_S, "return_log_prob": True}
    actor, critic = ProbabilisticActor(head, params, [ACTION], **drawn), ValueOperator(Network(1), SEEN)
    loss, gae = ClipPPOLoss(actor, critic, normalize_advantage=True), GAE(gamma=0.97, lmbda=0.93, value_network=critic)
    loss.set_keys(action=ACTION, reward=REWARD)
    gae.set_keys(reward=REWARD)
    return actor, loss, gae


def main() -> None:
    """Train for some iterations."""
    parser = argparse.ArgumentParser(description="TorchRL's own PPO, with Slipstream around it.")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path("runs/torchrl_ppo"))
    args = parser.parse_args()
    torch.manual_seed(0)
    env = NavigationEnv(NavigationConfig(args.envs, 60, 16, dynamics="lag", dt_s=0.1, compile="false"))
    actor, loss, gae = make_loss()
    optimizer, frames, path = torch.optim.Adam(loss.parameters(), 3e-4), args.envs * 32, args.folder / "ppo.slip"
    sizes = {"frames_per_batch": frames, "total_frames": frames * args.iterations}
    base = Collector(env, actor, **sizes, auto_register_policy_transforms=False)
    with CompressedDataCollector(base) as collector, AsyncCheckpointSaver() as saver:
        saver.guard(optimizer)  # its step waits for a copy in progress
        for iteration, batch in enumerate(collector, start=1):  # packed; what is read of it is an ordinary TensorDict
            parts = [gae(batch[first : first + 16]) for first in range(0, args.envs, 16)]  # 16 drones decoded at a time
            for key in ("advantage", "value_target"):
                batch.set(key, torch.cat([part[key] for part in parts]))
            for minibatch in (part for _ in range(4) for part in batch.minibatches(4)):  # four epochs
                optimizer.zero_grad()
                loss(minibatch).select("loss_objective", "loss_critic", "loss_entropy").sum(reduce=True).backward()
                optimizer.step()
            saver.save_async({"loss": loss.state_dict(), "optimizer": optimizer.state_dict()}, path, format="native")
            reward, ratio = batch["next", "agents", "reward"].mean(), collector.get_stats()["compression_ratio"]
            print(f"iteration {iteration}: reward {reward:.3f}, rollouts packed {ratio:.1f} times smaller")
    loss.load_state_dict(load_checkpoint(path, keys=["loss"])["loss"])  # reads these tensors only
    print(f"{path} is whole and checked: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
