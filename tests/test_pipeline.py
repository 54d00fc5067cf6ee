"""A pipeline of processes computes what one process does, and sends what it says it sends."""

from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist

import multigate as mg
from cases import Own
from multigate.pipeline import build_schedule, split, tie_gradients, token_loss

BATCH, LENGTH, MICRO_BATCHES, DEPTH = 2, 8, 4, 8
GPT = mg.GPTConfig(vocab_size=64, blocks=DEPTH // 2, width=32, heads=2, context=LENGTH)


@dataclass(frozen=True)
class Cut:
    """A pipeline to run: a GPT, where it is cut, and in which order its micro-batches go."""

    residual: str
    boundaries: tuple[int, ...] = (4,)
    kind: str = "gpipe"
    options: dict = field(default_factory=dict)
    bf16: bool = False

    def build(self):
        """The same model in every process; the residual's zeros and ones would hide mistakes."""
        torch.manual_seed(0)
        own = self.residual == "own"
        name = "prenorm" if own else self.residual
        model = mg.GPT(replace(GPT, residual=name, residual_options=self.options))
        if own:
            model.stack.residual = Own(GPT.width, DEPTH)
        with torch.no_grad():
            for p in model.stack.residual.parameters():
                p += 0.3 * torch.randn(p.shape)
        return model

    def __str__(self):
        places = "+".join(map(str, self.boundaries))
        options = "".join(f"-{k}={v}" for k, v in self.options.items())
        return f"{self.residual}{options}-at-{places}-{self.kind}" + "-bf16" * self.bf16


CUTS = [
    *(Cut(name) for name in mg.residual_names()),
    # While the streams of MGR are still growing, and when the last one has just been added.
    *(Cut(name, (i,)) for name in ("mgr-independent", "mgr-competitive") for i in (2, 3)),
    # Inside a block of DenseFormer, and where some of its outputs are never read again.
    Cut("denseformer", (5,)),
    Cut("denseformer", (7,), options={"dilation": 2}),
    Cut("hc", (3,), options={"norm_then_sum": True}),
    *(Cut(name, (5,), "1f1b") for name in ("attnres-full", "mhc", "mgr-competitive")),
    *(Cut(name, (3, 6), "1f1b") for name in ("prenorm", "denseformer", "mhc-lite")),
    *(Cut(name, (3, 6), "1f1b") for name in ("attnres-full", "attnres-block", "mgr-competitive")),
    Cut("own", (3, 6), "1f1b"),
    Cut("mgr-competitive", (4,), "1f1b", bf16=True),
    Cut("hc", (4,), "1f1b", bf16=True),
]


def batch():
    generator = torch.Generator().manual_seed(1)
    shape = (MICRO_BATCHES * BATCH, LENGTH + 1)
    tokens = torch.randint(GPT.vocab_size, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:]


def whole(cut):
    """Losses of the micro-batches and gradients by name, in one process."""
    model, (tokens, targets) = cut.build(), batch()
    losses = []
    for x, y in zip(tokens.split(BATCH), targets.split(BATCH), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cut.bf16):
            loss = model(x, y)
        (loss / MICRO_BATCHES).backward()
        losses.append(loss.detach())
    return torch.stack(losses), {name: p.grad for name, p in model.named_parameters()}


class Sent:
    """Counts what goes from this process to others, at the level every send passes through."""

    def __init__(self):
        self.bytes = {}
        send = dist.ProcessGroup.send

        def counting(group, tensors, peer, tag):
            for t in tensors:
                self.bytes[peer] = self.bytes.get(peer, 0) + t.numel() * t.element_size()
            return send(group, tensors, peer, tag)

        dist.ProcessGroup.send = counting


def run_stage(cut, group, sent):
    stage = split(cut.build(), cut.boundaries)[dist.get_rank(group)]
    tokens, targets = batch()
    losses = []
    dtype = torch.bfloat16 if cut.bf16 else None
    schedule = build_schedule(stage, MICRO_BATCHES, (BATCH, LENGTH), cut.kind, dtype, group)
    # The first step also agrees on shapes; the second sends nothing but the micro-batches.
    for _ in range(2):
        stage.zero_grad()
        sent.bytes.clear()
        inputs = (tokens,) if stage.first else ()
        ends = {"target": targets, "losses": losses} if stage.last else {}
        schedule.step(*inputs, **ends)
    counted = dict(sent.bytes)
    tie_gradients(stage, group)
    return {
        "losses": [loss.detach() for loss in losses],
        "gradients": {name: p.grad for name, p in stage.named_parameters() if p.grad is not None},
        "trained": [name for name, p in stage.named_parameters() if p.requires_grad],
        "sent": counted,
    }


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=3)
    sent, results = Sent(), {}
    # Two stages run on processes 1 and 2: a stage's number need not be its process's.
    pair = dist.new_group([1, 2])
    for cut in CUTS:
        if len(cut.boundaries) == 2:
            results[str(cut)] = run_stage(cut, None, sent)
        elif rank > 0:
            results[str(cut)] = run_stage(cut, pair, sent)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_pipelines_of_processes(tmp_path):
    """All in one test: starting the processes takes longer than running the pipelines."""
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=3)
    brought = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    for cut in CUTS:
        stages = [b[str(cut)] for b in brought if str(cut) in b]
        assert len(stages) == len(cut.boundaries) + 1
        check_losses_and_gradients(cut, stages)
        check_who_trains_what(cut, stages)
        check_what_was_sent(cut, stages)


def check_losses_and_gradients(cut, stages):
    """Those of one process."""
    losses, gradients = whole(cut)
    found = torch.stack(stages[-1]["losses"])
    if cut.bf16:
        torch.testing.assert_close(found, losses, rtol=1e-3, atol=0)
    else:
        assert torch.equal(found, losses)
    assert {name for stage in stages for name in stage["gradients"]} == set(gradients)
    largest = max(g.norm() for g in gradients.values())
    for stage in stages:
        assert stage["trained"] == list(stage["gradients"])
        for name, gradient in stage["gradients"].items():
            error, size = (gradient - gradients[name]).norm(), gradients[name].norm()
            if cut.bf16:
                assert error <= 3e-2 * size + 1e-3 * largest, name
            else:
                assert error <= 2e-6 * size + 1e-8 * largest, name


def check_who_trains_what(cut, stages):
    """Every parameter belongs to one stage, or to several with the same gradient."""
    ends = [0, len(stages) - 1]
    shared = {"embed.weight": ends, "stack.residual.gain": list(range(len(stages)))}
    for name in {name for stage in stages for name in stage["trained"]}:
        holders = [k for k, stage in enumerate(stages) if name in stage["trained"]]
        assert holders == shared[name] if name in shared else len(holders) == 1
        copies = [stages[k]["gradients"][name] for k in holders]
        assert all(torch.equal(copies[0], c) for c in copies)


def check_what_was_sent(cut, stages):
    """What the residual declares, to the next process and back from there, and nothing else."""
    residual = cut.build().stack.residual
    numbers = [residual.handover_size(i) for i in cut.boundaries]
    token = MICRO_BATCHES * BATCH * LENGTH * (2 if cut.bf16 else 4)
    for k, stage in enumerate(stages):
        forward = {k + 1: numbers[k] * token} if k < len(stages) - 1 else {}
        backward = {k - 1: numbers[k - 1] * token} if k > 0 else {}
        assert stage["sent"] == forward | backward


def in_one_process(stages, tokens, targets):
    """Loss after a forward and a backward pass from stage to stage, without a schedule."""
    arrived, passed, out = [], [], tokens
    for stage in stages:
        inputs = (out,) if stage.first else tuple(t.detach().requires_grad_() for t in out)
        arrived.append(inputs)
        out = stage(*inputs)
        passed.append(out)
    loss = token_loss(out, targets)
    loss.backward()
    for inputs, out in zip(arrived[:0:-1], passed[-2::-1], strict=True):
        torch.autograd.backward(out, [t.grad for t in inputs])
    return loss.detach(), arrived


@pytest.mark.parametrize("name", [*mg.residual_names(), "own"])
def test_every_boundary(name):
    """A stage for every sublayer: the model, and what each stage says it takes and returns."""
    model = Cut(name).build()
    tokens, targets = (t[:BATCH] for t in batch())
    stages = split(model, range(1, DEPTH))
    loss, arrived = in_one_process(stages, tokens, targets)
    exact = model(tokens, targets)
    exact.backward()
    assert torch.equal(loss, exact)
    for stage, inputs in zip(stages[1:], arrived[1:], strict=True):
        examples = stage.example_inputs(tuple(tokens.shape))
        assert [(t.shape, t.dtype, t.stride()) for t in examples] == [
            (t.shape, t.dtype, t.stride()) for t in inputs
        ]
    for parameter_name, parameter in model.named_parameters():
        parts = [dict(stage.named_parameters()).get(parameter_name) for stage in stages]
        total = sum(p.grad for p in parts if p is not None and p.grad is not None)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("stream_dtype", ["auto", "float32"])
def test_what_crosses_has_the_dtype_of_the_streams(stream_dtype):
    config = replace(GPT, residual="mhc", stream_dtype=stream_dtype)
    tokens, _ = batch()
    out = (tokens,)
    for stage in split(mg.GPT(config), [3, 6]):
        stage.compute_dtype = torch.bfloat16
        out = stage(*out)
        out = (out,) if stage.last else out
        streams = torch.float32 if stream_dtype == "float32" else torch.bfloat16
        expected = torch.bfloat16 if stage.last else streams
        examples = stage.example_outputs(tuple(tokens.shape))
        assert [t.dtype for t in out] == [t.dtype for t in examples] == [expected]
        assert [t.shape for t in out] == [t.shape for t in examples]


def test_what_nothing_reads_gets_a_gradient_of_zeros():
    """With dilation 2 the outputs 1 and 3 are in no average after sublayer 7."""
    stages = split(Cut("denseformer", options={"dilation": 2}).build(), [7])
    _, arrived = in_one_process(stages, *(t[:BATCH] for t in batch()))
    zero = [bool((t.grad == 0).all()) for t in arrived[1]]
    assert zero == [False, False, True, False, True]


def test_the_parts_make_up_the_model_and_leave_it_alone():
    model = Cut("mhc-lite").build()
    tokens, targets = (t[:BATCH] for t in batch())
    model(tokens, targets).backward()
    stages = split(model, [3, 6])
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())
    with torch.no_grad():
        for stage in stages:
            for p in stage.parameters():
                assert p.grad is None
                p += 1 if p.requires_grad else float("nan")
    parts = {name: t for stage in stages for name, t in stage.part().items()}
    before = model.state_dict()
    assert set(parts) == set(before)
    for name, t in parts.items():
        changed = 0 if name.endswith("permutations") else 1
        assert torch.equal(t, before[name] + changed), name


@pytest.mark.parametrize("assign", [False, True])
def test_a_stage_is_filled_after_splitting_on_the_meta_device(assign):
    model = Cut("mgr-independent").build()
    tokens, targets = (t[:BATCH] for t in batch())
    with torch.device("meta"):
        stages = split(mg.GPT(model.config), [2, 5])
    weights = model.state_dict()
    for stage in stages:
        if not assign:
            stage.to_empty(device="cpu")
        stage.load_state_dict({name: weights[name] for name in stage.state_dict()}, assign=assign)
    loss, _ = in_one_process(stages, tokens, targets)
    assert torch.equal(loss, model(tokens, targets))


def test_checkpointing_is_kept():
    model = Cut("mgr-competitive").build()
    tokens, targets = (t[:BATCH] for t in batch())
    model.stack.checkpointing = True
    stages = split(model, [4])
    calls = []
    stages[1].stack.sublayers[5].up.register_forward_hook(lambda *_: calls.append(1))
    loss, _ = in_one_process(stages, tokens, targets)
    assert torch.equal(loss, model(tokens, targets))
    assert len(calls) == 2


@pytest.mark.parametrize("boundaries", [[], [0], [8], [4, 4], [5, 3]])
def test_boundaries_must_rise(boundaries):
    with pytest.raises(ValueError, match="rising boundaries from 1 to 7"):
        split(mg.GPT(GPT), boundaries)


@pytest.mark.parametrize("attention", ["moda", "moda-ffn"])
def test_depth_attention_is_refused(attention):
    with pytest.raises(ValueError, match=f"attention='{attention}' cannot be split into stages"):
        split(mg.GPT(replace(GPT, attention=attention)), [4])


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_schedule_that_cannot_be_built(alone):
    stage = split(mg.GPT(GPT), [4])[1]
    with pytest.raises(ValueError, match="unknown schedule '1f2b': did you mean '1f1b'"):
        build_schedule(stage, 4, (2, 8), "1f2b")
    with pytest.raises(ValueError, match="9 tokens are more than this model's context of 8"):
        build_schedule(stage, 4, (2, 9))
    with pytest.raises(ValueError, match="stage 1 of 2 belongs to rank 1 of as many processes"):
        build_schedule(stage, 4, (2, 8))


def test_a_scheduled_stage_refuses_other_shapes_and_autocast():
    stage = split(mg.GPT(GPT), [4])[0]
    tokens, _ = batch()
    with torch.autocast("cpu", torch.bfloat16):
        assert stage(tokens)[0].dtype == torch.bfloat16
    stage.shape = (BATCH, LENGTH)
    with pytest.raises(ValueError, match=r"micro-batches of shape \(2, 8\), got \(8, 8\)"):
        stage(tokens)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="give build_schedule a compute_dtype"),
    ):
        stage(tokens[:BATCH])
