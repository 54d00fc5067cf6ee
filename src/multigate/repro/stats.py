"""Mean, spread, and Student's t: what a few seeds can tell."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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
class Noise:
    """What is left of the loss of a run beside its cell and its seed."""

    deviation: float
    freedom: int

    def half(self, seeds: int) -> float:
        """Of the interval of a difference of two cells over so many seeds: t s sqrt(2 / k)."""
        return t_quantile(self.freedom) * self.deviation * math.sqrt(2 / seeds)


def noise(cells: Iterable[Mapping[int, float]]) -> Noise | None:
    """The noise of all cells that have several seeds, if it is the same in all of them.

    Least squares of loss = cell + seed; None where they leave no degree of freedom. A cell that is
    the same as another to the bit, as memory modes may be, says nothing new and is left out.
    """
    several = list[Mapping[int, float]]()
    for cell in cells:
        if len(cell) > 1 and not any(same(cell, other) for other in several):
            several.append(cell)
    seeds = sorted({seed for cell in several for seed in cell})
    runs = [(k, seeds.index(seed)) for k, cell in enumerate(several) for seed in cell]
    if not runs:
        return None
    of_cell, of_seed = np.eye(len(several)), np.eye(len(seeds))
    design = np.array([np.concatenate((of_cell[k], of_seed[j])) for k, j in runs])
    losses = np.array([several[k][seeds[j]] for k, j in runs])
    freedom = len(runs) - int(np.linalg.matrix_rank(design))
    if freedom < 1:
        return None
    left = losses - design @ np.linalg.lstsq(design, losses, rcond=None)[0]
    return Noise(math.sqrt(float(left @ left) / freedom), freedom)


def same(cell: Mapping[int, float], other: Mapping[int, float]) -> bool:
    """Whether they agree on all seeds that both have, if there are any."""
    seeds = set(cell) & set(other)
    return bool(seeds) and all(cell[seed] == other[seed] for seed in seeds)


@dataclass(frozen=True)
class Difference:
    """Of two cells, seed by seed: the mean, and the half-width of its interval."""

    mean: float
    half: float | None
    """None for one seed, which has no interval."""
    seeds: tuple[int, ...]
    each: tuple[float, ...] = ()
    """Of every seed."""
    pooled: float | None = None
    """The half-width by the noise of all cells."""

    @property
    def verdict(self) -> str:
        return "one seed, no interval" if self.half is None else told(self.mean, self.half)

    @property
    def pooled_verdict(self) -> str | None:
        return None if self.pooled is None else told(self.mean, self.pooled)


def told(mean: float, half: float) -> str:
    """What a difference says with its interval."""
    if abs(mean) <= half:
        return "cannot tell"
    return "lower" if mean < 0 else "higher"


def paired(
    cell: Mapping[int, float], other: Mapping[int, float], of_all: Noise | None = None
) -> Difference | None:
    """`cell` minus `other` over the seeds that both have: mean +- t s / sqrt(k)."""
    seeds = tuple(sorted(set(cell) & set(other)))
    each = tuple(cell[seed] - other[seed] for seed in seeds)
    found = spread(each)
    if found is None:
        return None
    half = None
    if found.deviation is not None:
        half = t_quantile(found.count - 1) * found.deviation / math.sqrt(found.count)
    pooled = of_all.half(found.count) if of_all else None
    return Difference(found.mean, half, seeds, each, pooled)
