"""PPO whose rollouts are collected by actors of a Ray cluster. One of them is killed, and the result stays the same.

python examples/ray_rollouts.py                   # starts Ray on this machine
python examples/ray_rollouts.py --address auto    # uses the cluster of this machine, see docs/guides/many-machines.md
"""

from __future__ import annotations

import argparse
import hashlib
import logging

import ray
import torch

from slipstream import PPO, NavigationConfig, NavigationEnv, NavRLPolicy, PPOConfig, RayDataCollector
from slipstream.dist import shard_seed
from slipstream.nav.frame import velocity_from_unit

SHARDS = 2


def make_env(shard: int) -> NavigationEnv:
    """Return the environment of a shard; runs on an actor."""
    config = NavigationConfig(num_envs=32, start="through", dynamics="lag", dt_s=0.1, seed=shard_seed(0, shard))
    return NavigationEnv(config)


def train(address: str | None, actors: int, iterations: int, kill: int | None) -> str:
    """Train, and return a digest of the weights; an actor is killed after the iteration `kill`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy = NavRLPolicy(action_map=velocity_from_unit)
    ppo = PPO(policy, PPOConfig(num_minibatches=4))
    with RayDataCollector(make_env, policy, 16, shards=SHARDS, actors=actors, address=address) as collector:
        for iteration, rollout in enumerate(collector):
            if iteration == iterations:
                break
            ppo.update(rollout)
            if iteration == kill:
                ray.kill(collector.describe_actors()[0]["handle"])
        stats = collector.get_stats()
    ratio = stats["raw_bytes"] / stats["bytes_received"]
    print(f"{actors} actors, {stats['restarts']} replaced: rollouts were {ratio:.1f} times smaller on their way")
    digest = hashlib.sha256()
    for tensor in policy.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Train twice: once undisturbed, once with one actor more, of which one is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="of the cluster; by default, Ray is started on this machine")
    parser.add_argument("--iterations", type=int, default=5)
    args = parser.parse_args()
    # The loss of an actor is intended here.
    logging.getLogger("slipstream").setLevel(logging.ERROR)
    calm = train(args.address, 1, args.iterations, kill=None)
    disturbed = train(args.address, 2, args.iterations, kill=1)
    print(f"weights {calm}; the same bits after a kill: {calm == disturbed}")


if __name__ == "__main__":
    main()
