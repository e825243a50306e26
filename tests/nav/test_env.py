"""The TorchRL environment: specs, keys, resets, statistics and exact resume."""

import copy
import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import TensorDictBase
from torchrl.envs.utils import check_env_specs, step_mdp

from slipstream import NavigationConfig, NavigationEnv, StateMismatchError
from slipstream.nav import StaticMap

SHAPES = {"state": (8,), "lidar": (1, 36, 4), "direction": (1, 3), "dynamic_obstacle": (1, 5, 10)}


def environment(num_envs: int = 4, boxes: StaticMap | None = None, **settings: Any) -> NavigationEnv:
    defaults: dict[str, Any] = {"num_static_obstacles": 60, "num_dynamic_obstacles": 16, "dynamics": "lag", "dt_s": 0.1}
    return NavigationEnv(NavigationConfig(num_envs=num_envs, **{**defaults, **settings}), boxes=boxes)


def wander(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        command = torch.rand(*tensordict.batch_size, 3, generator=generator) * 2 - torch.tensor([0.0, 1.0, 1.0])
        return tensordict.set(("agents", "action"), command)

    return policy


def fly(env: NavigationEnv, data: Any, steps: int, seed: int = 0) -> tuple[list[Any], Any]:
    policy = wander(seed)
    taken = []
    for _ in range(steps):
        stepped, data = env.step_and_maybe_reset(policy(data))
        taken.append(stepped.clone())
    return taken, data


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dynamics": "hummingbird", "dt_s": 0.016},
        {"num_dynamic_obstacles": 0},
        {"num_static_obstacles": 0},
        {"num_static_obstacles": 0, "num_dynamic_obstacles": 0, "start": "line"},
        {"num_envs": 1},
    ],
)
def test_it_does_what_its_specs_say(settings):
    check_env_specs(environment(**settings))


def test_observations_actions_and_rewards_have_the_keys_and_shapes_of_navrl():
    env = environment(3)
    assert env.batch_size == (3,)
    data = env.rollout(2)
    for name, shape in SHAPES.items():
        assert data["agents", "observation", name].shape == (3, 2, *shape)
        assert data["next", "agents", "observation", name].dtype == torch.float32
    assert data["agents", "action"].shape == (3, 2, 3)
    assert data["next", "agents", "reward"].shape == (3, 2, 1)
    for name in ("done", "terminated", "truncated"):
        assert data["next", name].shape == (3, 2, 1)
    assert env.action_key == ("agents", "action")
    assert env.reward_key == ("agents", "reward")
    assert float(env.rand_action()["agents", "action"].abs().max()) <= 2.0


def test_done_is_terminated_or_truncated_and_what_is_done_begins_anew():
    env = environment(32, max_episode_length=30, random_clocks=True)
    steps, _ = fly(env, env.reset(), 40)
    ended = 0
    for now, later in itertools.pairwise(steps):
        done = now["next", "done"]
        assert torch.equal(done, now["next", "terminated"] | now["next", "truncated"])
        ended += int(done.sum())
        assert not later["done"].any()
        rows = done.squeeze(1)
        assert not later["stats", "episode_len"][rows].any()
        expected = now["next", "agents", "observation"][~rows]
        assert bool((later["agents", "observation"][~rows] == expected).all())
    assert ended > 32


def test_statistics_are_those_of_the_episode_so_far():
    env = environment(2, num_static_obstacles=0, num_dynamic_obstacles=0, max_episode_length=3)
    data = env.rollout(3, break_when_any_done=False)
    stats = data["next", "stats"]
    assert stats["episode_len"][:, :, 0].tolist() == [[1.0, 2.0, 3.0]] * 2
    torch.testing.assert_close(stats["return"], data["next", "agents", "reward"].cumsum(1))
    assert stats["truncated"][:, :, 0].tolist() == [[0.0, 0.0, 1.0]] * 2
    assert not stats["collision"].any()
    assert not stats["reach_goal"].any()


def test_a_collision_shows_in_statistics_and_info():
    wall = StaticMap.from_boxes((-24.5, 22.0, 24.5, 22.5, 5.0))
    env = environment(3, wall, num_dynamic_obstacles=0, start="line")
    data = env.reset()
    for _ in range(40):
        last = env.step(data.set(("agents", "action"), torch.tensor([[2.0, 0.0, 0.0]]).expand(3, 3)))["next"]
        data = step_mdp(data)
        if last["done"].any():
            break
    assert last["terminated"].all()
    assert last["info", "static_collision"].all()
    assert not last["info", "dynamic_collision"].any()
    assert not last["info", "out_of_bounds"].any()
    assert last["stats", "collision"].all()
    assert bool((last["info", "position"][:, 1] < 22.8).all())


def test_a_partial_reset_touches_only_what_it_should():
    env = environment(5)
    _, data = fly(env, env.reset(), 10)
    before = copy.deepcopy(env.state_dict())
    mask = torch.tensor([[False], [True], [False], [True], [False]])
    rows = mask.squeeze(1)
    reset = env.reset(data.clone().set("_reset", mask))
    for group in ("drone", "task", "progress"):
        for name, tensor in env.state_dict()[group].items():
            assert torch.equal(tensor[~rows], before[group][name][~rows])
    for name in SHAPES:
        key = ("agents", "observation", name)
        assert torch.equal(reset[key][~rows], data[key][~rows])
    assert not torch.equal(reset["info", "position"][rows], data["info", "position"][rows])


def test_a_reset_of_all_by_mask_leaves_the_obstacles_on_their_way():
    env = environment(3)
    _, data = fly(env, env.reset(), 10)
    before = env.simulation.obstacles.position_m.clone()
    env.reset(data.set("_reset", torch.ones(3, 1, dtype=torch.bool)))
    assert torch.equal(env.simulation.obstacles.position_m, before)
    env.reset()
    assert torch.equal(env.simulation.obstacles.position_m, env.simulation.obstacles.origin_m)


def test_what_it_returns_is_never_its_own_memory():
    env = environment(2)
    data = env.reset()
    before = copy.deepcopy(env.state_dict()["drone"])
    data.apply_(lambda tensor: tensor.zero_())
    stepped = env.step(data.set(("agents", "action"), torch.ones(2, 3)))
    after = copy.deepcopy(env.state_dict())
    stepped["next"].apply_(lambda tensor: tensor.zero_())
    for group in ("drone", "task", "progress"):
        for name, tensor in env.state_dict()[group].items():
            assert torch.equal(tensor, after[group][name])
    assert not torch.equal(before["position_m"], after["drone"]["position_m"])


def test_an_environment_restored_in_mid_episode_continues_bit_for_bit():
    env = environment(16, max_episode_length=50, random_clocks=True)
    _, data = fly(env, env.reset(), 30, seed=1)
    state, data = copy.deepcopy(env.state_dict()), data.clone()
    expected, _ = fly(env, data.clone(), 60, seed=2)
    other = environment(16, max_episode_length=50, random_clocks=True, seed=7)
    other.load_state_dict(state)
    found, _ = fly(other, data, 60, seed=2)
    for one, two in zip(expected, found, strict=True):
        assert bool((one == two).all())


def test_a_state_of_another_number_of_environments_is_refused():
    with pytest.raises(StateMismatchError):
        environment(2).load_state_dict(environment(3).state_dict())


def test_the_same_seed_is_the_same_rollout_and_another_is_another():
    env = environment(4)
    rollouts = []
    for seed in (5, 5, 6):
        env.set_seed(seed)
        rollouts.append(env.rollout(20, wander()))
    assert bool((rollouts[0] == rollouts[1]).all())
    assert not bool((rollouts[0]["info", "position"] == rollouts[2]["info", "position"]).all())


def test_the_global_seed_and_the_environment_do_not_touch_each_other():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    env = environment(2)
    env.set_seed(None)
    env.rollout(3, wander())
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.filterwarnings("ignore:Creating .* WeightUpdaterBase is deprecated:DeprecationWarning")
def test_it_works_under_a_collector():
    from torchrl.collectors import Collector

    collector = Collector(environment(4), wander(), frames_per_batch=32, total_frames=64)
    batches = [batch.clone() for batch in collector]
    collector.shutdown()
    assert [batch.batch_size for batch in batches] == [(4, 8)] * 2
    last, first = batches[0][:, -1]["next"], batches[1][:, 0]
    flying = ~last["done"].squeeze(1)
    assert torch.equal(last["agents", "observation", "lidar"][flying], first["agents", "observation", "lidar"][flying])


def test_stepping_by_hand_is_the_same_as_a_rollout():
    one, other = environment(2), environment(2)
    rollout = one.rollout(5, wander())
    data, policy = other.reset(), wander()
    for step in range(5):
        data = step_mdp(other.step(policy(data)))
        assert torch.equal(
            data["agents", "observation", "state"], rollout["next", "agents", "observation", "state"][:, step]
        )


def test_moving_to_where_it_is_changes_nothing():
    env = environment(2)
    before = env.simulation
    assert env.to("cpu") is env
    assert env.simulation is before
