"""Shards: what they divide, what they must not change, and which numbers of them there may be."""

import pytest
import torch

from slipstream import PPO, ConfigurationError, NavigationEnv, NavRLPolicy, SerialCollector
from slipstream.collect.randomness import seed_global
from slipstream.nav.frame import velocity_from_unit
from slipstream.nav.starts import line_tasks
from slipstream.run.folder import RunFolder
from slipstream.train.drones import shard_navigation
from slipstream.train.schedule import collision_penalty, learning_rate_factor, teacher_coefficient
from slipstream.train.settings import TrainSettings
from slipstream.train.teacher import planner_teacher
from slipstream.train.trainer import Trainer
from tests.train.conftest import small


@pytest.mark.parametrize("num_maps", [1, 2, 4, 8])
def test_shards_divide_the_drones_of_a_run_with_their_maps_and_their_places_on_the_start_line(num_maps):
    settings = small("env.start=line", "env.inside_starts=0", f"env.num_maps={num_maps}", "dist.shards=4")
    whole = settings.navigation()
    per_map = whole.num_envs // num_maps
    maps = [whole.map_seeds[drone // per_map] for drone in range(whole.num_envs)]
    starts = line_tasks(whole, torch.arange(whole.num_envs))[0]
    found_maps = []
    found_starts = []
    seeds = set()
    for shard in range(4):
        part = shard_navigation(settings, shard)
        per_map = part.num_envs // part.num_maps
        found_maps += [part.map_seeds[drone // per_map] for drone in range(part.num_envs)]
        found_starts.append(line_tasks(part, torch.arange(part.num_envs))[0])
        seeds.add(part.seed)
    assert found_maps == maps
    assert torch.equal(torch.cat(found_starts), starts)
    assert len(seeds) == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["dist.shards=3"],
            "expected 0, 1, 2, 4, 8 or 16: a power of two that divides env.num_envs=16",
        ),
        (["dist.shards=32"], "dist.shards is 32, expected 0, 1, 2, 4, 8 or 16"),
        (
            ["env.num_envs=24", "env.num_maps=6", "dist.shards=4"],
            "expected 0, 1 or 2: .* env.num_maps=6",
        ),
        (["dist.shards=4", "devices=3"], "devices is 3, expected 1, 2 or 4 for dist.shards=4"),
        (["dist.shards=1", "devices=2"], "devices is 2, expected 1 for dist.shards=1"),
        (["devices=2"], "dist.shards is 0, expected 2, 4, 8 or 16 for 2 processes: set dist.shards=2"),
        (["devices=3"], "devices is 3, expected 1, 2, 4, 8 or 16 for env.num_envs=16"),
        (["dist.shards=16", "algo.num_minibatches=9"], "dist.shards=16 leaves 8 steps to each shard"),
        (["dist.backend=mpi"], "dist.backend is 'mpi', expected one of 'auto', 'gloo', 'nccl'"),
        (["dist.timeout_s=5"], "dist.timeout_s is 5.0, expected a number of at least 60"),
    ],
)
def test_numbers_of_shards_and_processes_that_do_not_fit_are_refused_with_those_that_do(overrides, message):
    with pytest.raises(ConfigurationError, match=message):
        small("env.num_maps=1", *overrides)


def test_a_run_keeps_its_shards_and_may_change_its_processes(tmp_path, train):
    train("x", "dist.shards=4", until=2)
    trainer = Trainer(small("dist.shards=2"), RunFolder(tmp_path / "x"))
    with pytest.raises(ConfigurationError, match=r"cannot be resumed with dist\.shards=2 \(the run has 4\)"):
        trainer.restore()
    trainer.close()
    train("x", "dist.shards=4", "devices=2", "dist.timeout_s=60", resume=True)


def test_a_divided_run_leaves_the_number_of_threads_of_the_process_as_it_was(tmp_path, train):
    before = torch.get_num_threads()
    train("x", "dist.shards=2", until=1)
    assert torch.get_num_threads() == before


def hand_written_loop(settings: TrainSettings) -> NavRLPolicy:
    """Train as the trainer does without shards, in as few lines as possible."""
    seed_global(settings.seed)
    env = NavigationEnv(settings.navigation())
    policy = NavRLPolicy(action_map=velocity_from_unit)
    ppo = PPO(policy, settings.ppo(), teacher=planner_teacher(env.config.lidar))

    def set_penalty(rollout: int) -> None:
        env.simulation.collision_penalty = collision_penalty(settings, rollout)

    collector = SerialCollector(env, policy, settings.algo.training_frame_num, before_rollout=set_penalty)
    for iteration in range(settings.num_iterations):
        rollout = collector.collect()
        ppo.teacher_coefficient = teacher_coefficient(settings, iteration)
        for name, optimizer in ppo.optimizers().items():
            rate = getattr(ppo.config, name).learning_rate
            optimizer.param_groups[0]["lr"] = learning_rate_factor(settings, iteration) * rate
        ppo.update(rollout)
    return policy


def test_a_run_without_shards_learns_the_bits_of_a_loop_without_a_trainer(train):
    policy = hand_written_loop(small())
    expected = torch.get_rng_state()
    trainer = train("x")
    assert torch.equal(torch.get_rng_state(), expected)
    for name, tensor in trainer.ppo.policy.state_dict().items():
        assert torch.equal(tensor, policy.state_dict()[name]), name
