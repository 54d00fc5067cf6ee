"""The paper's stability theorem: convex steps bound every stream by the largest thing written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import multigate as mg
from cases import run

DIM, DEPTH = 4, 6

numbers = st.floats(-1e6, 1e6, width=32)
vectors = st.lists(numbers, min_size=DIM, max_size=DIM)


def tensors(vector_list):
    return [torch.tensor(v, dtype=torch.float64) for v in vector_list]


@pytest.mark.parametrize("name", ["mgr-independent", "mgr-competitive"])
@settings(max_examples=150, deadline=None)
@given(
    inputs=st.lists(vectors, min_size=DEPTH + 1, max_size=DEPTH + 1),
    streams=st.integers(1, DEPTH + 2),
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_streams_and_their_pool_stay_below_the_largest_input(name, inputs, streams, seed, spread):
    residual = mg.build_residual(name, DIM, DEPTH, streams, bias_init=-3.0).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in residual.parameters():
            p += spread * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    x, *ys = tensors(inputs)
    hs, states = run(residual, x, ys)
    for i, (h, state) in enumerate(zip(hs, states, strict=True)):
        bound = max(v.norm() for v in [x, *ys[:i]]) * (1 + 1e-12)
        assert h.norm() <= bound
        for streams_or_stream in state:
            assert (streams_or_stream.norm(dim=-1) <= bound).all()


def test_prenorm_breaks_the_bound():
    """The counter-example: the same output twice already exceeds it."""
    residual = mg.build_residual("prenorm", DIM, DEPTH).double()
    x = torch.ones(DIM, dtype=torch.float64)
    hs, _ = run(residual, x, [x] * DEPTH)
    assert hs[-1].norm() == pytest.approx((DEPTH + 1) * x.norm().item())
    assert hs[1].norm() > x.norm()


def test_a_deep_multigate_network_stays_bounded_where_prenorm_grows():
    """Through 96 real sublayers, each writing a vector of norm at most 1."""
    depth, dim = 96, 32
    torch.manual_seed(0)
    weight = torch.randn(depth, dim, dim, dtype=torch.float64) * dim**-0.5

    def sublayer(i):
        return lambda h: torch.tanh(h @ weight[i] + 0.5) * dim**-0.5

    x = torch.randn(8, dim, dtype=torch.float64)
    x = x / x.norm(dim=-1, keepdim=True)
    norms = {}
    for name in ("prenorm", "mgr-independent", "mgr-competitive"):
        options = {} if name == "prenorm" else {"streams": 4}
        stack = mg.Stack([sublayer(i) for i in range(depth)], name, dim, **options).double()
        norms[name] = stack(x).norm(dim=-1).max().item()
    assert norms["mgr-independent"] <= 1 + 1e-12
    assert norms["mgr-competitive"] <= 1 + 1e-12
    assert norms["prenorm"] > 5
