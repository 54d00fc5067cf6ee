"""The GPT: its size, its initialisation, its values, its precision."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import multigate as mg
from cases import takes_streams


def small(residual="prenorm", **changes):
    torch.manual_seed(0)
    config = mg.preset(
        "tiny", blocks=2, width=32, heads=2, context=32, residual=residual, **changes
    )
    return mg.GPT(config)


@pytest.mark.parametrize(
    ("scale", "count"),
    [
        ("tiny", 1_214_080),
        ("mini", 27_534_720),
        ("s", 123_587_328),
        ("m", 353_551_360),
        ("l", 772_271_360),
    ],
)
def test_parameter_counts_are_the_papers(scale, count):
    with torch.device("meta"):
        assert mg.GPT(mg.preset(scale, residual="prenorm")).parameter_count() == count


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("prenorm", {}, 0),
        ("highway", {}, 24 * 769),
        ("highway", {"gate": "vector"}, 24 * (768 * 768 + 768)),
        ("denseformer", {}, 90),
        ("hc", {"streams": 4}, 111_216),
        ("hc", {"streams": 4, "static": True}, 24 * 24),
        ("mhc", {"streams": 4}, 24 * 73_755),
        ("mhc-lite", {"streams": 4}, 24 * 98_339),
        ("attnres-full", {}, 24 * 2 * 768),
        ("attnres-block", {"streams": 8, "key_gain": False}, 24 * 768),
        ("mgr-independent", {"streams": 4}, 24 * 768 + 21 * (768 + 4)),
        ("mgr-competitive", {"streams": 4}, 34_665),
        ("mgr-competitive", {"streams": 8}, 31_641),
    ],
    ids=str,
)
def test_what_each_residual_adds_at_scale_s(name, options, count):
    with torch.device("meta"):
        residual = mg.build_residual(name, 768, 24, **options)
    assert sum(p.numel() for p in residual.parameters()) == count


@pytest.mark.parametrize("residual", mg.residual_names())
def test_initialisation_is_nanogpts_for_every_residual(residual):
    torch.manual_seed(1)
    model = mg.GPT(mg.preset("tiny", blocks=8, width=256, heads=2, residual=residual))
    for name, p in model.named_parameters():
        if ".residual." in name:
            continue
        if name.endswith("norm.weight"):
            assert (p == 1).all()
        else:
            ends = name.endswith((".out.weight", ".down.weight"))
            std = 0.02 / math.sqrt(16) if ends else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.02)
            assert abs(p.mean().item()) < 0.05 * std


def test_residuals_share_one_initialisation():
    """The same seed gives the same sublayers whatever the residual: comparisons start equal."""
    plain = dict(small("prenorm").named_parameters())
    for residual in mg.residual_names():
        for name, p in small(residual).named_parameters():
            if ".residual." not in name:
                assert torch.equal(p, plain[name]), (residual, name)


def test_values_against_a_plain_loop():
    """PreNorm logits from the equations, float64."""
    model = small().double()
    tokens = torch.randint(256, (2, 7))
    x = model.embed.weight[tokens]

    def norm(v, weight):
        return v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    position = torch.arange(7, dtype=torch.float64)[:, None]
    angle = position * 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    cos, sin = angle.cos().float().double(), angle.sin().float().double()

    def turn(v):
        a, b = v[..., :8], v[..., 8:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    for i, f in enumerate(model.stack.sublayers):
        n = norm(x, f.norm.weight)
        if i % 2 == 0:
            q, k, v = ((n @ m.weight.T).view(2, 7, 2, 16).transpose(1, 2) for m in (f.q, f.k, f.v))
            logits = turn(q) @ turn(k).transpose(-1, -2) / 4
            logits = logits + torch.full((7, 7), -math.inf).triu(1)
            y = (logits.softmax(-1) @ v).transpose(1, 2).reshape(2, 7, 32) @ f.out.weight.T
        else:
            y = (n @ f.up.weight.T).relu() ** 2 @ f.down.weight.T
        x = x + y
    logits = norm(x, model.stack.out_norm.weight) @ model.embed.weight.T
    torch.testing.assert_close(model(tokens), logits, rtol=1e-9, atol=1e-12)
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, 256), tokens[:, 1:].reshape(-1))
    torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:]), loss)


def test_the_rotary_tables_survive_casting_and_to_empty():
    model = small()
    cos, sin = model.rope_cos.clone(), model.rope_sin.clone()
    with torch.device("meta"):
        hollow = mg.GPT(model.config)
    for other in (small().bfloat16(), small().double(), hollow.to_empty(device="cpu")):
        assert other.rope_cos.dtype == torch.float32
        assert torch.equal(other.rope_cos, cos)
        assert torch.equal(other.rope_sin, sin)
    hollow.load_state_dict(model.state_dict())
    with torch.device("meta"):
        assigned = mg.GPT(model.config)
    assigned.load_state_dict(model.state_dict(), assign=True)
    tokens = torch.randint(256, (2, 9))
    assert torch.equal(hollow(tokens), model(tokens))
    assert torch.equal(assigned(tokens), model(tokens))


def lively(residual, **changes):
    """A model whose sublayers matter: at initialisation the logits hardly depend on them."""
    options = {"streams": 3} if takes_streams(residual) else {}
    model = small(residual, **options, **changes)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.15 * torch.randn(p.shape, generator=generator)
    return model


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("residual", mg.residual_names())
def test_a_lively_model_tells_its_sublayers_apart(residual):
    """What the bfloat16 tests below compare would move by far more if sublayers were wrong."""
    model, other = lively(residual), lively(residual)
    with torch.no_grad():
        other.stack.sublayers[1].down.weight.zero_()
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    assert relative(other(tokens), model(tokens)) > 0.1


@pytest.mark.parametrize("residual", mg.residual_names())
def test_bf16_autocast_and_a_bf16_model_are_near_float32(residual):
    model = lively(residual)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    exact = model(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, half = model(tokens, tokens), model(tokens)
    assert loss.dtype == torch.float32
    assert relative(half, exact) < 0.03
    assert relative(lively(residual).bfloat16()(tokens), exact) < 0.03


@pytest.mark.parametrize("residual", mg.residual_names())
def test_bf16_autocast_compiles_as_one_graph(residual):
    """The way it is trained: autocast, bf16 streams, one graph, gradients."""
    model = lively(residual)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for f in (model, compiled):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = f(tokens, tokens)
        loss.backward()
        gradients.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    largest = max(g.norm() for g in gradients[0])
    for eager, fast in zip(*gradients, strict=True):
        assert (fast - eager).norm() <= 0.03 * eager.norm() + 1e-3 * largest


def test_the_arithmetic_of_scale_s_counted_on_the_meta_device():
    """Two operations a weight and token for the matrices and the tied head, and QK and AV."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = mg.GPT(mg.preset("s", residual="prenorm"))
        model(torch.zeros(2, 1024, dtype=torch.long))
    matrices = 2 * (2 * 1024) * (12 * 12 * 768**2 + 50304 * 768)
    attention = 12 * 2 * 2 * (2 * 6 * 1024**2 * 128)
    assert counter.get_total_flops() == matrices + attention


@pytest.mark.parametrize("residual", mg.residual_names())
def test_the_future_is_hidden_and_the_past_is_not(residual):
    model = small(residual).double()
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    a, b = model(tokens), model(changed)
    torch.testing.assert_close(a[:, :9], b[:, :9], rtol=1e-12, atol=1e-14)
    assert (a[:, 9:] - b[:, 9:]).abs().amax(-1).min() > 1e-9


@pytest.mark.parametrize("residual", mg.residual_names())
def test_fullgraph_compile(residual):
    model = small(residual)
    tokens = torch.randint(256, (2, 9))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-4, atol=1e-5)


def streams_seen(model, tokens):
    seen = []
    start = model.stack.residual.start

    def spy(x, norm=None):
        seen.append(x.dtype)
        return start(x, norm)

    model.stack.residual.start = spy
    logits = model(tokens)
    return seen[0], logits


def test_stream_dtype_follows_the_compute_dtype_unless_it_is_set():
    tokens = torch.randint(256, (1, 8))
    assert streams_seen(small(), tokens)[0] == torch.float32
    assert streams_seen(small().double(), tokens)[0] == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert streams_seen(small(), tokens)[0] == torch.bfloat16
        assert streams_seen(small(stream_dtype="float32"), tokens)[0] == torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        assert streams_seen(small(), tokens)[0] == torch.float32
    dtype, logits = streams_seen(small(stream_dtype="bfloat16"), tokens)
    assert dtype == torch.bfloat16
    assert logits.dtype == torch.float32


def test_the_memory_mode_goes_to_the_residual():
    """As one of its options, which those without modes do not have."""
    for memory in ("store", "recompute", "invert", "exact"):
        model = small("mgr-independent", memory=memory)
        assert model.stack.residual.memory.mode == memory
    options = {"keep": 0.5, "every": 3}
    mode = small("mgr-competitive", memory="invert", residual_options=options).stack.residual.memory
    assert (mode.mode, mode.keep, mode.every) == ("invert", 0.5, 3)
    alone = small("mgr-competitive", residual_options={"memory": "exact"})
    assert alone.stack.residual.memory.mode == "exact"
    assert small("prenorm", memory="store").config.options() == {}
    with pytest.raises(ValueError, match="unknown option of prenorm 'memory'"):
        small("prenorm", memory="invert")
    with pytest.raises(ValueError, match="unknown memory 'inverted': did you mean 'invert'"):
        small("mgr-competitive", memory="inverted")
    with pytest.raises(ValueError, match="memory is 'exact' but the residual_options say 'invert'"):
        small("mgr-competitive", memory="exact", residual_options={"memory": "invert"})


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["plain", "moda-ffn"])
@pytest.mark.parametrize("residual", mg.residual_names())
def test_gpu_equals_cpu(residual, attention):
    """Loss and gradients in float32; in bf16 the streams are bf16 and the logits are near."""
    model = lively(residual, attention=attention)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    on_gpu = lively(residual, attention=attention).cuda()
    loss, gpu_loss = model(tokens, tokens), on_gpu(tokens.cuda(), tokens.cuda())
    torch.testing.assert_close(gpu_loss.cpu(), loss, rtol=1e-4, atol=1e-4)
    loss.backward()
    gpu_loss.backward()
    largest = max(p.grad.norm() for p in model.parameters())
    for (name, p), q in zip(model.named_parameters(), on_gpu.parameters(), strict=True):
        assert (q.grad.cpu() - p.grad).norm() <= 1e-3 * p.grad.norm() + 1e-6 * largest, name
    with torch.autocast("cuda", dtype=torch.bfloat16):
        dtype, half = streams_seen(on_gpu, tokens.cuda())
    assert dtype == torch.bfloat16
    assert relative(half.cpu(), model(tokens)) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("residual", mg.residual_names())
def test_gpu_compiled_training_step(residual):
    model = small(residual).cuda()
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0)).cuda()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    losses = []
    for f in (model, compiled):
        model.zero_grad()
        loss = f(tokens, tokens)
        loss.backward()
        losses.append((loss.item(), [p.grad.clone() for p in model.parameters()]))
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-4)
    for a, b in zip(losses[0][1], losses[1][1], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=2e-5)
