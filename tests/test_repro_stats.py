"""Student's t against tables, and what is said of a difference."""

import math
import random

import pytest

from multigate.repro.stats import (
    Difference,
    Noise,
    noise,
    paired,
    spread,
    t_probability,
    t_quantile,
)

# Two-sided quantiles as every textbook prints them.
TABLE = {
    0.95: {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 30: 2.042},
    0.99: {1: 63.657, 2: 9.925, 3: 5.841, 4: 4.604, 10: 3.169, 29: 2.756},
    0.90: {1: 6.314, 2: 2.920, 7: 1.895, 20: 1.725},
}


@pytest.mark.parametrize("confidence", TABLE)
def test_quantiles_are_those_of_the_tables(confidence):
    for freedom, expected in TABLE[confidence].items():
        assert t_quantile(freedom, confidence) == pytest.approx(expected, abs=5.1e-4)


def test_many_degrees_of_freedom_are_nearly_normal():
    assert t_quantile(100_000) == pytest.approx(1.959964, abs=5e-5)


def test_one_and_two_degrees_have_closed_forms():
    for p in (0.1, 0.5, 0.95, 0.999):
        assert t_quantile(1, p) == pytest.approx(math.tan(math.pi * p / 2), rel=1e-9)
        assert t_quantile(2, p) == pytest.approx(p * math.sqrt(2 / (1 - p**2)), rel=1e-9)


@pytest.mark.parametrize("freedom", [1, 2, 5, 8])
def test_the_probability_is_the_integral_of_the_density(freedom):
    norm = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    t, count = 1.7, 20000
    density = [
        norm * (1 + (t * (k + 0.5) / count) ** 2 / freedom) ** (-(freedom + 1) / 2)
        for k in range(count)
    ]
    expected = 2 * math.fsum(density) * t / count
    angle = math.atan(t / math.sqrt(freedom))
    assert t_probability(angle, freedom) == pytest.approx(expected, abs=1e-8)


def test_no_freedom_is_one_sentence():
    with pytest.raises(ValueError, match="at least one degree of freedom, got 0"):
        t_quantile(0)


def test_spread():
    assert spread([]) is None
    one = spread([3.25])
    assert (one.mean, one.deviation, one.count) == (3.25, None, 1)
    three = spread([1.0, 2.0, 6.0])
    assert (three.mean, three.count) == (3.0, 3)
    assert three.deviation == pytest.approx(math.sqrt(7.0))


def test_differences_are_taken_within_a_seed():
    """Seeds that only one of the two has do not count."""
    found = paired({0: 3.0, 1: 3.4, 2: 3.2, 7: 9.0}, {0: 3.1, 1: 3.6, 2: 3.3, 5: 0.0})
    assert found.seeds == (0, 1, 2)
    assert found.mean == pytest.approx(-0.4 / 3)
    deviation = math.sqrt(((0.1 - 0.4 / 3) ** 2 * 2 + (0.2 - 0.4 / 3) ** 2) / 2)
    assert found.half == pytest.approx(4.302653 * deviation / math.sqrt(3), rel=1e-6)
    assert found.verdict == "cannot tell"
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_verdicts():
    assert Difference(-0.03, 0.02, (0, 1)).verdict == "lower"
    assert Difference(0.03, 0.02, (0, 1)).verdict == "higher"
    assert Difference(0.02, 0.02, (0, 1)).verdict == "cannot tell"
    assert Difference(-0.03, None, (0,)).verdict == "one seed, no interval"
    assert paired({0: 2.0}, {0: 3.0}).verdict == "one seed, no interval"


def test_the_interval_holds_the_truth_as_often_as_it_says():
    draw = random.Random(0)
    held = 0
    for _ in range(2000):
        cell = {seed: draw.gauss(0.5, 1.0) for seed in range(4)}
        found = paired(cell, dict.fromkeys(range(4), 0.0))
        held += abs(found.mean - 0.5) <= found.half
    assert held / 2000 == pytest.approx(0.95, abs=0.015)


def test_noise_is_what_cells_and_seeds_do_not_explain():
    """Three cells of three seeds: the interaction of an analysis of variance in two ways."""
    losses = [[3.0, 3.4, 3.1], [2.8, 3.3, 2.9], [2.9, 3.1, 3.3]]
    cells = [dict(enumerate(row)) for row in losses]
    grand = sum(map(sum, losses)) / 9
    left = [
        losses[i][j] - sum(losses[i]) / 3 - sum(row[j] for row in losses) / 3 + grand
        for i in range(3)
        for j in range(3)
    ]
    found = noise([*cells, {0: 99.0}])
    assert found.freedom == 4
    assert found.deviation == pytest.approx(math.sqrt(sum(x * x for x in left) / 4))
    assert found.half(3) == pytest.approx(2.776445 * found.deviation * math.sqrt(2 / 3), rel=1e-6)
    # A shift of a whole cell or of a whole seed is no noise.
    shifted = [
        {seed: x + k + 7 * (seed == 1) for seed, x in c.items()} for k, c in enumerate(cells)
    ]
    assert noise(shifted).deviation == pytest.approx(found.deviation)


def test_noise_of_two_cells_is_that_of_their_difference():
    """Where both have the same seeds; what only one has says nothing of either."""
    cell, other = {0: 3.0, 1: 3.4, 2: 3.2}, {0: 3.1, 1: 3.6, 2: 3.3}
    found = noise([cell, other])
    own = spread([cell[seed] - other[seed] for seed in cell])
    assert (found.freedom, found.deviation) == (2, pytest.approx(own.deviation / math.sqrt(2)))
    assert noise([{**cell, 3: 9.0}, other]) == Noise(pytest.approx(found.deviation), 2)
    assert paired(cell, other, found).pooled == pytest.approx(paired(cell, other).half)


def test_a_copy_of_a_cell_says_nothing_new():
    cells = [{0: 3.0, 1: 3.4, 2: 3.2}, {0: 3.1, 1: 3.6, 2: 3.3}]
    assert noise([*cells, dict(cells[0]), {0: 3.1, 2: 3.3}]) == noise(cells)
    assert noise([*cells, {0: 3.1, 1: 3.61, 2: 3.3}]).freedom == 4


def test_no_noise_without_freedom():
    assert noise([]) is None
    assert noise([{0: 1.0}, {0: 2.0, 1: 3.0}]) is None
    assert noise([{0: 1.0, 1: 2.0}, {2: 2.0, 3: 3.0}]) is None
    assert paired({0: 2.0}, {0: 3.0}).pooled_verdict is None


def test_pooled_verdicts():
    one = paired({0: 2.0}, {0: 2.1}, Noise(0.02, 13))
    assert one.pooled == pytest.approx(2.160369 * 0.02 * math.sqrt(2), rel=1e-6)
    assert (one.verdict, one.pooled_verdict) == ("one seed, no interval", "lower")
    assert paired({0: 2.0}, {0: 2.05}, Noise(0.02, 13)).pooled_verdict == "cannot tell"
    assert paired({0: 2.1}, {0: 2.0}, Noise(0.02, 13)).pooled_verdict == "higher"


def test_the_pooled_interval_holds_the_truth_as_often_as_it_says():
    """Of six cells with one to three seeds each, which shift all cells alike."""
    draw = random.Random(1)
    held = count = 0
    for _ in range(1500):
        shifts = [draw.gauss(0.0, 3.0) for _ in range(3)]
        cells = [
            {seed: k + shifts[seed] + draw.gauss(0.0, 1.0) for seed in range(seeds)}
            for k, seeds in enumerate((3, 3, 3, 2, 2, 1))
        ]
        of_all = noise(cells)
        for k in (1, 3, 5):
            found = paired(cells[k], cells[0], of_all)
            held += abs(found.mean - k) <= found.pooled
            count += 1
    assert held / count == pytest.approx(0.95, abs=0.015)
