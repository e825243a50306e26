"""The losses of PPO on numbers small enough to check by hand."""

import math

import torch

from slipstream.rl.losses import effective_sample_share, explained_variance, kl_estimate, policy_loss, value_loss


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor(ratios).log()


def test_the_ratio_is_clipped_only_where_leaving_pays():
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    result = policy_loss(logs(2.0, 0.5, 2.0, 0.5), torch.zeros(4), advantage, 0.1)
    torch.testing.assert_close(result.loss, torch.tensor(-(1.1 + 0.5 - 2.0 - 0.9) / 4))
    assert float(result.clip_fraction) == 1.0


def test_an_action_that_became_impossible_or_certain_is_still_a_finite_loss():
    log_prob = torch.tensor([-500.0, 500.0], requires_grad=True)
    result = policy_loss(log_prob, torch.zeros(2), torch.tensor([-1.0, -1.0]), 0.1)
    result.loss.backward()
    assert bool(result.loss.isfinite())
    assert bool(result.approx_kl.isfinite())
    assert log_prob.grad is not None
    assert bool(log_prob.grad.isfinite().all())


def test_the_value_loss_is_the_larger_of_two_for_each_sample_or_for_all():
    value, old, target = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])
    free, near = [0.0, 0.5], [0.5 * 0.9**2, 0.5 * 0.1**2]
    each = value_loss(value, old, target, 0.1, 10.0)
    torch.testing.assert_close(each, torch.tensor((near[0] + free[1]) / 2))
    whole = value_loss(value, old, target, 0.1, 10.0, whole=True)
    torch.testing.assert_close(whole, torch.tensor(max(sum(free), sum(near)) / 2))


def test_the_value_loss_is_linear_far_away():
    far = value_loss(torch.tensor([100.0]), torch.tensor([100.0]), torch.tensor([0.0]), 0.1, 10.0)
    assert float(far) == 10.0 * (100.0 - 5.0)


def test_the_effective_share_is_one_for_equal_weights_and_one_part_for_a_single_weight():
    assert float(effective_sample_share(torch.full((8,), 3.0))) == 1.0
    assert float(effective_sample_share(torch.eye(8)[0])) == 0.125


def test_the_divergence_is_that_of_the_definition():
    shares = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    drawn = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    expected = sum(float(p) * math.log(p / q) for p, q in zip(*shares, strict=True))
    torch.testing.assert_close(kl_estimate((shares[1].log() - shares[0].log())[drawn]), torch.tensor(expected))


def test_values_explain_all_none_or_less_than_none_of_the_returns():
    target = torch.tensor([1.0, 2.0, 3.0])
    assert float(explained_variance(target + 5, target)) == 1.0
    assert float(explained_variance(torch.zeros(3), target)) == 0.0
    assert float(explained_variance(-target, target)) == -3.0
    assert float(explained_variance(torch.ones(3), torch.ones(3))) == 1.0
