"""Mean, spread, and Student's t: what a few seeds can tell."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


def t_probability(angle: float, freedom: int) -> float:
    """P(|T| < t) for t = sqrt(freedom) tan(angle) and a whole number of degrees of freedom.

    With s = sin(angle), c = cos(angle) this is a finite sum:
        even:  s (1 + c^2/2 + c^4 3/(2 4) + ... up to c^(freedom - 2))
        odd:   2/pi (angle + s (c + c^3 2/3 + c^5 (2 4)/(3 5) + ... up to c^(freedom - 2)))
    """
    sine, cosine = math.sin(angle), math.cos(angle)
    first = freedom % 2
    term, total = cosine**first, 0.0
    for k in range(first, freedom - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + sine * total) if first else sine * total


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| < t) = `confidence`, by halving the angle's range."""
    if freedom < 1:
        raise ValueError(f"Student's t needs at least one degree of freedom, got {freedom}.")
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        if t_probability(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; of one seed there is no deviation."""

    mean: float
    deviation: float | None
    count: int


def spread(values: Sequence[float]) -> Spread | None:
    """Of the numbers there are; None for none."""
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Spread(mean, None, 1)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Spread(mean, math.sqrt(squares / (len(values) - 1)), len(values))


@dataclass(frozen=True)
class Difference:
    """Of two cells, seed by seed: the mean, and the half-width of its interval."""

    mean: float
    half: float | None
    """None for one seed, which has no interval."""
    seeds: tuple[int, ...]

    @property
    def verdict(self) -> str:
        if self.half is None:
            return "one seed, no interval"
        if abs(self.mean) <= self.half:
            return "cannot tell"
        return "lower" if self.mean < 0 else "higher"


def paired(cell: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """`cell` minus `other` over the seeds that both have: mean +- t s / sqrt(k)."""
    seeds = tuple(sorted(set(cell) & set(other)))
    found = spread([cell[seed] - other[seed] for seed in seeds])
    if found is None:
        return None
    half = None
    if found.deviation is not None:
        half = t_quantile(found.count - 1) * found.deviation / math.sqrt(found.count)
    return Difference(found.mean, half, seeds)
