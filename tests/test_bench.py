"""`multigate bench`: what is measured, what is refused, and what the file of results says."""

import importlib.util
import io
import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch._dynamo.utils import counters

from multigate.__main__ import parse
from multigate.bench import BenchConfig, apart, arms, bench, ops, steps, timing
from multigate.bench.arms import Absent, Arm, load_rivals, register
from multigate.bench.cases import CASES, EPS, Size, gate_inputs
from multigate.bench.figure import draw
from multigate.bench.flags import parse_flags
from multigate.bench.listing import listing
from multigate.bench.results import Results, merged
from multigate.device import choose
from multigate.ops import cuda
from multigate.ops.depth_pool import cuda as depth_cuda
from multigate.ops.depth_pool import plan as depth_plan
from multigate.ops.gate_pool import plan
from multigate.residuals import residual_names

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
CPU = torch.device("cpu")
OP_FIELDS = {
    *("case", "pass", "backend", "n", "width", "tokens", "dtype", "us", "share_of_copy"),
    *("variant", "norm", "timing", "copy_gb_s", "torch", "triton"),
}
STEP_FIELDS = {
    *("case", "scale", "residual", "n", "memory", "ms", "tokens_per_s", "peak_gib", "overhead"),
    *("baseline_ms", "backend", "tokens", "dtype", "compile", "copy_gb_s", "torch", "triton"),
}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Arms registered by a test go with it, and nothing is repeated for long."""
    monkeypatch.setattr(arms, "_ARMS", dict(arms._ARMS))
    monkeypatch.setattr(steps, "BLOCK", 1)
    monkeypatch.setattr(steps, "WARM", 1)


@pytest.fixture
def config(tmp_path):
    return BenchConfig(
        device="cpu",
        cases=("gate_pool",),
        widths=(24,),
        streams=(4,),
        sources=(3,),
        tokens=(5,),
        repeats=2,
        rounds=1,
        batch=1,
        scales=("tiny",),
        out=tmp_path,
        machine="here",
        rivals=tmp_path,
    )


def run(config):
    """The rows of the file, and what was shown."""
    screen = io.StringIO()
    bench(config, Console(file=screen, width=200))
    return json.loads((config.out / "here.json").read_text()), screen.getvalue()


def test_the_rows_of_the_operations(config):
    cases = ("gate_pool", "depth_pool")
    found, shown = run(replace(config, cases=cases, streams=(2, 4), widths=(8, 24)))
    assert set(found) == {"machine", "copy_gb_s", "rows"}
    assert found["copy_gb_s"] > 0
    assert len(found["rows"]) == 2 * 2 * (2 * 2 + 2)
    for row in found["rows"]:
        assert set(row) == OP_FIELDS
        assert row["us"] > 0
        assert row["timing"] == "clock"
        assert row["backend"] in ("reference", "torch")
        assert (row["tokens"], row["dtype"]) == (5, "fp32")
        assert row["torch"] == torch.__version__
    sizes = {(r["case"], r["pass"], r["n"], r["width"]) for r in found["rows"]}
    assert ("gate_pool", "backward", 2, 24) in sizes
    assert ("depth_pool", "forward", 3, 8) in sizes
    assert "depth_pool backward" in shown


def test_share_of_copy_by_hand(config, monkeypatch):
    """A call of 100 us where a copy moves 50 GB/s."""
    monkeypatch.setattr(ops, "measure", lambda call, sets, device, repeats: (100.0, "graph"))
    size = Size(4, 24, 7, torch.float32)
    for case, factors in (("gate_pool", (10, 15)), ("depth_pool", (5, 9))):
        arm = next(arm for arm in arms.arms(case) if arm.name == "torch")
        rows = ops.measure_arm(arm, size, ("forward", "backward"), CPU, 50.0)
        for row, vectors in zip(rows, factors, strict=True):
            moved = vectors * 24 * 7 * 4
            assert row["share_of_copy"] == pytest.approx(moved / 100e-6 / 50e9)
            assert row["timing"] == "graph"
    moved = CASES["gate_pool"].bytes_moved(Size(8, 1024, 32768, torch.bfloat16), "backward")
    assert moved == 27 * 1024 * 32768 * 2


def test_a_later_run_replaces_only_its_own_rows(config):
    first, _ = run(replace(config, streams=(2, 4)))
    second, _ = run(replace(config, streams=(4, 3), passes=("backward",)))
    assert second["copy_gb_s"] != first["copy_gb_s"]
    for backend in ("reference", "torch"):
        before, after = ([r for r in f["rows"] if r["backend"] == backend] for f in (first, second))
        pairs = [(2, "forward"), (2, "backward"), (4, "forward"), (4, "backward"), (3, "backward")]
        assert [(r["n"], r["pass"]) for r in after] == pairs
        assert after[:3] == before[:3]
        assert after[3]["copy_gb_s"] == second["copy_gb_s"]


def test_an_error_is_replaced_when_the_arm_works():
    row = {"case": "gate_pool", "pass": "forward", "backend": "cuda", "n": 4}
    other = {**row, "norm": True, "us": 2.0}
    rows = merged([{**row, "error": "no compiler."}, other], [{**row, "us": 1.0}])
    assert rows == [{**row, "us": 1.0}, other]
    pair = [{"case": "step", "compile": on, "ms": 1.0} for on in (True, False)]
    assert merged(pair[:1], pair[1:]) == pair


def test_results_of_another_machine_are_kept_safe(tmp_path):
    Results(tmp_path / "x.json", "one GPU", 1.0).add({"case": "step"})
    with pytest.raises(ValueError, match="holds results of one GPU, not of another"):
        Results(tmp_path / "x.json", "another", 1.0)


def wrong(change):
    """The reference with something changed."""

    def forward(x):
        return change(x, *CASES["gate_pool"].reference(x))

    return Arm("gate_pool", "wrong", lambda x: forward, kernel=False)


def without(name):
    """The reference without the gradient of one input."""
    index = ("y", "streams", "w_gate", "w_pool", "bias").index(name)

    def forward(x):
        y, streams, *weights = (
            t.detach() if i == index else t for i, t in enumerate((*x.rows, *x.weights))
        )
        x = replace(x, rows=(y, streams), weights=tuple(weights))
        return CASES["gate_pool"].reference(x)

    return Arm("gate_pool", "wrong", lambda x: forward, kernel=False)


def test_rows_between_the_ends_must_have_been_written():
    """Only the ends are compared, but free memory was poisoned: what is left out is NaN."""

    def skip(x, h, s):
        h = h.clone()
        h[150] = torch.nan
        return h, s

    (row,) = ops.measure_arm(wrong(skip), Size(2, 8, 300, torch.float32), ("forward",), CPU, 1.0)
    assert row["error"] == "a result is not finite."


@pytest.mark.parametrize(
    ("arm", "passed", "said"),
    [
        (wrong(lambda x, h, s: (h * 1.001, s)), "forward", "h is off by 1.0e-03"),
        (wrong(lambda x, h, s: (h, s + 0.01)), "forward", "the new streams is off by"),
        (wrong(lambda x, h, s: (h * torch.nan, s)), "forward", "a result is not finite"),
        (wrong(lambda x, h, s: (h * 1.001, s)), "backward", "the gradient of y is off by"),
        (without("y"), "backward", "no gradient of y"),
        (without("streams"), "backward", "no gradient of streams"),
        (without("w_gate"), "backward", "no gradient of w_gate"),
        (without("w_pool"), "backward", "no gradient of w_pool"),
        (without("bias"), "backward", "no gradient of bias"),
    ],
)
def test_a_wrong_arm_is_reported_and_not_timed(config, monkeypatch, arm, passed, said):
    def never(*_):
        raise AssertionError("a wrong arm was timed")

    monkeypatch.setattr(ops, "measure", never)
    (row,) = ops.measure_arm(arm, Size(4, 24, 5, torch.float32), (passed,), CPU, 1.0)
    assert "us" not in row
    assert said in row["error"]


def test_only_the_ends_are_compared_but_every_sum():
    """A token in the middle of many is not looked at; the last one is, and the weights' sums."""

    def spoil(at):
        def change(x, h, s):
            h = h.clone()
            if at < len(h):
                h[at] = 9.0
            return h, s

        return wrong(change)

    size = Size(2, 8, 400, torch.float32)
    x = gate_inputs(size, CPU)
    for at, fine in ((200, True), (0, False), (399, False)):
        arm = spoil(at)
        if fine:
            ops.check_forward(arm, CASES["gate_pool"], arm.prepare(x), x)
            ops.check_backward(arm, CASES["gate_pool"], arm.prepare(x), x)
        else:
            with pytest.raises(ops.Wrong):
                ops.check_forward(arm, CASES["gate_pool"], arm.prepare(x), x)
            with pytest.raises(ops.Wrong):
                ops.check_backward(arm, CASES["gate_pool"], arm.prepare(x), x)


def test_arms_that_fail_are_rows_and_absent_ones_a_line(config):
    def fail(x):
        raise RuntimeError("the device is on fire\nand more")

    def absent(x):
        raise Absent("its package is not there.")

    register(Arm("gate_pool", "fails", fail, kernel=False))
    register(Arm("gate_pool", "peer", absent, kernel=False))
    found, shown = run(replace(config, widths=(8, 24)))
    once = [name for name in ("reference", "torch", "fails") for _ in ("forward", "backward")]
    assert [r["backend"] for r in found["rows"]] == once * 2
    for row in found["rows"]:
        if row["backend"] == "fails":
            assert row["error"] == "RuntimeError: the device is on fire"
        assert ("us" in row) == (row["backend"] != "fails")
    assert shown.count("gate_pool, peer: its package is not there.") == 1


def test_a_kernel_asked_for_without_a_gpu_is_a_row(config):
    found, _ = run(replace(config, backends=("cuda", "torch"), passes=("forward",)))
    rows = {r["backend"]: r for r in found["rows"]}
    assert set(rows) == {"torch", "cuda"}
    assert rows["cuda"]["error"] == "it needs a CUDA device."


def needs_triton():
    pytest.importorskip("triton")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1 before triton is imported")


@pytest.mark.parametrize(("case", "n"), [("gate_pool", 3), ("depth_pool", 4)])
def test_the_fused_operations_pass_their_check(case, n):
    """In Triton's interpreter; a kernel that would fall back to another has no time."""
    needs_triton()
    if torch.cuda.is_available():
        pytest.skip("on a GPU they are not interpreted")
    found = {arm.name: replace(arm, kernel=False) for arm in arms.arms(case)}
    size = Size(n, 24, 5, torch.float32, norm=True)
    for row in ops.measure_arm(found["triton"], size, ("forward", "backward"), CPU, 1.0, 1):
        assert "us" in row, row
    size = replace(size, dtype=torch.float64)
    x = CASES[case].inputs(size, CPU)
    with pytest.raises(arms.Unsupported, match="triton has no kernel for torch.float64"):
        found["triton"].prepare(x)
    if case == "gate_pool":
        with pytest.raises(arms.Unsupported, match="cuda does not run on cpu"):
            found["cuda"].prepare(gate_inputs(replace(size, dtype=torch.float32), CPU))


def test_an_arm_of_other_maths_need_only_be_finite():
    size = Size(2, 8, 3, torch.float32)
    for factor, fine in ((3.0, True), (torch.nan, False)):
        arm = replace(wrong(lambda x, h, s, f=factor: (h * f, s)), same=False, note="other")
        (row,) = ops.measure_arm(arm, size, ("forward",), CPU, 1.0, repeats=1)
        assert ("us" in row) == fine
        assert row["note"] == "other"


@pytest.mark.parametrize("variant", ["competitive", "independent"])
def test_the_listing_is_the_step(variant):
    torch.manual_seed(0)
    x = gate_inputs(Size(3, 16, 6, torch.float64, variant), CPU)
    x = ops.trainable(x.mapped(torch.Tensor.double, torch.Tensor.double))

    def results(outputs):
        gradients = [torch.linspace(-1, 1, o.numel()).view(o.shape).double() for o in outputs]
        return [*outputs, *torch.autograd.grad(outputs, x.leaves(), gradients)]

    y, streams = (t.unsqueeze(0) for t in x.rows)
    found = [t.squeeze(0) for t in listing(y, streams, *x.weights, variant, EPS)]
    for a, b in zip(results(found), results(CASES["gate_pool"].reference(x)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.fixture
def paper():
    """The paper's fusion as an arm."""
    needs_triton()
    path = BENCHMARKS / "paper_fusion.py"
    spec = importlib.util.spec_from_file_location("paper_fusion_tested", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return next(arm for arm in arms.arms("gate_pool") if arm.name == "paper")


@pytest.mark.parametrize(
    ("n", "width", "tokens", "variant", "dtype"),
    [
        (4, 40, 9, "competitive", torch.float32),
        (1, 7, 5, "independent", torch.float32),
        (3, 600, 6, "independent", torch.float32),
        (2, 1300, 3, "competitive", torch.float32),
        (4, 264, 5, "competitive", torch.bfloat16),
    ],
)
def test_the_papers_fusion_is_the_step(paper, monkeypatch, n, width, tokens, variant, dtype):
    """Outputs and every gradient against float64, on memory that was NaN before."""
    monkeypatch.setitem(ops.TOLERANCE, torch.float32, 3e-6)
    monkeypatch.setattr(
        torch, "empty_like", lambda t, **k: torch.full_like(t, torch.nan, **k), raising=True
    )
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = gate_inputs(Size(n, width, tokens, dtype, variant), device)
    forward = paper.prepare(x)
    ops.check_forward(paper, CASES["gate_pool"], forward, x)
    ops.check_backward(paper, CASES["gate_pool"], forward, x)


def test_the_papers_fusion_says_what_it_cannot_do(paper):
    size = Size(2, 8, 3, torch.float32, norm=True)
    (row,) = ops.measure_arm(replace(paper, kernel=False), size, ("forward",), CPU, 1.0)
    assert row["error"] == "the paper's fusion has no norm after the pool."


def test_rivals_are_found_in_their_folder(monkeypatch, tmp_path):
    for name in ("paper_fusion", "peers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "paper_fusion.py").write_text("import no_such_package")
    code = "from multigate.bench.arms import *\nregister(Arm('gate_pool', 'mine', eager))"
    (tmp_path / "peers.py").write_text(code)
    said = []
    load_rivals(tmp_path, said.append)
    assert "mine" in [arm.name for arm in arms.arms("gate_pool")]
    assert said == [
        f"{tmp_path / 'paper_fusion.py'} is left out: it needs the package no_such_package."
    ]
    monkeypatch.delitem(sys.modules, "peers")


def test_peers_that_are_not_installed_are_absent(monkeypatch):
    for name in ("fla", "liger_kernel"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "peers", raising=False)
    load_rivals(BENCHMARKS)
    for case, name in (("depth_pool", "fla"), ("depth_pool", "liger"), ("gate_pool", "liger-mhc")):
        arm = next(arm for arm in arms.arms(case) if arm.name == name)
        with pytest.raises(Absent, match="no row, as"):
            arm.prepare(CASES[case].inputs(Size(2, 8, 3, torch.float32), CPU))


def test_the_figure(config, tmp_path):
    pytest.importorskip("matplotlib")
    _, _ = run(replace(config, widths=(8, 24), streams=(2, 4)))
    assert (config.out / "here.png").read_bytes()[:4] == b"\x89PNG"
    failed = {"case": "gate_pool", "pass": "forward", "norm": False, "error": "no."}
    assert not draw([failed], tmp_path / "none.png", "here")
    assert not (tmp_path / "none.png").exists()


def test_without_matplotlib_the_rows_are_kept(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    found, shown = run(config)
    assert len(found["rows"]) == 2 * 2
    assert "the figure needs the package matplotlib" in shown


def test_the_rows_of_the_steps(config):
    residuals = ("prenorm", "mgr-competitive", "attnres-block")
    found, shown = run(replace(config, what="steps", residuals=residuals, streams=(4, 16)))
    rows = {(r["residual"], r["n"]): r for r in found["rows"]}
    assert list(rows) == [
        ("prenorm", 1),
        ("mgr-competitive", 4),
        ("mgr-competitive", 16),
        ("attnres-block", 4),
        ("attnres-block", 16),
    ]
    failed = rows.pop(("attnres-block", 16))
    assert "cannot cut 12 sublayers into 16 blocks" in failed["error"]
    assert "ms" not in failed
    for row in rows.values():
        assert set(row) == STEP_FIELDS
        assert (row["case"], row["scale"], row["memory"]) == ("step", "tiny", "store")
        assert row["tokens"] == 256
        assert row["tokens_per_s"] == pytest.approx(256 / row["ms"] * 1e3)
        assert row["overhead"] == pytest.approx(row["ms"] / row["baseline_ms"] - 1)
    assert rows["prenorm", 1]["overhead"] == 0
    assert "attnres-block" in shown


def test_steps_of_every_memory_mode(config):
    """Where a residual has them; the mode that was asked for is the one that runs."""
    residuals, memory = ("mgr-competitive", "denseformer"), ("store", "invert", "exact")
    found, shown = run(
        replace(config, what="steps", residuals=residuals, streams=(4,), memory=memory)
    )
    rows = [(r["residual"], r["memory"], r.get("error")) for r in found["rows"]]
    assert rows == [*((residuals[0], mode, None) for mode in memory), (residuals[1], "store", None)]
    assert "mgr-competitive n=4 invert:" in shown
    for scale in ("tiny", "wide"):
        with torch.device("meta"):
            model = steps.candidate(scale, residuals[0], 4, 1, choose("cpu"), "invert").model
        assert model.stack.residual.memory.mode == "invert"


def test_steps_alternate_so_that_drift_cancels(monkeypatch):
    """Times that grow by a tenth a turn: the overhead is still that of the models."""
    turns = []

    def fake(model):
        turns.append(model.model)
        return [(10.0 if model.model == "A" else 12.0) + 0.1 * len(turns)]

    monkeypatch.setattr(steps, "timed", fake)
    monkeypatch.setattr(steps, "warm_up", lambda model: 1.5)
    a, b = (steps.Candidate(name, None, (), None) for name in "AB")
    row = steps.beside(a, b, 3, 100)
    assert "".join(turns) == "ABBA" * 3
    assert row["ms"] - row["baseline_ms"] == pytest.approx(2.0)
    assert row["peak_gib"] == 1.5


@pytest.mark.slow
def test_steps_in_processes_of_their_own(config):
    """The same rows; what cannot be built is a row as well."""
    residuals = ("prenorm", "mgr-competitive", "attnres-block")
    told = replace(config, what="steps", residuals=residuals, streams=(16,), jobs=2)
    rows = run(told)[0]["rows"]
    assert [r["residual"] for r in rows] == list(residuals)
    assert [set(r) for r in rows[:2]] == [STEP_FIELDS, STEP_FIELDS]
    assert rows[0]["overhead"] == 0
    assert rows[1]["overhead"] == pytest.approx(rows[1]["ms"] / rows[1]["baseline_ms"] - 1)
    assert "cannot cut 12 sublayers into 16 blocks" in rows[2]["error"]


def test_a_process_that_dies_is_a_row():
    (job,) = steps.planned("tiny", ["prenorm"], (4,), choose("cpu"), batch=1, rounds=1)
    workers = [apart.Worker(job, 1) for _ in range(2)]
    workers[0].process.kill()
    for worker in workers:
        worker.wait()
    workers[1].process.kill()
    for worker in workers:
        row = worker.row()
        assert row["residual"] == "prenorm"
        assert row["error"] == "its process ended with status -9."


def compilations():
    """Graphs that Inductor was given, be it to compile them or to find them in its cache."""
    return sum(n for name, n in counters["inductor"].items() if name.startswith("fxgraph_cache"))


def test_nothing_runs_before_its_turn(monkeypatch, tmp_path):
    """Both passes are compiled behind the gate; then they run, with the weights brought back."""
    # A cache that had both passes would hide that only one was asked for.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compute = choose("cpu", compile="on")
    made = [torch.nn.Linear(3, 1) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    counters.clear()
    gate, ran = apart.Gate(), []
    model = made[0]
    x = torch.randn(5, 3)

    def loss(x):
        return model(x).square().sum()

    call = torch.compile(loss, backend=gate)
    candidate = steps.Candidate(model, lambda x: ran.append(call(x)) or ran[-1], (x,), compute)
    assert gate.compiled(candidate) is candidate
    assert not ran
    assert compilations() == 2
    apart.put_aside(model)
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    apart.bring_back(model, made[1])
    gate.open = True
    with torch._dynamo.config.patch(error_on_recompile=True):
        candidate.step()
    assert compilations() == 2
    torch.testing.assert_close(ran[0], made[1](x).square().sum())


def test_the_wide_stack(config, monkeypatch):
    monkeypatch.setattr(steps, "WIDE", {"blocks": 2, "width": 32, "heads": 2, "length": 6})
    chosen = ("mgr-competitive", "prenorm")
    jobs = steps.planned("wide", chosen, (2,), choose("cpu"), batch=2, rounds=1)
    rows = list(steps.measure_steps(jobs))
    assert [r.get("error") for r in rows] == [None, None]
    assert rows[0]["tokens"] == 12
    compute = choose("cpu")
    model = steps.candidate("wide", "mgr-competitive", 2, 2, compute)
    loss = model.call(*model.data)
    loss.backward()
    assert all(p.grad is not None for p in model.model.parameters())
    assert model.data[0].grad is not None
    model.step()
    assert model.data[0].grad is None


def test_a_scale_without_a_baseline_loses_its_own_rows_only(monkeypatch):
    jobs = [
        *steps.planned("wide", ("prenorm", "mgr-competitive"), (2,), choose("cpu"), 2, 1),
        *steps.planned("tiny", ("prenorm",), (2,), choose("cpu"), 1, 1),
    ]
    real = steps.candidate

    def candidate(scale, *rest, **more):
        if scale == "wide":
            raise torch.OutOfMemoryError("no room.")
        return real(scale, *rest, **more)

    monkeypatch.setattr(steps, "candidate", candidate)
    rows = list(steps.measure_steps(jobs))
    assert ["error" in row for row in rows] == [True, True, False]


def test_every_residual_is_stepped():
    names = steps.all_residuals()
    assert names[0] == "prenorm"
    assert sorted(names) == sorted(residual_names())
    assert [n for n in names if not steps.takes(n, streams=2)] == [
        *("prenorm", "highway", "denseformer", "attnres-full")
    ]


def test_buffers_are_rotated_past_the_cache(monkeypatch):
    cache = SimpleNamespace(L2_cache_size=60 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cache)
    device = torch.device("cuda")
    for size, sets in ((1 << 30, 1), (100 << 20, 3), (30 << 20, 8), (1 << 10, timing.MOST_SETS)):
        assert timing.sets_needed(size, device) == sets
    assert timing.sets_needed(1, CPU) == 1


def test_the_copy_counts_both_directions(monkeypatch):
    monkeypatch.setattr(timing, "clock", lambda call, sets, device, repeats: 1000.0)
    assert timing.copy_gb_s(CPU, gib=1 / 1024) == pytest.approx(2 * 2**20 / 1e-3 / 1e9)


def test_the_median_call_is_what_is_reported(monkeypatch):
    """Calls that take 5, 1, 1, 9 and 1 s of a clock of our own, over two sets in turn."""
    now, seen = [0.0], []
    waits = iter([7.0, 5.0, 1.0, 1.0, 9.0, 1.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call(i):
        seen.append(i)
        now[0] += next(waits)

    us, how = timing.measure(call, 2, CPU, 5)
    assert (us, how) == (1e6, "clock")
    assert seen == [0, 0, 1, 0, 1, 0]


def test_flags_with_and_without_tyro():
    flags = "--what sweep --cases gate_pool --widths 768 1024 --streams 4 --norm True --batch 3"
    flags += " --backends torch cuda --out there --machine h --scales s wide --dtype bf16"
    line = flags.split()
    wanted = BenchConfig(
        what="sweep",
        cases=("gate_pool",),
        widths=(768, 1024),
        streams=(4,),
        norm=True,
        batch=3,
        backends=("torch", "cuda"),
        out=Path("there"),
        machine="h",
        scales=("s", "wide"),
        dtype="bf16",
    )
    assert parse_flags(BenchConfig, line) == parse(BenchConfig, line, "bench") == wanted
    assert parse_flags(BenchConfig, []) == parse(BenchConfig, [], "bench") == BenchConfig()
    assert parse_flags(BenchConfig, [], what="steps") == BenchConfig(what="steps")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cases": ("gate_poll",)}, "gate_poll"),
        ({"passes": ("sideways",)}, "sideways"),
        ({"scales": ("xl",)}, "xl"),
        ({"residuals": ("mgr",)}, "mgr"),
        ({"tokens": (0,)}, "tokens must be at least 1 each"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"jobs": 0}, "jobs must be at least 1"),
    ],
)
def test_what_does_not_exist_is_said_at_once(changes, said):
    with pytest.raises(ValueError, match=said):
        BenchConfig(**changes)


def test_an_unknown_backend_is_said_at_once(config):
    with pytest.raises(ValueError, match="cudnn"):
        bench(replace(config, backends=("cudnn",)), Console(file=io.StringIO()))


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ops.py", "steps.py"])
def test_the_scripts_run(script, tmp_path):
    flags = "--device cpu --widths 8 --tokens 4 --repeats 1 --scales tiny --batch 1 --rounds 1"
    command = [sys.executable, str(BENCHMARKS / script), *flags.split(), "--out", str(tmp_path)]
    if script == "steps.py":
        command += ["--residuals", "prenorm"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "kept in" in shown
    (found,) = tmp_path.glob("*.json")
    assert json.loads(found.read_text())["rows"]


def launches(*problem):
    """What is in use, which is None and comes first, and the others."""
    first, *others = runpy.run_path(str(BENCHMARKS / "launches.py"))["candidates"](*problem)
    assert first is None
    return others


def test_the_launches_of_gate_pool_that_are_tried():
    """Every one is a launch that the kernels take."""
    launch = pytest.importorskip("multigate.ops.gate_pool.triton").Launch
    for passed in ("forward", "backward"):
        others = launches("gate_pool", "triton", passed, 4, 768)
        assert len({tuple(o.items()) for o in others}) == len(others) > 40
        assert all(launch(**o).block <= launch(**o).warps for o in others)
    for n, width, least in ((4, 768, 45), (8, 4096, 9)):
        others = launches("gate_pool", "cuda", "forward", n, width)
        assert len(set(others)) == len(others) >= least
        assert all(32 * cut.warps * cut.teams * cut.registers <= 65536 for cut in others)
        assert not any(cut.slots for cut in others)
    for n, width in ((4, 768), (4, 1024), (8, 768)):
        others = launches("gate_pool", "cuda", "backward", n, width)
        assert len(set(others)) == len(others) > 20
        what = plan.problem(n, width, 2, *[torch.empty(0)] * 2)
        assert cuda.plan(what) in others
        assert all(cut.slots % -(-width // (256 * cut.warps)) == 0 for cut in others)


@pytest.mark.parametrize("passed", ["forward", "backward"])
@pytest.mark.parametrize(
    ("sources", "width"), [(5, 768), (9, 1280), (25, 768), (49, 1024), (73, 1280)]
)
def test_the_launches_of_depth_pool_that_are_tried(passed, sources, width):
    """What is in use is among them, and all others are launches that the kernels take."""
    pytest.importorskip("triton")
    others = launches("depth_pool", "triton", passed, sources, width)
    assert len(set(others)) == len(others) > 10
    used = depth_plan.plan(sources, width, 2, passed == "backward")
    # Forward there is a program for every block of tokens.
    assert (used if passed == "backward" else replace(used, programs=1)) in others
    others = launches("depth_pool", "cuda", passed, sources, width)
    what = depth_cuda.problem(sources, width, 2, passed == "backward")
    assert what.plan(cuda.SHARED) in others
    assert len(set(others)) == len(others) > 5
    for cut in others:
        assert what.compiled(cut, cuda.SHARED)[1] <= cuda.SHARED


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_are_timed_in_graphs(config):
    backends = ("reference", "torch", "compile", "paper", "triton", "cuda")
    config = replace(
        config, device="cuda", backends=backends, tokens=(4, 5000), widths=(256,), rivals=BENCHMARKS
    )
    found, _ = run(config)
    assert len(found["rows"]) == 2 * 2 * len(backends)
    for row in found["rows"]:
        assert row.get("timing") == "graph", row
        assert 0.5 < row["us"] < 1e5
        assert row["share_of_copy"] < 1.2 or row["tokens"] == 4
