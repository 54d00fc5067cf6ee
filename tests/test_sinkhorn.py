"""Sinkhorn's iteration by one kernel, against the reference in float64.

Without a GPU the kernel runs in Triton's interpreter.
"""

import os

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import multigate as mg
from multigate.ops.sinkhorn import reference, sinkhorn
from multigate.ops.sinkhorn.op import fused, fused_backward
from offline import assert_compiles

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)


def problem(*shape, spread=1.0):
    generator = torch.Generator().manual_seed(sum(shape))
    given = (
        spread * torch.randn(shape, generator=generator),
        torch.randn(shape, generator=generator),
    )
    return [t.to(DEVICE) for t in given]


def results(function, logits, weight, steps):
    leaf = logits.clone().requires_grad_()
    out = function(leaf, steps, 1e-6)
    (out * weight).sum().backward()
    return out.detach(), leaf.grad


@pytest.mark.parametrize("spread", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize(("tokens", "n"), [(5, 1), (1100, 2), (600, 3), (129, 4), (7, 5), (3, 16)])
def test_values_and_gradients(tokens, n, steps, spread):
    """Blocks of matrices that are not full; sizes between powers of two."""
    logits, weight = problem(tokens, n, n, spread=spread)
    found = results(fused, logits, weight, steps)
    plain = results(reference.sinkhorn, logits, weight, steps)
    exact = results(reference.sinkhorn, logits.double(), weight.double(), steps)
    for a, eager, b in zip(found, plain, exact, strict=True):
        error, usual = ((x.double() - b).norm() for x in (a, eager))
        assert error <= 1.5 * usual + 1e-6 * b.norm() + 1e-7 * tokens**0.5


def test_any_shape_and_layout():
    logits, weight = problem(2, 3, 4, 4)
    turned = logits.transpose(-1, -2)
    found = results(fused, turned, weight, 4)
    for a, b in zip(found, results(reference.sinkhorn, turned, weight, 4), strict=True):
        torch.testing.assert_close(a, b)
    empty = torch.zeros(0, 4, 4, device=DEVICE, requires_grad=True)
    fused(empty, 3, 1e-6).sum().backward()
    assert empty.grad.shape == (0, 4, 4)


def test_extreme_logits():
    """One entry takes a row; the sums of columns that nobody takes are eps alone."""
    logits = torch.zeros(3, 4, 4, device=DEVICE)
    logits[0, :, 1] = 200.0
    logits[1] = -200.0 * (1 - torch.eye(4))
    logits[2] = 3e4
    weight = problem(3, 4, 4)[1]
    found, gradient = results(fused, logits, weight, 20)
    expected, wanted = results(reference.sinkhorn, logits, weight, 20)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-6)


def test_opcheck():
    logits, weight = problem(2, 5, 3, 3)
    torch.library.opcheck(fused, (logits.requires_grad_(), 3, 1e-6))
    torch.library.opcheck(fused_backward, (weight, logits.detach(), 3, 1e-6))


def test_the_backend_is_chosen(monkeypatch):
    logits, _ = problem(5, 4, 4)
    expected = reference.sinkhorn(logits, 20, 1e-6)
    torch.testing.assert_close(sinkhorn(logits, backend="triton"), expected)
    monkeypatch.setattr("multigate.ops.sinkhorn.fused", lambda *_: pytest.fail("not asked for"))
    assert torch.equal(sinkhorn(logits, backend="torch"), expected)
    assert sinkhorn(logits.double(), backend="triton").dtype == torch.float64


def test_mhc_with_the_kernel(monkeypatch):
    """The whole residual, as with the reference; compiled into one graph, once for all tokens."""
    torch.manual_seed(0)
    sublayers = [torch.nn.Linear(8, 8) for _ in range(3)]
    stack = mg.Stack(sublayers, "mhc", 8, 4).to(DEVICE)
    with torch.no_grad():
        for p in stack.residual.parameters():
            p += 0.3 * torch.randn_like(p)
    x = torch.randn(2, 9, 8, device=DEVICE)

    def gradients(call, x=x):
        stack.zero_grad()
        call(x).square().sum().backward()
        return [p.grad for p in stack.parameters()]

    monkeypatch.setenv("MULTIGATE_BACKEND", "torch")
    expected = gradients(stack)
    monkeypatch.setenv("MULTIGATE_BACKEND", "triton")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(stack, backend=counter, fullgraph=True, dynamic=True)
    for call in (stack, compiled):
        for a, b in zip(gradients(call), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    frames = counter.frame_count
    gradients(compiled, torch.randn(3, 4, 8, device=DEVICE))
    assert counter.frame_count == frames


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from multigate.ops.sinkhorn import triton as kernels

whole = {"tokens": "i32", "steps": "i32", "eps": "fp32"}
for n in (1, 3, 4):
    _, sizes = kernels._cut(kernels.torch.empty(5, n, n))
    for kernel in (kernels.forward_kernel, kernels.backward_kernel):
        names = kernel.arg_names
        signature = {name: whole.get(name, "*fp32") for name in names} | dict.fromkeys(
            sizes, "constexpr"
        )
        values = {(names.index(name),): value for name, value in sizes.items()}
        compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32))
print("compiled")
"""


def test_the_kernels_compile_for_a_gpu_without_one(tmp_path):
    assert_compiles(COMPILE, tmp_path)
