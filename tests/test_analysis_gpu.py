"""The analysis on a GPU: the numbers of the CPU, in little time."""

import time

import numpy as np
import pytest
import torch

import multigate as mg
from multigate.analysis.measure import measure

pytestmark = pytest.mark.gpu


def autocast():
    return torch.autocast("cuda", torch.bfloat16)


@pytest.mark.parametrize("residual", mg.residual_names())
def test_a_gpu_measures_what_a_cpu_does(residual):
    torch.manual_seed(0)
    model = mg.GPT(mg.preset("tiny", residual=residual, context=64)).eval()
    rows = torch.randint(256, (6, 65), generator=torch.Generator().manual_seed(1))
    on_cpu = measure(model, rows, 3, batch=4)
    on_gpu = measure(model.cuda(), rows, 3, batch=4)
    for family, arrays in on_cpu.items():
        assert arrays.keys() == on_gpu[family].keys()
        for name, expected in arrays.items():
            if name.endswith("counts"):
                # A value may fall to either side of a bin's edge.
                assert np.abs(on_gpu[family][name] - expected).sum() < 0.01 * expected.sum()
                continue
            np.testing.assert_allclose(
                on_gpu[family][name], expected, rtol=2e-2, atol=2e-3, err_msg=f"{family}.{name}"
            )


@pytest.mark.parametrize("residual", ["prenorm", "mgr-competitive", "attnres-full"])
def test_512_samples_at_mini_take_less_than_a_minute(residual):
    """All figures; pruning, which has no limit, is done on one sample."""
    model = mg.GPT(mg.preset("mini", residual=residual)).cuda().eval()
    rows = torch.randint(16384, (512, 1025))
    begin = time.perf_counter()
    measure(model, rows, 1, batch=16, autocast=autocast)
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    print(f"{residual}: {took:.1f} s, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    assert took < 60
