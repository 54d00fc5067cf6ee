"""From tokens a step to micro-batches; device, precision and compilation; the loss scale."""

import pytest
import torch

import multigate as mg
from multigate.batching import Batching, most_windows, plan
from multigate.device import Compute, LossScale, choose, compiled, flops_per_token


def test_accumulation_follows():
    def most():
        return 10

    assert plan(65536, 1024, 1, 8, most) == Batching(64, 8, 8)
    assert plan(65536, 1024, 2, 8, most) == Batching(64, 8, 4)
    assert plan(65536, 1024, 1, None, most) == Batching(64, 8, 8)
    assert plan(6 * 1024, 1024, 1, None, most) == Batching(6, 6, 1)
    assert plan(7 * 1024 * 2, 1024, 2, None, lambda: 3) == Batching(14, 1, 7)
    assert plan(1024, 1024, 1, None, lambda: 0) == Batching(1, 1, 1)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            (1000, 128, 1, None),
            "no multiple of 128 tokens of context times 1 processes: use 896 or",
        ),
        ((100, 128, 1, None), "use 128."),
        ((1024, 128, 3, None), "times 3 processes: use 768 or 1152."),
        ((768, 128, 1, 4), "micro_batch 4 does not divide the 6 windows .* use one of 1, 2, 3, 6."),
    ],
)
def test_sizes_that_do_not_fit(sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(*sizes, lambda: 8)


def test_on_a_cpu_a_micro_batch_is_as_large_as_is_useful():
    model = mg.GPT(mg.preset("tiny", blocks=1, width=16, context=512))
    assert most_windows(model, torch.no_grad) == 8192 // 512


@pytest.mark.gpu
def test_on_a_gpu_the_chosen_micro_batch_fits():
    model = mg.GPT(mg.preset("mini")).cuda()
    compute = choose("cuda")
    windows = most_windows(model, compute.autocast)
    tokens = torch.zeros(windows, 1024, dtype=torch.long, device="cuda")
    with compute.autocast():
        model(tokens, tokens).backward()
    assert windows >= 8
    assert torch.cuda.memory_allocated() > 0


def test_choices_come_with_reasons():
    compute = choose("auto")
    assert [r.split(":")[0] for r in compute.reasons] == [
        f"device {compute.device.type}",
        f"precision {compute.precision}",
        f"torch.compile {'on' if compute.compile else 'off'}",
    ]
    asked = choose("cpu", "bf16", "on")
    assert (asked.device.type, asked.precision, asked.compile) == ("cpu", "bf16", True)
    assert asked.reasons == ()
    with asked.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_one_sentence():
    with pytest.raises(ValueError, match="this machine has no cuda device: use --device auto"):
        choose("cuda")


def test_a_compilation_that_fails_is_said_and_done_without(monkeypatch):
    said = []

    def broken(*args):
        raise RuntimeError("no compiler found\nand more lines")

    monkeypatch.setattr(torch, "compile", lambda f, **_: broken)
    call = compiled(lambda x: x + 1, said.append)
    assert call(1) == 2
    assert call(2) == 3
    assert said == [
        "torch.compile failed (RuntimeError: no compiler found): going on without it",
    ]


def test_the_flops_of_the_papers_small_model():
    """468 TFLOP/s at 587k tokens/s, as counted elsewhere."""
    config = mg.preset("s", residual="prenorm")
    with torch.device("meta"):
        parameters = mg.GPT(config).parameter_count()
    assert flops_per_token(config, parameters) * 587e3 == pytest.approx(468e12, rel=0.005)


def test_the_peak_is_known_only_where_it_is():
    assert Compute(torch.device("cpu"), "fp32", False, ()).peak_flops() is None


def test_the_loss_scale_halves_doubles_and_unscales():
    scale = LossScale(torch.device("cpu"), patience=3)
    assert scale.scale.item() == 65536
    gradient = torch.tensor([65536.0, 131072.0])
    scale.unscale_([gradient])
    assert gradient.tolist() == [1.0, 2.0]
    scale.update(torch.tensor(1.0))
    assert scale.scale.item() == 32768
    for _ in range(2):
        scale.update(torch.tensor(0.0))
    assert scale.scale.item() == 32768
    scale.update(torch.tensor(0.0))
    assert scale.scale.item() == 65536
    for _ in range(40):
        scale.update(torch.tensor(1.0))
    assert scale.scale.item() == 1.0
    assert scale.state()["loss_scale.scale"] is scale.scale
