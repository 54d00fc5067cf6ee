"""Attention over depth against one softmax, written as a loop in float64."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import multigate as mg
from multigate.nn import depth_attention

B, H, T, K = 2, 2, 5, 4


def one_softmax(q, k, v, entries):
    """Every logit of a position in one list, one softmax over it."""
    out = torch.zeros_like(v)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                keys = [k[b, h, s] for s in range(t + 1)] + [key[b, h, t] for key, _ in entries]
                values = [v[b, h, s] for s in range(t + 1)] + [val[b, h, t] for _, val in entries]
                logits = [(q[b, h, t] * key).sum() / math.sqrt(K) for key in keys]
                total = sum(torch.exp(z) for z in logits)
                out[b, h, t] = sum(
                    torch.exp(z) / total * u for z, u in zip(logits, values, strict=True)
                )
    return out


def draw(count, spread=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(count)
    shape = (3 + 2 * count, B, H, T, K)
    q, k, v, *rest = (spread * torch.randn(shape, generator=generator, dtype=torch.float64)).to(
        dtype
    )
    leaves = [t.clone().requires_grad_() for t in (q, k, v, *rest)]
    return leaves, list(zip(leaves[3::2], leaves[4::2], strict=True))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_values_and_gradients_are_those_of_one_softmax(count, spread):
    leaves, entries = draw(count, spread)
    probe = torch.randn(B, H, T, K, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    results = []
    for attention in (depth_attention, one_softmax):
        out = attention(*leaves[:3], entries)
        results.append([out.detach(), *torch.autograd.grad((out * probe).sum(), leaves)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_gradcheck():
    leaves, _ = draw(2)

    def f(q, k, v, k0, v0, k1, v1):
        return depth_attention(q, k, v, [(k0, v0), (k1, v1)])

    assert torch.autograd.gradcheck(f, leaves)


def test_bf16_keeps_the_depth_logit():
    """One bf16 number would put the depth keys' log-sum-exp off by 1e-2; it travels in two."""
    leaves, entries = draw(3, spread=0.3, dtype=torch.bfloat16)
    with torch.no_grad():
        leaves[0][..., 0] = 60
        for key in (leaves[1], *(key for key, _ in entries)):
            key[..., 0] = 1
    exact = one_softmax(
        *(t.double() for t in leaves[:3]), [(k.double(), v.double()) for k, v in entries]
    )
    half = depth_attention(*leaves[:3], entries).double()
    assert (half - exact).norm() <= 6e-3 * exact.norm()


def gpt(attention, residual="prenorm", **changes):
    torch.manual_seed(0)
    sizes = {"blocks": 3, "width": 16, "heads": 2, "context": 16, **changes}
    return mg.GPT(mg.preset("tiny", residual=residual, attention=attention, **sizes)).double()


@pytest.mark.parametrize("attention", ["moda", "moda-ffn"])
def test_the_gpt_feeds_every_earlier_entry_and_no_other(attention, monkeypatch):
    """Block b reads b entries, or 2b with the MLPs' own; block 0 is plain attention."""
    seen = []

    def spy(q, k, v, entries):
        seen.append(len(entries))
        return depth_attention(q, k, v, entries)

    monkeypatch.setattr(mg.nn, "depth_attention", spy)
    gpt(attention)(torch.randint(256, (2, 9)))
    assert seen == ([1, 2] if attention == "moda" else [2, 4])


@pytest.mark.parametrize("attention", ["moda", "moda-ffn"])
@pytest.mark.parametrize("residual", ["prenorm", "mgr-competitive"])
def test_the_whole_gpt_equals_a_plain_loop(attention, residual):
    """Logits and every gradient, with the sublayers written out and one softmax over all keys."""
    model = gpt(attention, residual)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn_like(p)
    tokens = torch.randint(256, (B, T), generator=torch.Generator().manual_seed(5))
    loss = model(tokens, tokens)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    expected = plain_loop_loss(model, tokens)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-10)
    for (name, _), actual, other in zip(
        model.named_parameters(), gradients, torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(actual, other, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: n + m)


def plain_loop_loss(model, tokens):
    heads, width = 2, 16
    size = width // heads
    written = []

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def heads_of(x):
        return x.view(B, T, heads, size).permute(0, 2, 1, 3)

    def turn(x):
        out = torch.empty_like(x)
        for t in range(T):
            for i in range(size // 2):
                angle = t * 10000 ** (-2 * i / size)
                # The table of the model is float32.
                c, s = (float(torch.tensor(f(angle)).float()) for f in (math.cos, math.sin))
                a, b = x[:, :, t, i], x[:, :, t, i + size // 2]
                out[:, :, t, i] = a * c - b * s
                out[:, :, t, i + size // 2] = b * c + a * s
        return out

    def attention(module, h):
        x = norm(h, module.norm.weight)
        q, k, v = (heads_of(x @ f.weight.T) for f in (module.q, module.k, module.v))
        q, k = turn(q), turn(k)
        entries = list(written)
        written.append((k, v))
        logits = q @ k.transpose(-1, -2) / math.sqrt(size)
        logits = logits.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        deep = [(q * key).sum(-1, keepdim=True) / math.sqrt(size) for key, _ in entries]
        share = torch.cat([logits, *deep], dim=-1).softmax(-1)
        out = share[..., :T] @ v
        for j, (_, value) in enumerate(entries):
            out = out + share[..., T + j : T + j + 1] * value
        return out.permute(0, 2, 1, 3).reshape(B, T, width) @ module.out.weight.T

    def mlp(module, h):
        x = norm(h, module.norm.weight)
        if module.k is not None:
            written.append((turn(heads_of(x @ module.k.weight.T)), heads_of(x @ module.v.weight.T)))
        return (x @ module.up.weight.T).clamp(min=0) ** 2 @ module.down.weight.T

    residual = model.stack.residual
    h, state = residual.start(model.embed.weight[tokens])
    for i, sublayer in enumerate(model.stack.sublayers):
        y = attention(sublayer, h) if i % 2 == 0 else mlp(sublayer, h)
        h, state = residual.step(i, y, state)
    logits = norm(h, model.stack.out_norm.weight) @ model.embed.weight.T
    return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), tokens.flatten())


def test_block_zero_equals_plain_attention():
    plain, moda = gpt("plain", blocks=1), gpt("moda", blocks=1)
    tokens = torch.randint(256, (2, 9))
    assert torch.equal(plain(tokens), moda(tokens))


def test_the_last_mlp_writes_nothing_nobody_reads():
    names = [n for n, _ in gpt("moda-ffn").named_parameters()]
    writers = sorted(n for n in names if n.endswith(("k.weight", "v.weight")) and ".1." in n)
    assert writers == ["stack.sublayers.1.k.weight", "stack.sublayers.1.v.weight"]
    assert not any("sublayers.5.k" in n for n in names)


def test_later_positions_do_not_change_earlier_ones():
    model = gpt("moda-ffn")
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 256
    a, b = model(tokens), model(changed)
    torch.testing.assert_close(a[:, :8], b[:, :8], rtol=1e-12, atol=1e-14)
    assert not torch.allclose(a[:, 8:], b[:, 8:])


def test_sublayers_can_be_recomputed_in_the_backward_pass():
    """A recomputed attention finds its own entry and later ones written: it must not read them."""
    model = gpt("moda-ffn", "mgr-competitive")
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    gradients = []
    for recompute in (False, True):
        if recompute:
            for sublayer in model.stack.sublayers:
                sublayer.forward = partial(checkpoint, sublayer.forward, use_reentrant=False)
        gradients.append(torch.autograd.grad(model(tokens, tokens), list(model.parameters())))
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.equal(kept, recomputed)


def test_fullgraph_compile():
    model = gpt("moda-ffn", "mgr-competitive").float()
    tokens = torch.randint(256, (2, 9))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))
