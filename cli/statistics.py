"""Intervals for the report."""

import math
import random
from collections.abc import Sequence

Interval = tuple[float, float]


def wilson(successes: int, trials: int, z: float = 1.96) -> Interval:
    """Wilson's score interval for a proportion (E. B. Wilson, 1927); 95 % at the default z."""
    if trials == 0:
        return (0.0, 1.0)
    p = successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return (max(0.0, centre - half), min(1.0, centre + half))


def bootstrap_mean(values: Sequence[float], draws: int = 4000, seed: int = 0) -> Interval:
    """95 % percentile interval of the mean (B. Efron, 1979), with a fixed seed: the same data give the same interval."""
    if not values:
        return (math.nan, math.nan)
    draw = random.Random(seed)
    means = sorted(sum(draw.choices(values, k=len(values))) / len(values) for _ in range(draws))
    return (means[int(0.025 * draws)], means[min(draws - 1, int(0.975 * draws))])


def mean_interval(values: Sequence[float]) -> Interval:
    """95 %: Wilson's for rewards of 0 and 1, bootstrap for others."""
    if set(values) <= {0.0, 1.0}:
        return wilson(round(sum(values)), len(values))
    return bootstrap_mean(values)
