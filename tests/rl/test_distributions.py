"""The Beta distribution of actions, against torch's."""

import torch
from torch.distributions import Beta, Independent

from slipstream.rl import IndependentBeta


def concentrations(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    first, second = (1.01 + 20 * torch.rand(*shape, generator=generator) ** 3 for _ in range(2))
    return first, second


def test_log_probabilities_and_entropies_are_those_of_torch_and_so_are_their_gradients():
    found: list[torch.Tensor | None] = []
    expected: list[torch.Tensor | None] = []
    for kind, results in ((IndependentBeta, found), (lambda a, b: Independent(Beta(a, b), 1), expected)):
        alpha, beta = (tensor.requires_grad_() for tensor in concentrations(64, 5, 3))
        distribution = kind(alpha, beta)
        value = torch.linspace(0.01, 0.99, 64 * 5 * 3).reshape(64, 5, 3)
        log_prob, entropy = distribution.log_prob(value), distribution.entropy()
        (log_prob.sum() + entropy.square().sum()).backward()
        results += [log_prob.detach(), entropy.detach(), alpha.grad, beta.grad]
    assert found[0] is not None
    assert found[0].shape == (64, 5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_samples_have_the_mean_they_should_and_lie_strictly_inside():
    torch.manual_seed(0)
    alpha, beta = torch.tensor([1.0001, 3.0, 2.0]), torch.tensor([1.0001, 1.5, 9.0])
    distribution = IndependentBeta(alpha.expand(50_000, 3), beta.expand(50_000, 3))
    sample = distribution.sample()
    assert bool((sample > 0).all())
    assert bool((sample < 1).all())
    torch.testing.assert_close(sample.mean(0), distribution.mean[0], rtol=0, atol=0.01)
    assert not sample.requires_grad


def test_the_mode_is_where_the_density_is_highest():
    alpha, beta = torch.tensor([[2.0], [5.0]]), torch.tensor([[3.0], [1.2]])
    distribution = IndependentBeta(alpha, beta)
    grid = torch.linspace(0.001, 0.999, 999)
    densities = torch.stack([distribution.log_prob(x.expand(2, 1)) for x in grid])
    torch.testing.assert_close(grid[densities.argmax(0)], distribution.mode[:, 0], rtol=0, atol=1e-3)


def test_the_very_ends_have_a_finite_probability():
    distribution = IndependentBeta(torch.full((2, 3), 1.5), torch.full((2, 3), 4.0))
    ends = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    assert bool(distribution.log_prob(ends).isfinite().all())
