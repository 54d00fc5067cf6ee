"""Training gives the losses it gave before."""

import json

import pytest

import multigate as mg
from golden import FILE, STEPS, golden_losses


@pytest.mark.parametrize("residual", json.loads(FILE.read_text()) if FILE.exists() else [])
def test_golden_losses(residual, data, tmp_path):
    stored = json.loads(FILE.read_text())[residual]
    assert len(stored) == STEPS
    assert golden_losses(residual, data, tmp_path) == pytest.approx(stored, abs=1e-4)


def test_every_residual_has_golden_losses():
    assert list(json.loads(FILE.read_text())) == mg.residual_names()[:10]
