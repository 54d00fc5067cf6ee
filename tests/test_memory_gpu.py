"""The memory modes with kernels on a GPU."""

import math

import pytest
import torch
from torch import nn

import multigate as mg
from multigate.norm import RMSNorm
from multigate.ops.gate_pool import cuda, exact, reference
from multigate.ops.gate_pool.saved import saved_numbers

pytestmark = pytest.mark.gpu
GATES = ["mgr-competitive", "mgr-independent"]
MODES = ["recompute", "invert", "exact"]


class Sublayer(mg.residuals.Sublayer):
    """Matrix products alone: the same bits in every run."""

    def __init__(self, width):
        super().__init__()
        self.norm = RMSNorm(width)
        self.linear = nn.Linear(width, width)

    def body(self, x):
        return self.linear(x).tanh()


def stack(memory, residual, depth=12, streams=4, width=256, **options):
    torch.manual_seed(0)
    sublayers = [Sublayer(width) for _ in range(depth)]
    options = {"memory": memory, **options}
    made = mg.Stack(sublayers, residual, width, streams, RMSNorm(width), **options)
    with torch.no_grad():
        for name, p in made.residual.named_parameters():
            p += (0.5 if "b1" in name else 0.2) * torch.randn(p.shape)
    return made.cuda()


def gradients(memory, residual, compiled=False, tokens=1100, **options):
    torch._dynamo.reset()
    model = stack(memory, residual, **options)
    call = torch.compile(model, fullgraph=True) if compiled else model
    width = options.get("width", 256)
    x, weight = torch.randn(2, tokens, width, generator=torch.Generator().manual_seed(1)).cuda()
    x = x.bfloat16().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        loss = (call(x) * weight).float().sum()
    loss.backward()
    assert not model.residual.lost
    return {"x": x.grad} | {name: p.grad for name, p in model.named_parameters()}


def cosine(a, b):
    return float(nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("residual", GATES)
def test_gradients_are_those_of_store(residual, memory, backend, monkeypatch):
    monkeypatch.setenv("MULTIGATE_BACKEND", backend)
    expected, found = (gradients(m, residual) for m in ("store", memory))
    for name, gradient in expected.items():
        if memory != "invert":
            assert torch.equal(found[name], gradient), name
        elif gradient.norm() > 0:
            assert cosine(found[name], gradient) > 0.99, name


@pytest.mark.parametrize(("n", "width"), [(1, 264), (8, 1024), (16, 4096)])
@pytest.mark.parametrize("residual", GATES)
def test_long_blocks_are_replayed_to_the_bit(residual, n, width):
    """More steps than one launch takes."""
    options = {"depth": n + 21, "streams": n, "width": width, "tokens": 70, "every": 11}
    expected, found = (gradients(memory, residual, **options) for memory in ("store", "recompute"))
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("residual", GATES)
def test_compiled(residual, memory):
    expected = gradients(memory, residual)
    found = gradients(memory, residual, compiled=True)
    for name, gradient in expected.items():
        if gradient.norm() > 0:
            assert cosine(found[name], gradient) > 0.99, name


def problem(tokens, n, width, dtype, bias=-3.0):
    torch.manual_seed(n + width)

    def normal(*shape):
        return torch.randn(shape, device="cuda")

    weights = (0.02 * normal(width), 0.02 * normal(width), bias + 0.5 * normal(n), normal(width))
    return normal(tokens, width).to(dtype), normal(tokens, n, width).to(dtype), weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [384, 768, 1000, 1280, 2048, 4096])
def test_every_bit_comes_back(n, width, dtype):
    y, streams, weights = problem(700, n, width, dtype)
    if not exact.fits("cuda", 0, n, width, str(dtype)):
        pytest.skip("the kernels do not take this size")
    numbers = saved_numbers(n)
    h, new, saved, *kept, lost = exact.forward(y, streams, *weights, False, 1e-6, 20, numbers)
    plain = cuda.forward(y, streams.unbind(1), *weights, False, 1e-6)
    for a, b in zip(plain, (h, new, saved), strict=True):
        assert torch.equal(a, b)
    assert int(lost) == 0
    grads = (torch.randn_like(h), torch.randn_like(new))
    old, *found = exact.backward(*grads, y, new, *weights, saved, kept, False, 1e-6)
    assert torch.equal(old, streams)
    expected = cuda.backward(*grads, y, streams.unbind(1), *weights, saved, False, 1e-6)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("width", [768, 1024, 1280, 4096])
def test_the_kernel_that_inverts(n, width):
    y, streams, weights = problem(700, n, width, torch.bfloat16)
    h, new, saved = cuda.forward(y, streams.unbind(1), *weights, False, 1e-6)
    kept, places = cuda.keep(streams.unbind(1), saved, 30_000)
    beta = reference.gate(streams, weights[0], weights[2], "independent", 1e-6).flatten()
    index = (places.flatten() >= 0).nonzero().flatten()
    assert torch.equal(kept[places.flatten()[index]], streams.view(-1, width)[index])
    rows = 2048 // n
    for begin in range(0, 700, rows):
        here = places[begin : begin + rows].flatten() >= 0
        group = beta[begin * n : (begin + rows) * n]
        count = min(math.ceil(rows * n * 0.03), len(group))
        assert int(here.sum()) == count
        assert group[here].min() >= group.topk(count).values.min() - 1e-6
    grads = (torch.randn_like(h), torch.randn_like(new))
    old, found = cuda.invert_backward(
        *grads, y, new.unbind(1), weights, saved, kept, places, False, 1e-6
    )
    assert torch.equal(old.view(-1, width)[index], streams.view(-1, width)[index])
    assert (old.float() - streams.float()).norm() < 4e-3 * streams.float().norm()
    expected = cuda.backward(*grads, y, old.unbind(1), *weights, saved, False, 1e-6)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_less_memory_is_taken():
    """Beyond what one stream takes: 21 steps of 4 streams of 16384 x 768 in bfloat16, 2016 MiB."""
    peaks = {}
    for memory in ("store", *MODES):
        model = stack(memory, GATES[0], depth=24, width=768)
        x = torch.randn(16384, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16):
                model(x).float().square().sum().backward()
            peaks[memory] = (torch.cuda.max_memory_allocated() - before) / 2**20
            model.zero_grad()
        del model, x
    stored = 21 * 16384 * 4 * 768 * 2 / 2**20
    print(peaks)
    assert peaks["invert"] < peaks["store"] - 0.75 * stored
    assert peaks["exact"] < peaks["store"] - 0.6 * stored
    assert peaks["recompute"] < peaks["store"] - 0.4 * stored
