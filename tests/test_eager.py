"""Steps without kernel or compiler: the gradients by hand against autograd's of the references."""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from multigate.ops import depth_pool, gate_pool
from multigate.ops.depth_pool import reference as depth_reference
from multigate.ops.gate_pool import eager, reference

EPS, SCALE = 1e-6, 0.7
KINDS = ("plain", "equal", "shut", "open", "small", "large")
VARIANTS = pytest.mark.parametrize("variant", reference.VARIANTS)
NORMS = pytest.mark.parametrize("norm", [False, True])
HALVES = [torch.bfloat16, torch.float16]


def gate_leaves(batch, n, width, variant, norm, dtype=torch.float64, kind="plain"):
    """y, the streams, w_gate, w_pool, bias and, with `norm`, the gain."""
    generator = torch.Generator().manual_seed(n + width)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    size = {"small": 1e-3, "large": 1e3}.get(kind, 1.0)
    y, streams = size * normal(*batch, width), size * normal(*batch, n, width)
    if kind == "equal":
        streams = streams[..., :1, :].expand(*batch, n, width)
    bias = normal(n + (variant == "competitive"))
    bias[-n:] += {"shut": -12.0, "open": 6.0}.get(kind, 0.0)
    weights = [normal(width), normal(width), bias, *([1 + normal(width) / 4] if norm else [])]
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    moved = [y.to(dtype), streams.to(dtype), *(w.to(kept) for w in weights)]
    return [t.contiguous().requires_grad_() for t in moved]


def depth_leaves(batch, m, width, norm, dtype=torch.float64):
    """The query, with `norm` the gain, and m sources."""
    leaves = gate_leaves(batch, m, width, "independent", norm, dtype)
    _, streams, query, _, _, *gain = (t.detach() for t in leaves)
    sources = [s.clone() for s in streams.unbind(-2)]
    return [t.requires_grad_() for t in (2 * width**-0.5 * query, *gain, *sources)]


def by_reference(variant, y, streams, w_gate, w_pool, bias, gain=None):
    return reference.gate_pool(y, streams, w_gate, w_pool, bias, variant, gain, EPS)


def ours(variant, y, streams, w_gate, w_pool, bias, gain=None):
    return gate_pool(y, streams, w_gate, w_pool, bias, variant, gain, EPS, backend="torch")


def pooled_by_reference(norm, query, *rest):
    sources = rest[norm:]
    return (depth_reference.depth_pool(sources, query, SCALE, rest[0] if norm else None, EPS),)


def pooled(norm, query, *rest):
    options = {"scale": SCALE, "norm_weight": rest[0] if norm else None, "eps": EPS}
    return (depth_pool(rest[norm:], query, backend="torch", **options),)


def outcome(function, leaves, dtype=None, used=slice(None)):
    """Outputs, and of the used ones the gradients of all leaves that want one."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_(t.requires_grad) for t in leaves]
    outputs = function(*leaves)
    generator = torch.Generator().manual_seed(7)
    pairs = [(o, torch.randn(o.shape, generator=generator).to(o.dtype)) for o in outputs]
    used, grads = zip(*(pair for pair in pairs[used] if pair[0].requires_grad), strict=True)
    wanted = [t for t in leaves if t.requires_grad]
    found = torch.autograd.grad(used, wanted, grads, allow_unused=True)
    return [*(o.detach() for o in outputs), *found]


def assert_same(found, expected, tolerance=1e-11):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def error(found, exact):
    return (found.double() - exact).norm().item() / (exact.norm().item() + 1e-300)


def check_rounding(function, plain, leaves, slack):
    """Not further from float64 than autograd's of the reference, but for a few roundings."""
    exact = outcome(plain, leaves, torch.float64)
    found, usual = outcome(function, leaves), outcome(plain, leaves)
    for i, (a, b, e) in enumerate(zip(found, usual, exact, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert error(a, e) <= 1.1 * error(b, e) + slack, f"number {i}"


def hand(outputs):
    """Whether the gradient of outputs is made by hand."""
    return "StepBackward" in outputs[0].grad_fn.name() or "Pool" in outputs[0].grad_fn.name()


@VARIANTS
@NORMS
@pytest.mark.parametrize(("batch", "n", "width"), [((5,), 3, 8), ((2, 3), 1, 7), ((), 4, 16)])
def test_the_gradients_of_a_step(variant, norm, batch, n, width):
    leaves = gate_leaves(batch, n, width, variant, norm)
    assert hand(ours(variant, *leaves))
    expected = outcome(partial(by_reference, variant), leaves)
    assert_same(outcome(partial(ours, variant), leaves), expected)


@NORMS
@pytest.mark.parametrize(("batch", "m", "width"), [((5,), 3, 8), ((2, 3), 1, 7), ((), 9, 16)])
def test_the_gradients_of_a_pool(norm, batch, m, width):
    leaves = depth_leaves(batch, m, width, norm)
    assert hand(pooled(norm, *leaves))
    expected = outcome(partial(pooled_by_reference, norm), leaves)
    assert_same(outcome(partial(pooled, norm), leaves), expected)


@VARIANTS
@pytest.mark.parametrize("used", [slice(0, 1), slice(1, 2)], ids=["h", "streams"])
def test_one_output_alone(variant, used):
    leaves = gate_leaves((5,), 3, 8, variant, True)
    expected = outcome(partial(by_reference, variant), leaves, used=used)
    assert_same(outcome(partial(ours, variant), leaves, used=used), expected)


@pytest.mark.parametrize("wanted", range(6))
def test_one_gradient_alone(wanted):
    leaves = gate_leaves((5,), 3, 8, "competitive", True)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i == wanted)
    expected = outcome(partial(by_reference, "competitive"), leaves)
    assert_same(outcome(partial(ours, "competitive"), leaves), expected)


def test_one_gradient_of_a_pool_alone():
    for wanted in range(4):
        leaves = depth_leaves((5,), 2, 8, True)
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i == wanted)
        expected = outcome(partial(pooled_by_reference, True), leaves)
        assert_same(outcome(partial(pooled, True), leaves), expected)


def test_streams_that_lie_apart_and_gradients_that_are_expanded():
    leaves = gate_leaves((5,), 3, 8, "competitive", False)
    y, streams, *weights = (t.detach() for t in leaves)
    apart = streams.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    found = []
    for function in (ours, by_reference):
        h, new = function("competitive", y, apart, *weights)
        found.append(torch.autograd.grad(h.sum() + new.sum(), apart))
    assert_same(*found)


def test_sources_that_lie_apart_and_gradients_that_are_expanded():
    query, *sources = (t.detach() for t in depth_leaves((5, 3), 4, 8, False))
    sources = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in sources]
    leaves = [t.requires_grad_() for t in (query, *sources)]
    found = [
        torch.autograd.grad(function(False, *leaves)[0].sum(), leaves)
        for function in (pooled, pooled_by_reference)
    ]
    assert_same(*found)


def test_no_tokens_at_all():
    leaves = gate_leaves((0,), 3, 8, "competitive", True)
    expected = outcome(partial(by_reference, "competitive"), leaves)
    assert_same(outcome(partial(ours, "competitive"), leaves), expected)
    leaves = depth_leaves((2, 0), 3, 8, True)
    expected = outcome(partial(pooled_by_reference, True), leaves)
    assert_same(outcome(partial(pooled, True), leaves), expected)


@VARIANTS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_rounding_of_a_step(variant, kind, dtype):
    # Weights of float16 streams a thousand times as large as usual still have room.
    leaves = gate_leaves((37,), 4, 384, variant, True, dtype, kind)
    functions = partial(ours, variant), partial(by_reference, variant)
    # What is left of sums that cancel, here of the bias, is as exact as its largest part.
    check_rounding(*functions, leaves, 2e-6 if dtype in HALVES or kind == "shut" else 6e-7)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_rounding_of_a_pool(dtype):
    leaves = depth_leaves((37,), 9, 384, True, dtype)
    check_rounding(partial(pooled, True), partial(pooled_by_reference, True), leaves, 6e-7)


def test_sums_over_many_rows_do_not_drift():
    leaves = gate_leaves((16384,), 4, 32, "competitive", False, torch.float32)
    functions = partial(ours, "competitive"), partial(by_reference, "competitive")
    check_rounding(*functions, leaves, 6e-7)


def test_autocast_changes_nothing():
    leaves = gate_leaves((5,), 3, 8, "competitive", True, torch.float32)
    expected = outcome(partial(ours, "competitive"), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(partial(ours, "competitive"), leaves)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@VARIANTS
def test_gradients_of_gradients_of_a_step(variant):
    leaves = gate_leaves((2,), 2, 3, variant, True)
    assert torch.autograd.gradgradcheck(partial(ours, variant), leaves)


@pytest.mark.parametrize("used", [0, 1])
def test_gradients_of_gradients_of_one_output(used):
    leaves = gate_leaves((2,), 2, 3, "competitive", False)
    assert torch.autograd.gradgradcheck(lambda *a: ours("competitive", *a)[used], leaves)


def test_gradients_of_gradients_of_a_pool():
    leaves = depth_leaves((2,), 2, 3, True)
    assert torch.autograd.gradgradcheck(partial(pooled, True), leaves)


def test_transformations_of_functions():
    y, streams, *weights = (t.detach() for t in gate_leaves((5,), 3, 8, "competitive", True))
    whole = ours("competitive", y, streams, *weights)
    one_by_one = torch.func.vmap(lambda y, s: ours("competitive", y, s, *weights))(y, streams)
    assert_same(one_by_one, whole)
    tangent = torch.randn_like(y)
    _, expected = torch.func.jvp(
        lambda y: by_reference("competitive", y, streams, *weights), (y,), (tangent,)
    )
    with forward_ad.dual_level():
        outputs = ours("competitive", forward_ad.make_dual(y, tangent), streams, *weights)
        assert_same([forward_ad.unpack_dual(o).tangent for o in outputs], expected)


def test_the_streams_are_all_that_is_kept_of_their_size():
    y, streams, *rest = gate_leaves((64,), 4, 32, "competitive", True, torch.bfloat16)
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        h, new = ours("competitive", y, streams, *rest)
    own = {t.untyped_storage().data_ptr() for t in (y, streams, new, *rest)}
    # h in float32 before its norm, and what is measured of streams: z, root and weight, twice.
    assert sum(size for place, size in kept.items() if place not in own) == 64 * 4 * (
        32 + 6 * 4 + 1
    )


def test_what_is_measured_is_what_the_reference_says():
    y, streams, w_gate, w_pool, bias = gate_leaves((5,), 3, 8, "competitive", False)
    _, _, measured = eager.step((y, streams, w_gate, w_pool, bias, None), "competitive", EPS)
    beta = reference.gate(streams, w_gate, bias, "competitive", EPS)
    alpha = reference.pool_weights(reference.lerp(y, streams, beta), w_pool, EPS)
    assert_same([measured.beta, measured.alpha], [beta.detach(), alpha.detach()])
