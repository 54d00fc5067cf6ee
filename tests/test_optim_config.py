"""The optimizer's settings, and the course of the learning rate."""

import math
import re

import pytest

from multigate.optim import OptimConfig, learning_rate_share


def test_the_schedule_at_its_corners():
    shares = [learning_rate_share(k, 1000, 100, 0.1) for k in range(1001)]
    assert shares[0] == pytest.approx(1 / 101)
    assert shares[99] == pytest.approx(100 / 101)
    assert shares[100] == 1.0
    assert shares[550] == pytest.approx(0.55)
    assert shares[1000] == pytest.approx(0.1, abs=1e-15)
    assert shares[999] == pytest.approx(0.1 + 0.45 * (1 - math.cos(math.pi / 900)))
    assert all(a < b for a, b in zip(shares[:100], shares[1:101], strict=True))
    assert all(a > b for a, b in zip(shares[100:], shares[101:], strict=False))
    assert learning_rate_share(5000, 1000, 100, 0.1) == pytest.approx(0.1)
    assert learning_rate_share(0, 10, 0, 0.1) == 1.0
    assert learning_rate_share(9, 10, 100, 0.1) == pytest.approx(10 / 101)
    assert learning_rate_share(10, 10, 10, 0.3) == 1.0
    assert [learning_rate_share(k, 7, 2, 1.0) for k in (2, 4, 7)] == [1.0] * 3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lr_muon": -1.0}, "lr_muon must be a number from 0 up, got -1.0"),
        ({"lr_adamw": math.nan}, "lr_adamw must be a number from 0 up, got nan"),
        ({"weight_decay": math.inf}, "weight_decay must be a number from 0 up"),
        ({"clip": -0.1}, "clip must be a number from 0 up"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ({"beta1": -0.1}, "beta1 must be at least 0 and below 1"),
        ({"beta2": 1.5}, "beta2 must be at least 0 and below 1"),
        ({"eps": 0.0}, "eps must be a number above 0"),
        ({"floor": 1.1}, "floor must be a share from 0 to 1"),
        ({"warmup": -1}, "warmup must be a whole number of steps from 0 up"),
        ({"warmup": 0.5}, "warmup must be a whole number of steps from 0 up"),
        ({"method": "polar"}, "unknown method 'polar': did you mean 'polar-express'"),
        ({"scale": "rms"}, "unknown scale 'rms'"),
    ],
)
def test_wrong_settings_are_said(changes, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        OptimConfig(**changes)


def test_settings_from_the_command_line():
    tyro = pytest.importorskip("tyro")
    words = ["--lr-muon", "0.5", "--method", "newton-schulz", "--no-nesterov", "--beta2", "0.9"]
    expected = OptimConfig(lr_muon=0.5, method="newton-schulz", nesterov=False, beta2=0.9)
    assert tyro.cli(OptimConfig, args=words) == expected
