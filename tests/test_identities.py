"""Where one architecture must equal another, or a closed form, exactly."""

import math

import pytest
import torch

import multigate as mg
from cases import DEPTH, DIM, Case, packed, random_inputs, run
from multigate.ops.gate_pool import reference as maths
from multigate.ops.sinkhorn import sinkhorn


def same(a, b, tolerance=1e-12):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def copy_parameters(target, source):
    target.load_state_dict(source.state_dict(), strict=True)


@pytest.mark.parametrize("options", [{}, {"scaled": True}, {"key_gain": False}], ids=str)
def test_a_blocks_of_one_sublayer_are_full_attnres(options):
    full = Case("attnres-full", options).build()
    block = Case("attnres-block", {"streams": DEPTH, **options}).build(seed=9)
    copy_parameters(block, full)
    x, ys = random_inputs(4)
    for a, b in zip(run(full, x, ys)[0], run(block, x, ys)[0], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("depth", "blocks"), [(12, 3), (12, 2), (8, 4), (12, 1)])
def test_b_per_layer_bookkeeping_equals_per_sublayer_for_even_blocks(depth, blocks):
    """The form in which the authors sketch it: blocks start empty, the partial sum as the
    embedding, and a boundary is looked for once a transformer layer, after its attention has read.
    """
    residual = Case("attnres-block", {"streams": blocks}).build(depth=depth)
    x, ys = random_inputs(4, depth=depth)
    readers = [r.query * r.gain for r in residual.readers]
    layers_a_block = depth // blocks // 2

    def pool(sources, query):
        stacked = torch.stack(sources)
        keys = stacked / (stacked.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return torch.einsum("st,std->td", (keys @ query).softmax(0), stacked)

    closed, partial, hs = [], x, []
    for layer in range(depth // 2):
        hs.append(x if layer == 0 else pool([*closed, partial], readers[2 * layer - 1]))
        if layer % layers_a_block == 0:
            closed, partial = [*closed, partial], None
        attention, mlp = ys[2 * layer], ys[2 * layer + 1]
        partial = attention if partial is None else partial + attention
        hs.append(pool([*closed, partial], readers[2 * layer]))
        partial = partial + mlp
    hs.append(pool([*closed, partial], readers[-1]))
    same(run(residual, x, ys)[0], hs)


@pytest.mark.parametrize("options", [{}, {"streams": 1}, {"streams": 3}, {"streams": 4}], ids=str)
def test_c_zero_queries_give_the_prenorm_state_over_the_number_of_sources(options):
    name = "attnres-block" if options else "attnres-full"
    residual, plain = Case(name, options).fresh(), Case("prenorm").fresh()
    x, ys = random_inputs(4)
    expected, _ = run(plain, x, ys)
    hs, states = run(residual, x, ys)
    for i, (h, e) in enumerate(zip(hs, expected, strict=True)):
        sources = residual.state_size(i) // DIM
        torch.testing.assert_close(h * sources, e, rtol=1e-12, atol=1e-12)


def tiny_gpt(residual, **changes):
    torch.manual_seed(3)
    config = mg.preset("tiny", blocks=3, width=16, context=32, residual=residual, **changes)
    return mg.GPT(config).double()


@pytest.mark.parametrize(
    ("residual", "streams", "options"),
    [
        ("attnres-full", None, {}),
        ("attnres-block", 3, {}),
        ("hc", 4, {}),
        ("hc", 2, {"static": True}),
    ],
)
def test_c_d_logits_at_initialisation_are_those_of_prenorm(residual, streams, options):
    """Zero queries, hyper-connections before they move: the function of PreNorm at step 0."""
    plain = tiny_gpt("prenorm", eps=1e-12)
    options = {"eps": 1e-12, **options}
    other = tiny_gpt(residual, streams=streams, residual_options=options, eps=1e-12)
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    expected = plain(tokens)
    assert (other(tokens) - expected).norm() <= 2e-7 * expected.norm()


def test_denseformer_starts_as_prenorm():
    x, ys = random_inputs(4)
    same(run(Case("denseformer").fresh(), x, ys)[0], run(Case("prenorm").fresh(), x, ys)[0])


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_d_hyper_connections_start_as_prenorm(static, streams):
    residual = Case("hc", {"streams": streams, "static": static}).fresh()
    x, ys = random_inputs(4)
    *hs, out = run(residual, x, ys)[0]
    *expected, total = run(Case("prenorm").fresh(), x, ys)[0]
    same([*hs, out / streams], [*expected, total])


@pytest.mark.parametrize("name", ["mgr-independent", "mgr-competitive"])
@pytest.mark.parametrize("streams", [DEPTH + 1, DEPTH + 5])
def test_e_streams_for_every_sublayer_are_full_attnres_with_scale(name, streams):
    mgr = Case(name, {"streams": streams}).build()
    full = Case("attnres-full", {"scaled": True, "key_gain": False}).build(seed=9)
    copy_parameters(full, Renamed(mgr, "steps", "w2", "readers", "query"))
    x, ys = random_inputs(4)
    same(run(mgr, x, ys)[0], run(full, x, ys)[0])


class Renamed:
    """The state of a residual under the names another residual gives to the same parameters."""

    def __init__(self, residual, old_list, old_name, new_list, new_name):
        self.state = {
            k.replace(old_list, new_list).replace(old_name, new_name): v
            for k, v in residual.state_dict().items()
        }

    def state_dict(self):
        return self.state


def test_f_one_independent_stream_is_a_scalar_highway():
    mgr = Case("mgr-independent", {"streams": 1}).build()
    highway = Case("highway").build(seed=9)
    with torch.no_grad():
        for i, step in enumerate(mgr.steps):
            highway.weight[i].copy_(step.w1)
            highway.bias[i].copy_(step.b1[0])
    x, ys = random_inputs(4)
    same(run(mgr, x, ys)[0], run(highway, x, ys)[0])
    fresh_mgr, fresh_highway = (
        Case("mgr-independent", {"streams": 1}).fresh(),
        Case("highway").fresh(),
    )
    assert fresh_mgr.steps[2].b1.item() == pytest.approx(fresh_highway.bias[2].item())


def mixing_matrices(residual, batch=64):
    x, ys = random_inputs(batch)
    with residual.recording() as steps:
        run(residual, x, ys)
    return [steps[i]["mix"] for i in range(DEPTH)]


@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_g_mhc_mixes_doubly_stochastically(streams):
    for mix in mixing_matrices(Case("mhc", {"streams": streams}).fresh()):
        assert (mix > 0).all()
        assert (mix.sum(-2) - 1).abs().max() < 2e-6
        assert (mix.sum(-1) - 1).abs().max() < 1e-5
    for mix in mixing_matrices(Case("mhc", {"streams": streams}).build(spread=1.0)):
        assert (mix.sum(-2) - 1).abs().max() < 2e-6
    generator = torch.Generator().manual_seed(0)
    mix = sinkhorn(torch.randn(500, streams, streams, generator=generator, dtype=torch.float64))
    assert (mix.sum(-2) - 1).abs().max() < 2e-6
    assert (mix.sum(-1) - 1).abs().max() < 2e-3


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 5])
def test_g_mhc_lite_mixes_doubly_stochastically_to_rounding(streams):
    case = Case("mhc-lite", {"streams": streams})
    for residual in (case.fresh(), case.build(spread=2.0)):
        for mix in mixing_matrices(residual):
            assert (mix >= 0).all()
            assert (mix.sum(-2) - 1).abs().max() < 1e-14
            assert (mix.sum(-1) - 1).abs().max() < 1e-14


def test_g_mhc_lite_starts_near_the_identity():
    mix = mixing_matrices(Case("mhc-lite", {"streams": 4}).fresh())[3][0]
    share = 1 / (1 + 23 * math.exp(-8))  # of the identity, against 23 other permutations
    assert share == pytest.approx(0.99234, abs=1e-5)
    torch.testing.assert_close(mix.diagonal().min(), mix.diagonal().max())
    assert mix[0, 0].item() == pytest.approx(share + (1 - share) * 5 / 23)


@pytest.mark.parametrize(("depth", "streams"), [(24, 4), (24, 8), (48, 4), (72, 8), (12, 1)])
def test_h_competitive_gates_start_at_one_over_n_plus_e_to_the_bias(depth, streams):
    residual = mg.build_residual("mgr-competitive", DIM, depth, streams).double()
    x, ys = random_inputs(5, depth=depth)
    with residual.recording() as steps:
        run(residual, x, ys)
    bias = mg.gate_bias_init(depth + 1 - streams, streams)
    beta = steps[depth - 1]["beta"]
    torch.testing.assert_close(beta, torch.full_like(beta, 1 / (streams + math.exp(bias))))
    # ... which is the sigmoid of -3 at 21 lerp steps, scaled by sqrt(21 / lerp steps).
    wanted = math.sqrt(21 / (depth + 1 - streams)) / (1 + math.exp(3))
    assert beta[0, 0].item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("variant", ["independent", "competitive"])
def test_i_the_lerp_can_be_undone(variant):
    residual = Case(f"mgr-{variant}", {"streams": 3}).build()
    x, ys = random_inputs(50)
    _, states = run(residual, x, ys)
    for i in range(2, DEPTH):
        before, after = map(packed, states[i : i + 2])
        step = residual.steps[i]
        beta = maths.gate(before, step.w1, step.b1, variant, 1e-6).unsqueeze(-1)
        assert beta.min() > 0
        assert beta.max() < 1
        recovered = (after - beta * ys[i].unsqueeze(-2)) / (1 - beta)
        torch.testing.assert_close(recovered, before, rtol=1e-10, atol=1e-10)
