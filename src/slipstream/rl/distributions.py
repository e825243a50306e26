"""The distribution of actions: one Beta per axis on [0, 1], independent of each other."""

from __future__ import annotations

import torch


class IndependentBeta:
    """Beta distributions of the last axis, taken together as one of vectors.

    Both concentrations are expected above 1, so that the density is zero at both ends and has one peak. Samples, and
    values whose probability is requested, are kept off the very ends by the precision of their dtype: rounding can take
    a sample there, and its log-probability would be infinite.

    Args:
        alpha: First concentrations, ``[..., axes]``.
        beta: Second concentrations, of the same shape.

    Example:
        >>> policy = IndependentBeta(torch.tensor([2.0, 3.0]), torch.tensor([2.0, 1.5]))
        >>> policy.mode
        tensor([0.5000, 0.8000])
        >>> policy.log_prob(torch.tensor([0.5, 0.5])).shape
        torch.Size([])
    """

    def __init__(self, alpha: torch.Tensor, beta: torch.Tensor) -> None:
        self.alpha = alpha
        self.beta = beta

    @property
    def mean(self) -> torch.Tensor:
        """The expected action, ``[..., axes]``: what NavRL flies in evaluation."""
        return self.alpha / (self.alpha + self.beta)

    @property
    def mode(self) -> torch.Tensor:
        """The most probable action, ``[..., axes]``."""
        return (self.alpha - 1) / (self.alpha + self.beta - 2)

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw an action, ``[..., axes]``; no gradient flows through it.

        Args:
            generator: Where the random numbers come from; torch's global generator by default.
        """
        with torch.no_grad():
            concentration = torch.stack([self.alpha, self.beta], -1)
            # What torch.distributions.Beta does, which takes no generator.
            return _inside(torch._sample_dirichlet(concentration, generator)[..., 0])

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the density at actions ``[..., axes]``: ``[...]``."""
        value = _inside(value)
        density = (self.alpha - 1) * value.log() + (self.beta - 1) * torch.log1p(-value) - self._log_norm()
        return density.sum(-1)

    def entropy(self) -> torch.Tensor:
        """Return the differential entropy, ``[...]``; it is 0 where the distribution is uniform and negative else."""
        total = self.alpha + self.beta
        single = (self.alpha - 1) * self.alpha.digamma() + (self.beta - 1) * self.beta.digamma()
        return (self._log_norm() - single + (total - 2) * total.digamma()).sum(-1)

    def _log_norm(self) -> torch.Tensor:
        return self.alpha.lgamma() + self.beta.lgamma() - (self.alpha + self.beta).lgamma()


def _inside(value: torch.Tensor) -> torch.Tensor:
    margin = torch.finfo(value.dtype).eps
    return value.clamp(margin, 1 - margin)
