"""A process of a distributed run; prints a digest of the learner after each update.

python learner.py RANK WORLD STORE SHARDS ITERATIONS PLAN
"""

import atexit
import hashlib
import sys

import torch
import torch.distributed as torch_dist

from slipstream import (
    PPO,
    CompressedTensorDict,
    NavigationConfig,
    NavigationEnv,
    NavRLPolicy,
    PPOConfig,
    SerialCollector,
)
from slipstream.dist import ShardGroup, shard_seed
from slipstream.nav.frame import velocity_from_unit

ENVS = 16


def digest(ppo: PPO, metrics: dict[str, float]) -> str:
    """Return a digest of parameters, value statistics, optimizers and metrics."""
    found = hashlib.sha256(repr(sorted(metrics.items())).encode())
    for tensor in ppo.policy.state_dict().values():
        found.update(tensor.numpy().tobytes())
    for optimizer in ppo.optimizers().values():
        for state in optimizer.state_dict()["state"].values():
            found.update(state["exp_avg_sq"].numpy().tobytes())
    return found.hexdigest()[:16]


def main(rank: int, world: int, store: str, shards: int, iterations: int, plan: str) -> None:
    if world > 1:
        torch_dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        atexit.register(torch_dist.destroy_process_group)
    torch.manual_seed(0)
    group = ShardGroup(shards)
    config = PPOConfig(training_epoch_num=2, num_minibatches=2, mirror=True)
    policy = NavRLPolicy(action_map=velocity_from_unit)
    ppo = PPO(policy, config, group=group)
    generators = {}
    collectors = {}
    for shard in group.local_shards:
        seed = shard_seed(7, shard)
        generators[shard] = torch.Generator().manual_seed(seed)
        env = NavigationEnv(
            NavigationConfig(
                num_envs=ENVS // shards,
                num_static_obstacles=60,
                num_dynamic_obstacles=16,
                start="through",
                max_episode_length=6,
                dynamics="lag",
                dt_s=0.1,
                seed=seed,
            )
        )

        def act(seen, shard=shard):
            return policy.act(seen, generator=generators[shard])

        collectors[shard] = SerialCollector(env, act, num_steps=8)

    def collect(shard):
        rollout = collectors[shard].collect()
        return CompressedTensorDict(rollout) if plan == "compressed" else rollout

    for iteration in range(iterations):
        order = [generators[shard] for shard in group.local_shards]
        # As if rollouts were collected ahead: this takes the way through the correction for an older policy.
        metrics = ppo.update(group.map(collect), generators=order, staleness=int(iteration > 0))
        print(digest(ppo, metrics), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
