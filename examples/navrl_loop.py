"""NavRL's training loop with Slipstream in it: three lines, marked with a number each.

The loop has the shape of NavRL's own script: a collector yields rollouts, the policy is updated, episodes are counted,
now and then it is evaluated and saved. What the three lines change: saving no longer stops the loop, holds the
optimizers too, and is complete, checked and on disk whatever ends the process. The embedded simulator stands in for
Isaac Sim. To run it: python examples/navrl_loop.py [--iterations 20] [--envs 64] [--folder runs/navrl_loop]
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torchrl.collectors import Collector
from torchrl.envs.utils import ExplorationType, set_exploration_type

from slipstream import AsyncCheckpointSaver, NavigationConfig, NavigationEnv, load_checkpoint
from slipstream.nav import velocity_from_unit
from slipstream.rl import PPO, NavRLPolicy, PPOConfig
from slipstream.train.episodes import EpisodeStats


def evaluate(env: NavigationEnv, policy: NavRLPolicy) -> dict[str, float]:
    """Fly with the mean action; returns the means over episodes that ended."""
    stats = EpisodeStats(env.config.num_envs)
    with set_exploration_type(ExplorationType.MEAN), torch.no_grad():
        stats.add(env.rollout(100, policy, break_when_any_done=False))
    return {name.replace("train", "eval"): value for name, value in stats.means().items()}


def main() -> None:
    """Train for some iterations."""
    parser = argparse.ArgumentParser(description="NavRL's training loop with Slipstream in it.")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path("runs/navrl_loop"))
    parser.add_argument("--interval", type=int, default=5, help="iterations between evaluations and checkpoints")
    args = parser.parse_args()

    torch.manual_seed(0)
    world: dict[str, Any] = {"num_envs": args.envs, "num_static_obstacles": 60, "num_dynamic_obstacles": 16}
    world |= {"dynamics": "lag", "dt_s": 0.1, "max_episode_length": 60, "compile": "false"}
    env, eval_env = NavigationEnv(NavigationConfig(**world)), NavigationEnv(NavigationConfig(**world, map_seed=1))
    policy = NavRLPolicy(action_map=velocity_from_unit)
    ppo = PPO(policy, PPOConfig(training_epoch_num=2, num_minibatches=4))
    episodes, frames = EpisodeStats(args.envs), args.envs * 32
    total = frames * args.iterations
    collector = Collector(
        env, policy, frames_per_batch=frames, total_frames=total, auto_register_policy_transforms=False
    )

    saver = AsyncCheckpointSaver(verbose=True)  # 1
    saver.guard(*ppo.optimizers().values())  # 2: steps of these optimizers wait for a copy in progress

    for iteration, data in enumerate(collector, start=1):
        info = {"env_frames": iteration * frames, **ppo.update(data)}  # NavRL: policy.train(data)
        episodes.add(data)
        info |= episodes.means()
        if iteration % args.interval == 0 or iteration == args.iterations:
            info |= evaluate(eval_env, policy)
            path = args.folder / f"checkpoint_{iteration}.pt"
            saver.save_async(ppo.state_dict(), path, metadata=info)  # 3: was torch.save(policy.state_dict(), path)
        shown = ("actor_loss", "train/stats.return", "eval/stats.return")
        print(f"iteration {iteration}:", ", ".join(f"{name} {info[name]:.3f}" for name in shown if name in info))

    collector.shutdown()
    saver.shutdown()  # waits for what is still being written; NavRL: before simulation_app.close()
    state = load_checkpoint(path)  # finds path.lz4
    ppo.load_state_dict({name: part for name, part in state.items() if name != "metadata"})
    print(f"{path}.lz4 holds {', '.join(state)} after {state['metadata']['env_frames']} frames")


if __name__ == "__main__":
    main()
