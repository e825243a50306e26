"""Confidence intervals for flights that share a map, and for differences between paired flights.

Flights on one map meet the same obstacles, so they are not independent: their outcomes vary together, and an interval
that treats them as independent is too narrow. The unit of resampling is therefore the *cluster*: all flights that share
a map and a course of moving obstacles.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.run.evaluation import Interval

NUM_RESAMPLES = 4000
RESAMPLING_SEED = 20_000
SIGNIFICANCE = 0.05
LEAST_CLUSTERS = 6  # of a comparison: flipping the signs of fewer differences gives no p-value below .05

# Assumed correlation between two flights on one map where the data cannot show it. In this simulator .04 was measured
# on the line and about 0 through the field, so .1 errs on the safe side.
ASSUMED_CORRELATION = 0.1

_Z95 = 1.959964  # 95 % of a normal distribution lie within this many standard deviations
_PERCENTILES = (2.5, 97.5)
# The same for Student's distribution with 1 to 9 degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """How much a second candidate is better than a first one on the same flights.

    Attributes:
        mean: Rate of the second minus rate of the first.
        low: Lower end of the 95 % interval.
        high: Upper end of the 95 % interval.
        p_value: Probability of a difference at least this large if both were equally good. 1 with a single cluster,
            which cannot be tested.
        significant: Whether the interval excludes 0 and ``p_value`` is below .05, which takes `LEAST_CLUSTERS`.
    """

    mean: float
    low: float
    high: float
    p_value: float
    significant: bool


def rate_interval(hits: NDArray[Any], clusters: NDArray[Any]) -> Interval:
    """Return the share of flights that ended in some way, with its 95 % interval.

    The interval is the percentile bootstrap over clusters, and never narrower than Wilson's interval for independent
    flights. If all flights ended alike, or all are of one cluster, the data say nothing about the correlation within
    clusters. Then it is Wilson's interval for fewer flights: as many as are worth the same if flights of one cluster
    have the correlation `ASSUMED_CORRELATION`. It never has zero width.

    Args:
        hits: Whether each flight counts, ``[flights]``.
        clusters: The cluster of each flight, ``[flights]``.

    Example:
        >>> rate_interval(np.ones(512), np.arange(512) // 8).low > 0.98
        True
    """
    values = np.asarray(hits, np.float64)
    count = len(values)
    share = float(values.mean())
    sizes = _cluster_sums(np.ones(count), clusters)
    if len(sizes) == 1 or share in (0.0, 1.0):
        return wilson_interval(share, effective_count(sizes))
    independent = wilson_interval(share, count)
    if len(sizes) == count:
        return independent
    low, high = _bootstrap_interval(_cluster_sums(values, clusters), sizes)
    return Interval(share, max(0.0, min(low, independent.low)), min(1.0, max(high, independent.high)))


def ratio_interval(
    amounts: NDArray[Any],
    weights: NDArray[Any],
    clusters: NDArray[Any],
    least: float = -math.inf,
    most: float = math.inf,
) -> Interval | None:
    """Return the sum of amounts divided by the sum of weights, with its 95 % interval.

    With weights of 1 and 0 it is the mean over some of the flights. The interval is the percentile bootstrap over
    clusters. Flights that are all independent, or all of one cluster, get a normal interval; for one cluster it is
    widened as if its flights had the correlation `ASSUMED_CORRELATION`.

    Args:
        amounts: What is divided, ``[flights]``; 0 where the weight is 0.
        weights: By what it is divided, ``[flights]``.
        clusters: The cluster of each flight, ``[flights]``.
        least: The smallest possible ratio, at which the interval is cut off.
        most: The largest possible ratio.

    Returns:
        The ratio, or None if all weights are 0.
    """
    used = np.asarray(weights) > 0
    if not used.any():
        return None
    amount = np.asarray(amounts, np.float64)[used]
    weight = np.asarray(weights, np.float64)[used]
    kept = np.asarray(clusters)[used]
    count = len(amount)
    ratio = float(amount.sum() / weight.sum())
    if count == 1:
        return Interval(ratio, least, most)
    sizes = _cluster_sums(np.ones(count), kept)
    if 1 < len(sizes) < count:
        low, high = _bootstrap_interval(_cluster_sums(amount, kept), _cluster_sums(weight, kept))
    else:
        residuals = amount - ratio * weight
        variance = float((residuals**2).sum()) * count / (count - 1) / float(weight.sum()) ** 2
        half = _student(count - 1) * math.sqrt(variance * count / effective_count(sizes))
        low = ratio - half
        high = ratio + half
    return Interval(ratio, max(low, least), min(high, most))


def paired_difference(first: NDArray[Any], second: NDArray[Any], clusters: NDArray[Any]) -> Difference:
    """Compare the success of two candidates that flew the same flights.

    The interval is the percentile bootstrap of the mean difference over clusters; if no flight differs, it is as wide
    as Wilson's bound on the share of flights that differ. The test flips the sign of each cluster's difference at
    random: if both candidates are equally good, that changes nothing. It is exact with few clusters too.

    Args:
        first: Success of each flight of the first candidate, ``[flights]``.
        second: Success of each flight of the second candidate, ``[flights]``.
        clusters: The cluster of each flight, ``[flights]``.
    """
    change = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    sizes = _cluster_sums(np.ones(len(change)), clusters)
    sums = _cluster_sums(change, clusters)
    mean = float(change.mean())
    # The bootstrap has zero width where all clusters differ by the same amount, which proves little.
    bound = wilson_interval(0.0, effective_count(sizes)).high
    low = mean - bound
    high = mean + bound
    if len(sizes) > 1 and np.ptp(sums / sizes) > 0:
        low, high = _bootstrap_interval(sums, sizes)
    p_value = _sign_flip_test(sums)
    excludes_zero = low > 0 or high < 0
    significant = len(sizes) > 1 and excludes_zero and p_value < SIGNIFICANCE
    return Difference(mean, max(low, -1.0), min(high, 1.0), p_value, significant)


def wilson_interval(share: float, count: float) -> Interval:
    """Return Wilson's 95 % interval of a rate, which is sound for rates near 0 and 1 too.

    Args:
        share: The rate.
        count: The number of independent trials, which need not be whole.

    Example:
        >>> wilson_interval(0.0, 100).high < 0.04
        True
    """
    square = _Z95**2
    scale = 1 + square / count
    centre = (share + square / (2 * count)) / scale
    half = _Z95 / scale * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    # Rounding must not push the end of the interval past the rate itself.
    low = max(0.0, min(share, centre - half))
    high = min(1.0, max(share, centre + half))
    return Interval(share, low, high)


def effective_count(sizes: NDArray[Any]) -> float:
    """Return how many independent flights clusters of correlated flights are worth.

    Args:
        sizes: The number of flights in each cluster, ``[clusters]``.

    Example:
        >>> effective_count(np.ones(512)), round(effective_count(np.full(64, 8)))
        (512.0, 301)
    """
    worth = sizes / (1 + (sizes - 1) * ASSUMED_CORRELATION)
    return float(worth.sum())


def _cluster_sums(values: Floats, clusters: NDArray[Any]) -> Floats:
    """Return the sum of values in each cluster that occurs."""
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    sums: Floats = np.bincount(index.reshape(-1), weights=values).astype(np.float64)
    return sums


def _bootstrap_interval(amounts: Floats, weights: Floats) -> tuple[float, float]:
    """Return the 95 % percentile interval of ``sum(amounts) / sum(weights)`` over resampled clusters."""
    draws = _resamples(len(weights))
    total = draws @ weights
    drawn = total > 0
    ratios = (draws @ amounts)[drawn] / total[drawn]
    low, high = np.percentile(ratios, _PERCENTILES)
    centre = float(amounts.sum() / weights.sum())
    widening = _widening(len(weights))
    return centre + widening * (float(low) - centre), centre + widening * (float(high) - centre)


def _widening(num_clusters: int) -> float:
    """Return how much wider an interval must be than the bootstrap's, which is too narrow with few clusters.

    The bootstrap has two faults. Its variance is (n - 1) / n of the population's on average, and it knows nothing of
    how uncertain that variance is, which Student's distribution accounts for.
    """
    freedom = num_clusters - 1
    return _student(freedom) / _Z95 * math.sqrt(num_clusters / freedom)


def _student(freedom: int) -> float:
    """Return within how many standard deviations 95 % of Student's distribution lie."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    # The first terms of the expansion around the normal distribution, accurate to 0.001.
    first = (_Z95**3 + _Z95) / (4 * freedom)
    second = (5 * _Z95**5 + 16 * _Z95**3 + 3 * _Z95) / (96 * freedom**2)
    return _Z95 + first + second


@functools.lru_cache(maxsize=4)
def _resamples(num_clusters: int) -> Floats:
    """Return how often each cluster is in each resample, ``[resamples, clusters]``; always the same."""
    rng = np.random.default_rng(RESAMPLING_SEED)
    shares = np.full(num_clusters, 1 / num_clusters)
    counts = rng.multinomial(num_clusters, shares, size=NUM_RESAMPLES)
    return counts.astype(np.float64)


def _sign_flip_test(sums: Floats) -> float:
    """Return the two-sided p-value of clusters' differences whose signs are arbitrary under the null hypothesis."""
    differing = sums[sums != 0]
    if len(sums) < 2 or not len(differing):
        return 1.0
    observed = abs(float(differing.sum())) - 1e-9
    if len(differing) <= 12:
        # Few enough clusters for every combination of signs.
        numbers = np.arange(2 ** len(differing))
        bits = numbers[:, np.newaxis] >> np.arange(len(differing)) & 1
        flipped = np.abs((2.0 * bits - 1) @ differing)
        return float((flipped >= observed).mean())
    rng = np.random.default_rng(RESAMPLING_SEED)
    signs = rng.choice([-1.0, 1.0], size=(NUM_RESAMPLES, len(differing)))
    extreme = int((np.abs(signs @ differing) >= observed).sum())
    # The observed signs are one of the possible ones, so the p-value is never 0.
    return (extreme + 1) / (NUM_RESAMPLES + 1)
