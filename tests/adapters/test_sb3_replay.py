"""`SB3ReplayBuffer` beside SB3's own buffers: the same random numbers, the same batches, the same weights."""

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import ConfigurationError, ReplayError
from tests.adapters.shared import run_script, same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    sb3 = pytest.importorskip("stable_baselines3")

import gymnasium
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecNormalize, VecTransposeImage

from slipstream import SB3HerReplayBuffer, SB3ReplayBuffer

IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)
SPEED = spaces.Box(-np.inf, np.inf, (2,), np.float32)
WHEEL = spaces.Box(-1, 1, (1,), np.float32)
# What SB3 warns of when a model with `optimize_memory_usage` learns a second time.
TRUNCATED = "ignore:The last trajectory in the replay buffer will be truncated"


class Track(gymnasium.Env):  # type: ignore[misc, unused-ignore]
    """A bright spot that moves over noise. Episodes have 5 to 14 steps; every other one is cut off by a time limit."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        self.observation_space = observation
        self.action_space = action
        self.episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.step_number = 0
        self.length = int(self.np_random.integers(5, 15))
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        is_last = self.step_number == self.length
        is_cut_off = self.episode % 2 == 0
        reward = float(np.sum(action)) + self.step_number
        return self.observe(), reward, is_last and not is_cut_off, is_last and is_cut_off, {}

    def observe(self) -> Any:
        if not isinstance(self.observation_space, spaces.Dict):
            return self.observe_part(self.observation_space)
        return {name: self.observe_part(space) for name, space in self.observation_space.items()}

    def observe_part(self, space: spaces.Space[Any]) -> Any:
        if isinstance(space, spaces.Discrete):
            return self.step_number % int(space.n)
        if space.dtype != np.uint8:
            return self.np_random.normal(size=space.shape).astype(space.dtype)
        image = self.np_random.integers(0, 30, space.shape, np.uint8)
        image[self.step_number : self.step_number + 4] = 200
        return image


def many(num_envs: int, observation: spaces.Space[Any], action: spaces.Space[Any]) -> VecEnv:
    def make() -> Track:
        return Track(observation, action)

    env = DummyVecEnv([make] * num_envs)
    env.seed(0)
    return env


def pendulum(num_envs: int) -> VecEnv:
    return make_vec_env("Pendulum-v1", num_envs, seed=0)


def stacks(num_envs: int) -> VecEnv:
    return VecFrameStack(many(num_envs, IMAGE, spaces.Discrete(3)), 4)


def dictionaries(num_envs: int, action: spaces.Space[Any]) -> VecEnv:
    parts: dict[str, Any] = {"camera": IMAGE, "speed": SPEED, "gear": spaces.Discrete(5)}
    return many(num_envs, spaces.Dict(parts), action)


def bits(num_envs: int) -> VecEnv:
    return make_vec_env(BitFlippingEnv, num_envs, seed=0, env_kwargs={"n_bits": 5, "continuous": True})


NO_TIMEOUTS = {"handle_timeout_termination": False}
MLP: dict[str, Any] = {"policy": "MlpPolicy", "policy_kwargs": {"net_arch": [8]}}
DICT: dict[str, Any] = {
    "policy": "MultiInputPolicy",
    "policy_kwargs": {"net_arch": [8], "features_extractor_kwargs": {"cnn_output_dim": 8}},
}
CNN: dict[str, Any] = {"policy": "CnnPolicy", "policy_kwargs": {"features_extractor_kwargs": {"features_dim": 8}}}

# Name: (algorithm, environment, settings). Buffers have room for fewer steps than are taken, so they wrap around.
RUNS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "SAC": ("SAC", lambda: pendulum(1), {**MLP}),
    "SAC in three environments that read next from the step after": (
        "SAC",
        lambda: pendulum(3),
        {**MLP, "optimize_memory_usage": True, "replay_buffer_kwargs": NO_TIMEOUTS},
    ),
    "SAC on dictionaries": ("SAC", lambda: dictionaries(2, WHEEL), {**DICT}),
    "TD3 with normalized observations and rewards": ("TD3", lambda: VecNormalize(pendulum(2)), {**MLP}),
    "TD3 on short episodes without handling of time limits": (
        "TD3",
        lambda: many(2, spaces.Box(-9, 9, (3,), np.float64), spaces.Box(-1, 1, (2,), np.float64)),
        {**MLP, "replay_buffer_kwargs": NO_TIMEOUTS},
    ),
    "DDPG": ("DDPG", lambda: many(1, SPEED, WHEEL), {**MLP}),
    "DQN on stacked frames": ("DQN", lambda: stacks(1), {**CNN}),
    "DQN on stacked frames of three environments that read next from the step after": (
        "DQN",
        lambda: stacks(3),
        {**CNN, "optimize_memory_usage": True, "replay_buffer_kwargs": NO_TIMEOUTS},
    ),
    "DQN on numbers": ("DQN", lambda: many(2, spaces.Discrete(7), spaces.Discrete(3)), {**MLP}),
    "DQN on normalized dictionaries": (
        "DQN",
        lambda: VecNormalize(VecTransposeImage(dictionaries(2, spaces.Discrete(3))), norm_obs_keys=["speed"]),
        {**DICT},
    ),
    "SAC with hindsight": (
        "SAC",
        lambda: bits(2),
        {**DICT, "replay_buffer_class": sb3.HerReplayBuffer, "learning_starts": 40},
    ),
    "SAC with hindsight that gets infos": (
        "SAC",
        lambda: bits(1),
        {
            **DICT,
            "replay_buffer_class": sb3.HerReplayBuffer,
            "learning_starts": 40,
            "replay_buffer_kwargs": {"copy_info_dict": True, "goal_selection_strategy": "final"},
        },
    ),
}


def make_model(name: str, *, packed: bool) -> Any:
    algorithm, make_env, options = RUNS[name]
    if packed:
        replacement = SB3ReplayBuffer
        if "replay_buffer_class" in options:
            replacement = SB3HerReplayBuffer
        options = {**options, "replay_buffer_class": replacement}
    # SB3 writes into the dictionaries that it gets.
    options = copy.deepcopy({"buffer_size": 150, "batch_size": 16, "learning_starts": 20, "train_freq": 4, **options})
    return getattr(sb3, algorithm)(env=make_env(), seed=3, device="cpu", **options)


def learn(model: Any, num_steps: int, **options: Any) -> list[Any]:
    """Train a model and return all batches that it drew."""
    batches = []
    sample = model.replay_buffer.sample

    def record(*args: Any, **kwargs: Any) -> Any:
        batch = sample(*args, **kwargs)
        batches.append(copy.deepcopy(tuple(batch)))
        return batch

    model.replay_buffer.sample = record
    model.learn(num_steps, **options)
    del model.replay_buffer.sample
    return batches


def check_same_batches(batches: list[Any], expected: list[Any]) -> None:
    assert len(batches) == len(expected) > 5
    for batch, other in zip(batches, expected, strict=True):
        assert same(batch, other)
        assert [part.dtype for part in tensors_of(batch)] == [part.dtype for part in tensors_of(other)]
        assert [part.stride() for part in tensors_of(batch)] == [part.stride() for part in tensors_of(other)]


def tensors_of(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for part in batch:
        if isinstance(part, dict):
            found += part.values()
        elif part is not None:
            found.append(part)
    return found


def check_same_models(model: Any, other: Any) -> None:
    assert same(model.get_parameters(), other.get_parameters())


@pytest.mark.parametrize("name", RUNS)
def test_training_gives_the_weights_that_sb3s_own_buffer_gives(name):
    model = make_model(name, packed=True)
    batches = learn(model, 300)
    numbers = np.random.rand(3)
    other = make_model(name, packed=False)
    check_same_batches(batches, learn(other, 300))
    check_same_models(model, other)
    # Later code that uses NumPy's global generator is not affected either.
    assert np.array_equal(numbers, np.random.rand(3))
    assert isinstance(model.replay_buffer, SB3ReplayBuffer)
    assert not isinstance(other.replay_buffer, SB3ReplayBuffer)
    assert model.replay_buffer.full
    assert (model.replay_buffer.pos, model.replay_buffer.size()) == (
        other.replay_buffer.pos,
        other.replay_buffer.size(),
    )


@pytest.mark.filterwarnings(TRUNCATED)
@pytest.mark.parametrize("num_steps", [60, 240])
@pytest.mark.parametrize("name", [name for name in RUNS if "DQN" in name or "three" in name or "hindsight" in name])
def test_a_run_that_is_saved_and_loaded_in_the_middle_continues_as_with_sb3s_own_buffer(tmp_path, name, num_steps):
    finished = []
    for packed in (True, False):
        model = make_model(name, packed=packed)
        model.learn(num_steps)
        model.save_replay_buffer(tmp_path / "buffer")
        resumed = make_model(name, packed=packed)
        resumed.set_parameters(model.get_parameters())
        resumed.load_replay_buffer(tmp_path / "buffer")
        batches = learn(resumed, 100)
        finished.append((resumed, batches))
    check_same_batches(finished[0][1], finished[1][1])
    check_same_models(finished[0][0], finished[1][0])


# Buffers without a model


def fill(buffer: Any, num_steps: int, seed: int = 0) -> None:
    """Add steps of random episodes. Equal seeds add equal steps."""
    rng = np.random.default_rng(seed)
    observe = Observer(buffer, rng)
    obs = observe()
    for _ in range(num_steps):
        after = observe()
        done = rng.random(buffer.n_envs) < 0.2
        next_obs = mixed(after, observe(), done)
        action = np.array([buffer.action_space.sample() for _ in range(buffer.n_envs)])
        infos = [{"TimeLimit.truncated": bool(flag)} for flag in rng.random(buffer.n_envs) < 0.5]
        buffer.add(obs, next_obs, action, rng.normal(size=buffer.n_envs), done, infos)
        obs = after


class Observer:
    """Draws observations of all environments, as a vector environment returns them."""

    def __init__(self, buffer: Any, rng: np.random.Generator) -> None:
        self.space = buffer.observation_space
        self.num_envs = buffer.n_envs
        self.seed(rng)
        buffer.action_space.seed(int(rng.integers(1 << 30)))

    def seed(self, rng: np.random.Generator) -> None:
        self.space.seed(int(rng.integers(1 << 30)))

    def __call__(self) -> Any:
        samples = [self.space.sample() for _ in range(self.num_envs)]
        if not isinstance(self.space, spaces.Dict):
            return np.stack(samples)
        return {name: np.stack([sample[name] for sample in samples]) for name in self.space.spaces}


def mixed(obs: Any, other: Any, mask: np.ndarray) -> Any:
    """Return `obs`, but `other` where the mask is set."""
    if isinstance(obs, dict):
        return {name: mixed(obs[name], other[name], mask) for name in obs}
    return np.where(mask.reshape(-1, *[1] * (obs.ndim - 1)), other, obs).astype(obs.dtype)


def check_same_content(buffer: Any, other: Any) -> None:
    for name in ("actions", "rewards", "dones", "timeouts"):
        mine, theirs = getattr(buffer, name), getattr(other, name)
        assert mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs)
    check_same_observations(buffer.observations, other.observations)
    if not buffer.optimize_memory_usage:
        check_same_observations(buffer.next_observations, other.next_observations)


def check_same_observations(stored: Any, arrays: Any) -> None:
    if isinstance(arrays, dict):
        assert list(stored) == list(arrays)
        for name in arrays:
            check_same_observations(stored[name], arrays[name])
        return
    assert (stored.shape, stored.dtype, len(stored)) == (arrays.shape, arrays.dtype, len(arrays))
    assert np.asarray(stored).tobytes() == arrays.tobytes()


def draw(buffer: Any, seed: int = 0, size: int = 40) -> Any:
    np.random.seed(seed)
    return tuple(buffer.sample(size))


BOXES: list[Any] = [
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Box(-1, 1, (2, 2), np.float64),
    spaces.Box(-1, 1, (5,), np.float16),
    spaces.Box(0, 255, (1, 40, 30), np.uint8),
    spaces.Box(0, 255, (128,), np.uint8),
    spaces.Box(-99, 99, (2,), np.int32),
    spaces.Discrete(9),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiBinary(6),
]
OBSERVATIONS = [*BOXES, spaces.Dict({"next": BOXES[0], "observation": BOXES[3], "number": BOXES[6]})]
ACTIONS = [
    spaces.Box(-1, 1, (2,), np.float64),
    spaces.Discrete(4),
    spaces.MultiBinary(3),
    spaces.MultiDiscrete([2, 5]),
]


@settings(deadline=None, max_examples=40)
@given(
    observation=st.sampled_from(OBSERVATIONS),
    action=st.sampled_from(ACTIONS),
    buffer_size=st.integers(2, 200),
    num_envs=st.integers(1, 3),
    num_steps=st.lists(st.integers(1, 100), min_size=1, max_size=3),
    is_joined=st.booleans(),
    handle_timeouts=st.booleans(),
    pack_images=st.booleans(),
)
def test_any_buffer_holds_and_returns_what_sb3s_own_holds_and_returns(
    observation, action, buffer_size, num_envs, num_steps, is_joined, handle_timeouts, pack_images
):
    is_dict = isinstance(observation, spaces.Dict)
    is_joined = is_joined and not is_dict and not handle_timeouts and buffer_size // num_envs > 1
    options = {"optimize_memory_usage": is_joined, "handle_timeout_termination": handle_timeouts}
    arguments = (buffer_size, observation, action, "cpu", num_envs)
    buffer = SB3ReplayBuffer(*arguments, pack_images=pack_images, **options)
    kind = buffers.DictReplayBuffer if is_dict else buffers.ReplayBuffer
    other = kind(*arguments, **options)
    for seed, count in enumerate(num_steps):
        fill(buffer, count, seed)
        fill(other, count, seed)
        assert same(draw(buffer), draw(other))
        check_same_content(buffer, other)
        buffer = pickle.loads(pickle.dumps(buffer))
        assert (buffer.pos, buffer.full, buffer.size()) == (other.pos, other.full, other.size())


def make_buffer(space: Any = BOXES[0], size: int = 500, num_envs: int = 1, **options: Any) -> SB3ReplayBuffer:
    return SB3ReplayBuffer(size, space, WHEEL, "cpu", num_envs, **options)


@pytest.mark.parametrize(
    "index",
    [
        3,
        -2,
        np.array([4, 1, 4]),
        slice(2, 9, 3),
        np.arange(20) % 3 == 0,
        (5, 1),
        (np.array([4, 19, -1]), np.array([1, 0, 1])),
        (np.array([4, 19]), 1),
        (np.array([4, 19]), np.array([True, True])),
        (np.arange(20) > 15, 0),
        (np.array([[4, 19], [0, 1]]), np.array([[0], [1]]), slice(None)),
        (np.array([4, 19]), np.array([1, 0]), 2),
        (slice(None), 1, slice(0, 2)),
        (np.array([4, 19]), np.array([1, 0]), np.array([2, 0])),
        (..., 0),
        (slice(3), None, 1),
        np.arange(40).reshape(20, 2) % 7 == 0,
    ],
    ids=str,
)
def test_stored_observations_are_indexed_like_an_array(index):
    buffer = make_buffer(size=40, num_envs=2)
    other = buffers.ReplayBuffer(40, BOXES[0], WHEEL, "cpu", 2)
    fill(buffer, 30)
    fill(other, 30)
    for stored, array in (
        (buffer.observations, other.observations),
        (buffer.next_observations, other.next_observations),
    ):
        assert np.array_equal(stored[index], array[index])
        assert np.shape(stored[index]) == np.shape(array[index])


def test_an_index_out_of_range_is_an_index_error():
    buffer = make_buffer(size=40, num_envs=2)
    fill(buffer, 30)
    for index in (20, (0, 2), (np.array([20]), np.array([0])), (0, 0, 3), (0, 0, 0, 0)):
        with pytest.raises(IndexError):
            buffer.observations[index]


def test_batches_and_stored_observations_are_copies():
    buffer = make_buffer(spaces.Dict({"a": BOXES[0], "b": BOXES[1]}))
    fill(buffer, 200)
    before = draw(buffer)
    for tensor in tensors_of(draw(buffer)):
        tensor.fill_(7)
    steps = np.arange(100)
    for part in (buffer.observations, buffer.next_observations):
        part["a"][steps, 0][:] = 7
        part["b"][steps, 0][:] = 7
        assert not (part["a"][steps, 0] == 7).any()
    assert same(draw(buffer), before)


def test_reset_forgets_everything_and_the_buffer_can_be_filled_again():
    buffer = make_buffer(IMAGE, size=100)
    fill(buffer, 130)
    held = buffer.get_stats()["held_bytes"]
    buffer.reset()
    assert (buffer.size(), buffer.full, buffer.pos) == (0, False, 0)
    assert buffer.get_stats()["held_bytes"] < held / 20
    other = make_buffer(IMAGE, size=100)
    fill(buffer, 30, seed=1)
    fill(other, 30, seed=1)
    assert same(draw(buffer), draw(other))


def test_extend_adds_one_step_after_another():
    buffer, other = make_buffer(num_envs=2), make_buffer(num_envs=2)
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(5, 2, 3))
    parts: Any = (obs[:-1], obs[1:], rng.normal(size=(4, 2, 1)), rng.normal(size=(4, 2)), np.zeros((4, 2)))
    infos: Any = [[{}, {}]] * 4
    buffer.extend(*parts, infos)
    for step in range(4):
        one_step: list[Any] = [part[step] for part in (*parts, infos)]
        other.add(*one_step)
    assert buffer.size() == 4
    assert same(draw(buffer), draw(other))


def test_a_copy_is_independent():
    buffer = make_buffer()
    fill(buffer, 100)
    twin = copy.deepcopy(buffer)
    before = draw(twin)
    fill(buffer, 300, seed=1)
    assert same(draw(twin), before)
    fill(twin, 300, seed=1)
    assert same(draw(twin), draw(buffer))


# Memory


def fill_with_stacks(buffer: Any, num_steps: int) -> None:
    """Add stacks of four frames of a noisy camera; every 100th step ends an episode."""
    rng = np.random.default_rng(0)
    obs = np.zeros((1, 4, 84, 84), np.uint8)
    for step in range(num_steps):
        frame = rng.integers(100, 116, (1, 1, 84, 84), np.uint8)
        next_obs = np.concatenate([obs[:, 1:], frame], axis=1)
        is_last = step % 100 == 99
        buffer.add(obs, next_obs, np.zeros((1, 1)), np.ones(1), np.array([is_last]), [{}])
        obs = np.zeros_like(obs) if is_last else next_obs


def test_each_frame_of_stacks_is_stored_once_packed_and_pickled_that_small():
    buffer = make_buffer(spaces.Box(0, 255, (4, 84, 84), np.uint8), size=1_000_000)
    fill_with_stacks(buffer, 1000)
    stats = buffer.get_stats()
    assert stats["num_transitions"] == 1000
    assert stats["raw_bytes"] == 1000 * (2 * 4 * 84 * 84 + 4 + 12)
    # Half a byte a pixel, one of four frames, and one of two observations.
    assert stats["packed_bytes"] < stats["raw_bytes"] / 14
    parts = ("packed_bytes", "open_bytes", "array_bytes", "index_bytes")
    assert stats["held_bytes"] == sum(stats[name] for name in parts)
    content = stats["packed_bytes"] + stats["open_bytes"] + stats["array_bytes"]
    # The table of a million slots takes eight bytes for each.
    assert len(pickle.dumps(buffer)) < content + 9 * 1_000_000
    assert "1000 of 1000000 steps" in repr(buffer)


def test_frames_of_stacks_are_stored_once_without_packing_them():
    buffer = make_buffer(spaces.Box(0, 255, (4, 84, 84), np.uint8), pack_images=False)
    fill_with_stacks(buffer, 500)
    stats = buffer.get_stats()
    assert stats["raw_bytes"] / 9 < stats["packed_bytes"] < stats["raw_bytes"] / 6


def test_memory_does_not_grow_once_the_buffer_is_full():
    buffer = make_buffer(IMAGE, size=300)
    fill(buffer, 400)
    held = buffer.get_stats()["held_bytes"]
    for seed in range(4):
        fill(buffer, 300, seed)
    assert buffer.get_stats()["held_bytes"] < 1.3 * held


# Options and errors


@pytest.mark.parametrize("space", [BOXES[0], spaces.Dict({"a": BOXES[0]})], ids=["array", "dictionary"])
def test_the_flag_changes_nothing_where_sb3_refuses_it(space):
    buffer = make_buffer(space, size=60, optimize_memory_usage=True)
    other = make_buffer(space, size=60)
    assert not buffer.optimize_memory_usage
    fill(buffer, 100)
    fill(other, 100)
    assert same(draw(buffer), draw(other))


def test_with_the_flag_there_are_no_next_observations_as_in_sb3():
    options: Any = {"optimize_memory_usage": True, "handle_timeout_termination": False}
    for buffer in (make_buffer(**options), buffers.ReplayBuffer(9, BOXES[0], WHEEL, "cpu", **options)):
        assert not hasattr(buffer, "next_observations")


@pytest.mark.parametrize("options", [{"threads": 0}, {"cache_bytes": -1}, {"threads": 1.5}], ids=str)
def test_an_invalid_option_is_refused_by_name(options):
    (name,) = options
    with pytest.raises(ConfigurationError, match=name):
        make_buffer(**options)
    with pytest.raises(ConfigurationError, match=name):
        SB3HerReplayBuffer(100, bits(1).observation_space, WHEEL, bits(1), "cpu", **options)


@pytest.mark.parametrize("options", [{"threads": 2}, {"cache_bytes": 1 << 20}, {"pack_images": False}], ids=str)
def test_options_change_no_batch(options):
    space = spaces.Dict({"a": BOXES[0], "b": BOXES[3]})
    buffer, other = make_buffer(space, **options), make_buffer(space)
    fill(buffer, 300)
    fill(other, 300)
    for seed in range(3):
        assert same(draw(buffer, seed), draw(other, seed))


def test_observations_that_are_no_numbers_are_refused():
    class Words(spaces.Box):  # type: ignore[misc, unused-ignore]
        """A box whose elements are not numbers."""

        def __init__(self) -> None:
            super().__init__(-1, 1, (2,), np.float32)
            self.dtype = np.dtype("<U3")

    with pytest.raises(ReplayError, match="'observation' is <U3, expected numbers"):
        make_buffer(Words())


def test_a_step_of_another_shape_is_refused_and_changes_nothing():
    buffer = make_buffer(num_envs=2)
    fill(buffer, 20)
    before = draw(buffer)
    good: list[Any] = [np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((2, 1)), np.zeros(2), np.zeros(2), [{}, {}]]
    bad: list[Any] = [np.zeros((2, 4)), np.zeros((3, 3)), np.zeros((2, 2)), np.zeros(3), np.zeros(3), [{}, {}, {}]]
    for place, part in enumerate(bad):
        arguments = [*good]
        arguments[place] = part
        with pytest.raises(ValueError, match="shape|reshape"):
            buffer.add(*arguments)
        assert buffer.pos == 20
        assert same(draw(buffer), before)
    buffer.add(*good)
    assert buffer.pos == 21


# Subclasses of SB3


def test_hindsight_starts_again_after_reset():
    env = bits(1)
    buffer = SB3HerReplayBuffer(60, env.observation_space, env.action_space, env, "cpu")
    fill(buffer, 50)
    draw(buffer)
    buffer.reset()
    # None of the episodes before can be drawn any more.
    with pytest.raises(RuntimeError, match="before the end of the first episode"):
        buffer.sample(4)
    fresh = SB3HerReplayBuffer(60, env.observation_space, env.action_space, env, "cpu")
    fill(buffer, 50, seed=1)
    fill(fresh, 50, seed=1)
    assert same(draw(buffer), draw(fresh))


def test_hindsight_does_not_pickle_infos_that_nothing_reads():
    env = bits(1)
    buffer = SB3HerReplayBuffer(20_000, env.observation_space, env.action_space, env, "cpu")
    fill(buffer, 50)
    assert len(pickle.dumps(buffer)) < 10 * 20_000


def test_the_returns_of_several_steps_come_from_sb3s_own_code():
    if not hasattr(buffers, "NStepReplayBuffer"):
        pytest.skip("this version of stable-baselines3 has no NStepReplayBuffer")

    class PackedNStep(buffers.NStepReplayBuffer, SB3ReplayBuffer):  # type: ignore[misc, name-defined, unused-ignore]
        """The returns of several steps, from packed observations."""

    arguments = (90, BOXES[0], WHEEL, "cpu", 2)
    buffer = PackedNStep(*arguments, n_steps=3, gamma=0.9, threads=2)
    other = buffers.NStepReplayBuffer(*arguments, n_steps=3, gamma=0.9)
    for seed in range(4):
        fill(buffer, 35, seed)
        fill(other, 35, seed)
        assert same(draw(buffer), draw(other))


# Importing


BLOCKED = """
import sys
sys.modules.update(dict.fromkeys({blocked}))
import pickle
import warnings
import numpy as np
"""


def test_it_needs_neither_torchrl_nor_tensordict_and_loads_in_another_process(tmp_path):
    space = spaces.Dict({"a": BOXES[0], "b": BOXES[3]})
    buffer = make_buffer(space)
    fill(buffer, 300)
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(buffer))
    np.savez(tmp_path / "batch.npz", *map(torch.Tensor.numpy, tensors_of(draw(buffer))))
    script = BLOCKED.format(blocked=["torchrl", "tensordict"]) + (
        "buffer = pickle.load(open('buffer.pkl', 'rb'))\n"
        "np.random.seed(0)\n"
        "batch = buffer.sample(40)\n"
        "parts = [*batch.observations.values(), batch.actions, *batch.next_observations.values()]\n"
        "parts += [batch.dones, batch.rewards]\n"
        "expected = np.load('batch.npz')\n"
        "assert len(expected) == len(parts) == 7\n"
        "assert all(np.array_equal(part, expected[f'arr_{n}']) for n, part in enumerate(parts))\n"
        "assert buffer.size() == 300\n"
    )
    result = run_script(script, tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["SB3ReplayBuffer", "SB3HerReplayBuffer"])
def test_without_sb3_the_error_says_what_to_install(tmp_path, name):
    script = BLOCKED.format(blocked=["stable_baselines3"]) + (
        "from slipstream.text import install_hint\n"
        "try:\n"
        f"    from slipstream import {name}\n"
        "except ImportError as error:\n"
        "    expected = 'SB3ReplayBuffer needs stable-baselines3, which is not installed: '\n"
        "    expected += install_hint('adapters') + ', or stable-baselines3 by itself'\n"
        "    assert str(error) == expected, error\n"
        "else:\n"
        "    raise AssertionError('it was imported')\n"
    )
    result = run_script(script, tmp_path)
    assert result.returncode == 0, result.stderr


def test_importing_the_package_does_not_import_sb3(tmp_path):
    script = (
        "import sys, slipstream; assert 'SB3ReplayBuffer' in dir(slipstream); print('stable_baselines3' in sys.modules)"
    )
    assert run_script(script, tmp_path).stdout == "False\n"
