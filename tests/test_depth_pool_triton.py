"""The fused depth_pool against the reference in float64: values and every gradient.

Without a GPU the kernels run in Triton's interpreter, which cuts float32 to bfloat16 instead of
rounding: a bfloat16 result may then be one unit of the last place away.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from multigate.ops import depth_pool
from multigate.ops.depth_pool import reference
from multigate.ops.depth_pool.op import fused, fused_backward
from multigate.ops.depth_pool.plan import Plan, plan
from offline import assert_compiles

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"
if INTERPRETED and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

from multigate.ops.depth_pool import triton as kernels  # noqa: E402

SCALE, EPS = 0.7, 1e-6
COUNTS = [1, 2, 5, 13, 25]
PLANS = {
    "held": Plan(section=16, block=2, warps=4, group=5, held=True, programs=2),
    "swept one by one": Plan(section=16, block=4, warps=4, group=1, held=False, programs=3),
    "swept by twos": Plan(section=32, block=1, warps=1, group=2, held=False, programs=1),
    "swept at once": Plan(section=64, block=2, warps=2, group=8, held=False, programs=20),
}


class Problem:
    """Sources, weights and an incoming gradient, and what a backend makes of them."""

    def __init__(self, m, shape, width, dtype=torch.float32, norm=False, size=1.0, sharpness=2.0):
        generator = torch.Generator().manual_seed(1000 * m + width)

        def random(*sizes):
            return torch.randn(*sizes, generator=generator)

        self.sources = [(size * random(*shape, width)).to(DEVICE, dtype) for _ in range(m)]
        self.query = (sharpness * width**-0.5 * random(width)).to(DEVICE)
        self.norm_weight = (1 + 0.3 * random(width)).to(DEVICE) if norm else None
        self.grad = random(*shape, width).to(DEVICE, dtype)

    def solve(self, backend, dtype=None):
        """h, then the gradients of the sources, of the query and of the norm weight."""
        inputs = [*self.sources, self.query, self.norm_weight]
        leaves = [x.to(dtype or x.dtype).clone().requires_grad_() for x in inputs if x is not None]
        sources, (query, *norm) = leaves[: len(self.sources)], leaves[len(self.sources) :]
        norm_weight = norm[0] if norm else None
        if backend == "reference":
            h = reference.depth_pool(sources, query, SCALE, norm_weight, EPS)
        else:
            options = {"scale": SCALE, "norm_weight": norm_weight, "eps": EPS}
            h = depth_pool(sources, query, backend=backend, **options)
        return [h.detach(), *torch.autograd.grad(h, leaves, self.grad.to(h.dtype))]

    def check(self, roundings=8):
        truth = self.solve("reference", torch.float64)
        eager, ours = self.solve("reference"), self.solve("triton")
        for i, (a, e, t) in enumerate(zip(ours, eager, truth, strict=True)):
            assert (a.dtype, a.shape) == (e.dtype, e.shape)
            # Float32 sums in another order differ by a few roundings.
            slack = roundings * 2**-24
            if INTERPRETED and a.dtype == torch.bfloat16:
                slack = 2**-8
            assert distance(a, t) <= 1.1 * distance(e, t) + slack * t.norm(), f"result {i}"

    def run(self, chosen):
        """The kernels themselves, with a plan of our choice."""
        weights = (self.query, self.norm_weight)
        h, saved = kernels.forward(self.sources, *weights, SCALE, EPS, chosen)
        wanted = [True] * len(self.sources)
        grads, dquery, dnorm = kernels.backward(
            self.grad, self.sources, *weights, saved, SCALE, wanted, chosen=chosen
        )
        return [x for x in (h, *grads, dquery, dnorm) if x is not None]


def distance(a, truth):
    return (a.double() - truth).norm()


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", COUNTS)
def test_values_and_every_gradient(m, dtype, norm):
    Problem(m, (3, 5), 37, dtype, norm).check()


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(("m", "width"), [(2, 1), (3, 8), (9, 129), (4, 300), (6, 1000), (13, 520)])
def test_widths(m, width, norm):
    Problem(m, (5,), width, norm=norm).check()


def test_rows_whose_squares_are_infinite():
    """Their norm is 0, and so is their logit."""
    problem = Problem(3, (5,), 40, size=1e25)
    assert not torch.stack(problem.sources).square().sum(-1).isfinite().any()
    h, expected = (problem.solve(backend)[0] for backend in ("triton", "reference"))
    assert distance(h, expected.double()) <= 2**-21 * expected.double().norm()


@pytest.mark.parametrize("chosen", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_every_plan_gives_the_same(chosen, norm):
    problem = Problem(5, (11,), 40, norm=norm)
    truth = problem.solve("reference", torch.float64)
    for a, t in zip(problem.run(chosen), truth, strict=True):
        assert distance(a, t) <= 2**-21 * t.norm()


@pytest.mark.parametrize("size", [1e-4, 1e-2, 1e4])
@pytest.mark.parametrize("m", [3, 10])
def test_magnitudes(m, size):
    Problem(m, (4,), 48, norm=True, size=size).check()
    Problem(m, (4,), 48, size=size).check()


@pytest.mark.parametrize(("sharpness", "roundings"), [(12.0, 64), (40.0, 128)])
@pytest.mark.parametrize("m", [2, 10])
def test_one_source_with_nearly_all_the_weight(m, sharpness, roundings):
    """Logits of up to 30 and up to 100, which float32 rounds to 2^-20 and 2^-18: where two sources
    are nearly equal, their weights carry two such errors, 32 and 128 roundings.
    """
    Problem(m, (64,), 48, sharpness=sharpness).check(roundings)


@pytest.mark.parametrize("sign", [-1, 1])
def test_all_logits_far_from_zero(sign):
    """exp of about -500 or 500 is nowhere taken, not even for the slots that have no source."""
    problem = Problem(9, (7,), 37)
    problem.sources = [1 + 0.1 * source for source in problem.sources]
    problem.query = torch.full_like(problem.query, sign * 20.0)
    problem.check(roundings=4096)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_single_source_is_returned_and_its_query_has_no_gradient(dtype):
    problem = Problem(1, (7,), 37, dtype)
    h, dsource, dquery = problem.solve("triton")
    assert torch.equal(h, problem.sources[0])
    assert torch.equal(dsource, problem.grad)
    assert not dquery.any()
    *_, dquery, _ = Problem(1, (7,), 37, dtype, norm=True).solve("triton")
    assert not dquery.any()


def test_two_equal_sources():
    """Weights of exactly one half: the query has no gradient at all."""
    problem = Problem(2, (7,), 37)
    problem.sources = [problem.sources[0]] * 2
    h, *dsources, dquery = problem.solve("triton")
    assert torch.equal(h, problem.sources[0])
    assert all(torch.equal(d, problem.grad / 2) for d in dsources)
    assert not dquery.any()


@pytest.mark.parametrize("m", [3, 17])
def test_equal_sources(m):
    problem = Problem(m, (7,), 37)
    problem.sources = [problem.sources[0]] * m
    h, *dsources, dquery = problem.solve("triton")
    torch.testing.assert_close(h, problem.sources[0], rtol=1e-6, atol=0)
    for d in dsources:
        torch.testing.assert_close(d, problem.grad / m, rtol=1e-5, atol=1e-6)
    assert dquery.abs().max() < 1e-5


@pytest.mark.parametrize("m", [3, 14])
def test_no_output_is_left_unwritten_and_no_neighbour_is_read(m, monkeypatch):
    problem = Problem(m, (2, 5), 37, norm=True)
    expected = problem.solve("triton")
    empty = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        made = empty(self, *args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    islands = [torch.full((2, 5, 50), float("nan"), device=DEVICE) for _ in problem.sources]
    for island, source in zip(islands, problem.sources, strict=True):
        island[..., 6:43] = source
    problem.sources = [island[..., 6:43] for island in islands]
    h = depth_pool(
        problem.sources,
        problem.query,
        scale=SCALE,
        norm_weight=problem.norm_weight,
        eps=EPS,
        backend="triton",
    )
    assert torch.equal(h, expected[0])
    assert equal(problem.solve("triton"), expected)


@pytest.mark.parametrize("m", [4, 13])
def test_layouts(m):
    """Packed streams, sources of different strides, a transposed source, an expanded gradient."""
    problem = Problem(m, (2, 5), 40)
    expected = problem.solve("triton")
    contiguous = problem.sources
    packed = torch.stack(contiguous, dim=-2)
    odd = contiguous[0].movedim(-1, 0).contiguous().movedim(0, -1)
    layouts = [packed.unbind(-2), [packed[..., 0, :], *contiguous[1:]], [odd, *contiguous[1:]]]
    for sources in layouts:
        leaves = [x.detach().requires_grad_() for x in sources]
        query = torch.stack([problem.query] * 2, dim=-1)[:, 0].requires_grad_()
        h = depth_pool(leaves, query, scale=SCALE, eps=EPS, backend="triton")
        got = torch.autograd.grad(h, [*leaves, query], problem.grad)
        assert equal([h, *got], expected)
    problem.grad = torch.ones((), device=DEVICE).expand(2, 5, 40)
    problem.check()


@pytest.mark.parametrize("m", [3, 14])
def test_only_wanted_gradients_are_made(m):
    problem = Problem(m, (6,), 37, norm=True)
    tensors = ([*problem.sources], problem.query, problem.norm_weight)
    _, saved = fused(*tensors, SCALE, EPS, "triton")
    everything = fused_backward(problem.grad, *tensors, saved, SCALE, [True] * (m + 2), "triton")
    assert len(everything) == m + 2
    for wanted in (
        [i % 2 == 1 for i in range(m + 2)],
        [i % 2 == 0 for i in range(m + 2)],
        [False] * m + [True, False],
        [False] * m + [False, True],
        [True] * m + [False, False],
        [True] * (m - 1) + [False] * 3,
    ):
        some = fused_backward(problem.grad, *tensors, saved, SCALE, wanted, "triton")
        assert equal(some, [g for g, want in zip(everything, wanted, strict=True) if want])
    problem.sources[1].requires_grad_()
    h = depth_pool(problem.sources, problem.query, scale=SCALE, eps=EPS, backend="triton")
    h.sum().backward()
    assert problem.sources[0].grad is None
    assert problem.sources[1].grad is not None


@pytest.mark.parametrize("m", [5, 13])
def test_the_same_bits_every_time_and_for_every_number_of_tokens(m):
    problem = Problem(m, (14,), 37, norm=True)
    first = problem.solve("triton")
    assert all(equal(problem.solve("triton"), first) for _ in range(3))
    problem.sources = [source[:3] for source in problem.sources]
    problem.grad = problem.grad[:3]
    few = problem.solve("triton")
    assert equal(few[: m + 1], [x[:3] for x in first[: m + 1]])


def test_no_tokens():
    for m in (2, 12):
        for shape in [(0,), (2, 0)]:
            results = Problem(m, shape, 8, norm=True).solve("triton")
            assert results[0].shape == (*shape, 8)
            assert not results[-1].any()
            assert not results[-2].any()


@pytest.mark.parametrize("m", [1, 3, 13])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_opcheck(m, norm):
    problem = Problem(m, (2, 3), 20, norm=norm)
    leaves = [source.requires_grad_(i != 1) for i, source in enumerate(problem.sources)]
    weights = (problem.query.requires_grad_(), problem.norm_weight)
    torch.library.opcheck(fused, (leaves, *weights, SCALE, EPS, "triton"))
    with torch.no_grad():
        _, saved = fused(leaves, *weights, SCALE, EPS, "triton")
        wanted = [i != 1 for i in range(m)] + [True, norm]
        torch.library.opcheck(
            fused_backward, (problem.grad, leaves, *weights, saved, SCALE, wanted, "triton")
        )


def test_compiled_whole_and_once_for_all_token_counts():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def pool(sources, query):
        return depth_pool([2 * x for x in sources], query, backend="triton").sin()

    compiled = torch.compile(pool, fullgraph=True, backend=counter)
    for tokens in (4, 6, 9, 130):
        problem = Problem(3, (2, tokens), 20)
        leaves = [x.requires_grad_() for x in (*problem.sources, problem.query)]
        results = []
        for function in (pool, compiled):
            h = function(leaves[:3], leaves[3])
            results.append([h, *torch.autograd.grad(h, leaves, problem.grad)])
        assert equal(*results)
    # The second count makes the size dynamic; after that nothing is compiled again.
    assert counter.frame_count == 2


def test_checkpointing_and_autocast():
    problem = Problem(5, (6,), 40)
    expected = problem.solve("triton")
    leaves = [x.requires_grad_() for x in (*problem.sources, problem.query)]

    def pool(*inputs):
        return depth_pool(inputs[:-1], inputs[-1], scale=SCALE, eps=EPS, backend="triton")

    with torch.autocast(DEVICE, torch.bfloat16):
        h = checkpoint(pool, *leaves, use_reentrant=False)
    assert equal([h, *torch.autograd.grad(h, leaves, problem.grad)], expected)


def test_sources_of_several_dtypes_go_to_the_reference():
    x = torch.randn(3, 8, device=DEVICE)
    sources, query = [x, x.bfloat16()], x[0]
    expected = depth_pool(sources, query, backend="torch")
    assert torch.equal(depth_pool(sources, query, backend="triton"), expected)


def test_a_plan_for_every_size():
    for width in (1, 37, 768, 1000, 1024, 1280, 4096, 7168, 16384):
        for m in (1, 2, 5, 9, 25, 80):
            for itemsize in (2, 4):
                for backward in (False, True):
                    chosen = plan(m, width, itemsize, backward)
                    assert chosen.section & (chosen.section - 1) == 0
                    assert chosen.section < 2 * width
                    assert 1 <= chosen.group <= m
                    assert chosen.held == (chosen.group == m)


def test_needs_no_triton_to_import():
    script = (
        "import sys; sys.modules['triton'] = None; import torch; import multigate as mg; "
        "x = torch.ones(2, 4); assert mg.ops.depth_pool([x, x], x[0]).equal(x)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


COMPILE = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from multigate.ops.depth_pool.plan import plan
from multigate.ops.depth_pool.triton_kernels import backward_kernel, forward_kernel

def build(kernel, count, width, missing=()):
    chosen = plan(count, width, 2, kernel is backward_kernel)
    constants = {
        ("WIDTH",): width,
        ("SECTION",): chosen.section,
        ("BLOCK",): chosen.block,
        ("GROUP",): chosen.group,
        ("HELD",): chosen.held,
        ("ALIGN",): 16,
    }
    kinds = {name: "constexpr" for name, in constants}
    kinds |= dict.fromkeys(("tokens", "count", "row_stride"), "i32")
    kinds |= dict.fromkeys(("scale", "eps"), "fp32")
    kinds |= dict.fromkeys(("h", "grad_h"), "*bf16")
    kinds |= dict.fromkeys(("sources", "grads"), ("*bf16",) * count if chosen.held else "*i64")
    if chosen.held:
        kinds["grads"] = tuple("constexpr" if i in missing else "*bf16" for i in range(count))
        constants |= {("grads", i): None for i in missing}
    names = kernel.arg_names
    signature = {name: kinds.get(name, "*fp32") for name in names}
    values = {(names.index(name), *rest): value for (name, *rest), value in constants.items()}
    source = ASTSource(kernel, signature, values)
    options = {"num_warps": chosen.warps}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

for count, width in ((3, 40), (9, 37)):
    ptx = build(forward_kernel, count, width)
    for approximate in ("rsqrt.approx", "sqrt.approx", "div.full", "rcp.approx"):
        assert approximate not in ptx, approximate
    # exp(x) is 2^(x log2(e)).
    raised = re.findall(r"mul.f32\\s+%r\\d+, (%r\\d+), 0f3FB8AA3B;", ptx)
    assert raised
    for x in raised:
        assert re.search(rf"sub.f32\\s+{x},", ptx), f"exp of something else than a difference: {x}"
for missing in ((), (1,), (0, 2)):
    build(backward_kernel, 3, 40, missing)
build(backward_kernel, 1, 40, (0,))
build(backward_kernel, 9, 40)
print("compiled")
"""


def test_the_kernels_compile_for_a_gpu_without_one(tmp_path):
    """With gradients that nobody wants; and what is raised to a power is logit - top, both rounded:
    a fused multiply-add would take another logit than the one that is kept for the backward pass,
    and an approximate root is off by 2 units, which a logit of 80 takes into its weight 80 times.
    """
    assert_compiles(COMPILE, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [768, 1000, 1024, 1280, 4096])
@pytest.mark.parametrize("m", [1, 2, 5, 9, 25, 73])
def test_model_sizes(m, width, dtype, norm):
    Problem(m, (1025,), width, dtype, norm).check()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [3, 25])
def test_in_a_cuda_graph(m):
    problem = Problem(m, (64,), 768, torch.bfloat16)
    expected = problem.solve("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = problem.solve("triton")
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    assert equal(captured, expected)
