"""The estimate of a step's memory: against what the allocator holds, and against arithmetic."""

import dataclasses
import re

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import multigate as mg
from multigate.__main__ import main
from multigate.config import resolve
from multigate.fit import PARTS, Step, dry_run, estimate, in_mode, modes, target, vocabulary
from multigate.live import Live
from multigate.ops import backend
from multigate.optim import build_optimizer
from multigate.residuals.memory import MODES
from plain import by_autograd
from runs import prepared, quiet, small

OPTIM = resolve("tiny").optim
MGR = "mgr-competitive"


def tiny(**changes):
    return mg.preset("tiny", **{"blocks": 3, "width": 64, "context": 64, **changes})


def one_step(config, step):
    """What `estimate` runs, with numbers."""
    model = mg.GPT(config)
    model.stack.checkpointing = step.checkpointing
    optimizer = build_optimizer(model, OPTIM, steps=1)
    tokens = torch.zeros(step.windows, config.context, dtype=torch.long)
    for _ in range(min(step.accumulation, 2)):
        with step.autocast():
            loss = model(tokens, tokens)
        loss.backward()
    optimizer.clip()
    optimizer.step(torch.zeros(()))


def allocated(config, step):
    """The most bytes that the CPU's allocator held during a step."""
    one_step(config, step)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        one_step(config, step)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("residual", "memory", "vocab_size", "step"),
    [
        ("prenorm", "store", 4096, Step(4)),
        ("prenorm", "store", 256, Step(4, 3, checkpointing=True)),
        ("hc", "store", 256, Step(3, 1, "bf16")),
        ("attnres-block", "store", 256, Step(3, 2, "fp16")),
        (MGR, "store", 4096, Step(4, 1, "bf16")),
        (MGR, "recompute", 256, Step(4, 2, "bf16")),
        (MGR, "invert", 256, Step(4, 1, "bf16")),
        (MGR, "invert", 256, Step(4, 2, "bf16", checkpointing=True)),
        (MGR, "exact", 4096, Step(4)),
    ],
    ids=str,
)
def test_the_estimate_is_what_the_allocator_holds(residual, memory, vocab_size, step):
    """On a CPU, where a step without compilation can be measured to the byte."""
    config = tiny(residual=residual, memory=memory, vocab_size=vocab_size)
    expected = sum(estimate(config, OPTIM, step).values())
    # How long the list of "exact" is depends on the numbers; a checkpoint keeps random states.
    close = 0.03 if memory == "exact" else 0.01 if step.checkpointing else 1e-4
    assert expected == pytest.approx(allocated(config, step), rel=close)


def test_the_optimizers_own_step_counts():
    """It is the fullest moment where there are few tokens."""
    config = tiny(width=256, context=8)
    parts = estimate(config, OPTIM, Step(1))
    assert sum(parts.values()) == pytest.approx(allocated(config, Step(1)), rel=1e-3)
    assert parts["gradients"] == parts["weights"] - 2 * 8 * 128 * 4 - 8
    assert parts["working"] > parts["gradients"] / 2 > parts["sublayers"]


@pytest.mark.parametrize("attention", ["plain", "moda-ffn"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("residual", mg.residual_names())
def test_every_residual_in_every_mode_has_an_estimate(residual, precision, attention):
    config = tiny(residual=residual, attention=attention, blocks=2)
    for mode in modes(config):
        parts = estimate(in_mode(config, mode), OPTIM, Step(2, 2, precision, "cuda"))
        assert tuple(parts) == PARTS
        assert all(size > 0 for size in parts.values())


def test_weights_gradients_and_optimizer():
    config = tiny(vocab_size=4096)
    model = mg.GPT(config)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    state = build_optimizer(model, OPTIM, 1).state().values()
    for accumulation in (1, 2, 7):
        parts = estimate(config, OPTIM, Step(8, accumulation, "bf16", "cuda"))
        assert parts["weights"] == 4 * model.parameter_count() + buffers
        assert parts["optimizer"] == sum(t.numel() * t.element_size() for t in state)
        # At the peak, the head's, there are none of the first micro-batch.
        assert parts["gradients"] == (4 * model.parameter_count() if accumulation > 1 else 0)
    logits = 8 * config.context * config.vocab_size * 4
    assert 3 * logits < parts["working"] < 3.2 * logits


def test_the_modes_differ_by_the_streams_they_keep():
    """In units of the n streams of all tokens, in bfloat16; as docs/memory.md has it."""
    n, width, blocks, windows = 4, 512, 12, 8
    config = tiny(residual=MGR, streams=n, width=width, heads=4, blocks=blocks, vocab_size=50304)
    steps = 2 * blocks - (n - 1)
    unit = windows * config.context * n * width * 2

    def kept(memory, **options):
        changed = dataclasses.replace(config, memory=memory, residual_options=options)
        return estimate(changed, OPTIM, Step(windows, 1, "bf16", "cuda"))["residual"] / unit

    # The streams before the first gate are outputs of sublayers, and kept by all.
    base = kept("store") - (steps - 1)
    assert kept("recompute") - base == pytest.approx(5, abs=0.01)
    assert kept("recompute", every=7) - base == pytest.approx(3, abs=0.01)
    # All steps but the first and the last know, in 4 bytes, which streams they have kept.
    places = 4 / (2 * width)
    assert kept("invert", keep=0.0) - base == pytest.approx(1 + places * (steps - 2), abs=0.01)
    both = 1 + (places + 0.05) * (steps - 2)
    assert kept("invert", keep=0.05) - base == pytest.approx(both, abs=0.02)
    most = 3 + places * (steps - 2)
    assert kept("invert", keep=0.0, every=7) - base == pytest.approx(most, abs=0.01)
    codes = (1 / 8 + 1 / 20) * (steps - 2)
    # A few numbers a token, and the room of a list of a few elements, come to it.
    assert 0 <= kept("exact") - base - (1 + codes) < 0.5


def test_eight_streams_cost_at_scale_s_what_was_measured():
    """Peaks of compiled steps on an H200, 32 x 1024 tokens: 17.31 GiB with 4 streams, 19.59 with 8.

    What the residual keeps is the same with and without compilation."""
    four, eight = (
        estimate(mg.preset("s", residual=MGR, streams=n), OPTIM, Step(32, 1, "bf16", "cuda"))
        for n in (4, 8)
    )
    assert (eight["residual"] - four["residual"]) / 2**30 == pytest.approx(19.59 - 17.31, abs=0.02)
    assert {k: v for k, v in four.items() if k not in ("residual", "weights", "optimizer")} == {
        k: v for k, v in eight.items() if k not in ("residual", "weights", "optimizer")
    }


def test_kernels_keep_less_than_plain_pytorch_and_that_less_than_autograd():
    config = tiny(residual=MGR)
    kernel, eager = (
        estimate(config, OPTIM, Step(4, 1, "bf16", k))["residual"] for k in ("cuda", "torch")
    )
    with by_autograd():
        reference = estimate(config, OPTIM, Step(4, 1, "bf16", "torch"))["residual"]
    assert kernel < 0.6 * eager
    assert eager < reference / 2


def test_recomputed_sublayers_keep_their_inputs_alone():
    config = tiny(residual=MGR, blocks=6, vocab_size=4096)
    plain, again = (
        estimate(config, OPTIM, Step(8, 1, "bf16", "cuda", c))["sublayers"] for c in (False, True)
    )
    inputs = 12 * 8 * config.context * config.width * 2
    assert inputs <= again <= 1.1 * inputs
    assert plain > 5 * again


def test_live_counts_storages_not_tensors():
    live = Live()
    with live:
        x = torch.zeros(1000)
        live.part = "views"
        views = [x[10:], x.view(10, 100), x.t()]
        y = x + 1
        assert live.now == {"working": 4000, "views": 4000}
        live.give(y[1:], "working")
        assert live.now == {"working": 8000, "views": 0}
        del x, y
        assert live.now["working"] == 4000
        del views
        assert live.now == {"working": 0, "views": 0}
        torch.zeros(10)
    assert live.peak == {"working": 4000, "views": 4000}


def test_live_leaves_real_masks_alone():
    with Live():
        x = torch.arange(100)
        assert x[x > 97].tolist() == [98, 99]


def test_assumed_kernels():
    words = ("gate_pool", ("cuda", "triton"), "auto", "cpu", None)
    with backend.assuming("triton"):
        assert backend.choose(*words, "torch.bfloat16") == "triton"
        assert backend.choose(*words, "torch.float64") == "torch"
        assert backend.choose(*words, "more than 16 streams") == "torch"
        with backend.assuming("torch"):
            assert backend.choose(*words, "torch.bfloat16") == "torch"
    with pytest.raises(KeyError), backend.assuming("cuda"):
        raise KeyError
    assert backend.choose(*words, "torch.bfloat16") == "torch"


def test_modes_of_residuals():
    assert modes(tiny(residual=MGR)) == MODES
    assert modes(tiny(residual="mgr-independent", memory="exact")) == MODES
    assert modes(tiny(residual="hc")) == ("store",)


def test_the_vocabulary_is_that_of_the_data_or_of_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolve("tiny")

    def of(**changes):
        return vocabulary(dataclasses.replace(config, **changes))

    assert of() == 256
    assert of(tokenizer="bpe:5000") == 5000
    assert of(tokenizer="gpt2") == 50257
    data = prepared(tmp_path, tokenizer="bpe:300")
    assert of(data=str(data), tokenizer="gpt2") == 300
    assert of(tokenizer=str(data / "tokenizer.json")) == 300
    with pytest.raises(ValueError, match="unknown tokenizer 'gpt3'"):
        of(tokenizer="gpt3")
    with pytest.raises(ValueError, match="must be bpe: and a number"):
        of(tokenizer="bpe:many")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_need_not_be_there():
    config = dataclasses.replace(resolve("s"), device="cuda")
    compute = target(config)
    assert (compute.device.type, compute.precision, compute.compile) == ("cuda", "bf16", True)
    compute = target(dataclasses.replace(config, precision="fp16", compile="off"))
    assert (compute.precision, compute.compile) == ("fp16", False)
    assert target(dataclasses.replace(config, device="auto")).device.type == "cpu"


def rows_of(shown):
    """The table: the chosen mode, and the numbers of every mode by name."""
    found = re.findall(r"^ *(\w+)( \*)?((?: +\d+\.\d\d){7}) *$", shown, re.M)
    (chosen,) = [name for name, star, _ in found if star]
    return chosen, {name: [float(x) for x in numbers.split()] for name, _, numbers in found}


@pytest.mark.parametrize("memory", ["store", "invert"])
def test_a_dry_run(memory, tmp_path, monkeypatch, capsys):
    """As a user would, in an empty folder, for a GPU that is elsewhere."""
    monkeypatch.chdir(tmp_path)
    flags = f"train --scale s --device cuda --micro-batch 8 --dry-run --model.memory {memory}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(flags.split()) == 0
    shown = capsys.readouterr().out
    chosen, rows = rows_of(shown)
    assert chosen == memory
    assert tuple(rows) == MODES
    for numbers in rows.values():
        assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.04)
    peaks = {mode: numbers[-1] for mode, numbers in rows.items()}
    assert peaks["invert"] < peaks["recompute"] < peaks["store"]
    assert peaks["invert"] < peaks["exact"] < peaks["store"]
    assert "123,621,993 parameters" in shown
    assert "step 524,288 tokens = processes 1 x micro-batches 64 x windows 8 x tokens 1024" in shown
    assert "without torch.compile" in shown
    assert "the largest that is of use" not in shown
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_a_residual_without_modes(data, tmp_path):
    console = quiet()
    dry_run(small(data, tmp_path, residual="prenorm"), console)
    chosen, rows = rows_of(console.file.getvalue())
    assert chosen == "store"
    assert list(rows) == ["store"]
    assert "the largest that is of use" in console.file.getvalue()
    assert "torch.compile off" in console.file.getvalue()


def test_a_dry_run_says_what_cannot_be(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--dry-run", "--residual", "hc", "--model.memory", "exact"]) == 1
    assert "unknown option of hc 'memory'" in capsys.readouterr().err
    assert main(["train", "--dry-run", "--micro-batch", "3"]) == 1
    assert "micro_batch 3 does not divide" in capsys.readouterr().err
