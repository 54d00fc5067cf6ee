"""What every registered residual must satisfy; a new one is tested by being registered."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import multigate as mg
from cases import DEPTH, DIM, all_cases, random_inputs, run
from multigate.norm import RMSNorm
from multigate.residuals import flatten_state
from references import reference_of

CASES = all_cases()
everywhere = pytest.mark.parametrize("case", CASES, ids=str)


def assert_close(actual, expected, tolerance):
    """Relative error in norm, of tensors that are not all zero."""
    expected = expected.to(actual.device)
    assert expected.norm() > 0
    error = ((actual - expected).norm() / expected.norm()).item()
    assert error <= tolerance, f"relative error {error:.3g} > {tolerance:.3g}"


def options_of(case, residual):
    return {"eps": residual.eps, "streams": residual.streams, **case.options}


@everywhere
@pytest.mark.parametrize(
    "skipped", [(), (4,), (3, 4), (2,), (5,), (5, 6)], ids=lambda s: f"skip={s}"
)
def test_values_are_those_of_the_equations(case, skipped):
    residual = case.build()
    skipped = [i for i in skipped if residual.can_skip(i)]
    x, ys = random_inputs(5)
    ys = [None if i in skipped else y for i, y in enumerate(ys)]
    hs, _ = run(residual, x, ys)
    parameters = {k: v.detach().numpy() for k, v in residual.named_parameters()}
    reference = reference_of(case.name)
    for token in range(5):
        expected = reference(
            parameters,
            options_of(case, residual),
            x[token].numpy(),
            [None if y is None else y[token].numpy() for y in ys],
        )
        assert len(expected) == len(hs) == DEPTH + 1
        for h, e in zip(hs, expected, strict=True):
            np.testing.assert_allclose(h[token].detach().numpy(), e, rtol=1e-9, atol=1e-11)


@everywhere
def test_gradients_of_inputs_and_parameters(case):
    """In a random direction; an error in any element shows in it."""
    check_gradients(case, fast_mode=True)


@pytest.mark.slow
@everywhere
def test_every_element_of_the_gradients(case):
    check_gradients(case, fast_mode=False)


def check_gradients(case, fast_mode):
    residual = case.build(dim=4)
    x, ys = random_inputs(2, dim=4, requires_grad=True)
    names = [name for name, _ in residual.named_parameters()]
    parameters = [p.detach().clone().requires_grad_() for _, p in residual.named_parameters()]

    def outputs(*tensors):
        values = dict(zip(names, tensors[: len(names)], strict=True))
        x, *ys = tensors[len(names) :]
        return tuple(torch.func.functional_call(Runner(residual), prefixed(values), (x, ys)))

    inputs = (*parameters, x, *ys)
    tolerances = {"eps": 1e-6, "atol": 1e-6, "rtol": 1e-4}
    assert torch.autograd.gradcheck(outputs, inputs, **tolerances, fast_mode=fast_mode)


class Runner(nn.Module):
    """A residual over given sublayer outputs, as one module call."""

    def __init__(self, residual):
        super().__init__()
        self.residual = residual

    def forward(self, x, ys):
        return run(self.residual, x, ys)[0]


def prefixed(values):
    return {f"residual.{name}": value for name, value in values.items()}


class Bend(nn.Module):
    """A sublayer that is neither linear nor scale-free."""

    def __init__(self, dim, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(draw * dim**-0.5)

    def forward(self, h):
        return torch.tanh(h @ self.weight.to(h.dtype).mT) + 0.3


def stack_of(case, dim=DIM, depth=DEPTH, dtype=torch.float64, **build):
    residual = case.build(dim, depth, dtype=dtype, **build)
    return mg.Stack([Bend(dim, seed=i).to(dtype) for i in range(depth)], residual)


@everywhere
def test_every_parameter_learns_or_is_declared_not_to(case):
    """From the real initialisation, on a task that needs the output to be right everywhere."""
    torch.manual_seed(0)
    stack = mg.Stack([Bend(DIM, seed=i) for i in range(DEPTH)], case.fresh()).double()
    x = torch.randn(64, DIM, dtype=torch.float64)
    target = torch.randn(64, DIM, dtype=torch.float64)
    optimizer = torch.optim.Adam(stack.parameters(), lr=0.01)
    for _ in range(8):
        optimizer.zero_grad()
        loss = (stack(x) - target).square().mean()
        loss.backward()
        optimizer.step()
    declared = case.fresh().structural_zeros()
    assert declared <= {name for name, _ in stack.residual.named_parameters()}
    for module_name, module in stack.residual.named_modules():
        sizes = {
            f"{module_name}.{name}".lstrip("."): p.grad.abs().max().item()
            for name, p in module.named_parameters(recurse=isinstance(module, nn.ParameterList))
        }
        largest = max(sizes.values(), default=0.0)
        for name, size in sizes.items():
            if name in declared:
                assert size < 1e-7, f"{name} is declared zero but has gradient {size:.3g}"
            else:
                assert size > 1e-6 * largest > 0, f"{name} does not learn: gradient {size:.3g}"


@everywhere
def test_bf16_is_as_good_as_its_inputs(case):
    """One step at a time: within 1e-2 of float32, and within twice the error of rounding the inputs
    (as it is in the inputs, or as float32 arithmetic carries it into the outputs if that is more).
    """
    residual = case.build(dim=64, dtype=torch.float32, spread=0.3)
    x, ys = random_inputs(50, dim=64, dtype=torch.float32)
    _, states = run(residual, x, ys)
    for i, y in enumerate(ys):
        inputs = torch.cat([y.flatten(), *(t.flatten() for t in streams_of(states[i]))])
        rounding = (inputs.bfloat16().float() - inputs).norm() / inputs.norm()
        exact = outputs_of(residual, i, y, states[i])
        rounded_state = mapped(states[i], lambda t: t.bfloat16().float())
        rounded = outputs_of(residual, i, y.bfloat16().float(), rounded_state)
        half = outputs_of(residual, i, y.bfloat16(), mapped(states[i], lambda t: t.bfloat16()))
        for e, r, b in zip(exact, rounded, half, strict=True):
            assert b.dtype == torch.bfloat16
            carried = (r - e).norm() / e.norm()
            assert_close(b.float(), e, min(1e-2, 2 * max(rounding, carried).item()))


def streams_of(state):
    """The streams of a state, without the few coefficients some residuals keep beside them."""
    return [t for t in flatten_state(state) if t.shape[-1] == 64]


def outputs_of(residual, i, y, state):
    h, state = residual.step(i, y, state)
    return [h, *streams_of(state)]


def mapped(state, change):
    """`change` applied to the streams of a state; the coefficients in it stay float32."""
    return tuple(
        mapped(t, change) if isinstance(t, tuple) else change(t) if t.shape[-1] == 64 else t
        for t in state
    )


@everywhere
def test_bf16_over_the_whole_depth(case):
    residual = case.build(dim=64, dtype=torch.float32, spread=0.3)
    x, ys = random_inputs(50, dim=64, dtype=torch.float32)
    exact, _ = run(residual, x, ys)
    half, _ = run(residual, x.bfloat16(), [y.bfloat16() for y in ys])
    for e, b in zip(exact, half, strict=True):
        assert b.dtype == torch.bfloat16
        assert_close(b.float(), e, 1e-2)


@everywhere
def test_fullgraph_compile_equals_eager(case):
    stack = stack_of(case, dtype=torch.float32)
    check_compiled(stack, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", mg.residual_names())
def test_fullgraph_compile_with_inductor_equals_eager(name):
    """Four sublayers: the C++ compiler takes minutes for the unrolled Sinkhorn steps of more."""
    default = next(case for case in CASES if case.name == name)
    check_compiled(stack_of(default, depth=4, dtype=torch.float32), backend="inductor")


def check_compiled(stack, backend):
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(stack), fullgraph=True, backend=backend)
    x = random_inputs(2, 5, dtype=torch.float32)[0]
    results = []
    for model in (stack, compiled):
        inputs = x.clone().requires_grad_()
        out = model(inputs)
        out.square().sum().backward()
        gradients = [p.grad for p in model.parameters()]
        results.append([out.detach(), inputs.grad, *gradients])
    # Gradients that are zero by algebra are rounding noise of the others' size.
    noise = 1e-6 * max(eager.norm() for eager in results[0])
    for eager, fast in zip(*results, strict=True):
        assert (fast - eager).norm() <= 2e-5 * eager.norm() + noise


@everywhere
def test_a_token_does_not_depend_on_the_others(case):
    """Batch and sequence invariance: alone, in a batch or in a sequence, a token gives the same."""
    residual = case.build()
    x, ys = random_inputs(3, 4)
    together, _ = run(residual, x, ys)
    for b, t in [(0, 0), (2, 3), (1, 2)]:
        alone, _ = run(residual, x[b, t], [y[b, t] for y in ys])
        row, _ = run(residual, x[b], [y[b] for y in ys])
        for h, a, r in zip(together, alone, row, strict=True):
            torch.testing.assert_close(a, h[b, t], rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(r[t], h[b, t], rtol=1e-12, atol=1e-13)


@everywhere
def test_state_size_is_as_declared(case):
    """Counted on a real run, and on the meta device, where there is nothing but sizes."""
    x, ys = random_inputs(2, 3)
    for device in ("cpu", "meta"):
        residual = case.build().to(device)
        _, states = run(residual, x.to(device), [y.to(device) for y in ys])
        for i, state in enumerate(states):
            assert sum(t.numel() for t in flatten_state(state)) == 6 * residual.state_size(i)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(case, dtype):
    """The residual computes in float32 whatever autocast says: bit for bit the same."""
    residual = case.build(dtype=torch.float32)
    x, ys = random_inputs(2, 3, dtype=dtype)
    plain, _ = run(residual, x, ys)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = run(residual, x, ys)
    for a, b in zip(plain, cast, strict=True):
        assert a.dtype == b.dtype == dtype
        assert torch.equal(a, b)


@everywhere
def test_a_narrow_output_is_taken_into_wide_streams(case):
    """Under autocast sublayers return bf16 while streams may be float32: h stays float32."""
    residual = case.build(dtype=torch.float32)
    x, ys = random_inputs(2, 3, dtype=torch.float32)
    hs, _ = run(residual, x, [y.bfloat16() for y in ys])
    expected, _ = run(residual, x, [y.bfloat16().float() for y in ys])
    for h, e in zip(hs, expected, strict=True):
        assert h.dtype == torch.float32
        torch.testing.assert_close(h, e, rtol=1e-6, atol=1e-6)


@everywhere
@pytest.mark.parametrize("precisions", ["x", "y", "parameters"])
def test_mixed_float64_is_computed_in_the_precision_of_x(case, precisions):
    """A float64 x, y or residual among float32 ones: h follows x."""
    residual = case.build(dtype=torch.float32)
    x, ys = random_inputs(2, 3, dtype=torch.float32)
    expected, _ = run(residual, x, ys)
    if precisions == "x":
        x = x.double()
    elif precisions == "y":
        ys = [y.double() for y in ys]
    else:
        residual = residual.double()
    for h, e in zip(run(residual, x, ys)[0], expected, strict=True):
        assert h.dtype == x.dtype
        torch.testing.assert_close(h.float(), e, rtol=1e-4, atol=1e-4)


@everywhere
def test_state_dict_round_trip(case):
    residual, other = case.build(seed=1), case.build(seed=2)
    x, ys = random_inputs(2, 3)
    other.load_state_dict(residual.state_dict(), strict=True)
    for a, b in zip(run(residual, x, ys)[0], run(other, x, ys)[0], strict=True):
        assert torch.equal(a, b)


@everywhere
def test_a_norm_handed_over_is_the_norm_applied(case):
    """Both the norm that can be fused and one that cannot."""
    residual = case.build()
    x, ys = random_inputs(2, 3)
    plain, _ = run(residual, x, ys)
    fused, other = RMSNorm(DIM).double(), nn.LayerNorm(DIM).double()
    with torch.no_grad():
        fused.weight.copy_(torch.linspace(0.5, 2, DIM))
    for norm in (fused, other, RMSNorm(DIM, eps=1e-3).double()):
        normed, _ = run(residual, x, ys, [norm] * (DEPTH + 1))
        for h, n in zip(plain, normed, strict=True):
            torch.testing.assert_close(n, norm(h), rtol=1e-9, atol=1e-10)


@everywhere
def test_skipping_reads_and_leaves_the_streams(case):
    residual = case.build()
    x, ys = random_inputs(2, 3)
    _, states = run(residual, x, ys)
    for i in range(DEPTH):
        if not residual.can_skip(i):
            with pytest.raises(ValueError, match="cannot be skipped"):
                residual.step(i, None, states[i])
            continue
        h, after = residual.step(i, None, states[i])
        written, _ = residual.step(i, ys[i], states[i])
        assert not torch.allclose(h, written)
        # Everything that was kept is still there, bit for bit, wherever the state keeps it now.
        kept = [t for t in flatten_state(after) if t.shape[-1] == DIM]
        for old in (t for t in flatten_state(states[i]) if t.shape[-1] == DIM):
            assert any(old.shape == new.shape and torch.equal(old, new) for new in kept)


@everywhere
def test_a_handover_is_resumed_as_if_nothing_had_been(case):
    """At every sublayer: h and the state bit for bit, whether or not some have been skipped."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        residual = case.build(dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        x, ys = random_inputs(2, 3, dtype=dtype)
        for skipped in ((), (4,), (5,), (4, 5)):
            skipped = [k for k in skipped if residual.can_skip(k)]
            written = [None if k in skipped else y for k, y in enumerate(ys)]
            hs, states = run(residual, x, written)
            for i in range(1, DEPTH):
                sent = residual.handover(i, hs[i], states[i])
                assert all(t.dtype == dtype for t in sent)
                numbers = sum(t.numel() for t in sent)
                expected = 6 * residual.handover_size(i)
                assert numbers <= expected if skipped else numbers == expected
                check_resumed(residual, i, sent, written[i - 1], states)


def check_resumed(residual, i, sent, y, states):
    """Under autocast, with and without a norm handed over, from copies of what was sent."""
    dtype = sent[0].dtype
    for norm in (None, RMSNorm(DIM).to(dtype), nn.LayerNorm(DIM, dtype=dtype)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h, state = residual.resume(i, [t.detach().clone() for t in sent], norm)
            expected, _ = residual.step(i - 1, y, states[i - 1], norm)
        if dtype == torch.bfloat16:
            # A gated step reads its streams before they are rounded, which nobody can later.
            assert_close(h.float(), expected.float(), 5e-3)
        else:
            assert torch.equal(h, expected)
        assert_same_state(state, states[i])


def assert_same_state(state, expected):
    assert len(state) == len(expected)
    for a, b in zip(state, expected, strict=True):
        assert type(a) is type(b)
        if isinstance(a, tuple):
            assert_same_state(a, b)
        else:
            assert torch.equal(a, b)


@everywhere
def test_gradients_cross_a_handover(case):
    """Backward in two halves, with what was sent as leaves between them, is the whole backward."""
    for dtype, relative, absolute in ((torch.float64, 0, 1e-11), (torch.bfloat16, 1e-2, 1e-3)):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        residual = case.build(dim=16, dtype=wide)
        x, ys = random_inputs(20, dim=16, dtype=dtype, requires_grad=True)
        weights = random_inputs(20, dim=16, seed=2, dtype=dtype)[1]
        leaves = [*residual.parameters(), x, *ys]
        hs, states = run(residual, x, ys)
        whole = gradients_of(weighted(hs[1:], weights), leaves)
        largest = max(g.norm() for g in whole)
        for i in range(1, DEPTH):
            sent = residual.handover(i, hs[i], states[i])
            arrived = [t.detach().clone().requires_grad_() for t in sent]
            h, state = residual.resume(i, arrived)
            later = [h]
            for k in range(i, DEPTH):
                h, state = residual.step(k, ys[k], state)
                later.append(h)
            second = gradients_of(weighted(later, weights[i - 1 :]), [*leaves, *arrived])
            roots = [*weighted(hs[1:i], weights[: i - 1]), *sent]
            back = [*(torch.ones_like(h) for h in hs[1:i]), *second[len(leaves) :]]
            first = gradients_of(roots, leaves, back)
            for w, a, b in zip(whole, first, second, strict=False):
                assert (a + b - w).norm() <= relative * w.norm() + absolute * largest


def weighted(hs, weights):
    return [h * w for h, w in zip(hs, weights, strict=True)]


def gradients_of(outputs, inputs, back=None):
    back = [torch.ones_like(t) for t in outputs] if back is None else back
    return torch.autograd.grad(outputs, inputs, back, retain_graph=True, materialize_grads=True)


@everywhere
def test_recording_changes_nothing(case):
    residual = case.build()
    x, ys = random_inputs(2, 3)
    plain, _ = run(residual, x, ys)
    with residual.recording() as steps:
        recorded, _ = run(residual, x, ys)
    for a, b in zip(plain, recorded, strict=True):
        assert torch.equal(a, b)
    assert residual._record is None
    for i, coefficients in steps.items():
        assert -1 <= i < DEPTH
        for name, value in coefficients.items():
            assert name.isidentifier()
            assert torch.isfinite(value).all()
            assert not value.requires_grad
    if any(True for _ in residual.parameters()):
        assert steps, "a residual with parameters has coefficients to show"


@everywhere
def test_what_is_read_again_is_recorded_again(case):
    residual = case.build()
    x, ys = random_inputs(2, 3)
    with residual.recording() as steps:
        hs, states = run(residual, x, ys)
    for i in range(1, DEPTH):
        with residual.recording() as again:
            residual.resume(i, residual.handover(i, hs[i], states[i]))
        assert set(again) <= {i - 1}
        for name, value in again.get(i - 1, {}).items():
            assert torch.equal(value, steps[i - 1][name])
