"""PPO in any number of processes, with the same result for each: run it with both commands and compare the last lines.

python examples/many_processes.py
torchrun --standalone --nproc-per-node=2 examples/many_processes.py
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import os
from typing import Any

import torch
import torch.distributed

from slipstream import PPO, NavigationConfig, NavigationEnv, NavRLPolicy, PPOConfig, SerialCollector
from slipstream.dist import ShardGroup, shard_seed
from slipstream.nav.frame import velocity_from_unit


def make_collector(policy: NavRLPolicy, num_envs: int, seed: int, generator: torch.Generator) -> SerialCollector:
    """Return a collector for one shard: its environments and its actions have separate random numbers."""
    config = NavigationConfig(num_envs=num_envs, start="through", dynamics="lag", dt_s=0.1, seed=seed)

    def act(observations: Any) -> Any:
        return policy.act(observations, generator=generator)

    return SerialCollector(NavigationEnv(config), act, num_steps=16)


def main() -> None:
    """Train, and print a digest of the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--envs", type=int, default=256, help="environments of all shards together")
    parser.add_argument("--shards", type=int, default=4)
    args = parser.parse_args()
    if "WORLD_SIZE" in os.environ:  # set by torchrun
        torch.distributed.init_process_group("gloo")
        atexit.register(torch.distributed.destroy_process_group)

    group = ShardGroup(args.shards)
    torch.manual_seed(0)  # every process starts with the same weights
    policy = NavRLPolicy(action_map=velocity_from_unit)
    ppo = PPO(policy, PPOConfig(num_minibatches=4), group=group)
    generators = []
    collectors = []
    for shard in group.local_shards:
        generator = torch.Generator().manual_seed(shard_seed(0, shard))
        generators.append(generator)
        collectors.append(make_collector(policy, args.envs // args.shards, shard_seed(1, shard), generator))

    first = group.local_shards.start
    for iteration in range(1, args.iterations + 1):
        rollouts = group.map(lambda shard: collectors[shard - first].collect())
        metrics = ppo.update(rollouts, generators=generators)
        if group.rank == 0:
            print(f"iteration {iteration}: explained variance {metrics['explained_variance']:.3f}")

    digest = hashlib.sha256()
    for tensor in policy.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    print(f"rank {group.rank} of {group.world}: weights {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
