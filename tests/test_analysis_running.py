"""Running statistics are those of all the numbers at once, whatever the batches were."""

import numpy as np
import pytest
import torch

from multigate.analysis.running import BINS, Histogram, Largest, Mean, exact

PARTS = [7, 1, 300, 40, 2]
"""Sizes of the batches."""


def numbers(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(sum(PARTS), *shape, generator=generator, dtype=torch.float64).to(dtype)


def filled(statistic, values):
    for part in values.split(PARTS):
        statistic.add(part)
    return statistic


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
def test_the_mean_is_over_all(shape):
    values = numbers(*shape)
    found = filled(Mean(), values).result()
    np.testing.assert_allclose(found, values.numpy().mean(0), rtol=1e-13, atol=1e-14)


def test_a_mean_of_half_precision_is_summed_in_double():
    values = torch.full((5000,), 1.0, dtype=torch.bfloat16)
    values[0] = 256.0
    mean = Mean()
    mean.add(values)
    assert mean.result() == 5255 / 5000
    assert exact(values).dtype == torch.float64


@pytest.mark.parametrize("k", [1, 3, 9])
def test_the_largest_of_all(k):
    values = numbers(6)
    found = filled(Largest(k), values).result()
    assert np.array_equal(found, np.sort(values.numpy(), axis=None)[::-1][:k])


def test_fewer_than_asked_for():
    largest = Largest(3)
    assert np.isnan(largest.result()).all()
    for value in (2.0, 5.0):
        largest.add(torch.tensor([value]))
    np.testing.assert_array_equal(largest.result(), [5.0, 2.0, np.nan])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_histogram(dtype):
    values = (2 * numbers(50, dtype=dtype)).sigmoid()
    histogram = filled(Histogram(), values)
    known = values.double().numpy().astype(np.float32).astype(np.float64)
    assert np.array_equal(histogram.result(), np.histogram(known, BINS, (0, 1))[0])
    least, *quartiles, largest, mean = histogram.box()
    assert (least, largest) == (known.min(), known.max())
    assert mean == pytest.approx(known.mean(), rel=1e-9)
    np.testing.assert_allclose(quartiles, np.quantile(known, [0.25, 0.5, 0.75]), atol=1.5 / BINS)


def test_both_ends_are_counted():
    histogram = Histogram()
    histogram.add(torch.tensor([0.0, 1.0, 1.0, 0.5]))
    histogram.add(torch.tensor([0.0]))
    counts = histogram.result()
    assert counts.sum() == 5
    assert (counts[0], counts[BINS // 2], counts[-1]) == (2, 1, 2)
    assert histogram.box()[[0, 4, 5]].tolist() == [0.0, 1.0, 0.5]


def test_a_box_of_one_value_is_that_value():
    histogram = Histogram()
    histogram.add(torch.full((9,), 0.25))
    assert histogram.box().tolist() == [0.25] * 6
