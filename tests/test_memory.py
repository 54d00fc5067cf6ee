"""The memory modes of Multi-Gate Residuals: the gradients of `store`, from fewer kept streams."""

import math

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import multigate as mg
from multigate.norm import RMSNorm
from multigate.ops.gate_pool import codes, exact, lean, passes, reference
from multigate.residuals.memory import Memory
from plain import by_autograd

GATES = ["mgr-competitive", "mgr-independent"]
MODES = ["recompute", "invert", "exact"]
WIDTH = 16


class Tanh(mg.residuals.Sublayer):
    def __init__(self, dtype):
        super().__init__()
        self.norm = RMSNorm(WIDTH).to(dtype)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def body(self, x):
        return self.linear(x).tanh()


def stack(memory="store", residual=GATES[0], depth=11, streams=4, dtype=torch.float32, **options):
    """With gates that are closed by and large, and a few that stand open."""
    torch.manual_seed(0)
    sublayers = [Tanh(dtype) for _ in range(depth)]
    made = mg.Stack(
        sublayers, residual, WIDTH, streams, RMSNorm(WIDTH).to(dtype), memory=memory, **options
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.residual.parameters():
            p += 0.7 * torch.randn(p.shape, generator=generator)
    made.residual.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return made


def data(tokens=21, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(3, tokens // 3, WIDTH, generator=generator).to(dtype) for _ in range(2)]


def gradients(model, call=None, dtype=torch.float32):
    x, weight = data(dtype=dtype)
    x.requires_grad_()
    model.zero_grad()
    call = model if call is None else call
    (call(x) * weight).float().sum().backward()
    return {"x": x.grad} | {name: p.grad for name, p in model.named_parameters()}


def assert_same(found, expected):
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None or not found[name].any(), name
        else:
            assert torch.equal(found[name], gradient), name


def distance(found, expected):
    """The largest relative error of all gradients that are not zero."""
    return max(
        float((found[name] - g).norm() / g.norm())
        for name, g in expected.items()
        if g is not None and g.norm() > 0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("streams", [1, 2, 4, 12])
@pytest.mark.parametrize("residual", GATES)
def test_recompute_and_exact_give_the_gradients_of_store_to_the_bit(residual, streams, dtype):
    expected = gradients(stack("store", residual, streams=streams, dtype=dtype), dtype=dtype)
    for memory in ("recompute", "exact"):
        for every in (None, 1, 3):
            model = stack(memory, residual, streams=streams, dtype=dtype, every=every)
            assert_same(gradients(model, dtype=dtype), expected)


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("residual", GATES)
def test_inversion_is_as_exact_as_the_numbers_are(residual, streams):
    expected = gradients(
        stack("store", residual, streams=streams, dtype=torch.float64), dtype=torch.float64
    )
    model = stack("invert", residual, streams=streams, dtype=torch.float64, keep=0.0)
    found = gradients(model, dtype=torch.float64)
    assert 0 < distance(found, expected) < 1e-9
    model = stack("invert", residual, streams=streams, dtype=torch.float64, keep=1.0)
    assert_same(gradients(model, dtype=torch.float64), expected)


def test_kept_streams_and_kept_states_make_the_inversion_better():
    """In bfloat16, where it is bad."""
    expected = gradients(stack("store", dtype=torch.bfloat16), dtype=torch.bfloat16)

    def error(**options):
        model = stack("invert", dtype=torch.bfloat16, **options)
        return distance(gradients(model, dtype=torch.bfloat16), expected)

    plain = error(keep=0.0)
    assert error(keep=0.5) < 0.9 * plain
    assert error(keep=0.0, every=2) < 0.9 * plain


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("residual", GATES)
def test_a_step_writes_and_reads_as_in_store(residual, memory):
    """Also without gradients, where nothing is owed to anybody."""
    model, plain = stack(memory, residual), stack("store", residual)
    x, _ = data()
    assert torch.equal(model(x), plain(x))
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        _, state = model.residual.start(x)
        for i in range(6):
            _, state = model.residual.step(i, x, state)
        assert len(state) == 1


def kept_bytes(model, dtype):
    """What autograd keeps of one forward pass, every storage once, without the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    x, _ = data(tokens=600, dtype=dtype)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x.requires_grad_())
    return sum(storage.nbytes() for storage in kept.values())


def test_what_is_kept():
    """With 29 gated steps of 4 streams in bfloat16, beyond what the sublayers keep themselves."""
    depth, steps, streams = 32, 29, 600 * 4 * WIDTH * 2
    scalars = steps * 600 * 4 * 4
    alone = kept_bytes(stack("invert", depth=depth, dtype=torch.bfloat16, keep=0.0), torch.bfloat16)
    base = alone - scalars - streams
    for memory, options, most in (
        ("invert", {"keep": 0.01}, scalars + streams * (1 + 0.01 * (steps + 1) + 0.05)),
        ("exact", {}, scalars + streams * (1 + steps * (1 / 8 + 1 / 32))),
        ("recompute", {}, scalars + 6 * streams),
    ):
        model = stack(memory, depth=depth, dtype=torch.bfloat16, bias_init=-3.0, **options)
        assert kept_bytes(model, torch.bfloat16) - base <= most * 1.01, memory


@pytest.mark.slow
@pytest.mark.parametrize("memory", MODES)
def test_compiled(memory):
    """In one graph, and once for all numbers of tokens."""
    torch._dynamo.reset()
    model = stack(memory, depth=6, streams=2, bias_init=-3.0)
    with by_autograd():
        expected = gradients(model)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    found = gradients(model, compiled)
    assert distance(found, expected) < 1e-6
    assert int(model.residual.lost) == 0
    frames = counter.frame_count
    compiled(torch.randn(2, 5, WIDTH, requires_grad=True)).sum().backward()
    assert counter.frame_count == frames


@pytest.mark.parametrize("memory", MODES)
def test_backward_again_and_accumulated(memory):
    """Nothing is used up: the graph can be gone through again, and gradients add up."""
    model, plain = stack(memory), stack("store")
    x, weight = data()
    for m in (model, plain):
        loss = (m(x) * weight).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    twice = {n: p.grad for n, p in plain.named_parameters()}
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, twice[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory", MODES)
def test_checkpointed_sublayers(memory):
    model = stack(memory)
    expected = gradients(model)
    model.checkpointing = True
    assert_same(gradients(model), expected)


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("skipped", [{5}, {4, 5, 6}, {10}, {3, 10}, set(range(3, 11))], ids=str)
def test_skipped_sublayers(memory, skipped):
    def run(memory):
        residual = stack(memory).residual
        x, weight = data()
        h, state = residual.start(x.requires_grad_())
        for i in range(residual.depth):
            h, state = residual.step(i, None if i in skipped else (h * 1.5).tanh(), state)
        (h * weight).sum().backward()
        return {"x": x.grad} | {n: p.grad for n, p in residual.named_parameters()}

    found, expected = run(memory), run("store")
    if memory == "invert":
        assert distance(found, expected) < 1e-4
    else:
        assert_same(found, expected)


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("at", [2, 4, 5, 6, 9])
def test_a_chain_may_be_handed_over(memory, at):
    """To another process: its gradients come back to the streams that were sent."""

    def run(memory):
        residual = stack(memory).residual
        x, weight = data()
        h, state = residual.start(x.requires_grad_())
        for i in range(at):
            h, state = residual.step(i, (h * 1.5).tanh(), state)
        sent = residual.handover(at, h, state)
        arrived = [t.detach().requires_grad_() for t in sent]
        h, state = residual.resume(at, arrived)
        for i in range(at, residual.depth):
            h, state = residual.step(i, (h * 1.5).tanh(), state)
        (h * weight).sum().backward()
        torch.autograd.backward(sent, [t.grad for t in arrived])
        return {"x": x.grad} | {n: p.grad for n, p in residual.named_parameters()}

    found, expected = run(memory), run("store")
    if memory == "invert":
        assert distance(found, expected) < 1e-4
    else:
        assert_same(found, expected)


@pytest.mark.parametrize("memory", MODES)
def test_gates_that_are_wide_open(memory):
    """beta is 1 to the last bit: nothing of the old streams is left, and nothing breaks."""

    def run(memory):
        model = stack(memory, "mgr-independent", keep=0.0)
        with torch.no_grad():
            model.residual.steps[6].b1.fill_(200.0)
        return gradients(model)

    found, expected = run(memory), run("store")
    assert all(g.isfinite().all() for g in found.values() if g is not None)
    if memory != "invert":
        assert_same(found, expected)


@pytest.mark.parametrize("memory", MODES)
def test_a_token_that_is_not_a_number_spoils_only_its_own_gradient(memory):
    def run(memory):
        model = stack(memory)
        x, weight = data()
        x[1, 2] = math.nan
        (model(x.requires_grad_()) * weight).sum().backward()
        return x.grad

    found, expected = run(memory), run("store")
    assert torch.equal(found.isnan(), expected.isnan())
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("memory", ["invert", "exact"])
def test_the_last_step_needs_no_inversion(memory, monkeypatch):
    """So the first operator of the backward pass is the one of `store`, which the first gated step
    needs too: met for the first time behind a chain of others, Inductor prints the whole chain for
    its log, in a time that doubles with every step."""
    order = []
    for name in ("backward", "invert_backward", "exact_backward"):
        plain = getattr(lean.passes, name)

        def noted(*args, name=name, plain=plain):
            order.append(name)
            return plain(*args)

        monkeypatch.setattr(lean.passes, name, noted)
    gradients(stack(memory, depth=8, streams=3))
    calls = [name for i, name in enumerate(order) if name != "backward" or i in (0, len(order) - 1)]
    assert calls == ["backward", *[f"{memory}_backward"] * 4, "backward"]


def test_one_step():
    for memory in MODES:
        expected = gradients(stack("store", depth=1, streams=1))
        assert_same(gradients(stack(memory, depth=1, streams=1)), expected)


@pytest.mark.parametrize("memory", MODES)
def test_steps_that_were_not_run_are_missed(memory):
    residual = stack(memory).residual
    x, _ = data()
    h, state = residual.start(x.requires_grad_())
    for i in range(8):
        h, state = residual.step(i, x, state)
    with pytest.raises(RuntimeError, match=f"memory='{memory}'.*use memory='store'"):
        h.sum().backward()


@pytest.mark.parametrize("memory", MODES)
def test_a_state_is_stepped_from_once(memory):
    residual = stack(memory).residual
    x, _ = data()
    _, state = residual.start(x.requires_grad_())
    for i in range(8):
        _, state = residual.step(i, x, state)
    residual.step(8, x, state)
    with pytest.raises(ValueError, match="a second step from one state needs memory='store'"):
        residual.step(8, x, state)


@pytest.mark.parametrize("memory", MODES)
def test_a_gradient_of_a_gradient_is_refused(memory):
    model = stack(memory)
    x, weight = data()
    (first,) = torch.autograd.grad((model(x.requires_grad_()) * weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"memory": "inverted"}, "unknown memory 'inverted': did you mean 'invert'"),
        ({"memory": "invert", "keep": 1.5}, "keep is a share of the streams, from 0 to 1, got 1.5"),
        ({"memory": "recompute", "every": 0}, "every must be a whole number of steps, at least 1"),
    ],
)
def test_options_that_mean_nothing(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        mg.build_residual(GATES[0], 8, 6, 2, **options)


def test_where_chains_end():
    assert [i for i in range(10) if Memory("recompute").ends(i, 10)] == [2, 5, 8, 9]
    assert [i for i in range(10) if Memory("invert").ends(i, 10)] == [9]
    assert [i for i in range(10) if Memory("invert", every=4).ends(i, 10)] == [0, 4, 8, 9]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_codes_bring_back_every_bit(dtype):
    """Random bits: every kind of number, infinities, NaN with their payloads, both zeros."""
    bits = codes.BITS[dtype]
    low, high = torch.iinfo(bits).min, torch.iinfo(bits).max
    guess = torch.randint(low, high, (4000,), dtype=bits)
    away = torch.tensor([-2, -1, 0, 0, 0, 1, 2, 77], dtype=bits)[torch.randint(8, (4000,))]
    order = torch.where(guess < 0, ~(guess & high), guess) + away
    true = torch.where(order < 0, ~order + low, order)
    true[:6] = torch.tensor([0, low, high, low + 1, 0, low], dtype=bits)
    guess[:6] = torch.tensor([low, 0, high, 0, 0, low], dtype=bits)
    packed, listed, lost = codes.encode(true.view(dtype), guess.view(dtype))
    assert int(lost) == 0
    assert packed.dtype == torch.uint8
    assert len(packed) == 1000
    assert len(listed) < 4000 / 2
    assert torch.equal(codes.decode(packed, listed, guess.view(dtype)).view(bits), true)


def test_codes_count_what_they_lose():
    """A list of known length: beyond it the guess stands."""
    true, guess = torch.arange(1.0, 65.0), torch.arange(1.0, 65.0)
    guess[:10] = 0.0
    packed, listed, lost = codes.encode(true, guess, codes.room_for(true, codes.LISTED))
    room = math.ceil(64 / codes.LISTED)
    assert int(lost) == 10 - room
    found = codes.decode(packed, listed, guess)
    assert torch.equal(found, torch.where(torch.arange(64) < room, true, guess))


def test_the_compiler_sees_no_double_of_an_output():
    """`to` and `float` that change nothing: torch 2.11 then gives the output no gradient."""
    graphs = []

    def backend(module, _):
        graphs.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    step = torch.compile(reference.step, backend=backend, fullgraph=True)
    weights = (torch.randn(4), torch.randn(4), torch.zeros(3))
    step(torch.randn(3, 4), torch.randn(3, 2, 4), *weights, "competitive", None, 1e-6)
    (outputs,) = graphs[0].output_node().args
    assert len(outputs) == 3
    for node in outputs:
        assert node.target not in ("to", "float")
        assert not {user.target for user in node.users} & {"to", "float"}


@pytest.mark.slow
@pytest.mark.parametrize("memory", MODES)
def test_compiled_by_inductor(memory):
    """In bfloat16, where a rounding that the compiler leaves out would show."""
    torch._dynamo.reset()
    options = {"depth": 6, "streams": 2, "dtype": torch.bfloat16, "bias_init": -3.0}
    stored, model = stack("store", **options), stack(memory, **options)
    expected, found = (
        gradients(m, torch.compile(m, fullgraph=True), dtype=torch.bfloat16)
        for m in (stored, model)
    )
    assert int(model.residual.lost) == 0
    assert distance(found, expected) < 0.05
    streams = torch.randn(50, 2, WIDTH).bfloat16()
    y, beta = torch.randn(50, WIDTH).bfloat16(), 0.2 * torch.rand(50, 2)

    @torch.compile(fullgraph=True)
    def back(streams, y, beta):
        new = reference.lerp(y, streams, beta).to(streams.dtype)
        packed, listed, lost = exact.coded(streams, new, y, beta, codes.LISTED)
        return exact.uncoded(new, y, beta, packed, listed), lost

    found, lost = back(streams, y, beta)
    assert int(lost) == 0
    assert torch.equal(found, streams)


def test_opcheck():
    streams, y, beta = torch.randn(7, 3, 5), torch.randn(7, 5), 0.2 * torch.rand(7, 3)
    new = reference.lerp(y, streams, beta)
    torch.library.opcheck(exact.coded, (streams, new, y, beta, codes.LISTED))
    packed, listed, _ = exact.coded(streams, new, y, beta, codes.LISTED)
    torch.library.opcheck(exact.uncoded, (new, y, beta, packed, listed))


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_gate_that_stands_open(memory, dtype):
    """In the middle of a chain, where s' is an inverted stream itself: noise must not blow up."""

    def run(memory, bias):
        model = stack(memory, "mgr-independent", dtype=dtype)
        with torch.no_grad():
            model.residual.steps[5].b1[1] = bias
        return gradients(model, dtype=dtype)

    for bias in (40.0, 16.6, 8.0):
        found, expected = run(memory, bias), run("store", bias)
        if memory != "invert":
            assert_same(found, expected)
        for name, gradient in expected.items():
            if gradient is not None:
                assert found[name].isfinite().all(), name
                assert found[name].norm() < 3 * gradient.norm() + 1, name


@pytest.mark.parametrize("memory", MODES)
def test_no_tokens_and_strange_strides(memory):
    for x in (torch.randn(2, 0, WIDTH), torch.randn(5, 3, WIDTH).transpose(0, 1)):
        for streams in (1, 2):
            results = []
            for mode in (memory, "store"):
                model = stack(mode, streams=streams, depth=5)
                leaf = x.detach().requires_grad_()
                model(leaf).square().sum().backward()
                results.append(leaf.grad)
            torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def test_the_largest_gates_are_kept():
    beta = torch.rand(5, 4)
    streams = torch.randn(5, 4, 3)
    rows, index = passes.largest(streams, beta, 120_000)
    assert sorted(index.tolist()) == sorted(beta.flatten().topk(3).indices.tolist())
    assert torch.equal(rows, streams.view(20, 3)[index])
    assert len(passes.largest(streams, beta, 0)[1]) == 0
    assert len(passes.largest(streams, beta, 1_000_000)[1]) == 20
    assert len(passes.largest(streams[:0], beta[:0], 120_000)[1]) == 0


@pytest.mark.parametrize(("total", "group"), [(4096, 2048), (4100, 1367), (2052, 1026), (92, 10)])
def test_every_group_keeps_its_largest_gates(total, group, monkeypatch):
    """The last group may be smaller: even smaller than what every group keeps."""
    monkeypatch.setattr(passes, "GROUP", 10 if group == 10 else 2048)
    keep = 250_000 if group == 10 else 10_000
    beta, streams = torch.rand(total // 4, 4), torch.randn(total // 4, 4, 2)
    rows, index = passes.largest(streams, beta, keep)
    assert torch.equal(rows, streams.view(total, 2)[index])
    count = math.ceil(keep * group / 1e6)
    for begin in range(0, total, group):
        values = beta.flatten()[begin : begin + group]
        here = set((index[(index >= begin) & (index < begin + len(values))] - begin).tolist())
        assert here == set(values.topk(min(count, len(values))).indices.tolist())
    assert set(passes.largest(streams, beta, 1_000_000)[1].tolist()) == set(range(total))


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("residual", GATES)
def test_with_kernels(residual, memory, monkeypatch):
    """Triton's, on a CPU in its interpreter: as store with the same kernels."""
    monkeypatch.setenv("MULTIGATE_BACKEND", "triton")
    expected = gradients(stack("store", residual, depth=6, streams=2))
    found = gradients(stack(memory, residual, depth=6, streams=2))
    if memory == "invert":
        assert distance(found, expected) < 1e-4
    else:
        assert_same(found, expected)
