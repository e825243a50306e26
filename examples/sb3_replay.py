"""Train DQN of stable-baselines3 twice, with SB3's replay buffer and with a packed one, and compare.

Both runs must end with the same weights, bit for bit. To run it: python examples/sb3_replay.py [--steps 4000]
"""

import sys
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack

from slipstream import SB3ReplayBuffer

NUM_STEPS = int(sys.argv[2]) if "--steps" in sys.argv else 4000


class Catch(gymnasium.Env[np.ndarray, int]):
    """A noisy camera shows a falling ball and a paddle that should catch it."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (84, 84, 1), np.uint8)
        self.action_space: Any = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode with the ball at the top."""
        super().reset(seed=seed)
        self.height = 0
        self.ball = int(self.np_random.integers(4, 80))
        self.paddle = 42
        return self.look(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move the paddle by one step to the left, not at all, or to the right."""
        self.paddle = int(np.clip(self.paddle + 4 * (action - 1), 4, 80))
        self.height += 4
        is_last = self.height >= 80
        is_caught = is_last and abs(self.ball - self.paddle) <= 8
        return self.look(), float(is_caught), is_last, False, {}

    def look(self) -> np.ndarray:
        """Take a picture with sensor noise."""
        image = self.np_random.integers(96, 112, (84, 84, 1), np.uint8)
        image[self.height : self.height + 4, self.ball - 4 : self.ball + 4] = 255
        image[80:, self.paddle - 4 : self.paddle + 4] = 0
        return image


def train(buffer_class: type[ReplayBuffer]) -> Any:
    """Train with one kind of replay buffer; everything else is the same."""
    model = DQN(
        "CnnPolicy",
        VecFrameStack(make_vec_env(Catch, n_envs=4, seed=0), n_stack=4),
        buffer_size=NUM_STEPS,
        learning_starts=NUM_STEPS // 4,
        policy_kwargs={"features_extractor_kwargs": {"features_dim": 64}},
        replay_buffer_class=buffer_class,
        seed=0,
        device="cpu",
    )
    return model.learn(NUM_STEPS)


packed = train(SB3ReplayBuffer)
plain = train(ReplayBuffer)
pairs = zip(packed.policy.parameters(), plain.policy.parameters(), strict=True)
equal = all(torch.equal(weight, other) for weight, other in pairs)
stats = packed.replay_buffer.get_stats()
print(f"{packed.replay_buffer}, {stats['compression_ratio']:.1f} times smaller than SB3's; weights equal: {equal}")
