"""The probe shows what goes through the seam, for every residual, and changes nothing."""

import pytest
import torch

import multigate as mg
from cases import Own
from hooked import DEPTH, WIDTH, hooked, small_gpt, some_tokens
from multigate.analysis import gates, life, mixing
from multigate.analysis.probe import Probe, batches, blocks_of, depth_of, stack_of, watch
from multigate.residuals.base import _REGISTRY

VARIANTS = [
    ("highway", {"residual_options": {"gate": "vector"}}),
    ("denseformer", {"residual_options": {"period": 1, "dilation": 2}}),
    ("hc", {"residual_options": {"static": True}}),
    ("hc", {"residual_options": {"norm_then_sum": True}}),
    ("mhc-lite", {"streams": 3, "residual_options": {"norm_then_sum": True}}),
    ("attnres-block", {"streams": 2}),
    ("mgr-competitive", {"streams": 1}),
    ("mgr-independent", {"streams": 2}),
    ("mgr-competitive", {"streams": DEPTH + 2, "residual_options": {"bias_init": -1.0}}),
]
CASES = [(name, {}) for name in mg.residual_names()] + VARIANTS
every_residual = pytest.mark.parametrize("name", mg.residual_names())
every_case = pytest.mark.parametrize(("name", "settings"), CASES, ids=str)


class Steps:
    """A watcher that keeps all it sees."""

    def __init__(self):
        self.seen = []

    def see(self, step):
        self.seen.append(step)

    def result(self):
        return {}


def looked(model, tokens, *skipped):
    steps = Steps()
    with model.stack.skipping(*skipped):
        watch(model, tokens, steps)
    return steps.seen


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def same(a, b):
    assert (a is None) == (b is None)
    if a is not None:
        close(a, b)


@every_case
def test_the_output_stays_the_same(name, settings):
    model, tokens = small_gpt(name, **settings), some_tokens()
    with torch.no_grad():
        plain = model(tokens)
        with Probe(model, Steps()):
            watched = model(tokens)
    if name.startswith(("mgr", "attnres")):  # their norms are fused
        close(watched, plain)
    else:
        assert torch.equal(watched, plain)


@every_case
def test_the_steps_are_those_of_a_loop(name, settings):
    model, tokens = small_gpt(name, **settings), some_tokens()
    seen = hooked(model, tokens)
    start, *steps = looked(model, tokens)
    assert [step.i for step in steps] == list(range(DEPTH))
    assert (start.i, start.input, start.output, start.before, start.mixture) == (-1, *[None] * 4)
    close(start.hidden, seen.hs[0])
    same(start.after, seen.streams(0))
    with torch.no_grad(), model.stack.residual.recording() as noted:
        hooked(model, tokens)
    for i, step in enumerate(steps):
        close(step.input, seen.hs[i])
        close(step.output, seen.ys[i])
        close(step.hidden, seen.hs[i + 1])
        same(step.before, seen.streams(i))
        same(step.after, seen.streams(i + 1))
    for step in (start, *steps):
        assert step.coefficients.keys() == noted.get(step.i, {}).keys()
        for key, value in step.coefficients.items():
            close(value, noted[step.i][key].detach())


@every_case
def test_streams_follow_from_the_mixture(name, settings):
    """new = keep @ old + take * y, token by token."""
    model = small_gpt(name, **settings)
    _, *steps = looked(model, some_tokens())
    vector = settings.get("residual_options", {}).get("gate") == "vector"
    if vector or name.startswith(("attnres", "denseformer")):
        assert {step.mixture for step in steps} == {None}
        return
    for step in steps:
        keep, take = (part.double() for part in step.mixture)
        old, y = step.before, step.output
        keep = keep.expand(*old.shape[:-2], step.after.shape[-2], old.shape[-2])
        take = take.expand(*old.shape[:-2], step.after.shape[-2])
        new = torch.einsum("btkj,btjd->btkd", keep, old) + torch.einsum("btk,btd->btkd", take, y)
        close(new, step.after)


def test_a_residual_is_told_before_which_sublayer_its_streams_are(monkeypatch):
    model, places = small_gpt("prenorm"), []
    monkeypatch.setattr(type(model.stack.residual), "carried", lambda _, i, __: places.append(i))
    looked(model, some_tokens())
    assert places == list(range(DEPTH + 1))


@every_residual
def test_skipped_sublayers_write_nothing(name):
    model, tokens = small_gpt(name), some_tokens()
    skipped = (4, 5)
    seen = hooked(model, tokens, skipped)
    _, *steps = looked(model, tokens, *skipped)
    for i in range(DEPTH):
        assert (steps[i].output is None) == (i in skipped)
        close(steps[i].hidden, seen.hs[i + 1])
        same(steps[i].after, seen.streams(i + 1))
    for i in skipped:
        assert steps[i].mixture is None
        if name != "denseformer":  # which averages at the end of a block in any case
            same(steps[i].after, steps[i].before)


def test_the_residual_is_given_back_as_it_was():
    model, tokens = small_gpt("mgr-competitive"), some_tokens()
    residual = model.stack.residual
    before = {**vars(residual), "_record": None}
    with Probe(model, Steps()):
        assert {"start", "step"} <= vars(residual).keys()
        model(tokens)
    assert vars(residual) == before
    with pytest.raises(RuntimeError, match="in the middle"), Probe(model, Interrupted()):
        model(tokens)
    assert vars(residual) == before
    assert len(looked(model, tokens)) == DEPTH + 1


class Interrupted(Steps):
    def see(self, step):
        if step.i == 2:
            raise RuntimeError("in the middle")


def test_nothing_is_recorded_without_a_probe():
    model, tokens = small_gpt("mgr-competitive"), some_tokens()
    steps, records = Steps(), []
    model.stack.sublayers[-1].register_forward_hook(
        lambda *_: records.append(model.stack.residual._record)
    )
    with Probe(model, steps):
        model(tokens)
    count = len(steps.seen)
    model(tokens)
    assert count == len(steps.seen) == DEPTH + 1
    assert records[0] is not None
    assert records[1] is None


def test_what_was_noted_is_let_go_step_by_step():
    """The coefficients of a pass are not kept until its end."""
    model, kept = small_gpt("hc"), []

    class Counting(Steps):
        def see(self, step):
            kept.append(len(model.stack.residual._record))

    watch(model, some_tokens(), Counting())
    assert kept == [0] * (DEPTH + 1)


def test_one_probe_at_a_time():
    model, tokens = small_gpt("prenorm"), some_tokens()
    first, second = Steps(), Steps()
    with Probe(model, first):
        with pytest.raises(ValueError, match="watched already"), Probe(model, second):
            pass
        model(tokens)
    assert (len(first.seen), second.seen) == (DEPTH + 1, [])
    assert len(looked(model, tokens)) == DEPTH + 1


@pytest.mark.parametrize("memory", ["store", "recompute", "invert", "exact"])
def test_gradients_and_memory_modes_go_on_as_before(memory):
    model = small_gpt("mgr-competitive", streams=3, memory=memory)
    tokens, steps = some_tokens(), Steps()
    seen = hooked(model, tokens)
    model(tokens, tokens).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with Probe(model, steps):
        model(tokens, tokens).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, plain[name], rtol=1e-9, atol=1e-10)
    for i, step in enumerate(steps.seen[1:]):
        close(step.after.detach(), seen.streams(i + 1))


def test_a_stack_by_itself_and_a_module_that_holds_one():
    functions = [torch.tanh] * 5
    stack = mg.Stack(functions, "mgr-independent", dim=4, streams=2)
    assert stack_of(stack) is stack
    assert stack_of(small_gpt("prenorm")).residual.depth == DEPTH
    assert (depth_of(stack), blocks_of(stack)) == (5, [range(0, 2), range(2, 4)])
    steps, x = Steps(), torch.randn(3, 4)
    with torch.no_grad(), Probe(stack, steps):
        h = stack(x)
    close(steps.seen[-1].hidden, h)
    with pytest.raises(ValueError, match="Linear has no Stack to look into"):
        Probe(torch.nn.Linear(2, 2))


def test_every_token_is_seen_once():
    model, tokens = small_gpt("prenorm"), some_tokens(5)
    assert [len(rows) for rows in batches(model, tokens, 2)] == [2, 2, 1]
    assert [len(rows) for rows in batches(model, torch.zeros(40, 1024), None)] == [16, 16, 8]
    assert [len(rows) for rows in batches(model, torch.zeros(2, 20000), None)] == [1, 1]
    steps = Steps()
    watch(model, tokens, steps, batch=2)
    starts = [step.hidden for step in steps.seen if step.i == -1]
    assert torch.equal(torch.cat(starts), model.embed(tokens))
    assert not any(step.hidden.requires_grad for step in steps.seen)


@every_residual
def test_skipping_is_a_loop_without_these_outputs(name):
    model, tokens = small_gpt(name), some_tokens()
    called = []
    for i, sublayer in enumerate(model.stack.sublayers):
        sublayer.register_forward_hook(lambda *_, i=i: called.append(i))
    seen = hooked(model, tokens, (3, 4))
    assert called == [0, 1, 2, 5]
    h = model.stack.out_norm(seen.hs[-1])
    close(seen.logits, (h @ model.embed.weight.mT).detach())


def test_skipping_ends_with_its_context():
    stack = small_gpt("prenorm").stack
    with stack.skipping(1):
        with stack.skipping(2, 3):
            assert stack.skipped == {1, 2, 3}
        with pytest.raises(ValueError, match="16 numbers"), stack.skipping(2, 3):
            stack(torch.zeros(()))
        assert stack.skipped == {1}
    assert stack.skipped == frozenset()


def test_a_residual_that_says_nothing_of_its_streams(monkeypatch):
    """A user's own, with neither `carried` nor `mixture`, is absent where they are needed."""
    monkeypatch.setitem(_REGISTRY, "own", type("Registered", (Own,), {"name": "own"}))
    model, tokens = small_gpt("own"), some_tokens()
    with torch.no_grad():
        plain = model(tokens)
    _, *steps = looked(model, tokens)
    logits = model.stack.out_norm(steps[-1].hidden) @ model.embed.weight.mT
    close(logits.detach(), plain)
    assert all(step.after is None and step.mixture is None for step in steps)
    assert all(step.coefficients.keys() == {"share"} for step in steps)
    assert steps[0].hidden.shape == (5, 8, WIDTH)
    for family, sentence in (
        (gates, "own has neither gates nor pool weights."),
        (mixing, "own has no coefficients to read or write with."),
        (life, "own carries no streams."),
    ):
        (watcher,) = (family.__dict__[n] for n in ("Gates", "Mixing", "Life") if n in vars(family))
        found = watcher()
        watch(model, tokens, found)
        assert found.result() == {}
        (chart,) = family.charts({"own": found.result()})
        assert (chart.panels, list(chart.absent)) == ((), [sentence])
