"""The Triton kernels of the Multi-Gate step against float64: values and every gradient.

On a GPU they are compiled; without one Triton's interpreter runs them on the CPU.
"""

import itertools

import pytest
import torch

from multigate.ops.gate_pool import reference
from multigate.ops.gate_pool.saved import saved_gates
from offline import assert_compiles

pytest.importorskip("triton")
kernels = pytest.importorskip("multigate.ops.gate_pool.triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
NAMES = ("h", "new streams", "dy", "dstreams", "dw_gate", "dw_pool", "dbias", "dnorm")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Memory that nobody has written to holds NaN."""
    empty, empty_like = torch.empty, torch.empty_like
    nan = float("nan")
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(nan))


class Problem:
    """Inputs and gradients of the outputs, each rounded to its dtype and kept as float64."""

    def __init__(self, n, width, tokens, competitive=True, norm=True, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape, dtype=dtype):
            return torch.randn(shape, generator=generator).to(DEVICE, dtype).double()

        self.competitive, self.norm, self.dtype, self.y_dtype = competitive, norm, dtype, dtype
        self.eps = EPS
        self.y, self.streams = draw(tokens, width), draw(tokens, n, width)
        self.w_gate = draw(width, dtype=torch.float32)
        self.w_pool = draw(width, dtype=torch.float32)
        self.bias = draw(n + competitive, dtype=torch.float32)
        self.norm_weight = draw(width, dtype=torch.float32) if norm else None
        self.grad_h, self.grad_streams = draw(tokens, width), draw(tokens, n, width)

    def expected(self, dtype, y_dtype, weight_dtype, bias=None):
        """Outputs and gradients of the reference in the given dtypes."""
        bias = self.bias if bias is None else bias
        inputs = [self.y.to(y_dtype), self.streams.to(dtype)]
        inputs += [w.to(weight_dtype) for w in (self.w_gate, self.w_pool, bias)]
        inputs += [self.norm_weight.to(weight_dtype)] if self.norm else []
        inputs = [x.clone().requires_grad_() for x in inputs]
        y, streams, w_gate, w_pool, bias, *norm = inputs
        variant = "competitive" if self.competitive else "independent"
        outputs = reference.gate_pool(
            y, streams, w_gate, w_pool, bias, variant, norm[0] if norm else None, self.eps
        )
        given = [(o, g) for o, g in zip(outputs, self.grads(dtype), strict=True) if g is not None]
        grads = torch.autograd.grad(
            [o for o, _ in given], inputs, [g for _, g in given], allow_unused=True
        )
        zeros = [
            torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)
        ]
        return [*(o.detach() for o in outputs), *zeros]

    def grads(self, dtype):
        return [g if g is None else g.to(dtype) for g in (self.grad_h, self.grad_streams)]

    def exact(self, bias=None):
        return self.expected(*[torch.float64] * 3, bias=bias)

    def eager(self):
        return self.expected(self.dtype, self.y_dtype, torch.float32)

    def kernel(self, streams=None, **launch):
        """What the kernels give, and `saved`."""
        if streams is None:
            streams = self.streams.to(self.dtype).unbind(1)
        y = self.y.to(self.y_dtype)
        weights = [w.float() for w in (self.w_gate, self.w_pool, self.bias)]
        weights.append(self.norm_weight.float() if self.norm else None)
        gate = (self.competitive, self.eps)
        h, new, saved = kernels.forward(y, streams, *weights, *gate, launch=launch)
        grads = kernels.backward(
            *self.grads(self.dtype), y, streams, *weights, saved, *gate, launch=launch
        )
        assert [x is None for x in grads] == [False] * 5 + [not self.norm]
        for x, like in zip(grads, [y, h, *weights], strict=True):
            assert x is None or x.dtype == like.dtype
        return [h, new, *(x for x in grads if x is not None)], saved


def check(problem, got, slack=1e-6, floor=0.0, cancelling=NAMES):
    """At most 1.1 times the error of the eager reference, in norm.

    `slack`: both are at the level of float32's rounding, where the order of a sum decides which is
    nearer. It is a share of the result, or of what the result would be with a bias of zero (a gate
    that is shut or wide open makes gradients which are differences of numbers of that size), or of
    `floor`, the size of what cancels in those that are `cancelling`.
    """
    exact, eager = problem.exact(), problem.eager()
    plain = problem.exact(bias=torch.zeros_like(problem.bias))
    assert len(got) == len(exact)
    for name, a, w, e, p in zip(NAMES, got, exact, eager, plain, strict=False):
        assert a.shape == w.shape, name
        assert torch.isfinite(a).all(), name
        size = max(w.norm().item(), p.norm().item(), floor if name in cancelling else 0.0)
        error, allowed = (a.double() - w).norm().item(), 1.1 * (e.double() - w).norm().item()
        assert error <= allowed + slack * size, (name, error, allowed, size)


SHAPES = [(1, 7, 5), (2, 40, 33), (3, 1, 5), (4, 260, 33), (5, 40, 1), (8, 40, 5), (16, 7, 5)]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("competitive", [False, True], ids=["independent", "competitive"])
@pytest.mark.parametrize(("n", "width", "tokens"), SHAPES)
def test_values_and_gradients(n, width, tokens, competitive, norm):
    problem = Problem(n, width, tokens, competitive, norm)
    got, _ = problem.kernel()
    # rms(s) is the sign of s if there is one channel: what flows through the norms cancels.
    check(problem, got, floor=1.0 if width == 1 else 0.0)
    if n == 1:
        assert not got[NAMES.index("dw_pool")].any()


@pytest.mark.parametrize("width", [768, 1280, 1000])
def test_widths_of_several_sections(width):
    problem = Problem(2, width, 3)
    check(problem, problem.kernel()[0])


@pytest.mark.parametrize(
    "launch",
    [
        {"block": 1, "warps": 1},
        {"block": 1, "warps": 2, "keep": False, "programs": 1},
        {"block": 2, "warps": 1, "hoist": True},
        {"block": 4, "warps": 2, "keep": False, "hoist": True, "stages": 2},
    ],
    ids=str,
)
def test_every_launch_gives_the_same(launch):
    problem = Problem(3, 150, 5)
    check(problem, problem.kernel(**launch)[0])


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("missing", ["grad_h", "grad_streams"])
def test_a_missing_gradient_counts_as_zeros(missing, norm):
    problem = Problem(3, 40, 5, norm=norm)
    setattr(problem, missing, None)
    got, _ = problem.kernel()
    check(problem, got)
    if missing == "grad_h":
        assert not got[NAMES.index("dw_pool")].any()
        assert not norm or not got[NAMES.index("dnorm")].any()


def test_without_any_gradient_all_are_zero():
    problem = Problem(2, 8, 3)
    problem.grad_h = problem.grad_streams = None
    got, _ = problem.kernel()
    assert not any(x.any() for x in got[2:])


@pytest.mark.parametrize("competitive", [False, True], ids=["independent", "competitive"])
@pytest.mark.parametrize("sign", [-1, 1], ids=["shut", "open"])
def test_gates_that_are_shut_or_wide_open(sign, competitive):
    problem = Problem(3, 40, 9, competitive)
    problem.bias = torch.full_like(problem.bias, 30.0 * sign)
    if competitive:
        problem.bias[0] = 0
    check(problem, problem.kernel()[0])


@pytest.mark.parametrize("y_size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("stream_size", [1e-3, 1e3])
def test_magnitudes(stream_size, y_size):
    problem = Problem(4, 40, 9)
    problem.y = (problem.y * y_size).float().double()
    problem.streams = (problem.streams * stream_size).float().double()
    # Next to a large y the new streams are parallel to it, and the gradient of w_pool cancels.
    floor = 0.05 if y_size > stream_size else 0.0
    check(problem, problem.kernel()[0], slack=2e-6, floor=floor, cancelling=("dw_pool",))


def test_equal_streams():
    problem = Problem(4, 40, 9, competitive=False)
    problem.streams = problem.streams[:, :1].expand_as(problem.streams).contiguous()
    check(problem, problem.kernel()[0])


def test_streams_that_the_output_cancels():
    """The new streams are zero, and what is computed of their square may be less."""
    problem = Problem(2, 64, 33, competitive=False, norm=False)
    problem.streams = (problem.streams * 1e3).float().double()
    problem.streams[:, 1] = problem.streams[:, 0]
    problem.w_gate, problem.bias = (
        torch.zeros_like(problem.w_gate),
        torch.full_like(problem.bias, 0.3),
    )
    beta = problem.bias[0].sigmoid()
    problem.y = (-(1 - beta) / beta * problem.streams[:, 0]).float().double()
    got, _ = problem.kernel()
    assert all(torch.isfinite(x).all() for x in got)
    assert got[0].abs().max() < 1e-3
    assert got[1].abs().max() < 1e-3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_eps():
    """Rows beyond the last token are no numbers divided by zero."""
    problem = Problem(2, 40, 5)
    problem.eps = 0.0
    check(problem, problem.kernel()[0])


def test_a_wide_open_gate_keeps_its_small_gradient():
    """beta (1 - beta) is 2e-9 here, and 1 - beta of the rounded beta would be nothing."""
    problem = Problem(2, 40, 5, competitive=False)
    problem.w_gate, problem.bias = (
        torch.zeros_like(problem.w_gate),
        torch.full_like(problem.bias, 20.0),
    )
    dbias = NAMES.index("dbias")
    check_norm("dbias", problem.kernel()[0][dbias], problem.exact()[dbias], 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
def test_half_precision_streams(dtype, norm):
    """Rounded once at the end: within one unit in the last place. (The interpreter cuts off where
    a GPU rounds, so no half.)"""
    problem = Problem(4, 40, 5, norm=norm, dtype=dtype)
    got, _ = problem.kernel()
    for name, a, w in zip(NAMES, got, problem.exact(), strict=False):
        unit = torch.finfo(a.dtype).eps
        if a.dtype == dtype:
            atol = 1e-6 * w.abs().max().item()
            torch.testing.assert_close(a.double(), w, rtol=1.01 * unit, atol=atol, msg=name)
        else:
            check_norm(name, a, w)
    if DEVICE == "cuda":
        check(problem, got)


def check_norm(name, a, w, share=2e-6):
    assert (a.double() - w).norm() <= share * w.norm(), name


def test_an_output_of_another_dtype():
    problem = Problem(3, 40, 5, dtype=torch.bfloat16)
    problem.y_dtype = torch.float32
    got, _ = problem.kernel()
    exact = problem.exact()
    assert got[2].dtype == torch.float32
    check_norm("dy", got[2], exact[2])
    check_norm("new streams", got[1], exact[1], 5e-3)


def test_weights_of_another_dtype():
    problem = Problem(3, 40, 5)
    for name in ("w_gate", "w_pool", "bias", "norm_weight"):
        setattr(problem, name, getattr(problem, name).bfloat16().double())
    weights = [w.bfloat16() for w in (problem.w_gate, problem.w_pool, problem.bias)]
    weights.append(problem.norm_weight.bfloat16())
    y, streams = problem.y.float(), problem.streams.float().unbind(1)
    h, new, saved = kernels.forward(y, streams, *weights, True, EPS)
    grads = kernels.backward(*problem.grads(torch.float32), y, streams, *weights, saved, True, EPS)
    exact = problem.exact()
    for name, a, w in zip(NAMES, [h, new, *grads], exact, strict=True):
        weight = name.startswith(("dw", "db", "dn"))
        assert a.dtype == (torch.bfloat16 if weight else torch.float32)
        check_norm(name, a, w, 8e-3 if weight else 2e-6)


def test_streams_apart_and_in_a_wider_buffer():
    problem = Problem(3, 40, 5)
    packed, _ = problem.kernel()
    apart = [s.clone() for s in problem.streams.float().unbind(1)]
    wide = torch.zeros(5, 3, 53, device=DEVICE)
    wide[..., 6:46] = problem.streams.float()
    for streams in (apart, wide[..., 6:46].unbind(1)):
        for a, b in zip(problem.kernel(streams)[0], packed, strict=True):
            assert torch.equal(a, b)


def test_what_is_saved():
    problem = Problem(3, 40, 5)
    _, saved = problem.kernel()
    y, s = problem.y, problem.streams
    normed = problem.exact()[0]
    problem.norm = False
    plain = problem.exact()[0]
    inverse = (plain.square().mean(-1) + EPS).rsqrt()
    torch.testing.assert_close(plain * inverse[:, None] * problem.norm_weight, normed)
    columns = [s.square().sum(-1), s @ problem.w_gate, s @ problem.w_pool]
    columns += [torch.einsum("tnc,tc->tn", s, y), y.square().sum(-1, keepdim=True)]
    columns += [(y @ problem.w_pool)[:, None], inverse[:, None]]
    beta = reference.gate(s, problem.w_gate.double(), problem.bias.double(), "competitive", EPS)
    new = reference.lerp(y, s, beta)
    columns += [1 - beta.sum(-1, keepdim=True), beta]
    columns += [
        reference.pool_weights(new, problem.w_pool.double(), EPS),
        torch.zeros_like(s[:, 0, :2]),
    ]
    assert saved.dtype == torch.float32
    torch.testing.assert_close(saved.double(), torch.cat(columns, 1), rtol=2e-6, atol=2e-5)
    without, saved = problem.kernel()
    check(problem, without)
    assert not saved[:, 14].any()
    assert torch.equal(saved_gates(saved, 3), saved[:, 16:19])


def test_no_tokens():
    problem = Problem(3, 40, 0)
    got, saved = problem.kernel()
    assert [tuple(x.shape) for x in got[:4]] == [(0, 40), (0, 3, 40), (0, 40), (0, 3, 40)]
    assert saved.shape == (0, 24)
    assert not any(x.any() for x in got[4:])


def test_bitwise_the_same_twice():
    problem = Problem(4, 40, 33)
    first, second = problem.kernel()[0], problem.kernel()[0]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("width", "lanes", "most", "widths"),
    [
        (768, 32, 5, (256, 256, 256)),
        (768, 32, 2, (512, 256)),
        (768, 32, 1, (1024,)),
        (1280, 128, 2, (1024, 256)),
        (4096, 256, 2, (2048, 2048)),
        (1000, 128, 4, (1024,)),
        (1920, 128, 4, (1024, 512, 256, 128)),
        (1920, 128, 3, (1024, 1024)),
        (1408, 128, 2, (1024, 512)),
        (7, 32, 4, (32,)),
        (1, 8, 4, (8,)),
    ],
)
def test_sections(width, lanes, most, widths):
    starts, found = kernels.sections(width, lanes, 8, most)
    assert found == widths
    assert starts == tuple(sum(widths[:j]) for j in range(len(widths)))


def test_every_default_is_a_launch_the_kernels_take():
    widths = (1, 64, 768, 1024, 1280, 4096, 8192)
    for *size, backward in itertools.product(range(1, 17), widths, (2, 4), (False, True)):
        plan = kernels.default_launch(*size, backward)
        assert plan.warps in (1, 2, 4, 8, 16)
        # Backward a program writes its share of the weight gradients: no more than run at once.
        assert not backward or plan.warps * plan.programs <= 64


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from multigate.ops.gate_pool import triton as kernels

def build(kernel, constants, num_warps):
    half = {"y", "h", "new_streams", "grad_h", "grad_streams", "dy", "dstreams"}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "streams":
            signature[name] = ("*bf16",) * constants["N"]
            attributes |= {(i, k): [["tt.divisibility", 16]] for k in range(constants["N"])}
        elif name in ("tokens", "y_stride", "stream_stride"):
            signature[name] = "i32"
        elif name == "eps":
            signature[name] = "fp32"
        else:
            signature[name] = "*bf16" if name in half else "*fp32"
            attributes[(i,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, attributes)
    compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})

for n, width, block in ((2, 384, 1), (1, 40, 4)):
    plan = kernels.Launch(warps=1 if block == 1 else 4, programs=4, block=block)
    settings = kernels._settings(plan, n, width, 2)
    warps = settings.pop("num_warps")
    settings |= {"COMPETITIVE": block == 1, "NORM": True, "SAVED": 16}
    build(kernels.forward_kernel, settings | {"COLUMNS": 16}, warps)
    settings |= {"GRAD_H": True, "GRAD_STREAMS": block == 1}
    build(kernels.backward_kernel, settings, warps)
print("compiled")
"""


def test_the_kernels_compile_for_a_gpu_without_one(tmp_path):
    assert_compiles(COMPILE, tmp_path)
