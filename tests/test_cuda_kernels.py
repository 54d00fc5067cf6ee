"""The CUDA kernels, run on the CPU by tests/cuda_on_cpu.h."""

import math
import runpy
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import multigate as mg
from emulated import compiler
from multigate.bench.cases import Size
from multigate.ops import cuda as launch
from multigate.ops import nvrtc
from multigate.ops.backend import at_trace_time
from multigate.ops.cuda import Plan
from multigate.ops.depth_pool import cuda as depth
from multigate.ops.depth_pool import few, many
from multigate.ops.depth_pool import reference as depth_reference
from multigate.ops.depth_pool.many import Many
from multigate.ops.depth_pool.op import fused
from multigate.ops.gate_pool import cuda, exact, passes, plan, reference
from multigate.ops.gate_pool.op import fused as gate_fused
from multigate.ops.gate_pool.saved import saved_gates, saved_numbers

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
NAMES = ("h", "streams", "dy", "dstreams", "dw_gate", "dw_pool", "dbias", "dnorm")


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture(params=[False, True], ids=["late copies", "early copies"])
def emulated(request, monkeypatch, libraries):
    monkeypatch.setattr(nvrtc, "module", compiler(libraries, request.param))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 3)
    kernels = (cuda._kernels, cuda._replaying, cuda._keeping, depth._compiled)
    for made in kernels:
        made.cache_clear()
    yield
    for made in kernels:
        made.cache_clear()


def problem(tokens, n, width, competitive, dtype):
    torch.manual_seed(tokens + n + width)
    leaves = [
        torch.randn(tokens, width).to(dtype),
        torch.randn(tokens, n, width).to(dtype),
        torch.randn(width),
        torch.randn(width),
        torch.randn(n + competitive),
        1 + torch.randn(width) / 4,
    ]
    grads = [torch.randn(tokens, width).to(dtype), torch.randn(tokens, n, width).to(dtype)]
    return leaves, grads


def expected(leaves, grads, competitive, norm, dtype):
    """By autograd through the reference, computed in `dtype`; a gradient of None is left out."""
    leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    y, streams, w_gate, w_pool, bias, gain = leaves
    variant = "competitive" if competitive else "independent"
    gain = gain if norm else None
    outputs = reference.gate_pool(y, streams, w_gate, w_pool, bias, variant, gain, 1e-6)
    pairs = [(o, g.to(dtype)) for o, g in zip(outputs, grads, strict=True) if g is not None]
    leaves = leaves if norm else leaves[:5]
    found = torch.autograd.grad(
        [o for o, _ in pairs], leaves, [g for _, g in pairs], materialize_grads=True
    )
    return [t.detach() for t in (*outputs, *found)]


def computed(leaves, grads, competitive, norm, cuts=(None, None)):
    y, streams, w_gate, w_pool, bias, gain = leaves
    rest = (w_gate, w_pool, bias, gain if norm else None)
    each = streams.unbind(1)
    h, new, saved = cuda.forward(y, each, *rest, competitive, 1e-6, cuts[0])
    found = cuda.backward(*grads, y, each, *rest, saved, competitive, 1e-6, cuts[1])
    return [t for t in (h, new, *found) if t is not None]


def check(leaves, grads, competitive, norm, cuts=(None, None)):
    exact = expected(leaves, grads, competitive, norm, torch.float64)
    eager = expected(leaves, grads, competitive, norm, torch.float32)
    found = computed(leaves, grads, competitive, norm, cuts)
    dtype = leaves[0].dtype
    for name, e, a, b in zip(NAMES, exact, eager, found, strict=False):
        # What is stored in 16 bits is rounded to them once.
        stored = a.to(dtype) if name in NAMES[:4] else a
        error = (b.double() - e).norm()
        allowed = 1.1 * (stored.double() - e).norm() + 1e-6 * e.norm()
        assert error <= allowed, f"{name}: {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("competitive", [True, False], ids=["competitive", "independent"])
@pytest.mark.parametrize(
    ("n", "width", "dtype", "norm"),
    [
        (3, 64, torch.float32, True),
        (1, 40, torch.float32, False),
        (4, 520, torch.bfloat16, True),
        (9, 264, torch.float16, False),
    ],
    ids=str,
)
def test_every_result(emulated, n, width, dtype, norm, competitive):
    check(*problem(11, n, width, competitive, dtype), competitive, norm)


@pytest.mark.parametrize(
    "cuts",
    [
        (Plan(1, 3, 3, True), Plan(1, 3, 3, True)),
        (Plan(1, 2, 4, False), Plan(1, 2, 7, False)),
        (Plan(2, 2, 2, True), Plan(2, 1, 2, True)),
        (Plan(3, 1, 1, False), Plan(3, 2, 2, False)),
    ],
    ids=["one warp", "slots that are no multiple", "two warps", "a part that is not full"],
)
def test_every_cut(emulated, cuts):
    """One to three slabs a token, teams of one to three warps, rings of one token and of more."""
    check(*problem(23, 2, 312, True, torch.float32), True, True, cuts)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize(
    ("n", "width", "dtype", "cut"),
    [
        (2, 312, torch.float32, Plan(1, 1, 0, False, registers=64)),
        (3, 312, torch.float32, Plan(3, 2, 0, False)),
        (4, 520, torch.bfloat16, Plan(2, 3, 0, False, registers=80)),
        (8, 768, torch.float16, Plan(3, 1, 0, False)),
    ],
    ids=str,
)
def test_without_a_ring(emulated, n, width, dtype, cut, norm):
    """To the bit what a ring gives for a team of the same size; also where a team has no token."""
    (y, streams, *weights, gain), _ = problem(23, n, width, True, dtype)
    given = (y, streams.unbind(1), *weights, gain if norm else None, True, 1e-6)
    slabs = -(-width * y.element_size() // (512 * cut.warps))
    ringed = cuda.forward(*given, Plan(cut.warps, 1, slabs, False))
    for a, b in zip(cuda.forward(*given, cut), ringed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
def test_cuts_without_a_ring(norm):
    """They cover a row, and a multiprocessor has registers and threads for two blocks or more."""
    device = torch.device("cpu")
    for n in range(1, 17):
        for width in (8, 64, 256, 384, 768, 1024, 1280, 2048, 4096, 5120, 8192):
            for itemsize in (2, 4):
                cut = plan.ringless(n, width, itemsize, norm)
                what = plan.problem(n, width, itemsize)
                if cut is None:
                    # Three chunks a thread leave room for one block of so many warps only.
                    assert n > plan.MOST_HELD or width * itemsize > 18 * 512
                    assert plan.forward_plan(device, what, norm, ring=False) == launch.plan(what)
                    continue
                chunks = -(-width * itemsize // (512 * cut.warps))
                threads = 32 * cut.warps * cut.teams
                assert (cut.slots, cut.hold) == (0, False)
                assert chunks <= (4 if (n, width) in plan.BETTER else 3)
                assert 4 * chunks * (n + 1) + 8 <= cut.registers <= 168
                assert 2 * threads <= min(2048, 4 * (16384 // cut.registers))
                assert plan.forward_plan(device, what, norm, ring=False) == cut
                ringed = plan.forward_plan(device, what, norm, ring=True)
                assert ringed.warps == cut.warps
                assert ringed.slots >= chunks
    # Sizes of the paper's models.
    warps = [plan.ringless(4, width, 2, norm).warps for width in (768, 1024, 1280)]
    assert warps == ([3, 2, 2] if norm else [3, 4, 3])
    assert [plan.ringless(n, 768, 2, norm).registers for n in (4, 8)] == [80, 128]


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
def test_cuts_of_the_backward_pass(norm, monkeypatch):
    """Those that were found are used where they fit, for rows of 2 bytes; elsewhere the rule's."""
    device, found = torch.device("cpu"), torch.empty(0)
    for n, width in {key[:2] for key in plan.BACKWARD} | {(3, 512), (8, 2048)}:
        for itemsize, grads in ((2, (found, found)), (2, (None, found)), (4, (found, found))):
            what = plan.problem(n, width, itemsize, *grads)
            cut, ruled = plan.backward_plan(device, what, norm), launch.plan(what)
            better = plan.BACKWARD.get((n, width, norm)) if itemsize == 2 else None
            assert (cut.teams, cut.slots) == (better or (ruled.teams, ruled.slots))
            assert (cut.warps, cut.hold) == (ruled.warps, ruled.hold)
            assert (
                what.static_bytes(cut.warps, cut.teams) + what.dynamic_bytes(cut) <= launch.SHARED
            )
            assert better is None or 512 * cut.warps >= width * itemsize
    monkeypatch.setattr(plan, "shared_memory", lambda device: 100 * 1024)
    monkeypatch.setattr(launch, "shared_memory", lambda device: 100 * 1024)
    what = plan.problem(4, 1024, 2, found, found)
    assert plan.backward_plan(device, what, True) == launch.plan(what, 100 * 1024)


@pytest.mark.parametrize("n", [9, 12, 16])
def test_five_warps_of_a_backward_pass_are_no_team_alone(n):
    """With more than eight rows, where a second team fits. Other widths are as they were."""
    gradients = [torch.empty(0)] * 2
    for width, teams in ((1024, 2), (1280, 2), (1536, 1), (2048, 1)):
        for what in (few.few(n, width, 2, True), plan.problem(n, width, 2, *gradients)):
            cut = launch.plan(what)
            assert (cut.warps, cut.teams) == (width // 256, teams)
            assert what.static_bytes(cut.warps, teams) + what.dynamic_bytes(cut) <= launch.SHARED
            little = launch.plan(what, 48 * 1024)
            assert little is None or width == 1024 or little.teams == 1


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
def test_cuts_are_those_for_the_norm(emulated, monkeypatch, norm):
    asked = []

    def spy(of, device, what, norm, **ring):
        asked.append((norm, what.backward))
        return of(device, what, norm, **ring)

    for name in ("forward_plan", "backward_plan"):
        monkeypatch.setattr(cuda, name, partial(spy, getattr(plan, name)))
    check(*problem(7, 3, 64, True, torch.float32), True, norm)
    assert set(asked) == {(norm, False), (norm, True)}


@pytest.mark.parametrize("missing", ["h", "streams"])
def test_an_output_that_is_not_used(emulated, missing):
    leaves, (grad_h, grad_streams) = problem(7, 3, 64, True, torch.float32)
    grads = [None, grad_streams] if missing == "h" else [grad_h, None]
    for norm in (True, False):
        check(leaves, grads, True, norm)


def test_the_sums_of_many_blocks(emulated, monkeypatch):
    """More blocks than warps that add them up."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 19)
    check(*problem(40, 2, 64, True, torch.float32), True, True)


def test_fewer_tokens_than_blocks(emulated):
    check(*problem(1, 3, 64, True, torch.float32), True, True)


@pytest.mark.parametrize(
    ("n", "width", "dtype", "norm", "cut"),
    [
        (3, 64, torch.float32, True, None),
        (4, 520, torch.bfloat16, True, None),
        (9, 264, torch.float16, False, None),
        (2, 312, torch.float32, True, Plan(1, 2, 6, False)),
        (2, 312, torch.float32, False, Plan(3, 2, 1, True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("competitive", [True, False], ids=["competitive", "independent"])
def test_inverted(emulated, n, width, dtype, norm, cut, competitive):
    """The streams before the step, and the gradients at them to the bit; kept rows as they were."""
    leaves, grads = problem(23, n, width, competitive, dtype)
    y, streams, w_gate, w_pool, bias, gain = leaves
    rest = (w_gate, w_pool, bias, gain if norm else None)
    _, new, saved = cuda.forward(y, streams.unbind(1), *rest, competitive, 1e-6)
    places = torch.full((23, n), -1, dtype=torch.int32)
    chosen = torch.randperm(23 * n)[:7]
    places.view(-1)[chosen] = torch.arange(7, dtype=torch.int32)
    kept = streams.reshape(-1, width)[chosen]
    old, found = cuda.invert_backward(
        *grads, y, new.unbind(1), rest, saved, kept, places, competitive, 1e-6, cut
    )
    assert torch.equal(old.view(-1, width)[chosen], kept)
    variant = "competitive" if competitive else "independent"
    beta = reference.gate(streams, w_gate, bias, variant, 1e-6)
    wanted = reference.unlerp(new, y, beta)
    wanted.view(-1, width)[chosen] = kept
    torch.testing.assert_close(old, wanted)
    assert (old.double() - streams.double()).norm() <= 0.1 * streams.double().norm()
    again = cuda.backward(*grads, y, old.unbind(1), *rest, saved, competitive, 1e-6, cut)
    for a, b in zip(found, again, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize(
    ("n", "width", "dtype", "norm", "cuts"),
    [
        (3, 64, torch.float32, True, (None, None)),
        (4, 520, torch.bfloat16, True, (None, None)),
        (8, 264, torch.float16, False, (None, None)),
        (2, 312, torch.float32, True, (Plan(1, 2, 4, False), Plan(3, 2, 2, False))),
        (2, 312, torch.float32, False, (Plan(3, 2, 1, True), Plan(1, 2, 6, False))),
    ],
    ids=str,
)
def test_exact(emulated, n, width, dtype, norm, cuts):
    """All bits of the streams come back, with a list in which every element has room."""
    leaves, grads = problem(23, n, width, True, dtype)
    y, streams, w_gate, w_pool, bias, gain = leaves
    streams.view(-1)[::101] *= 1e-4
    rest = (w_gate, w_pool, bias, gain if norm else None)
    each = streams.unbind(1)
    plain = cuda.forward(y, each, *rest, True, 1e-6, cuts[0])
    h, new, saved, kept, lost = cuda.exact_forward(
        y, each, rest, True, 1e-6, streams.numel(), cuts[0]
    )
    assert not lost.any()
    for a, b in zip(plain, (h, new, saved), strict=True):
        assert torch.equal(a, b)
    assert (kept[0].view(torch.uint8) != 0x55).float().mean() > 0.02
    old, found = cuda.exact_backward(
        *grads, y, new.unbind(1), rest, saved, kept, True, 1e-6, cuts[1]
    )
    assert torch.equal(old, streams)
    expected = cuda.backward(*grads, y, each, *rest, saved, True, 1e-6, cuts[1])
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("emulated", [False], indirect=True)
@pytest.mark.parametrize("one_team", [True, False])
def test_what_the_sanitizer_is_shown(emulated, one_team, monkeypatch, capsys):
    """All kernels, those of every source file."""
    shown = set()
    source = launch.source
    monkeypatch.setattr(launch, "source", lambda *files: shown.add(files) or source(*files))
    script = Path(__file__).parents[1] / "benchmarks/sanitize.py"
    runpy.run_path(str(script))["main"](torch.device("cpu"), 7, one_team)
    assert capsys.readouterr().out.count("every kernel") == 3
    for folder in (cuda.FOLDER, depth.FOLDER):
        told = {part for place, *parts in shown if place == folder for part in parts}
        assert {file.stem for file in folder.glob("*.cu")} == told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(emulated, dtype):
    (y, streams, *weights), (grad_h, grad_streams) = problem(9, 3, 64, True, dtype)
    # Lists and places are only filled as far as they are used: no two runs need be the same.
    checks = ("test_schema", "test_faketensor")
    given = (y, streams, *weights, True, 1e-6, 20, saved_numbers(3))
    torch.library.opcheck(exact.forward, given, test_utils=checks[1:])
    _, new, saved, *kept, _ = exact.forward(*given)
    given = (grad_h, grad_streams, y, new, *weights, saved, kept, True, 1e-6)
    torch.library.opcheck(exact.backward, given, test_utils=checks)


def test_exact_counts_what_finds_no_room(emulated):
    (y, streams, *weights, _), grads = problem(23, 3, 256, True, torch.float32)
    each, rest = streams.unbind(1), (*weights, None)
    _, new, saved, kept, lost = cuda.exact_forward(y, each, rest, True, 1e-6, 300)
    assert 0 < lost.sum() < streams.numel() / 2
    old, _ = cuda.exact_backward(*grads, y, new.unbind(1), rest, saved, kept, True, 1e-6)
    wrong = (old != streams).sum()
    assert 0 < wrong <= lost.sum()
    torch.testing.assert_close(old, streams, rtol=1e-3, atol=1e-3)


def test_streams_are_read_where_they_are(emulated, monkeypatch):
    """Without a copy, in both passes."""
    shown, rows = [], launch.rows
    monkeypatch.setattr(
        launch, "rows", lambda tensors, room=0: shown.append(tensors) or rows(tensors)
    )
    (y, streams, *weights, _), _ = problem(5, 3, 64, True, torch.float32)
    apart = [s.contiguous().requires_grad_() for s in streams.unbind(1)]
    h, *_ = gate_fused(y, apart, *weights, None, True, 1e-6, "cuda", saved_numbers(3))
    torch.autograd.grad(h.sum(), apart)
    own = [s.data_ptr() for s in apart]
    assert [[t.data_ptr() for t in tensors] for tensors in shown] == [own, own]


def test_no_tokens(emulated):
    leaves, grads = problem(0, 3, 64, True, torch.float32)
    found = computed(leaves, grads, True, True)
    assert found[0].shape == (0, 64)
    assert all(t.abs().sum() == 0 for t in found)


def pooled(leaves, grad, scale, norm, dtype):
    """h, the gradients of the sources as one tensor, of the query and of the norm weight."""
    leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    *sources, query, gain = leaves
    h = depth_reference.depth_pool(sources, query, scale, gain if norm else None, 1e-6)
    leaves = leaves if norm else leaves[:-1]
    found = torch.autograd.grad(h, leaves, grad.to(dtype))
    count = len(sources)
    return [t.detach() for t in (h, torch.stack(found[:count]), *found[count:])]


def check_pool(tokens, count, width, dtype, norm, scale=0.3, kind="plain", cuts=(None, None)):
    torch.manual_seed(tokens + count + width)
    sources = [torch.randn(tokens, width).to(dtype) for _ in range(count)]
    if kind == "equal":
        sources = [sources[0].clone() for _ in range(count)]
    query, gain = torch.randn(width), 1 + torch.randn(width) / 4
    grad = torch.randn(tokens, width).to(dtype)
    given = gain if norm else None
    h, saved = depth.forward(sources, query, given, scale, 1e-6, cuts[0])
    wanted = [True] * count
    found = depth.backward(grad, sources, query, given, saved, scale, wanted, cut=cuts[1])
    found = [h, torch.stack(found[0]), *(t for t in found[1:] if t is not None)]
    exact = pooled([*sources, query, gain], grad, scale, norm, torch.float64)
    eager = pooled([*sources, query, gain], grad, scale, norm, torch.float32)
    for i, (e, a, b) in enumerate(zip(exact, eager, found, strict=True)):
        stored = a.to(dtype) if i < 2 else a
        error = (b.double() - e).norm()
        allowed = 1.1 * (stored.double() - e).norm() + 1e-6 * e.norm() + 1e-12
        assert error <= allowed, f"result {i}: {error:.2e}, allowed {allowed:.2e}"
    return found


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("count", "width", "dtype"),
    [(2, 64, torch.float32), (5, 520, torch.bfloat16), (16, 264, torch.float16)],
    ids=str,
)
def test_every_result_of_a_pool(emulated, count, width, dtype, norm):
    check_pool(11, count, width, dtype, norm)


def test_every_cut_of_a_pool(emulated):
    for cuts in ((Plan(1, 3, 3, True), Plan(1, 2, 4, True)), (Plan(2, 2, 2, False),) * 2):
        check_pool(23, 3, 312, torch.float32, True, cuts=cuts)


MANY = [
    (17, 64, torch.float32),
    (24, 8, torch.float16),
    (25, 520, torch.bfloat16),
    (49, 264, torch.float16),
    (128, 40, torch.bfloat16),
]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("count", "width", "dtype"), MANY, ids=str)
def test_every_result_of_a_pool_of_many(emulated, count, width, dtype, norm):
    check_pool(11, count, width, dtype, norm)


@pytest.mark.parametrize("slots", [3, 4, 5, 6, 9])
def test_every_cut_of_a_pool_of_many(emulated, slots):
    """Rings that have a token, and more, up to three; rows of one chunk a thread, and of more."""
    for cut in (Plan(1, 3, slots, False), Plan(2, 2, slots, True), Plan(3, 1, slots, True)):
        check_pool(23, 19, 200, torch.float32, True, cuts=(cut, cut))


def test_a_pool_of_many_is_the_pool_of_few(emulated, monkeypatch):
    """The same rules for all numbers of sources, down to one."""
    monkeypatch.setattr(few, "MOST", 0)
    for count, kind in ((1, "plain"), (4, "equal"), (20, "equal")):
        *_, dquery = check_pool(7, count, 64, torch.float32, False, kind=kind)
        assert dquery.abs().max() == 0
    check_pool(9, 3, 64, torch.float32, True, scale=4.0)


def test_gradients_of_a_pool_of_many_that_are_not_wanted(emulated):
    sources = [torch.randn(6, 64) for _ in range(20)]
    query, grad = torch.randn(64), torch.randn(6, 64)
    _, saved = depth.forward(sources, query, None, 0.3, 1e-6)
    everything, *_ = depth.backward(grad, sources, query, None, saved, 0.3, [True] * 20)
    wanted = [i % 3 == 1 for i in range(20)]
    some, dquery, _ = depth.backward(
        grad, sources, query, None, saved, 0.3, wanted, query_wanted=False
    )
    assert dquery is None
    for want, a, b in zip(wanted, some, everything, strict=True):
        assert torch.equal(a, b) if want else a is None


def test_cuts_of_a_pool_of_many_fit():
    """Into the shared memory of a block, with room for a token; and threads for its barriers."""
    for count in (17, 25, 49, 73, 128):
        for width in (8, 256, 384, 768, 1024, 1280, 2048, 4096):
            for itemsize, backward in ((2, False), (2, True), (4, False), (4, True)):
                what = Many(count, width, itemsize, backward)
                cut = what.plan()
                fits = 8 * what.groups * (width * itemsize + 16) < launch.SHARED - 16 * 1024
                assert cut is not None or not fits
                if cut is not None:
                    assert what.dynamic_bytes(cut) <= launch.SHARED - many.STATIC
                    assert cut.slots >= what.groups
                    assert cut.teams <= 15
                    assert 32 * cut.teams * cut.warps <= (512 if backward else 768)
                    assert cut.warps * 512 >= width * itemsize or not cut.hold
    assert Many(129, 64, 2, False).plan() is None
    rows = [torch.empty(3, 64)] * 129
    assert depth.takes(rows[:128])
    assert not depth.takes(rows)


def test_one_source_and_equal_sources_do_not_move_the_query(emulated):
    for count, kind in ((1, "plain"), (4, "equal")):
        *_, dquery = check_pool(7, count, 64, torch.float32, False, kind=kind)
        assert dquery.abs().max() == 0


def test_a_pool_that_looks_at_one_source_alone(emulated):
    """Saturated weights: the gradient of the logits is what is left of nearly equal numbers."""
    check_pool(9, 3, 64, torch.float32, True, scale=4.0)


@pytest.mark.parametrize("count", [5, 20])
def test_what_is_left_of_a_weight_that_is_nearly_one(emulated, count):
    """The others have about 1e-7: autograd in float32 keeps one digit of the query's gradient."""
    torch.manual_seed(3)
    sources = [torch.randn(9, 64) for _ in range(count)]
    query, grad = torch.randn(64), torch.randn(9, 64)
    sources[3] = 3 * query + 0.01 * torch.randn(9, 64)
    _, saved = depth.forward(sources, query, None, 0.3, 1e-6)
    _, dquery, _ = depth.backward(grad, sources, query, None, saved, 0.3, [True] * count)
    given = [*sources, query, query], grad, 0.3, False
    exact, eager = pooled(*given, torch.float64)[2], pooled(*given, torch.float32)[2]
    assert (dquery.double() - exact).norm() <= 1e-5 * exact.norm()
    assert (eager.double() - exact).norm() >= 1e-3 * exact.norm()


def test_gradients_of_a_pool_that_are_not_wanted(emulated):
    sources = [torch.randn(6, 64) for _ in range(3)]
    query, grad = torch.randn(64), torch.randn(6, 64)
    _, saved = depth.forward(sources, query, None, 0.3, 1e-6)
    everything = depth.backward(grad, sources, query, None, saved, 0.3, [True] * 3)
    some, dquery, dnorm = depth.backward(
        grad, sources, query, None, saved, 0.3, [False, True, False], query_wanted=False
    )
    assert torch.equal(some[1], everything[0][1])
    assert [some[0], some[2], dquery, dnorm] == [None] * 4
    nothing, dquery, _ = depth.backward(grad, sources, query, None, saved, 0.3, [False] * 3)
    assert nothing == [None] * 3
    assert torch.equal(dquery, everything[1])


def shifted(tensor):
    return torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def test_tensors_at_odd_addresses(emulated):
    """Views that do not begin at a multiple of 16 bytes are copied before they are read."""
    leaves, grads = problem(5, 3, 64, True, torch.float32)
    leaves, grads = [list(map(shifted, tensors)) for tensors in (leaves, grads)]
    assert leaves[2].data_ptr() % 16
    check(leaves, grads, True, True)


def test_a_pool_keeps_its_kernel_whatever_becomes_of_its_sources(emulated):
    """Saved at odd addresses, handed back at even ones: what was saved beside them still fits."""
    sources = [shifted(torch.randn(6, 64)).requires_grad_() for _ in range(3)]
    query = torch.randn(64)
    results = []
    for backend in ("cuda", "torch"):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            if backend == "cuda":
                h, _ = fused(sources, query, None, 0.3, 1e-6, "cuda")
            else:
                h = depth_reference.depth_pool(sources, query, 0.3, None, 1e-6)
        results.append(torch.autograd.grad(h.square().sum(), sources))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_another_default_dtype(emulated, monkeypatch):
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        sources = [torch.randn(6, 64, dtype=torch.float32) for _ in range(2)]
        query, grad = torch.randn(64, dtype=torch.float32), torch.randn(6, 64, dtype=torch.float32)
        _, saved = depth.forward(sources, query, None, 0.3, 1e-6)
        _, dquery, _ = depth.backward(grad, sources, query, None, saved, 0.3, [True] * 2)
    finally:
        torch.set_default_dtype(torch.float32)
    exact = pooled([*sources, query, query], grad, 0.3, False, torch.float64)[2]
    torch.testing.assert_close(dquery, exact.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("n", "width", "dtype", "steps"),
    [
        (1, 8, torch.bfloat16, 1),
        (3, 40, torch.float32, 2),
        (4, 768, torch.bfloat16, 5),
        (8, 4104, torch.bfloat16, 9),
        (16, 72, torch.float16, 17),
    ],
)
@pytest.mark.parametrize("competitive", [True, False])
def test_steps_are_replayed_to_the_bit(emulated, n, width, dtype, steps, competitive):
    """The lanes of a step's gates in one round of the block or in several; slabs; more steps than
    one launch has."""
    (_, streams, _, w_pool, _, gain), _ = problem(3, n, width, competitive, dtype)
    state, states, given = streams, [], []
    for _ in range(steps):
        y, w_gate = torch.randn(3, width).to(dtype), torch.randn(width)
        bias = torch.randn(n + competitive)
        call = (y, state.unbind(1), w_gate, w_pool, bias, gain, competitive, 1e-6)
        _, state, saved = cuda.forward(*call)
        states.append(state)
        given.append((y, saved))
    found = cuda.replay(streams, *zip(*given, strict=True))
    assert len(found) == steps
    for a, b in zip(found, states, strict=True):
        assert torch.equal(a, b)
    assert cuda.replay(streams[:0], [y[:0]], [saved[:0]])[0].numel() == 0


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16], ids=["one dtype", "two dtypes"])
def test_steps_are_replayed_from_whatever_tensors_there_are(emulated, other):
    """Odd addresses, strides, biases in 16 bits; an output of another dtype, whose step is
    Triton's, behind one that the CUDA kernels take."""
    torch.manual_seed(0)
    start = shifted(torch.randn(2, 3, 2, 64))
    state, states, ys, weights, saved = start, [], [], [], []
    for dtype in (torch.float32, other, torch.float32):
        ys.append(shifted(torch.randn(2, 3, 64)).to(dtype))
        weights.append((torch.randn(64), torch.randn(64), torch.randn(3).bfloat16(), None))
        call = (ys[-1], state, weights[-1], "competitive", 1e-6, "cuda")
        _, state, kept = passes.forward(*call)
        states.append(state)
        saved.append(kept)
    assert start.data_ptr() % 16
    assert ys[0].data_ptr() % 16
    turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (start, *ys)]
    for first, *given in ((start, *ys), turned):
        found = passes.replay(first, given, weights, saved, "competitive", 1e-6, "cuda")
        for a, b in zip(found, states, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("n", "tokens", "width", "dtype"),
    [
        (1, 2049, 8, torch.bfloat16),
        (3, 682 + 7, 4, torch.float32),
        (4, 512, 8, torch.float16),
        (12, 2 * 170 + 1, 8, torch.bfloat16),
        (16, 3, 2056, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("competitive", [True, False], ids=["competitive", "independent"])
def test_the_largest_gates_are_kept(emulated, monkeypatch, n, tokens, width, dtype, competitive):
    """Of every group, also of a last one that is smaller, even than what a group keeps."""
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    (y, streams, *weights, _), _ = problem(tokens, n, width, competitive, dtype)
    _, _, saved = cuda.forward(y, streams.unbind(1), *weights, None, competitive, 1e-6)
    beta = passes.gates(saved, streams)
    group = 2048 // n
    for millionths in (0, 10_000, 1_000_000):
        count = math.ceil(group * n * millionths / 1e6)
        kept, places = cuda.keep(streams.unbind(1), saved, millionths)
        assert places.dtype == torch.int32
        taken = places[places >= 0].long()
        assert torch.equal(kept[taken], streams[places >= 0])
        assert taken.unique().numel() == taken.numel()
        if tokens % group == 0:
            # The groups of the reference, and so its choice.
            _, index = passes.largest(streams, beta, millionths)
            assert (places.flatten() >= 0).nonzero().flatten().tolist() == sorted(index.tolist())
        for i, here in enumerate(places.split(group)):
            gates = beta[i * group : (i + 1) * group]
            wanted = min(count, gates.numel())
            assert (here >= 0).sum() == wanted
            assert ((here < 0) | (here // max(count, 1) == i)).all()
            assert not kept[i * count + wanted : (i + 1) * count].any()
            if wanted:
                least = gates.flatten().topk(wanted).values.min()
                assert (gates[here >= 0] >= least * (1 - 1e-5)).all()
    assert cuda.keep(streams[:0].unbind(1), saved[:0], 10)[0].numel() == 0


def test_of_equal_gates_the_first_are_kept(emulated):
    streams, saved = torch.randn(700, 3, 4), torch.zeros(700, saved_numbers(3))
    beta = saved_gates(saved, 3)
    beta[:] = 0.3
    beta[600:610, 1] = 0.9
    beta[605, 2] = math.nan
    _, places = cuda.keep(streams.unbind(1), saved, 10_000)
    first = places[:682].flatten()
    opened = 3 * torch.arange(600, 610) + 1
    chosen = (first >= 0).nonzero().flatten()
    assert chosen.tolist() == [*range(10), *sorted([*opened.tolist(), 3 * 605 + 2])]
    assert (places[682:].flatten() >= 0).nonzero().flatten().tolist() == list(range(21))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("memory", ["recompute", "invert", "exact"])
@pytest.mark.parametrize("residual", ["mgr-competitive", "mgr-independent"])
def test_the_memory_modes_of_a_whole_stack(emulated, monkeypatch, residual, memory, compiled):
    """By the same kernels as store, and so with its gradients to the bit."""
    torch._dynamo.reset()
    module = sys.modules["multigate.ops.gate_pool"]
    monkeypatch.setattr(module, "choose", at_trace_time(lambda *_: "cuda"))

    def gradients(memory):
        torch.manual_seed(0)
        sublayers = [torch.nn.Linear(40, 40) for _ in range(7)]
        stack = mg.Stack(sublayers, residual, 40, 3, memory=memory, every=3)
        x = torch.randn(2, 9, 40, requires_grad=True)
        run = torch.compile(stack, backend="aot_eager", fullgraph=True) if compiled else stack
        (run(x) * torch.randn(2, 9, 40)).sum().backward()
        assert not stack.residual.lost
        return [x.grad, *(p.grad for p in stack.parameters())]

    for a, b in zip(gradients(memory), gradients("store"), strict=True):
        assert torch.equal(a, b) if memory != "invert" else (a - b).norm() <= 1e-5 * b.norm() + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("passed", ["forward", "backward"])
@pytest.mark.parametrize(("case", "n"), [("gate_pool", 4), ("depth_pool", 4), ("depth_pool", 20)])
def test_other_launches_give_the_same(emulated, case, n, passed):
    """What `benchmarks/launches.py` tries is of the kernels' own results, but for rounding."""
    pytest.importorskip("triton")
    script = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks/launches.py"))
    torch.manual_seed(0)
    size = Size(n, 768, 7, norm=True)
    problem = script["PROBLEMS"][case](case, "cuda", size, torch.device("cpu"))
    used, *others = script["candidates"](case, "cuda", passed, n, 768)
    expected = problem.run(passed, used, 0)
    for cut in (others[0], others[-1]):
        for a, b in zip(problem.run(passed, cut, 0), expected, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)
