"""One process of one contender of `processes.py`: answers each line of input with a line of JSON.

python processes_worker.py METHOD RANK WORLD SHARDS THREADS DRONES STORE
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream import PPO, NavRLPolicy
from slipstream.dist import ShardGroup
from slipstream.nav.env import NavigationEnv
from slipstream.nav.frame import velocity_from_unit
from slipstream.rl import ppo as rl_ppo
from slipstream.rl.gradients import Metrics
from slipstream.train.drones import make_collector
from slipstream.train.settings import compose_settings
from slipstream.train.shards import Shards
from slipstream.train.startup import prepare_process
from slipstream.train.teacher import planner_teacher

ppo_module: Any = rl_ppo  # some of whose functions are replaced below

Step = Callable[[], tuple[float, float]]
"""Trains for an iteration; returns the seconds of collecting and of updating."""


def learner(num_envs: int, shards: int, seed: int, group: ShardGroup | None) -> tuple[Any, PPO]:
    """Return settings and a learner as `slipstream train preset=quick` has them."""
    overrides = ["preset=quick", f"env.num_envs={num_envs}", f"seed={seed}", f"dist.shards={shards}"]
    if group is None:
        overrides.append(f"algo.update_threads={torch.get_num_threads()}")
    settings = compose_settings(overrides)
    settings.algo.precision = settings.precision()
    torch.manual_seed(0)  # the weights
    policy = NavRLPolicy(action_map=velocity_from_unit)
    return settings, PPO(policy, settings.ppo(), teacher=planner_teacher(settings.navigation().lidar), group=group)


def in_shards(num_envs: int, shards: int, threads: int) -> tuple[Step, PPO]:
    """Return a learner in shards, which every number of processes trains alike."""
    group = ShardGroup(shards, threads=threads)
    settings, ppo = learner(num_envs, shards, 0, group)
    shards_here = Shards(settings, ppo.policy, group, torch.device("cpu"))
    collected = iter(shards_here)
    generators = shards_here.generators()

    def step() -> tuple[float, float]:
        began = time.perf_counter()
        rollouts = next(collected)
        between = time.perf_counter()
        ppo.update(rollouts, generators=generators)
        return between - began, time.perf_counter() - between

    return step, ppo


def alone(num_envs: int, seed: int) -> tuple[Step, PPO]:
    """Return a learner that is not divided: the whole run, or what each process of another method does."""
    settings, ppo = learner(num_envs, 0, seed, None)
    env = NavigationEnv(settings.navigation(), torch.device("cpu"))
    torch.manual_seed(seed)  # actions and the order of minibatches
    rollouts = iter(make_collector(settings, env, ppo.policy))

    def step() -> tuple[float, float]:
        began = time.perf_counter()
        rollout = next(rollouts)
        collected = time.perf_counter()
        ppo.update(rollout)
        return collected - began, time.perf_counter() - collected

    return step, ppo


def reduce_gradients() -> None:
    """Average all gradients in one all_reduce before each step, as rsl_rl does; everything else is local."""
    compute = ppo_module.sum_gradients

    def reduced(losses: Any, minibatch: Any, parameters: Sequence[torch.Tensor], threads: int) -> Any:
        metrics, gradients = compute(losses, minibatch, parameters, threads)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        torch_dist.all_reduce(flat)
        flat /= torch_dist.get_world_size()
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        return metrics, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]

    ppo_module.sum_gradients = reduced


class _Loss(nn.Module):
    """The loss of a minibatch as a module, which is what DDP takes."""

    def __init__(self, policy: NavRLPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.metrics: Metrics = {}

    def forward(self, losses: Any, minibatch: Any) -> torch.Tensor:
        self.metrics, loss = losses(minibatch)
        return loss  # type: ignore[no-any-return]


def wrap_in_ddp(ppo: PPO) -> None:
    """Let DistributedDataParallel average gradients while it computes them; everything else is local."""
    module = _Loss(ppo.policy)
    wrapped = DistributedDataParallel(module, forward_sync_buffers=False)

    def through_ddp(losses: Any, minibatch: Any, parameters: Sequence[torch.Tensor], threads: int) -> Any:  # noqa: ARG001
        for parameter in parameters:
            parameter.grad = None
        wrapped(losses, minibatch).backward()
        gradients = [parameter.grad for parameter in parameters]
        return {name: value.detach() for name, value in module.metrics.items()}, gradients

    ppo_module.sum_gradients = through_ddp


def digest(ppo: PPO) -> str:
    """Return a digest of all weights. Without the statistics of values, which only shards have in common."""
    found = hashlib.sha256()
    for tensor in ppo.policy.parameters():
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def main(method: str, numbers: Sequence[int], store: str) -> None:
    """Serve."""
    rank, world, shards, threads, num_envs = numbers
    prepare_process(threads)
    if world > 1:
        torch_dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    if method == "shards":
        torch.set_num_threads(1)
        step, ppo = in_shards(num_envs, shards, threads)
    else:
        step, ppo = alone(num_envs // world, rank)
        if method == "all_reduce":
            reduce_gradients()
        elif method == "ddp":
            wrap_in_ddp(ppo)
    for line in sys.stdin:
        cpu = time.process_time()
        spent = [step() for _ in range(int(line))]
        answer = {
            "collect_s": sum(collect for collect, _ in spent),
            "update_s": sum(update for _, update in spent),
            "cpu_s": time.process_time() - cpu,
            "digest": digest(ppo),
            "parameters": sum(parameter.numel() for parameter in ppo.policy.parameters()),
        }
        print(json.dumps(answer), flush=True)
    if world > 1:
        torch_dist.destroy_process_group()


if __name__ == "__main__":
    _, chosen, *numbers, path = sys.argv
    main(chosen, [int(number) for number in numbers], path)
