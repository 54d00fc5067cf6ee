"""`multigate.hf.with_residual`: models of Transformers whose residuals are replaced."""

import copy
import json
import os
import pickle
import sys
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file, save_file

import multigate as mg

hf = pytest.importorskip("transformers", reason="multigate.hf needs the package transformers")
from multigate.hf import with_residual  # noqa: E402

hf.utils.logging.disable_progress_bar()
VOCAB, WIDTH, BLOCKS = 40, 32, 3
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
}
FAMILIES = {
    "llama": lambda **more: hf.LlamaConfig(**SMALL, **more),
    "qwen2": lambda **more: hf.Qwen2Config(**SMALL, **more),
    "qwen3": lambda **more: hf.Qwen3Config(**SMALL, head_dim=8, **more),
    "gpt2": lambda **more: hf.GPT2Config(
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=BLOCKS,
        n_head=4,
        n_positions=64,
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
        **more,
    ),
}
RESIDUALS = [("mgr-competitive", 2), ("mgr-independent", 3), ("attnres-full", None), ("hc", 2)]
every_family = pytest.mark.parametrize("family", FAMILIES)


def stir(model):
    """Move everything that starts as zero or one, so that leaving it out would show."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn_like(p) if p.ndim < 2 else 0.1 * torch.randn_like(p)
    return model.eval()


def plain(family, **more):
    """No dropout, which GPT-2 has by default."""
    torch.manual_seed(0)
    off = {} if family != "gpt2" else {f"{part}_pdrop": 0.0 for part in ("attn", "embd", "resid")}
    return stir(hf.AutoModelForCausalLM.from_config(FAMILIES[family](**off, **more)))


def changed(family, residual, streams=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = with_residual(plain(family), residual, streams, **options)
    stir(model.stack.residual)
    return model


def tokens(*shape):
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(2))


def padded(side):
    """A batch of lengths 9, 6 and 2."""
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    for row, length in ((1, 6), (2, 2)):
        outside = slice(0, 9 - length) if side == "left" else slice(length, 9)
        ids[row, outside], mask[row, outside] = 0, 0
    return ids, mask


def step_by_step(model, ids, mask):
    """Logits from a cache: four tokens at once, then one by one."""
    cache, logits = None, []
    for begin, end in ((0, 4), *((i, i + 1) for i in range(4, ids.shape[1]))):
        positions = (mask[:, :end].cumsum(-1) - 1).clamp(min=0)[:, begin:end]
        with torch.no_grad():
            out = model(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
        cache = out.past_key_values
        logits.append(out.logits)
    assert cache.get_seq_length() == ids.shape[1]
    return torch.cat(logits, 1)


@every_family
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_prenorm_is_the_plain_model_bit_for_bit(family, attention):
    before = plain(family, attn_implementation=attention).train()
    given = copy.deepcopy(before)
    parameters = dict(given.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after = with_residual(given, "prenorm")
    assert after is given
    assert {id(p) for p in after.parameters()} == {id(p) for p in parameters.values()}
    ids = tokens(2, 11)
    outs = [model(ids, labels=ids) for model in (before, after)]
    assert torch.equal(outs[0].logits, outs[1].logits)
    assert torch.equal(outs[0].loss, outs[1].loss)
    for out in outs:
        out.loss.backward()
    for name, p in before.named_parameters():
        assert p.grad.abs().max() > 0, name
        assert torch.equal(p.grad, parameters[name].grad), name


@every_family
@pytest.mark.parametrize("side", ["left", "right"])
def test_prenorm_with_a_cache_and_padding_bit_for_bit(family, side):
    before = plain(family)
    after = with_residual(copy.deepcopy(before), "prenorm")
    ids, mask = padded(side)
    found = step_by_step(after, ids, mask)
    assert torch.equal(found, step_by_step(before, ids, mask))
    with torch.no_grad():
        whole = [model(ids, attention_mask=mask).logits for model in (before, after)]
    assert torch.equal(*whole)


@every_family
@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 10},
        {"num_beams": 3},
        {"cache_implementation": "static"},
    ],
    ids=["greedy", "sampling", "beams", "static"],
)
def test_prenorm_generates_what_the_plain_model_does(family, how):
    before = plain(family)
    after = with_residual(copy.deepcopy(before), "prenorm")
    ids, mask = padded("left")
    texts = []
    for model in (before, after):
        torch.manual_seed(3)
        texts.append(model.generate(ids, attention_mask=mask, max_new_tokens=8, **how))
    assert texts[0].shape == (3, 17)
    assert torch.equal(*texts)


def test_sliding_windows_are_kept():
    """All layers of one kind, with a window of four positions."""
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    before = plain("qwen2", **window)
    after = with_residual(copy.deepcopy(before), "prenorm")
    ids = tokens(2, 12)
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)
        assert not torch.equal(before(ids).logits, plain("qwen2")(ids).logits)
    texts = [m.generate(ids, max_new_tokens=6, do_sample=False) for m in (before, after)]
    assert torch.equal(*texts)


def by_hand(model, family, residual, ids):
    """The logits of the plain model's parts in a loop over the seam, without masks or cache."""
    decoder = model.base_model
    if family == "gpt2":
        x = decoder.wte(ids) + decoder.wpe(torch.arange(ids.shape[1]))
        parts = [((b.ln_1, b.attn), (b.ln_2, b.mlp)) for b in decoder.h]
        given, final = {}, decoder.ln_f
    else:
        x = decoder.embed_tokens(ids)
        parts = [
            ((b.input_layernorm, b.self_attn), (b.post_attention_layernorm, b.mlp))
            for b in decoder.layers
        ]
        rotary = decoder.rotary_emb(x, torch.arange(ids.shape[1])[None])
        given, final = {"position_embeddings": rotary, "attention_mask": None}, decoder.norm
    h, state = residual.start(x)
    for block, ((norm, attention), (mlp_norm, mlp)) in enumerate(parts):
        h, state = residual.step(2 * block, attention(norm(h), **given)[0], state)
        h, state = residual.step(2 * block + 1, mlp(mlp_norm(h)), state)
    return model.lm_head(final(h))


@every_family
@pytest.mark.parametrize(("name", "streams"), RESIDUALS)
def test_the_residual_is_what_stands_between_the_parts(family, name, streams):
    """Against a loop by hand over the parts of a plain model, in float64."""
    before, model = plain(family).double(), changed(family, name, streams).double()
    residual = mg.build_residual(name, WIDTH, 2 * BLOCKS, streams).double()
    residual.load_state_dict(model.stack.residual.state_dict())
    ids = tokens(2, 10)
    with torch.no_grad():
        expected = by_hand(before, family, residual, ids)
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-10)
        assert (expected - before(ids).logits).abs().max() > 0.01


@every_family
@pytest.mark.parametrize(("name", "streams"), RESIDUALS)
def test_cached_decoding_equals_the_full_forward(family, name, streams):
    model = changed(family, name, streams)
    ids, mask = padded("left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        full = model(ids, attention_mask=mask, position_ids=positions).logits
        real = mask.bool()
        found = step_by_step(model, ids, mask)
        torch.testing.assert_close(found[real], full[real], rtol=0, atol=1e-5)
        text = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        for row in range(3):
            alone = ids[row, mask[row].bool()][None]
            for _ in range(6):
                best = model(alone, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
                alone = torch.cat([alone, best], 1)
            assert text[row, -6:].tolist() == alone[0, -6:].tolist()
    assert torch.equal(
        text,
        model.generate(
            ids, attention_mask=mask, max_new_tokens=6, do_sample=False, use_cache=False
        ),
    )
    with_beams = [
        model.generate(ids, attention_mask=mask, max_new_tokens=4, num_beams=3, use_cache=use)
        for use in (True, False)
    ]
    assert torch.equal(*with_beams)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("name", "streams"), RESIDUALS)
def test_a_fresh_model_learns(family, name, streams):
    torch.manual_seed(0)
    model = with_residual(FAMILIES[family](), name, streams)
    ids = tokens(4, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] == pytest.approx(torch.tensor(float(VOCAB)).log().item(), abs=0.3)
    assert losses[-1] < 0.75 * losses[0]


@every_family
@pytest.mark.parametrize("name", mg.residual_names())
def test_a_fresh_model_starts_by_both_rules(family, name):
    """Transformers' own weights as in a plain model, the residual's as it is built."""
    torch.manual_seed(0)
    before = hf.AutoModelForCausalLM.from_config(FAMILIES[family]())
    after_plain = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = with_residual(FAMILIES[family](), name)
    torch.random.set_rng_state(after_plain)
    expected = mg.build_residual(name, WIDTH, 2 * BLOCKS).state_dict()
    found = model.stack.residual.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    own = [p for key, p in model.named_parameters() if ".residual." not in key]
    seen, wanted = (
        sorted((*p.shape, p.sum().item()) for p in some) for some in (own, before.parameters())
    )
    assert seen == wanted


def test_the_dtype_is_that_of_the_configuration():
    config = FAMILIES["llama"](dtype=torch.bfloat16)
    for name, streams in RESIDUALS:
        model = with_residual(config, name, streams)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        out = model(tokens(1, 5))
        assert out.logits.dtype == torch.bfloat16
        assert torch.isfinite(out.logits).all()
    given = plain("gpt2").to(torch.bfloat16)
    assert with_residual(given, "prenorm").dtype == torch.bfloat16


@every_family
@pytest.mark.parametrize(
    ("name", "streams", "options"),
    [
        ("mgr-competitive", 2, {"bias_init": "calibrated", "memory": "invert"}),
        ("mhc-lite", 2, {}),
        ("prenorm", None, {}),
    ],
)
def test_a_saved_model_comes_back_bit_for_bit(family, name, streams, options, tmp_path):
    model = changed(family, name, streams, **options)
    ids = tokens(2, 7)
    with torch.no_grad():
        expected = model(ids).logits
    for folder, more in ((tmp_path / "one", {}), (tmp_path / "cut", {"max_shard_size": "20KB"})):
        model.save_pretrained(folder, **more)
        entry = json.loads((folder / "config.json").read_text())["multigate"]
        assert entry == {"residual": name, "streams": streams, "options": options}
        found = hf.AutoModelForCausalLM.from_pretrained(folder)
        assert type(found) is type(model)
        assert not found.training
        with torch.no_grad():
            assert torch.equal(found(ids).logits, expected)
        assert all(
            torch.equal(b, model.stack.residual.get_buffer(key))
            for key, b in found.stack.residual.named_buffers()
        )
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 1
    found.train()
    found(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in found.parameters())
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        with torch.no_grad():
            assert torch.equal(other(ids).logits, expected)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    model = changed("llama", "mgr-competitive", 2)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    gone = next(key for key in weights if key.endswith("residual.steps.1.w1"))
    save_file({k: v for k, v in weights.items() if k != gone}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"1 missing keys, the first is {gone}"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    save_file({**weights, "model.layers.9.x": torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"1 unexpected keys, the first is model.layers.9.x"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    plain("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="missing keys"):
        type(model).from_pretrained(tmp_path / "plain", config=model.config)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (None, "must hold the name of a residual"),
        ("prenorm", "must hold the name of a residual"),
        ({"residual": "prenorm"}, "must hold the name of a residual"),
        ({"residual": ["hc"], "streams": 2, "options": {}}, "must hold the name of a residual"),
        ({"residual": "hc", "streams": 2, "options": []}, "must hold the name of a residual"),
        ({"residual": "os.system", "streams": None, "options": {}}, "unknown residual 'os.system'"),
        ({"residual": "hc", "streams": "2", "options": {}}, "streams must be a whole number"),
        ({"residual": "hc", "streams": 2, "options": {"dim": 1}}, "dim is not an option"),
        ({"residual": "hc", "streams": 2, "options": {"eval": 1}}, "unknown option of hc 'eval'"),
    ],
)
def test_a_configuration_that_says_nothing_usable(entry, sentence, tmp_path):
    changed("llama", "hc", 2).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "multigate": entry}))
    with pytest.raises(ValueError, match=sentence):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_gradient_checkpointing_changes_no_gradient(family, reentrant, when):
    model = changed(family, "mgr-competitive", 2).train()
    ids = tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    expected = {key: p.grad.clone() for key, p in model.named_parameters()}
    if when == "before":
        source = plain(family).train()
        source.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with pytest.warns(UserWarning, match="needs training"):
            source = with_residual(source, "mgr-competitive", 2)
        source.load_state_dict(model.state_dict())
        model = source
    else:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    calls = []
    for sublayer in model.stack.sublayers:
        sublayer.register_forward_pre_hook(lambda *_: calls.append(1))
    model.zero_grad()
    cache = hf.DynamicCache(config=model.config)
    model(ids, labels=ids, past_key_values=cache).loss.backward()
    assert len(calls) == 4 * BLOCKS, "every sublayer is computed again"
    assert cache.get_seq_length() == 0
    # The reentrant kind adds the gradients of queries, keys and values up in another order.
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if reentrant else {"rtol": 0, "atol": 0}
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[key], **tolerance)
    model.gradient_checkpointing_disable()
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 6 * BLOCKS


def test_attentions_come_out_as_before():
    before = plain("qwen3", attn_implementation="eager")
    after = with_residual(copy.deepcopy(before), "prenorm")
    ids = tokens(2, 6)
    with torch.no_grad():
        shown = [model(ids, output_attentions=True).attentions for model in (before, after)]
    assert len(shown[1]) == BLOCKS
    assert all(torch.equal(a, b) for a, b in zip(*shown, strict=True))


@every_family
def test_hidden_states_are_refused(family):
    model = changed(family, "mgr-competitive", 2)
    ids = tokens(1, 4)
    with pytest.raises(ValueError, match="output_hidden_states is not there"):
        model(ids, output_hidden_states=True)
    with pytest.raises(ValueError, match="output_hidden_states is not there"):
        model.generate(
            ids, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True
        )
    model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="output_hidden_states is not there"):
        model(ids)
    model(ids, output_hidden_states=False)


def test_the_coefficients_of_the_gates_can_be_recorded():
    model = changed("gpt2", "mgr-competitive", 2)
    with torch.no_grad(), model.stack.residual.recording() as steps:
        model(tokens(2, 7))
    assert steps[2 * BLOCKS - 1]["beta"].shape == (2, 7, 2)


def test_one_sentence_says_that_a_given_model_needs_training():
    for name, streams in RESIDUALS:
        with pytest.warns(UserWarning, match=f"with {name} it needs training now") as seen:
            with_residual(plain("llama"), name, streams)
        assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_residual(FAMILIES["llama"](), "hc")


def test_models_that_share_a_configuration_stay_plain():
    config = FAMILIES["llama"]()
    first, second = (hf.LlamaForCausalLM(config) for _ in range(2))
    with_residual(second, "prenorm")
    with_residual(config, "hc")
    assert type(config) is type(first.config) is hf.LlamaConfig
    assert not hasattr(config, "multigate")
    configs = [m.config for m in second.modules() if hasattr(m, "config")]
    assert all(c is second.config for c in configs)


def two_kinds():
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    return FAMILIES["qwen3"](layer_types=kinds, use_sliding_window=True, sliding_window=4)


SENTENCES = {
    "family": (
        lambda: with_residual(hf.GPTNeoXConfig()),
        "does not know models of type 'gpt_neox': it knows llama, qwen2, qwen3, gpt2",
    ),
    "head": (
        lambda: with_residual(hf.LlamaModel(FAMILIES["llama"]())),
        "needs a LlamaForCausalLM itself, got a LlamaModel",
    ),
    "name of a model": (lambda: with_residual("gpt2"), "a configuration or a model .* got str"),
    "residual": (lambda: with_residual(FAMILIES["llama"](), "mgr"), "unknown residual 'mgr'"),
    "streams": (
        lambda: with_residual(FAMILIES["llama"](), "prenorm", 4),
        "prenorm takes no number of streams",
    ),
    "option": (lambda: with_residual(FAMILIES["llama"](), depth=3), "depth is not an option"),
    "kinds of layers": (lambda: with_residual(two_kinds()), "full_attention and sliding_attention"),
    "model twice": (
        lambda: with_residual(with_residual(plain("gpt2"), "prenorm"), "hc"),
        "has a multigate residual already",
    ),
    "configuration twice": (
        lambda: with_residual(with_residual(FAMILIES["gpt2"](), "hc").config),
        "has a multigate residual already",
    ),
    "final norm": (
        lambda: with_residual(FAMILIES["llama"](), "hc", norm_then_sum=True),
        "hc: with these options the last step needs the final norm",
    ),
    "cross attention": (
        lambda: with_residual(FAMILIES["gpt2"](add_cross_attention=True)),
        "has no cross attention",
    ),
}


@pytest.mark.parametrize("what", SENTENCES)
def test_one_clear_sentence(what):
    call, sentence = SENTENCES[what]
    with pytest.raises(ValueError, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_two_devices():
    model = plain("llama")
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match="needs a model on one device.* cpu and meta"):
        with_residual(model)


def test_a_model_that_is_refused_is_left_as_it_was():
    model = plain("llama")
    ids = tokens(1, 5)
    before = model(ids).logits
    with pytest.raises(ValueError, match="unknown residual"):
        with_residual(model, "nothing")
    assert type(model) is hf.LlamaForCausalLM
    assert type(model.config) is hf.LlamaConfig
    assert torch.equal(model(ids).logits, before)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs the package transformers.*multigate\[hf\]"):
        with_residual(None)
