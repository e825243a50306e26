"""Advantages, against the sum that defines them."""

import pytest
import torch

from slipstream.rl import GAE, generalized_advantages

GAMMA, LMBDA = 0.9, 0.8


def reference(reward, terminated, cut, value, next_value) -> torch.Tensor:
    """Sum the discounted surprises from each step on, up to and including the step where the episode is cut."""
    advantage = torch.zeros_like(reward)
    envs, steps, _ = reward.shape
    for env in range(envs):
        for start in range(steps):
            for step in range(start, steps):
                future = 0.0 if terminated[env, step] else float(next_value[env, step])
                surprise = float(reward[env, step]) + GAMMA * future - float(value[env, step])
                advantage[env, start] += (GAMMA * LMBDA) ** (step - start) * surprise
                if cut[env, step]:
                    break
    return advantage


def steps(envs: int = 6, length: int = 20) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    reward, value, next_value = (torch.randn(envs, length, 1, generator=generator) for _ in range(3))
    return {"reward": reward, "value": value, "next_value": next_value}


def flags(share: float, seed: int, envs: int = 6, length: int = 20) -> torch.Tensor:
    return torch.rand(envs, length, 1, generator=torch.Generator().manual_seed(seed)) < share


@pytest.mark.parametrize("terminating", [0.0, 0.2])
@pytest.mark.parametrize("truncating", [0.0, 0.2])
def test_advantages_are_the_sums_that_define_them(terminating, truncating):
    parts, terminated = steps(), flags(terminating, 1)
    done = terminated | flags(truncating, 2)
    advantage, target = generalized_advantages(**parts, terminated=terminated, done=done, gamma=GAMMA, lmbda=LMBDA)
    expected = reference(parts["reward"], terminated, done, parts["value"], parts["next_value"])
    torch.testing.assert_close(advantage, expected)
    torch.testing.assert_close(target, expected + parts["value"])


def test_given_terminated_as_done_advantages_leak_across_truncation_as_in_the_original():
    parts, terminated, truncated = steps(), flags(0.1, 1), flags(0.3, 2)
    leaking, _ = generalized_advantages(**parts, terminated=terminated, done=terminated, gamma=GAMMA, lmbda=LMBDA)
    expected = reference(parts["reward"], terminated, terminated, parts["value"], parts["next_value"])
    torch.testing.assert_close(leaking, expected)
    right, _ = generalized_advantages(
        **parts, terminated=terminated, done=terminated | truncated, gamma=GAMMA, lmbda=LMBDA
    )
    assert not torch.allclose(leaking[truncated], right[truncated])


def test_a_truncated_step_is_worth_what_follows_and_a_terminated_one_is_not():
    yes, no = torch.tensor([[[True]]]), torch.tensor([[[False]]])
    numbers = {"reward": torch.ones(1, 1, 1), "value": torch.zeros(1, 1, 1), "next_value": torch.full((1, 1, 1), 10.0)}
    assert float(generalized_advantages(**numbers, terminated=no, done=yes, gamma=0.5)[0]) == 6.0
    assert float(generalized_advantages(**numbers, terminated=yes, done=yes, gamma=0.5)[0]) == 1.0


def test_the_next_value_of_a_terminated_step_does_not_matter_even_if_it_is_no_number():
    parts, terminated = steps(), flags(0.3, 1)
    expected, _ = generalized_advantages(**parts, terminated=terminated, done=terminated)
    parts["next_value"][terminated] = float("nan")
    found, _ = generalized_advantages(**parts, terminated=terminated, done=terminated)
    assert torch.equal(found, expected)


def test_the_module_uses_what_it_was_set_to_and_changes_none_of_its_inputs():
    parts, terminated = steps(), flags(0.2, 1)
    before = {name: tensor.clone() for name, tensor in parts.items()}
    module = GAE(0.5, 0.5)
    module.set_to(GAMMA, LMBDA)
    found, _ = module(**parts, terminated=terminated, done=terminated)
    expected, _ = generalized_advantages(**parts, terminated=terminated, done=terminated, gamma=GAMMA, lmbda=LMBDA)
    torch.testing.assert_close(found, expected)
    assert all(torch.equal(parts[name], tensor) for name, tensor in before.items())
