"""The fused kernels on a GPU: the full grid of sizes, determinism, graphs, whole models."""

import pytest
import torch

import multigate as mg
from multigate.ops import depth_pool, gate_pool
from multigate.ops.depth_pool import cuda as depth_pool_cuda
from multigate.ops.depth_pool import reference as depth_reference
from multigate.ops.gate_pool import cuda, reference

pytestmark = pytest.mark.gpu
NAMES = ("h", "streams", "dy", "dstreams", "dw_gate", "dw_pool", "dbias", "dnorm")
KINDS = ("plain", "equal", "shut", "open", "small", "large")


def problem(tokens, n, width, competitive, dtype, kind="plain", seed=0):
    """Leaves (y, streams, w_gate, w_pool, bias, norm_weight) and gradients of h and the streams."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    scale = {"small": 1e-3, "large": 1e3}.get(kind, 1.0)
    y, streams = scale * normal(tokens, width), scale * normal(tokens, n, width)
    if kind == "equal":
        streams = streams[:, :1].expand(tokens, n, width)
    w_gate, w_pool, bias, gain = (
        normal(width),
        normal(width),
        normal(n + competitive),
        1 + normal(width) / 4,
    )
    shift = {"shut": -12.0, "open": 12.0}.get(kind, 0.0)
    bias[competitive:] += shift
    leaves = [y.to(dtype), streams.to(dtype).contiguous(), w_gate, w_pool, bias, gain]
    grads = [normal(tokens, width).to(dtype), normal(tokens, n, width).to(dtype)]
    return leaves, grads


def outcome(leaves, grads, competitive, norm, backend, dtype=None):
    """Outputs and every gradient, computed in `dtype` if it is given."""
    leaves = [leaf.to(dtype or leaf.dtype).requires_grad_() for leaf in leaves]
    *inputs, gain = leaves
    variant = "competitive" if competitive else "independent"
    gain = gain if norm else None
    if backend == "reference":
        outputs = reference.gate_pool(*inputs, variant, gain, 1e-6)
    else:
        outputs = gate_pool(*inputs, variant, gain, backend=backend)
    leaves = leaves if norm else inputs
    found = torch.autograd.grad(
        outputs, leaves, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)]
    )
    return [t.detach() for t in (*outputs, *found)]


def error(found, exact):
    return (found.double() - exact).norm().item() / (exact.norm().item() + 1e-300)


def check(tokens, n, width, competitive, norm, dtype, backend, kind="plain"):
    leaves, grads = problem(tokens, n, width, competitive, dtype, kind)
    exact = outcome(leaves, grads, competitive, norm, "reference", torch.float64)
    eager = outcome(leaves, grads, competitive, norm, "reference")
    fused = outcome(leaves, grads, competitive, norm, backend)
    for name, e, a, b in zip(NAMES, exact, eager, fused, strict=False):
        assert b.dtype == a.dtype
        if e.abs().max() == 0:
            assert b.abs().max() == 0, f"{name} must be exactly zero"
            continue
        allowed = 1.1 * error(a, e) + slack(width, dtype)
        assert error(b, e) <= allowed, f"{name}: {error(b, e):.2e}, eager {error(a, e):.2e}"


def slack(width, dtype):
    """What a few roundings of float32 more or less can do: nothing that 16 bits would notice.

    With one channel rms(s) is a sign, and the gradients are what is left of sums that cancel.
    """
    return 1e-3 if width == 1 else 6e-7 if dtype == torch.float32 else 2e-6


# Triton takes minutes to compile its backward pass for 16 streams.
COUNTS = [("cuda", n) for n in (1, 2, 3, 4, 5, 8, 12, 16)] + [("triton", n) for n in (1, 3, 4, 8)]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("competitive", [True, False])
@pytest.mark.parametrize(("backend", "n"), COUNTS)
def test_every_number_of_streams(n, competitive, norm, backend):
    check(77, n, 768, competitive, norm, torch.bfloat16, backend)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "width", [1, 7, 8, 40, 260, 384, 1000, 1001, 1024, 1280, 1536, 2048, 4096, 5120, 7168]
)
def test_every_width(width, dtype, backend):
    check(45, 4, width, True, True, dtype, backend)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("tokens", [1, 2, 31, 131, 133, 1055, 4099])
def test_every_number_of_tokens(tokens, backend):
    check(tokens, 4, 768, True, True, torch.bfloat16, backend)
    check(tokens, 8, 1280, False, True, torch.float32, backend)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("competitive", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data(kind, competitive, dtype, backend):
    check(130, 4, 768, competitive, True, dtype, backend, kind)


def test_the_grid_that_is_measured():
    for n in (2, 4, 8):
        for width in (768, 1024, 1280, 2048, 4096):
            for backend in ("cuda", "triton"):
                check(2000, n, width, True, True, torch.bfloat16, backend)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("width", [768, 4096])
def test_ten_runs_give_the_same_bits(width, backend):
    leaves, grads = problem(3001, 4, width, True, torch.bfloat16)
    first = outcome(leaves, grads, True, True, backend)
    for _ in range(9):
        again = outcome(leaves, grads, True, True, backend)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_token_does_not_depend_on_the_others(backend):
    """Outputs and the gradients of y and the streams are the same in any company."""
    leaves, grads = problem(1500, 4, 768, True, torch.bfloat16)
    whole = outcome(leaves, grads, True, True, backend)
    part = [leaf[400:700].contiguous() if i < 2 else leaf for i, leaf in enumerate(leaves)]
    alone = outcome(part, [g[400:700].contiguous() for g in grads], True, True, backend)
    for a, b in zip(whole[:4], alone[:4], strict=True):
        assert torch.equal(a[400:700], b)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_outputs_hold_nothing_of_what_was_there(backend, monkeypatch):
    """Every number of every result is written: buffers that begin as NaN leave none."""

    def poisoned(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    for n, width in ((4, 768), (3, 1000), (8, 4096)):
        leaves, grads = problem(133, n, width, True, torch.bfloat16)
        for result in outcome(leaves, grads, True, True, backend):
            assert result.isfinite().all()


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_offsets_beyond_two_to_the_31(backend):
    """The last token of streams with more than 2^31 numbers is that token alone."""
    n, width = 8, 4096
    tokens = 2**31 // (n * width) + 3
    leaves, _ = problem(5, n, width, True, torch.bfloat16)
    y = torch.zeros(tokens, width, dtype=torch.bfloat16, device="cuda")
    streams = torch.zeros(tokens, n, width, dtype=torch.bfloat16, device="cuda")
    y[-5:], streams[-5:] = leaves[0], leaves[1]
    made = []
    for given in ((y, streams), leaves[:2]):
        ends = [t.detach().requires_grad_() for t in given]
        h, new = gate_pool(*ends, *leaves[2:5], norm_weight=leaves[5], backend=backend)
        (h[-5:].float().sum() + new[-5:].float().square().sum()).backward()
        made.append([t.detach()[-5:] for t in (h, new, *(end.grad for end in ends))])
    for a, b in zip(*made, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_cuda_graph_replays_with_new_numbers(backend):
    leaves, _ = problem(64, 4, 768, True, torch.bfloat16)
    other, _ = problem(64, 4, 768, True, torch.bfloat16, seed=1)
    y, streams, *weights, gain = leaves
    gate_pool(y, streams, *weights, norm_weight=gain, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h, new = gate_pool(y, streams, *weights, norm_weight=gain, backend=backend)
    y.copy_(other[0])
    streams.copy_(other[1])
    graph.replay()
    expected = gate_pool(y, streams, *weights, norm_weight=gain, backend=backend)
    assert torch.equal(h, expected[0])
    assert torch.equal(new, expected[1])


def test_separate_streams_are_read_where_they_are():
    leaves, grads = problem(200, 4, 768, True, torch.bfloat16)
    y, streams, *weights, gain = leaves
    one = gate_pool(y, streams, *weights, norm_weight=gain, backend="cuda")
    apart = [s.contiguous() for s in streams.unbind(1)]
    other = gate_pool(y, apart, *weights, norm_weight=gain, backend="cuda")
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_cuda_does_not_take_is_done_by_triton():
    leaves, grads = problem(20, 4, 100, True, torch.bfloat16)
    assert not cuda.takes(leaves[0], leaves[1].unbind(1))
    check(20, 4, 100, True, True, torch.bfloat16, "cuda")
    mixed = [leaves[0].float(), *leaves[1:]]
    h, _ = gate_pool(*mixed[:5], norm_weight=mixed[5], backend="cuda")
    expected, _ = gate_pool(*mixed[:5], norm_weight=mixed[5], backend="torch")
    torch.testing.assert_close(h, expected)


@pytest.mark.parametrize("name", ["mgr-competitive", "mgr-independent", "attnres-full"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_gives_the_loss_and_gradients_of_the_reference(name, compiled, monkeypatch):
    """With autocast, activation checkpointing, and torch.compile without a graph break."""
    results = []
    for backend in ("torch", "auto"):
        monkeypatch.setenv("MULTIGATE_BACKEND", backend)
        torch._dynamo.reset()
        torch.manual_seed(0)
        config = mg.GPTConfig(512, blocks=3, width=256, heads=2, context=64, residual=name)
        model = mg.GPT(config).cuda()
        for residual in model.stack.residual.parameters():
            torch.nn.init.normal_(residual, std=0.5)
        model.stack.checkpointing = True
        call = torch.compile(model, fullgraph=True) if compiled else model
        tokens = torch.randint(512, (4, 65), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        results.append((loss, torch.cat([p.grad.flatten() for p in model.parameters()])))
    (loss, grad), (fused_loss, fused_grad) = results
    torch.testing.assert_close(fused_loss, loss, rtol=2e-3, atol=2e-3)
    cosine = torch.nn.functional.cosine_similarity(fused_grad, grad, dim=0)
    assert cosine > 0.999


POOLS = [("triton", 5, 768), ("triton", 9, 1024), ("triton", 25, 768), ("triton", 73, 1280)]
POOLS += [
    ("cuda", 2, 768),
    ("cuda", 4, 1280),
    ("cuda", 9, 1024),
    ("cuda", 16, 384),
    ("cuda", 5, 4096),
    ("cuda", 17, 4096),
    ("cuda", 25, 384),
    ("cuda", 49, 1024),
    ("cuda", 73, 1280),
    ("cuda", 128, 256),
]


def check_pool(kernel, count, width, dtype, norm, scale):
    torch.manual_seed(count)
    sources = [torch.randn(1001, width, device="cuda").to(dtype) for _ in range(count)]
    assert kernel == "triton" or depth_pool_cuda.takes(sources)
    query, gain = torch.randn(width, device="cuda"), torch.rand(width, device="cuda") + 0.5
    grad = torch.randn(1001, width, device="cuda").to(dtype)
    weights = (query, gain) if norm else (query,)
    results = []
    for backend, inside in (("reference", torch.float64), ("reference", None), (kernel, None)):
        leaves = [t.to(inside or t.dtype).requires_grad_() for t in (*sources, *weights)]
        rows, (query, *gains) = leaves[:count], leaves[count:]
        given = gains[0] if norm else None
        if backend == "reference":
            h = depth_reference.depth_pool(rows, query, scale, given, 1e-6)
        else:
            h = depth_pool(rows, query, scale=scale, norm_weight=given, backend=backend)
        found = torch.autograd.grad(h, leaves, grad.to(h.dtype))
        stacked = torch.stack([g.double() for g in found[:count]])
        results.append([h.detach().double(), stacked, *(g.double() for g in found[count:])])
    exact, eager, fused = results
    for e, a, b in zip(exact, eager, fused, strict=True):
        assert error(b, e) <= 1.1 * error(a, e) + 2e-6


@pytest.mark.parametrize(("kernel", "count", "width"), POOLS)
def test_depth_pool_at_the_sizes_of_the_paper(kernel, count, width):
    check_pool(kernel, count, width, torch.bfloat16, norm=True, scale=0.05)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("count", "width", "dtype", "scale"),
    [
        (3, 96, torch.float32, 1.0),
        (16, 264, torch.float16, 0.3),
        (25, 768, torch.bfloat16, 1 / 28),
        (20, 200, torch.float32, 1.0),
        (49, 264, torch.float16, 0.3),
    ],
    ids=str,
)
def test_depth_pool_by_cuda_in_every_dtype(count, width, dtype, scale, norm):
    check_pool("cuda", count, width, dtype, norm, scale)


@pytest.mark.parametrize("count", [9, 25])
def test_depth_pool_has_the_same_bits_in_every_run(count):
    sources = [torch.randn(3000, 768, device="cuda").bfloat16() for _ in range(count)]
    query, gain = torch.randn(768, device="cuda"), torch.rand(768, device="cuda")
    leaves = [t.requires_grad_() for t in (*sources, query, gain)]
    first = None
    for _ in range(10):
        h = depth_pool(sources, query, scale=0.1, norm_weight=gain, backend="cuda")
        found = [h.detach(), *torch.autograd.grad(h.float().square().sum(), leaves)]
        first = first or found
        assert all(map(torch.equal, first, found))


def test_the_statistics_that_are_saved_are_those_of_the_reference():
    leaves, _ = problem(50, 4, 768, True, torch.float32)
    y, streams, w_gate, w_pool, bias, gain = leaves
    *_, saved = cuda.forward(y, streams.unbind(1), w_gate, w_pool, bias, gain, True, 1e-6)
    beta = reference.gate(streams, w_gate, bias, "competitive", 1e-6)
    new = reference.lerp(y, streams, beta)
    h, _ = reference.pool(new, w_pool, None, 1e-6)
    expected = torch.cat(
        [
            streams.square().sum(-1),
            streams @ w_gate,
            streams @ w_pool,
            (streams * y.unsqueeze(1)).sum(-1),
            y.square().sum(-1, keepdim=True),
            (y @ w_pool).unsqueeze(1),
            (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
            1 - beta.sum(-1, keepdim=True),
            beta,
            reference.pool_weights(new, w_pool, 1e-6),
        ],
        dim=1,
    )
    torch.testing.assert_close(saved, expected, rtol=1e-4, atol=1e-3)
