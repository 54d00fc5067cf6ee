"""`MultigateForCausalLM`: the GPT of multigate under Transformers, with its logits to the bit."""

import json
import os
import pickle
import re
from functools import partial

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file, save_file

import multigate as mg

hf = pytest.importorskip("transformers", reason="multigate.hf needs the package transformers")
from multigate.hf import (  # noqa: E402
    MultigateConfig,
    MultigateForCausalLM,
    from_gpt,
    to_gpt,
    with_residual,
)

hf.utils.logging.disable_progress_bar()
VOCAB, CONTEXT = 40, 24
SMALL = {"vocab_size": VOCAB, "blocks": 3, "width": 32, "heads": 2, "context": CONTEXT}
OPTIONS = [
    {"residual": "mgr-competitive", "streams": 3, "residual_options": {"bias_init": -1.0}},
    {"residual": "mgr-independent", "memory": "recompute", "residual_options": {"every": 2}},
    {"residual": "mhc", "streams": 2, "residual_options": {"sinkhorn_steps": 3}},
    {"residual": "prenorm", "attention": "moda"},
    {"residual": "attnres-block", "streams": 2, "attention": "moda-ffn"},
    {"residual": "highway", "stream_dtype": "bfloat16", "rope_base": 500.0, "eps": 1e-5},
]
every_residual = pytest.mark.parametrize("residual", mg.residual_names())
every_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o)))


def gpt(**changes):
    """With every parameter moved away from where it starts, so that leaving one out would show."""
    torch.manual_seed(0)
    model = mg.GPT(mg.GPTConfig(**{**SMALL, **changes}))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p) if p.ndim < 2 else 0.1 * torch.randn_like(p)
    return model.eval()


def wrapped(**changes):
    model = from_gpt(gpt(**changes))
    model.generation_config.pad_token_id = 0
    return model


def tokens(*shape):
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(2))


def padded(side, lengths=(9, 6, 2)):
    ids, mask = tokens(len(lengths), 9), torch.ones(len(lengths), 9, dtype=torch.long)
    for row, length in enumerate(lengths):
        outside = slice(0, 9 - length) if side == "left" else slice(length, 9)
        ids[row, outside], mask[row, outside] = 0, 0
    return ids, mask


@every_residual
def test_the_logits_are_those_of_the_gpt_to_the_bit(residual):
    plain = gpt(residual=residual)
    model, ids = from_gpt(plain), tokens(2, 11)
    before = plain(ids)
    for settings in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(ids)}):
        assert torch.equal(model(ids, **settings).logits, before)
    positions = torch.arange(11).expand(2, -1)
    assert torch.equal(model(ids, position_ids=positions, use_cache=False).logits, before)
    assert torch.equal(model.train()(ids).logits, before)
    assert model(ids).past_key_values is None
    assert model.eval()(ids, return_dict=False)[0].equal(before)


@every_option
def test_every_option_is_kept_by_saving_and_loading(options, tmp_path):
    model, ids = wrapped(**options), tokens(2, 11)
    model.save_pretrained(tmp_path)
    assert {f.name for f in tmp_path.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
    }
    for back in (
        hf.AutoModelForCausalLM.from_pretrained(tmp_path),
        MultigateForCausalLM.from_pretrained(str(tmp_path)),
    ):
        assert type(back) is MultigateForCausalLM
        assert back.config.gpt() == model.config.gpt() == model.model.config
        assert torch.equal(back(ids).logits, model(ids).logits)
        assert not any(p.is_meta for p in (*back.parameters(), *back.buffers()))
        # Buffers that are not saved are made once more.
        found, expected = dict(back.named_buffers()), dict(model.named_buffers())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    plain = to_gpt(tmp_path)
    assert torch.equal(plain(ids), model(ids).logits)
    assert plain.config == model.model.config


def test_the_configuration_speaks_both_languages():
    config = MultigateConfig(hidden_size=64, num_hidden_layers=5, num_attention_heads=4)
    assert (config.width, config.blocks, config.heads) == (64, 5, 4)
    assert config.max_position_embeddings == config.context == 1024
    assert MultigateConfig().gpt() == mg.GPTConfig()
    again = pickle.loads(pickle.dumps(config))
    assert again.to_dict() == config.to_dict()
    assert hf.AutoConfig.for_model("multigate", blocks=7).blocks == 7
    config.blocks = 3
    assert MultigateForCausalLM(config).model.config.blocks == 3


def test_a_new_model_is_initialised_as_the_gpt_is():
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(MultigateConfig(**SMALL, residual="hc"))
    torch.manual_seed(3)
    plain = mg.GPT(mg.GPTConfig(**SMALL, residual="hc"))
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.model.get_parameter(name), parameter), name


def test_precision():
    model, ids = wrapped(), tokens(1, 9)
    half = MultigateForCausalLM.from_pretrained(
        None, config=model.config, state_dict=model.state_dict(), dtype=torch.bfloat16
    )
    assert half.dtype == torch.bfloat16
    assert half.model.rope_cos.dtype == torch.float32
    assert torch.equal(half.model.rope_sin, model.model.rope_sin)
    assert half(ids).logits.dtype == torch.bfloat16
    assert torch.allclose(half(ids).logits.float(), model(ids).logits, atol=0.5)
    assert torch.equal(half(ids).logits, model.model.bfloat16()(ids))


@every_residual
def test_labels_give_the_loss_and_every_gradient_of_the_gpt(residual):
    plain = gpt(residual=residual).train()
    ids = tokens(2, 11)
    expected = plain(ids[:, :-1], ids[:, 1:])
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in plain.named_parameters()}
    plain.zero_grad()
    model = from_gpt(plain).train()
    out = model(ids, labels=ids)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    out.loss.backward()
    for name, p in plain.named_parameters():
        assert torch.allclose(p.grad, gradients[name], atol=1e-6), name


def test_labels_of_padding_do_not_count_and_left_padding_can_be_trained():
    model = wrapped().train()
    for side in ("left", "right"):
        ids, mask = padded(side)
        # Nothing comes before the first token of a text that it could be predicted from.
        labels = ids.masked_fill(mask.cumsum(-1) * mask < 2, -100)
        model.zero_grad()
        loss = model(ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        gradient = model.model.embed.weight.grad.clone()
        model.zero_grad()
        rows = [row[there.bool()][None] for row, there in zip(ids, mask, strict=True)]
        singles = [(model(row, labels=row).loss, row.shape[1] - 1) for row in rows]
        count = sum(n for _, n in singles)
        single = sum(one * n for one, n in singles) / count
        single.backward()
        assert loss.item() == pytest.approx(single.item(), rel=1e-5)
        assert torch.allclose(gradient, model.model.embed.weight.grad, atol=1e-6)


def test_it_learns():
    torch.manual_seed(0)
    model = MultigateForCausalLM(MultigateConfig(**SMALL))
    optimizer, ids = torch.optim.AdamW(model.parameters(), 3e-3), tokens(4, 20)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("attention", ["plain", "moda-ffn"])
def test_gradient_checkpointing_changes_no_gradient(attention):
    model, ids = wrapped(attention=attention).train(), tokens(2, 9)
    gradients = []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable()
        assert model.is_gradient_checkpointing == enabled
        model.zero_grad()
        model(ids, labels=ids, use_cache=True).loss.backward()
        assert model.model.stack.checkpointing == enabled
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-7)
    with pytest.raises(ValueError, match=r"use model.eval\(\) or use_cache=False"):
        model.generate(ids, max_new_tokens=2)
    model.eval()(ids)
    assert not model.model.stack.checkpointing


def test_a_cache_that_is_given_is_used_in_training_too():
    model, ids = wrapped().train(), tokens(2, 9)
    with torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).past_key_values
    out = model(ids[:, 4:], past_key_values=cache)
    assert torch.allclose(out.logits, model(ids).logits[:, 4:], atol=1e-5)
    out.logits.sum().backward()
    assert model.model.embed.weight.grad.isfinite().all()


@every_option
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side, options):
    model = wrapped(**{**options, "stream_dtype": "auto"})
    ids, mask = padded(side)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        for row in range(3):
            there = mask[row].bool()
            alone = model(ids[row, there][None]).logits[0]
            assert torch.allclose(logits[row, there], alone, atol=1e-5)
    assert logits.isfinite().all()


@every_residual
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_cache_gives_the_logits_of_the_whole(residual, cache):
    model = wrapped(residual=residual)
    ids, mask = padded("left")
    made = None
    if cache == "static":
        made = hf.StaticCache(config=model.config, max_cache_len=12)
    with torch.no_grad():
        whole, logits = model(ids, attention_mask=mask).logits, []
        for begin, end in ((0, 4), (4, 5), (5, 8), (8, 9)):
            out = model(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                past_key_values=made,
                use_cache=True,
            )
            made = out.past_key_values
            logits.append(out.logits)
    assert made.get_seq_length() == 9
    assert torch.allclose(torch.cat(logits, 1)[mask.bool()], whole[mask.bool()], atol=1e-5)


def test_masks_of_four_dimensions():
    model = wrapped(attention="moda")
    ids, mask = padded("left")
    seen = torch.ones(9, 9, dtype=torch.bool).tril() & mask[:, None].bool()
    seen = (seen | torch.eye(9, dtype=torch.bool))[:, None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    whole = model(ids, attention_mask=mask).logits
    for given in (seen, added):
        assert torch.equal(model(ids, attention_mask=given, position_ids=positions).logits, whole)


def test_texts_packed_into_one_row_do_not_see_each_other():
    model, ids = wrapped(), tokens(1, 11)
    positions = torch.cat([torch.arange(4), torch.arange(7)])[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(ids[:, :4]).logits, model(ids[:, 4:]).logits], dim=1)
    assert torch.allclose(packed, alone, atol=1e-5)


def test_logits_of_some_positions():
    model, ids = wrapped(), tokens(2, 11)
    whole = model(ids).logits
    assert torch.allclose(model(ids, logits_to_keep=1).logits, whole[:, -1:], atol=1e-6)
    assert torch.allclose(model(ids, logits_to_keep=3).logits, whole[:, -3:], atol=1e-6)
    chosen = torch.tensor([0, 5])
    assert torch.allclose(model(ids, logits_to_keep=chosen).logits, whole[:, chosen], atol=1e-6)


@every_residual
@pytest.mark.parametrize("attention", ["plain", "moda"])
def test_greedy_text_is_that_of_generate(residual, attention):
    """One prompt, and several of different lengths, padded on the left."""
    model = wrapped(residual=residual, attention=attention)
    ids, mask = padded("left")
    rows = [row[there.bool()] for row, there in zip(ids, mask, strict=True)]
    ours = mg.generate(model.model, rows, 8, temperature=0)
    theirs = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    for row, there, text in zip(theirs, mask, ours, strict=True):
        assert row[9 - int(there.sum()) :].tolist() == text.tolist()
    alone = model.generate(rows[1][None], max_new_tokens=8, do_sample=False)
    assert alone[0].tolist() == ours[1].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
@pytest.mark.parametrize("attention", ["plain", "moda"])
def test_every_cache_of_transformers_writes_the_same(settings, attention):
    model = wrapped(attention=attention)
    ids, mask = padded("left", (9,) if "prompt_lookup_num_tokens" in settings else (9, 6, 2))
    given = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    plain = model.generate(ids, **given)
    assert torch.equal(model.generate(ids, **given, **settings), plain)


@pytest.mark.slow
def test_a_static_cache_is_decoded_by_one_graph():
    model, graphs = wrapped(attention="moda"), []
    ids, mask = padded("left")

    def count(graph, _, **options):
        graphs.append(options)
        return graph.forward

    settings = hf.CompileConfig(fullgraph=True, backend=count)
    settings._compile_all_devices = True
    given = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    text = model.generate(ids, cache_implementation="static", compile_config=settings, **given)
    assert torch.equal(text, model.generate(ids, **given))
    assert len(graphs) == 1


@every_residual
def test_beams_are_the_best_there_are(residual):
    """With as many beams as there are texts, none is missed, so the best of all must come out."""
    model = wrapped(residual=residual, vocab_size=6)
    ids = tokens(2, 5) % 6
    found = model.generate(
        ids, max_new_tokens=3, num_beams=36, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    pairs = torch.cartesian_prod(*[torch.arange(6)] * 3)
    for row, text in zip(ids, found, strict=True):
        whole = torch.cat([row.expand(len(pairs), -1), pairs], dim=1)
        with torch.no_grad():
            shares = model(whole).logits.log_softmax(-1)[:, 4:-1].gather(-1, pairs[..., None])
        assert text[5:].tolist() == pairs[shares.sum((1, 2)).argmax()].tolist()


def test_beams_do_not_depend_on_padding_or_cache():
    model = wrapped()
    ids, mask = padded("left")
    given = {"max_new_tokens": 6, "num_beams": 4, "num_return_sequences": 2, "do_sample": False}
    texts = model.generate(ids, attention_mask=mask, **given)
    slow = model.generate(ids, attention_mask=mask, use_cache=False, **given)
    assert torch.equal(texts, slow)
    for row in range(3):
        length = int(mask[row].sum())
        alone = model.generate(ids[row, 9 - length :][None], **given)
        assert torch.equal(texts[2 * row : 2 * row + 2, 9 - length :], alone)


def test_sampling_repeats_with_a_seed():
    model, ids = wrapped(), tokens(2, 5)
    texts = []
    for seed in (1, 1, 2):
        hf.set_seed(seed)
        texts.append(model.generate(ids, max_new_tokens=10, do_sample=True, top_k=20, top_p=0.9))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_text_ends_where_the_context_does():
    model, ids = wrapped(), tokens(2, 9)
    text = model.generate(ids, max_new_tokens=100, do_sample=False, pad_token_id=0)
    assert text.shape == (2, CONTEXT)
    with pytest.raises(ValueError, match="25 tokens are more than this model's context of 24"):
        model(tokens(1, 25))
    with torch.no_grad():
        cache = model(tokens(1, 20)).past_key_values
        with pytest.raises(ValueError, match="25 tokens are more than this model's context of 24"):
            model(tokens(1, 5), past_key_values=cache)


def test_padding_takes_no_place_in_the_context():
    """A row may have more slots than the context, as long as its text fits."""
    model = wrapped()
    with torch.no_grad():
        ids = tokens(2, 20)
        mask = torch.ones_like(ids)
        mask[:, :10] = 0
        cache = model(ids, attention_mask=mask).past_key_values
        more = tokens(2, 10)
        mask = torch.cat([mask, torch.ones_like(more)], 1)
        late = model(more, attention_mask=mask, past_key_values=cache).logits
        whole = model(torch.cat([ids[:, 10:], more], 1)).logits
    assert torch.allclose(late, whole[:, 10:], atol=1e-5)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_what_is_not_there_is_one_sentence(name):
    model, ids = wrapped(), tokens(1, 5)
    with pytest.raises(ValueError, match=f"{name} is not there in this model"):
        model(ids, **{name: True})
    model(ids, **{name: False})


def test_wrong_inputs_are_one_sentence():
    model, ids = wrapped(), tokens(2, 5)
    with pytest.raises(ValueError, match="needs input_ids"):
        model(None)
    with pytest.raises(ValueError, match="inputs_embeds is not there"):
        model(ids, inputs_embeds=torch.zeros(1, 2, 32))
    with pytest.raises(ValueError, match="the token 40 is not in this model's vocabulary of 40"):
        model(torch.tensor([[1, VOCAB]]))
    with pytest.raises(ValueError, match="the attention mask must have a number for each of 2 x 5"):
        model(ids, attention_mask=torch.ones(2, 3))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"residual": "mgr-compettive"}, "did you mean 'mgr-competitive'"),
        ({"residual": ["prenorm"]}, "residual of the configuration must be of type str"),
        ({"width": "32"}, "width of the configuration must be of type int, got '32'"),
        ({"hidden_size": 32.0}, "width of the configuration must be of type int, got 32.0"),
        ({"blocks": True}, "blocks of the configuration must be of type int, got True"),
        ({"blocks": 10**9}, "blocks of the configuration must be at most 4096, got 1000000000"),
        ({"vocab_size": 10**12}, "vocab_size of the configuration must be at most"),
        ({"context": 1 << 40}, "context of the configuration must be at most"),
        ({"context": 1 << 20, "width": 1 << 15, "heads": 1}, "is more than can be meant"),
        ({"streams": "many"}, "streams of the configuration must be of type int or null"),
        ({"streams": 10**6}, "streams of the configuration must be at most"),
        ({"streams": -2}, "streams must be a whole number of at least 1, got -2"),
        ({"residual_options": {"gates": 2}}, "unknown option of mgr-competitive 'gates'"),
        ({"residual_options": {"bias_init": [1]}}, "do not fit 'mgr-competitive'"),
        ({"residual_options": {"bias_init": True}}, "bias_init must be of type str . float, got"),
        ({"residual_options": {"eps": "small"}}, "eps must be of type float, got 'small'"),
        ({"residual_options": {"dim": 2}}, "do not fit 'mgr-competitive'.* 'dim'"),
        (
            {"residual_options": "none"},
            "residual_options of the configuration must be of type dict",
        ),
        ({"attention": "flash"}, "unknown attention 'flash'"),
        ({"eps": None}, "eps of the configuration must be of type int or float"),
        ({"eps": float("nan")}, "eps of the configuration must be a finite number above 0"),
        ({"rope_base": 10**400}, "rope_base of the configuration must be a finite number above 0"),
        ({"rope_base": 0}, "rope_base of the configuration must be a finite number above 0"),
        ({"dtype": "nonsense"}, "dtype of the configuration must be one like float32, got 'nons"),
        ({"dtype": 5}, "dtype of the configuration must be one like float32, got 5"),
        ({"id2label": "x"}, "id2label of the configuration must be of type dict or null"),
        ({"quantization_config": 5}, "quantization_config of the configuration must be of type"),
        ({"eos_token_id": "a"}, "eos_token_id of the configuration must be of type int or list"),
        ({"attn_implementation": "somebody/code"}, "attn_implementation of the configuration must"),
        ({"use_cache": "yes"}, "use_cache of the configuration must be of type bool"),
        ({"tokenizer_fingerprints": "a"}, "tokenizer_fingerprints of the configuration must be of"),
        ({"straems": 3}, "unknown setting of the configuration 'straems': did you mean 'streams'"),
        ({"__class__": "os.system"}, "unknown setting of the configuration '__class__'"),
        ({"model_type": "multigates"}, "multigates"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_a_hostile_configuration_is_one_sentence(changes, said, tmp_path):
    wrapped().save_pretrained(tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    for name in changes:
        table.pop(MultigateConfig.attribute_map.get(name, name), None)
    (tmp_path / "config.json").write_text(json.dumps({**table, **changes}))
    with pytest.raises(ValueError, match=said) as raised:
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "\n" not in str(raised.value) or "model_type" in changes


@pytest.mark.parametrize("changes", [{"width": "32"}, {"residual_options": {"eps": "small"}}])
def test_a_hostile_configuration_is_one_sentence_for_the_trainer_too(changes, tmp_path):
    wrapped().save_pretrained(tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**table, **changes}))
    with pytest.raises(ValueError, match=r"(width|eps).* must be of type (int|float), got"):
        to_gpt(tmp_path)


def test_only_safetensors_are_read(tmp_path):
    """A pickle is not even opened: this one would leave a file behind."""

    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    model = wrapped()
    model.save_pretrained(tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights: save the model with save_pretrained"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.save({"model.embed.weight": Trap()}, tmp_path / "pytorch_model.bin")
    named = partial(MultigateForCausalLM.from_pretrained, pretrained_model_name_or_path=tmp_path)
    for load in (hf.AutoModelForCausalLM.from_pretrained, to_gpt, lambda _: named()):
        with pytest.raises(ValueError, match=r"no weights but pytorch_model.bin, a pickle, and"):
            load(tmp_path)
    (tmp_path / "model.other.safetensors").write_bytes(weights)
    with pytest.raises(OSError, match="no file named model.safetensors"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="leave use_safetensors=False out"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, use_safetensors=False)
    hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_an_index_may_only_name_safetensors_beside_it(tmp_path):
    """Transformers would open whatever it names, pickles too."""
    model = wrapped()
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    torch.save(model.state_dict(), tmp_path / "model" / "weights.bin")
    save_file(model.state_dict(), tmp_path / "elsewhere.safetensors")
    hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    def naming(file):
        return json.dumps({**table, "weight_map": dict.fromkeys(table["weight_map"], file)})

    for text, said in (
        (naming("weights.bin"), "read from weights.bin, which may be a pickle"),
        (naming("../elsewhere.safetensors"), "a file outside of its folder"),
        (naming(5), "index.json is damaged"),
        ("{", "index.json is damaged"),
        ("[]", "index.json is damaged"),
    ):
        index.write_text(text)
        for load in (hf.AutoModelForCausalLM.from_pretrained, to_gpt):
            with pytest.raises(ValueError, match=said):
                load(tmp_path / "model")


@pytest.mark.parametrize("with_llama", [False, True])
def test_no_pickle_is_read_from_the_hub_either(with_llama, tmp_path, monkeypatch):
    """There the folder is not known before Transformers has found the files."""
    small = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    config = hf.LlamaConfig(**small, num_hidden_layers=2, num_attention_heads=2)
    model = with_residual(config, "hc") if with_llama else wrapped()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(re.sub(r"model-\d+-of-\d+\.safetensors", "weights.bin", index.read_text()))
    torch.save(model.state_dict(), tmp_path / "weights.bin")
    for place in ("multigate.hf.model", "multigate.hf.classes"):
        monkeypatch.setattr(f"{place}.check_weights", lambda *_: None)
    with pytest.raises(ValueError, match=r"weights.bin, which may be a pickle"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_ids_that_the_trainer_of_transformers_notes_are_kept(tmp_path):
    """It writes those of the tokenizer into the configuration."""
    model = wrapped()
    model.config.eos_token_id, model.config.pad_token_id = [3, 4], 0
    model.save_pretrained(tmp_path)
    back = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (back.config.eos_token_id, back.config.pad_token_id) == ([3, 4], 0)
    assert MultigateConfig(bos_token_id=2).bos_token_id == 2


def test_only_safetensors_are_read_into_a_model_with_another_residual(tmp_path):
    small = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    config = hf.LlamaConfig(**small, num_hidden_layers=2, num_attention_heads=2)
    with_residual(config, "hc").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ValueError, match="are damaged"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no weights but pytorch_model.bin, a pickle"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 200, 5000])
def test_damaged_weights_are_one_sentence(keep, tmp_path):
    wrapped().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="are damaged") as raised:
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=r"the weights in .* are damaged: copy or export them"):
        to_gpt(tmp_path)


def test_weights_of_another_model_are_one_sentence(tmp_path):
    wrapped().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    name = "model.stack.residual.steps.1.w2"
    without = {k: v for k, v in whole.items() if k != name}
    for changed, said in (
        (without, f"1 missing keys, the first is {name}"),
        ({**whole, "lm_head.weight": torch.ones(2)}, "1 unexpected keys, the first is lm_head"),
        ({**without, name: torch.ones(5)}, f"1 mismatched keys, the first is {name}"),
    ):
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=said):
            hf.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_no_memory_is_taken_for_what_a_configuration_claims(tmp_path):
    """400 GB of it; the file of weights says that it is not so."""
    wrapped().save_pretrained(tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    claimed = {**table, "width": 1 << 16, "blocks": 4}
    (tmp_path / "config.json").write_text(json.dumps(claimed))
    with pytest.raises(ValueError, match="these are not the weights of a Multigate"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds 'model.embed.weight' of shape .40, 32."):
        to_gpt(tmp_path)


def test_a_folder_of_something_else_is_one_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no config.json"):
        to_gpt(tmp_path)
    for text, said in (
        ("{", "cannot be read as a configuration"),
        ("[]", "is not the configuration of a multigate GPT"),
        ('{"model_type": "llama"}', "but of 'llama'"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            to_gpt(tmp_path)


def test_a_vocabulary_can_grow(tmp_path):
    model, ids = wrapped(), tokens(2, 9)
    before = model(ids).logits
    model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
    assert model.config.vocab_size == model.model.config.vocab_size == VOCAB + 8
    assert torch.allclose(model(ids).logits[..., :VOCAB], before, atol=1e-6)
    model.save_pretrained(tmp_path)
    back = MultigateForCausalLM.from_pretrained(tmp_path)
    assert back(torch.full((1, 3), VOCAB + 7)).logits.shape == (1, 3, VOCAB + 8)


def test_the_names_do_not_clash():
    from multigate.hf.classes import classes

    assert hf.CONFIG_MAPPING["multigate"] is MultigateConfig
    assert hf.CONFIG_MAPPING["multigate_llama"] is classes("llama").config
    assert hf.MODEL_FOR_CAUSAL_LM_MAPPING[MultigateConfig] is MultigateForCausalLM
