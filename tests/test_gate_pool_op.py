"""The fused gate_pool as an operator: choice of backend, autograd, torch.compile, cuts of work."""

import logging

import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint

from multigate.ops import backend, gate_pool
from multigate.ops.cuda import SHARED, plan
from multigate.ops.gate_pool import cuda
from multigate.ops.gate_pool.op import (
    fused,
    fused_backward,
    fused_invert_backward,
    fused_replay,
)
from multigate.ops.gate_pool.plan import problem as problem_of
from multigate.ops.gate_pool.saved import saved_numbers

N, WIDTH = 3, 24


def inputs(*batch, n=N, width=WIDTH, competitive=True, dtype=torch.float32, device="cpu"):
    torch.manual_seed(len(batch) + n)
    y, streams = torch.randn(*batch, width), torch.randn(*batch, n, width)
    weights = [torch.randn(width), torch.randn(width), torch.randn(n + competitive)]
    gain = 1 + torch.randn(width) / 4
    moved = [t.to(device) for t in (y.to(dtype), streams.to(dtype), *weights, gain)]
    return [t.requires_grad_() for t in moved]


def gradients(outputs, leaves, seed=0):
    torch.manual_seed(seed)
    return torch.autograd.grad(outputs, leaves, [torch.randn_like(o) for o in outputs])


@pytest.fixture
def said(caplog):
    """What is said about the choice of a backend."""
    backend.say.cache_clear()
    backend.why_not.cache_clear()
    caplog.set_level(logging.INFO, logger="multigate")
    return caplog


@pytest.mark.parametrize("batch", [(5,), (2, 3), ()])
@pytest.mark.parametrize("unpacked", [False, True])
def test_triton_gives_what_torch_gives(batch, unpacked):
    leaves = inputs(*batch)
    y, streams, *weights, gain = leaves
    results = []
    for name in ("torch", "triton"):
        given = streams.unbind(-2) if unpacked else streams
        outputs = gate_pool(y, given, *weights, norm_weight=gain, backend=name)
        results.append((*outputs, *gradients(outputs, leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", ["h", "streams"])
def test_an_output_that_is_not_used(which):
    leaves = inputs(5)
    y, streams, *weights, gain = leaves
    results = []
    for name in ("torch", "triton"):
        h, new = gate_pool(y, streams, *weights, norm_weight=gain, backend=name)
        used = [h] if which == "h" else [new]
        wanted = leaves if which == "h" else [y, streams, weights[0], weights[2]]
        results.append(gradients(used, wanted))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("unpacked", [False, True])
def test_opcheck(norm, unpacked):
    y, streams, w_gate, w_pool, bias, gain = inputs(2, 2)
    given = [s.detach().clone().requires_grad_() for s in streams.unbind(-2)]
    arguments = [y, given if unpacked else [streams], w_gate, w_pool, bias, gain if norm else None]
    options = (True, 1e-6, "triton", saved_numbers(N))
    torch.library.opcheck(fused, (*arguments, *options))
    plain = [
        None if a is None else [s.detach() for s in a] if isinstance(a, list) else a.detach()
        for a in arguments
    ]
    h, new, saved = fused(*plain, *options)
    torch.library.opcheck(fused_backward, (h, new, *plain, saved, True, 1e-6, "triton"))
    if not unpacked:
        y, (streams,), *rest = plain
        steps = [[t, t] for t in (y, *rest, saved)]
        torch.library.opcheck(fused_replay, (streams, *steps, True, 1e-6, "triton"))
        index = torch.tensor([1, 4])
        kept = streams.reshape(-1, streams.shape[-1])[index]
        given = (h, new, y, new, *rest, saved, kept, index, True, 1e-6, "triton")
        torch.library.opcheck(fused_invert_backward, given)


def test_compile_without_a_graph_break_or_a_recompilation():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(
        lambda *a: gate_pool(*a[:-1], norm_weight=a[-1], backend="triton"),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    frames = []
    for tokens in (7, 11, 19):
        leaves = inputs(tokens)
        y, streams, *weights, gain = leaves
        outputs = step(*leaves)
        expected = gate_pool(y, streams, *weights, norm_weight=gain, backend="torch")
        both = [(*o, *gradients(o, leaves)) for o in (outputs, expected)]
        for a, b in zip(*both, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1, "compiled again for another number of tokens"


def test_under_autocast_and_activation_checkpointing():
    leaves = inputs(5)
    y, streams, *weights, gain = leaves

    def step(y, streams):
        return gate_pool(y, streams, *weights, norm_weight=gain, backend="triton")

    plain = step(y, streams)
    with torch.autocast("cpu", torch.bfloat16):
        again = torch.utils.checkpoint.checkpoint(step, y, streams, use_reentrant=False)
    results = [(*o, *gradients(o, leaves)) for o in (plain, again)]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_gradient_of_a_gradient_is_refused():
    leaves = inputs(4)
    y, streams, *weights, _ = leaves
    h, _ = gate_pool(y, streams, *weights, backend="triton")
    (dy,) = torch.autograd.grad(h.square().sum(), [y], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dy.sum().backward()


def test_the_environment_stands_in_for_the_argument(monkeypatch, said):
    y, streams, *weights, _ = (t.detach() for t in inputs(4))
    monkeypatch.setenv(backend.VARIABLE, "triton")
    gate_pool(y, streams, *weights)
    gate_pool(y, streams, *weights)
    assert said.messages == ["gate_pool by triton: fused kernels can run here"]
    gate_pool(y, streams, *weights, backend="torch")
    assert len(said.messages) == 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cpu_and_shapes_alone_take_torch_without_a_word(monkeypatch, said, device):
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    y, streams, *weights, _ = (t.detach().to(device) for t in inputs(4))
    gate_pool(y, streams, *weights)
    assert said.messages == []


def test_what_cannot_run_gives_way_and_says_so_once(said):
    y, streams, *weights, _ = (t.detach().double() for t in inputs(4))
    for _ in range(2):
        h, _ = gate_pool(y, streams, *weights, backend="triton")
    assert h.dtype == torch.float64
    assert said.messages == [
        "gate_pool by torch: triton has no kernel for torch.float64; "
        "cuda has no kernel for torch.float64"
    ]
    assert said.records[0].levelno == logging.WARNING


def test_cuda_on_a_cpu_gives_way_to_triton(said):
    y, streams, *weights, _ = (t.detach() for t in inputs(4))
    gate_pool(y, streams, *weights, backend="cuda")
    assert said.messages == ["gate_pool by triton: cuda does not run on cpu"]
    assert said.records[0].levelno == logging.WARNING


def test_triton_that_is_not_installed(monkeypatch, said):
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    y, streams, *weights, _ = (t.detach() for t in inputs(4))
    gate_pool(y, streams, *weights, backend="triton")
    assert "pip install 'multigate[kernels]'" in said.messages[0]
    backend.why_not.cache_clear()


def test_more_streams_than_the_kernels_take(said):
    y, streams, *weights, _ = (t.detach() for t in inputs(4, n=17))
    h, _ = gate_pool(y, streams, *weights, backend="triton")
    expected, _ = gate_pool(y, streams, *weights, backend="torch")
    assert torch.equal(h, expected)
    assert "gate_pool by torch: triton has no kernel for more than 16 streams" in said.messages[0]


def test_what_cuda_does_not_take_is_done_by_triton_and_said(said):
    y, streams, *weights, _ = (t.detach() for t in inputs(4, width=23))
    options = (None, True, 1e-6, "cuda", saved_numbers(N))
    h, *_ = fused(y, [streams], *weights, *options)
    expected, _ = gate_pool(y, streams, *weights, backend="torch")
    torch.testing.assert_close(h, expected, rtol=1e-5, atol=1e-5)
    fused(y[..., :21], [streams[..., :21]], *(w[..., :21] for w in weights), *options)
    assert said.messages == [f"gate_pool by triton: {cuda.TAKES}"]


def test_what_cuda_does_not_take_without_triton(monkeypatch):
    backend.say.cache_clear()
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    y, streams, *weights, _ = (t.detach() for t in inputs(4, width=23))
    with pytest.raises(
        RuntimeError, match="this call is another, and Triton, which takes it, is not"
    ):
        fused(y, [streams], *weights, None, True, 1e-6, "cuda", saved_numbers(N))


def test_an_unknown_backend():
    y, streams, *weights, _ = inputs(4)
    with pytest.raises(ValueError, match="unknown backend 'tritn': did you mean 'triton'"):
        gate_pool(y, streams, *weights, backend="tritn")


def test_streams_that_do_not_belong_together():
    y, streams, *weights, _ = inputs(4)
    first, *rest = streams.unbind(-2)
    with pytest.raises(ValueError, match="the list is empty"):
        gate_pool(y, [], *weights)
    with pytest.raises(ValueError, match=r"stream 2 of shape \(4, 24\), got \(4, 23\)"):
        gate_pool(y, [first, rest[0], rest[1][:, :-1]], *weights)
    with pytest.raises(ValueError, match="streams of one dtype"):
        gate_pool(y, [first, *(s.half() for s in rest)], *weights)


@pytest.mark.parametrize("shared", [SHARED, 99 * 1024])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("n", range(1, 17))
def test_the_cuts_of_the_cuda_kernels_fit(n, itemsize, backward, shared):
    """Every cut holds a whole token, in the shared memory and the named barriers there are."""
    for width in (8, 128, 384, 768, 1000, 1024, 1280, 1536, 2048, 4096, 7168, 8192, 16384):
        present = torch.empty(0)
        problem = problem_of(n, width, itemsize, *([present] * 2 if backward else []))
        cut = plan(problem, shared)
        token = problem.rows * width * itemsize
        if cut is None:
            assert max(token, 12 * width) > shared * 5 // 8
            continue
        dynamic = problem.dynamic_bytes(cut)
        assert cut.slots * cut.warps * 512 >= width * itemsize
        assert dynamic >= cut.teams * max(token, 12 * width + 4 * n + 4 if backward else 0)
        assert dynamic + problem.static_bytes(cut.warps, cut.teams) <= shared
        assert cut.warps == 1 or cut.teams <= 15
        assert cut.warps * cut.teams <= (16 if backward else 24 if n > 2 else 32)


def test_what_the_cuda_kernels_leave_to_triton():
    y, streams = torch.randn(4, 64), torch.randn(4, 3, 64)
    assert cuda.takes(y, streams.unbind(1))
    assert not cuda.takes(y.bfloat16(), streams.unbind(1))
    assert not cuda.takes(y[:, :63].contiguous(), streams[..., :63].contiguous().unbind(1))
    assert not cuda.takes(y[:, :0], streams[..., :0].unbind(1))
    assert not cuda.takes(torch.randn(1, 65536), torch.randn(1, 16, 65536).unbind(1))
