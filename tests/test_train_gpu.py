"""The trainer on a GPU."""

import os
import signal

import pytest
import torch

from multigate.log import read_log
from multigate.train import Run
from runs import losses, numbers, run, small

pytestmark = pytest.mark.gpu


def on_gpu(data, out, **changes):
    return small(data, out, **{"device": "cuda", "compile": "off", **changes})


def test_a_gpu_gives_the_losses_of_a_cpu(data, tmp_path):
    cpu = losses(small(data, tmp_path / "cpu"))
    gpu = losses(on_gpu(data, tmp_path / "gpu", precision="fp32"))
    assert gpu == pytest.approx(cpu, abs=0.02), "Muon's products are bfloat16 there"
    assert gpu[0] == pytest.approx(cpu[0], abs=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_learns_the_same(precision, data, tmp_path):
    settings = {"steps": 40, "tokens_per_step": 512, "eval_every": 40}
    exact, *_ = run(on_gpu(data, tmp_path / "32", precision="fp32", **settings))
    lower, *_ = run(on_gpu(data, tmp_path / "16", precision=precision, **settings))
    assert lower.val.loss == pytest.approx(exact.val.loss, abs=0.1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_no_step_waits_for_the_gpu(precision, data, tmp_path, monkeypatch):
    advance = Run._advance

    def watched(self):
        torch.cuda.set_sync_debug_mode("error" if self.session.step > 2 else "default")
        try:
            advance(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Run, "_advance", watched)
    result, *_ = run(on_gpu(data, tmp_path, precision=precision, micro_batch=2))
    assert result.step == 12


def test_every_step_is_logged_once_although_it_is_read_later(data, tmp_path, monkeypatch):
    whole = on_gpu(data, tmp_path / "whole", precision="fp32", steps=20)
    run(whole)
    parts = on_gpu(data, tmp_path / "parts", precision="fp32", steps=20)
    read = Run._read

    def interrupted(self, reading):
        if reading.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        read(self, reading)

    monkeypatch.setattr(Run, "_read", interrupted)
    result, *_ = run(parts)
    monkeypatch.undo()
    assert result.signal == signal.SIGTERM
    assert 7 < result.step < 12
    run(parts)
    a, b = (numbers(read_log(c.folder)) for c in (whole, parts))
    assert [r["step"] for r in b] == list(range(1, 21))
    assert [r["lr_muon"] for r in b] == [r["lr_muon"] for r in a]
    assert [r["loss"] for r in b] == pytest.approx([r["loss"] for r in a], abs=1e-2)


def test_a_compiled_run_learns_what_an_eager_one_does(data, tmp_path):
    settings = {"steps": 30, "tokens_per_step": 512, "eval_every": 30}
    eager, *_ = run(on_gpu(data, tmp_path / "eager", **settings))
    compiled, shown, _ = run(on_gpu(data, tmp_path / "compiled", **settings | {"compile": "on"}))
    assert "torch.compile failed" not in shown
    assert compiled.val.loss == pytest.approx(eager.val.loss, abs=0.1)


def test_the_micro_batch_is_found(data, tmp_path):
    config = on_gpu(data, tmp_path, tokens_per_step=4096, steps=2)
    _, shown, _ = run(config)
    assert "micro-batches 1 x windows 128 x tokens 32" in shown
    assert "MFU" in shown or torch.cuda.get_device_name() not in ("NVIDIA H200",)
