"""Generation: the cache against the full forward pass, batches against single prompts, sampling
against a distribution written out by hand."""

import gc
import math
import threading
import time
import weakref

import pytest
import torch

import multigate as mg
from cases import takes_streams
from multigate import decode
from multigate.cache import Cache
from multigate.decode import Decode
from multigate.generate import draw, generate_stream, pick, shares
from replayed import pretend

CONTEXT = 24
ATTENTION = ("plain", "moda", "moda-ffn")
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7], [9, 3]]


def lively(residual="mgr-competitive", dtype=torch.float32, **changes):
    """A small GPT with random parameters: at initialisation hardly a position looks at another."""
    torch.manual_seed(0)
    options = {"streams": 3} if takes_streams(residual) else {}
    sizes = {"vocab_size": 40, "blocks": 3, "width": 16, "heads": 2, "context": CONTEXT}
    model = mg.GPT(mg.preset("tiny", residual=residual, **{**sizes, **options, **changes}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape, generator=generator)
    return model.to(dtype)


def random_tokens(*shape, seed=0):
    return torch.randint(40, shape, generator=torch.Generator().manual_seed(seed))


def by_hand(model, prompt, steps):
    """The likeliest token after the likeliest token, each from all that fits into the context."""
    tokens = list(prompt)
    for _ in range(steps):
        with torch.no_grad():
            logits = model(torch.tensor([tokens[-model.config.context :]]))
        tokens.append(logits[0, -1].argmax().item())
    return tokens


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("residual", mg.residual_names())
@torch.no_grad()
def test_cached_logits_are_those_of_the_full_forward(residual, attention, dtype, most):
    """At every position, whether it comes with the prompt, alone, or with others after it."""
    model = lively(residual, dtype, attention=attention)
    tokens = random_tokens(2, CONTEXT)
    full = model(tokens)
    cache, found, begin = Cache(model, 2), [], 0
    for count in (5, 1, 1, 4, *[1] * (CONTEXT - 11)):
        found.append(model(tokens[:, begin : begin + count], cache=cache))
        begin += count
    assert (torch.cat(found, dim=1) - full).abs().max() <= most
    # The test could not fail if positions did not look at each other.
    alone = model(tokens[:, 7:8])
    assert (alone - full[:, 7:8]).abs().max() > 0.1


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("residual", mg.residual_names())
def test_greedy_tokens_are_those_of_the_full_forward(residual, attention):
    model = lively(residual, attention=attention)
    prompts = random_tokens(6, 6)
    rows = mg.generate(model, prompts, CONTEXT - 6, temperature=0)
    for row, prompt in zip(rows, prompts.tolist(), strict=True):
        assert row.tolist() == by_hand(model, prompt, CONTEXT - 6)
    new = torch.stack(rows)[:, 6:]
    assert len(new.unique()) > 2, "a model that repeats itself shows nothing"


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("residual", mg.residual_names())
@torch.no_grad()
def test_padded_rows_have_the_logits_of_single_prompts(residual, attention):
    model = lively(residual, torch.float64, attention=attention)
    lengths = (3, 1, 7)
    rows = [random_tokens(1, n + 9, seed=n) for n in lengths]
    longest = max(lengths)
    padding = torch.tensor([longest - n for n in lengths])
    # Padding is no text: whichever token stands there must not matter.
    batch = torch.full((3, longest), 11)
    for line, row, n in zip(batch, rows, lengths, strict=True):
        line[longest - n :] = row[0, :n]
    cache = Cache(model, 3, longest + 9, padding)
    found = [model(batch, cache=cache)]
    for step in range(9):
        new = torch.stack([row[0, n + step] for row, n in zip(rows, lengths, strict=True)])
        found.append(model(new[:, None], cache=cache))
    together = torch.cat(found, dim=1)
    for number, row in enumerate(rows):
        own = together[number, padding[number] :]
        assert (own - model(row)[0]).abs().max() <= 1e-12


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("steps", [12, 40], ids=["within the context", "beyond it"])
def test_a_batch_gives_the_text_of_single_prompts(attention, steps):
    model = lively(attention=attention)
    together = mg.generate(model, PROMPTS, steps, temperature=0)
    assert [row.tolist() for row in together] == [by_hand(model, p, steps) for p in PROMPTS]
    seeds = [7, 8, 9, 7]
    together = mg.generate(model, PROMPTS, steps, seed=seeds)
    for prompt, seed, row in zip(PROMPTS, seeds, together, strict=True):
        (alone,) = mg.generate(model, [prompt], steps, seed=seed)
        assert row.tolist() == alone.tolist()
        assert row.tolist()[: len(prompt)] == prompt


def test_prompts_may_be_a_tensor_or_lists_or_tensors_of_any_integers():
    model, prompts = lively(), random_tokens(3, 4)
    expected = mg.generate(model, prompts, 5, temperature=0)
    lists = prompts.tolist()
    for other in (lists, list(prompts.to(torch.uint8)), tuple(map(tuple, lists))):
        for a, b in zip(mg.generate(model, other, 5, temperature=0), expected, strict=True):
            assert a.dtype == torch.long
            assert torch.equal(a, b)
    assert [row.tolist() for row in mg.generate(model, prompts, 0)] == lists


def distribution(logits, temperature, top_k, top_p):
    """The probabilities of one row, from a list of pairs that shrinks."""
    pairs = sorted(((z / temperature, i) for i, z in enumerate(logits)), reverse=True)
    if top_k is not None:
        pairs = pairs[:top_k]
    total = sum(math.exp(z) for z, _ in pairs)
    if top_p not in (None, 1.0):
        kept, mass = [], 0.0
        for z, i in pairs:
            if mass >= top_p:
                break
            kept.append((z, i))
            mass += math.exp(z) / total
        pairs = kept
    total = sum(math.exp(z) for z, _ in pairs)
    found = [0.0] * len(logits)
    for z, i in pairs:
        found[i] = math.exp(z) / total
    return found


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 5, 30, 99])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.4, 0.9, 1.0])
def test_shares_are_those_of_a_distribution_by_hand(temperature, top_k, top_p):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(6, 30, generator=generator, dtype=torch.float64)
    found = shares(logits, temperature, top_k, top_p)
    expected = torch.tensor(
        [distribution(row, temperature, top_k, top_p) for row in logits.tolist()]
    )
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=1e-12)


def test_a_tiny_temperature_is_greedy_and_top_p_of_1_cuts_nothing():
    logits = torch.tensor([[500.0, 800.0, -300.0]])
    for temperature in (1e-3, 1e-30, 1e-45):
        assert shares(logits, temperature, None, None).tolist() == [[0, 1, 0]]
    # In float32 the sum of the first ones is 1 already.
    logits = torch.tensor([[0.0, -30.0, -40.0]])
    assert (shares(logits, 1.0, None, 1.0) > 0).all()


@pytest.mark.parametrize(("top_p", "count"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_top_p_takes_no_more_than_it_needs(top_p, count):
    """Of four equal tokens, whose sums are exact."""
    found = shares(torch.zeros(1, 4), 1.0, None, top_p)
    assert sorted(found[0].tolist()) == [0.0] * (4 - count) + [pytest.approx(1 / count)] * count


def test_a_number_picks_the_token_in_whose_share_it_lies():
    share = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    nearly = math.nextafter(1.0, 0.0)
    cases = {0.0: 1, 0.1: 1, 0.2499: 1, 0.25: 3, 0.5: 3, 0.7499: 3, 0.75: 4, 0.9999: 4}
    for number, token in cases.items():
        assert pick(share, torch.tensor([number])).tolist() == [token]
    assert pick(share.double(), torch.tensor([nearly], dtype=torch.float64)).tolist() == [4]
    # Sums that rounding leaves below 1 still end at the last token that has a share.
    third = torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]]) * 0.999
    assert pick(third, torch.tensor([1 - 2**-24])).tolist() == [2]
    grid = (torch.arange(4000) + 0.5) / 4000
    counts = pick(share.expand(4000, -1), grid).bincount(minlength=6)
    assert counts.tolist() == [0, 1000, 0, 2000, 1000, 0]


@torch.no_grad()
def test_tokens_follow_the_distribution():
    """The first token of many rows, and the second after a given first one."""
    model, count = lively(), 20000
    prompt = torch.tensor([[5, 6, 7]])
    rows = torch.stack(mg.generate(model, prompt.expand(count, -1), 2, 0.7, 6, 0.95, seed=1))
    likeliest = rows[:, 3].mode().values.item()
    groups = [(prompt, rows[:, 3])]
    after = rows[rows[:, 3] == likeliest]
    groups.append((torch.tensor([[5, 6, 7, likeliest]]), after[:, 4]))
    for given, tokens in groups:
        expected = distribution(model(given)[0, -1].tolist(), 0.7, 6, 0.95)
        observed = tokens.bincount(minlength=40) / len(tokens)
        for token, share in enumerate(expected):
            if share == 0:
                assert observed[token] == 0
            else:
                spread = math.sqrt(share * (1 - share) / len(tokens))
                assert abs(observed[token] - share) < 5 * spread + 1e-6


def test_seeds():
    model = lively()
    prompt = torch.tensor([[1, 2]]).expand(3, -1)

    def text(prompts=prompt, **options):
        return [row.tolist() for row in mg.generate(model, prompts, 15, **options)]

    assert text(seed=3) == text(seed=3)
    assert text(seed=3) != text(seed=4)
    first, *others = text(seed=3)
    assert text(prompt[:1], seed=3) == [first]
    assert first not in others, "rows must not draw the same numbers"
    assert text(generator=torch.Generator().manual_seed(3)) == text(seed=3)
    generator = torch.Generator().manual_seed(3)
    assert text(generator=generator) != text(generator=generator)
    torch.manual_seed(3)
    plain = text()
    torch.manual_seed(3)
    assert text() == plain
    assert text(seed=[3, 4, 3])[0] == first
    # Greedily, nobody's random numbers are touched.
    before = torch.get_rng_state()
    text(temperature=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_numbers_are_below_1_and_each_rows_own():
    numbers = draw(3, 1000, None, [1, 2, 1])
    assert torch.equal(numbers[0], numbers[2])
    assert not torch.equal(numbers[0], numbers[1])
    assert 0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1


def test_stop_tokens_end_their_rows_and_then_the_loop(monkeypatch):
    model, steps = lively(), 14
    free = [row.tolist() for row in mg.generate(model, PROMPTS, steps, temperature=0)]
    stop = [free[0][len(PROMPTS[0]) + 3], free[2][len(PROMPTS[2]) + 5]]

    def cut(row, prompt):
        new = row[len(prompt) :]
        ends = [i for i, token in enumerate(new) if token in stop]
        return prompt + new[: ends[0] + 1 if ends else None]

    expected = [cut(row, prompt) for row, prompt in zip(free, PROMPTS, strict=True)]
    lengths = [len(e) - len(p) for e, p in zip(expected, PROMPTS, strict=True)]
    assert len(set(lengths)) > 1, "the rows must end at different places"
    found = mg.generate(model, PROMPTS, steps, temperature=0, stop=stop)
    assert [row.tolist() for row in found] == expected
    calls = []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda tokens, **k: calls.append(tokens.shape[1]) or forward(tokens, **k)
    )
    mg.generate(model, PROMPTS[:1], steps, temperature=0, stop=stop)
    assert calls == [len(PROMPTS[0])] + [1] * (lengths[0] - 1)


@pytest.mark.parametrize("stop", [(), range(0, 40, 7)], ids=["free", "stops"])
def test_the_stream_is_the_text(stop):
    model = lively()
    options = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": 2, "stop": stop}
    rows = mg.generate(model, PROMPTS, 10, **options)
    steps = list(generate_stream(model, PROMPTS, 10, **options))
    assert all(step.shape == (4,) for step in steps)
    for number, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        new = [step[number].item() for step in steps]
        count = len(row) - len(prompt)
        assert new[:count] == row.tolist()[len(prompt) :]
        assert new[count:] == [-1] * (len(steps) - count)
    assert bool(stop) == any((step == -1).any() for step in steps)


def test_the_stream_leaves_gradients_to_its_reader():
    stream = generate_stream(lively(), [[1, 2]], 3)
    for _ in stream:
        assert torch.is_grad_enabled()


def test_a_reader_may_write_into_the_tokens():
    model, found = lively(), []
    for step in generate_stream(model, [[1, 2]], 8, temperature=0):
        found.append(step.item())
        step.zero_()
    assert found == by_hand(model, [1, 2], 8)[2:]


def test_the_vocabulary_can_be_cut():
    model = lively()
    rows = torch.stack(mg.generate(model, random_tokens(50, 1) % 7, 20, 3.0, vocab_size=7, seed=0))
    assert rows.max() == 6
    assert set(rows[:, 1:].flatten().tolist()) == set(range(7))


def test_the_context_slides_or_not():
    model, prompt = lively(), random_tokens(1, CONTEXT - 4)
    (row,) = mg.generate(model, prompt, 30, temperature=0)
    assert row.tolist() == by_hand(model, prompt[0].tolist(), 30)
    full = mg.generate(model, prompt, 4, temperature=0, slide=False)
    assert full[0].tolist() == row.tolist()[:CONTEXT]
    with pytest.raises(
        ValueError, match=r"20 tokens of prompt and 5 new ones exceed the context of"
    ):
        mg.generate(model, prompt, 5, slide=False)


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        (([[1], []], 3), {}, "prompt 2 is empty"),
        ((torch.zeros(2, 0, dtype=torch.long), 3), {}, "prompt 1 is empty"),
        (([], 3), {}, "there is no prompt to continue"),
        ((torch.zeros(4, dtype=torch.long), 3), {}, r"shape \[batch, positions\], got \(4,\)"),
        ((torch.zeros(1, 4), 3), {}, "must be a sequence of token ids, got torch.float32"),
        (
            ([1, 2], 3),
            {},
            r"prompt 1 must be a sequence of token ids, got torch.int64 of shape \(\)",
        ),
        (("text", 3), {}, "prompts are token ids, not text"),
        ((["text"], 3), {}, "prompts are token ids, not text"),
        (([[1], [2, 40]], 3), {}, "prompt 2 holds the token 40, which is not in the model's voc"),
        (([[-1, 40]], 3), {}, "prompt 1 holds the token -1"),
        (([[0] * 25], 3), {}, "a prompt of 25 tokens is longer than the model's context of 24"),
        (([[1]], -1), {}, "max_new_tokens must not be negative"),
        (([[1]], 3, -0.5), {}, "temperature must be a number of at least 0, got -0.5"),
        (([[1]], 3, math.nan), {}, "temperature must be a number of at least 0, got nan"),
        (([[1]], 3, 1.0, 0), {}, "top_k must be at least 1, got 0"),
        (([[1]], 3, 1.0, None, 0.0), {}, "top_p must be above 0 and at most 1, got 0.0"),
        (([[1]], 3, 1.0, None, 1.5), {}, "top_p must be above 0 and at most 1, got 1.5"),
        (([[1]], 3), {"vocab_size": 41}, "vocab_size must be from 1 to 40, got 41"),
        (([[1]], 3), {"seed": [1, 2]}, "there are 2 seeds for 1 prompts"),
        (([[1]], 3), {"seed": 1, "generator": torch.Generator()}, "a generator or a seed, not bot"),
    ],
)
def test_errors_are_one_sentence_before_the_start(arguments, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        generate_stream(lively(), *arguments, **options)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_said(value, temperature):
    model = lively()
    with torch.no_grad():
        model.stack.out_norm.weight[0] = value
    with pytest.raises(ArithmeticError, match="the model's logits are not finite"):
        next(generate_stream(model, [[1, 2]], 3, temperature))


@pytest.mark.parametrize("stop", [(), (39,)])
def test_logits_that_cease_to_be_finite_are_said(stop, monkeypatch):
    model = lively()
    forward = model.forward
    calls = []

    def broken(tokens, **options):
        calls.append(tokens)
        return forward(tokens, **options) + (math.nan if len(calls) > 2 else 0)

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(ArithmeticError, match="the model's logits are not finite"):
        mg.generate(model, [[1, 2]], 5, temperature=0, stop=stop)
    assert len(calls) == (3 if stop else 5)


@torch.no_grad()
def test_a_cache_says_what_does_not_fit_it():
    model, tokens = lively(), random_tokens(2, 5)
    cache = Cache(model, 2, 6)
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match="has 6 slots and 5 are in use, 2 more do not fit"):
        model(tokens[:, :2], cache=cache)
    with pytest.raises(ValueError, match="the cache is for 2 rows of tokens, got 1"):
        model(tokens[:1, :1], cache=cache)
    model(tokens[:, :1], cache=cache)
    for size in (0, CONTEXT + 1):
        with pytest.raises(ValueError, match=f"has 1 to 24 slots, its context, got {size}"):
            Cache(model, 2, size)
    with torch.enable_grad(), pytest.raises(ValueError, match=r"under torch.no_grad\(\)"):
        model(tokens, cache=Cache(model, 2))
    cache, sentence = (
        Cache(model, 2),
        "the cache holds torch.float32 and attention computes in torc",
    )
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match=sentence):
        model(tokens, cache=cache)


@torch.no_grad()
def test_the_last_logits_and_a_loss_with_a_cache():
    model, tokens = lively(dtype=torch.float64), random_tokens(2, 12)
    last = model(tokens, last=True)
    assert last.shape == (2, 1, 40)
    torch.testing.assert_close(last, model(tokens)[:, -1:], rtol=1e-12, atol=1e-13)
    cache = Cache(model, 2)
    model(tokens[:, :6], cache=cache)
    loss = model(tokens[:, 6:11], tokens[:, 7:], cache=cache)
    chosen = model(tokens)[:, 6:11].log_softmax(-1).gather(-1, tokens[:, 7:, None])
    assert loss.item() == pytest.approx(-chosen.mean().item(), rel=1e-12)


@pytest.mark.parametrize("attention", ["plain", "moda-ffn"])
@torch.no_grad()
def test_bf16_autocast_stays_near_the_full_forward(attention):
    """Each is computed in bf16 and differs from the other by its rounding only."""
    model, tokens = lively(attention=attention), random_tokens(2, CONTEXT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = Cache(model, 2)
        assert all(k.dtype == torch.bfloat16 for pair in cache.entries.values() for k in pair)
        found = [model(tokens[:, :4], cache=cache)]
        found += [model(tokens[:, i : i + 1], cache=cache) for i in range(4, CONTEXT)]
        full = model(tokens)
    found, exact = torch.cat(found, dim=1), model(tokens)

    def distance(a):
        return (a.float() - exact).norm() / exact.norm()

    assert distance(full) < 0.03
    assert distance(found) < 1.5 * distance(full)


@pytest.mark.parametrize(
    ("residual", "attention"),
    [
        ("mgr-competitive", "plain"),
        ("prenorm", "moda-ffn"),
        *(pytest.param(name, "moda-ffn", marks=pytest.mark.slow) for name in mg.residual_names()),
    ],
)
@torch.no_grad()
def test_one_graph_decodes_every_position(residual, attention):
    """Traced once, also for a new cache with another prompt; padded rows need one graph more."""
    model, tokens = lively(residual, attention=attention, blocks=2), random_tokens(2, CONTEXT)
    full = model(tokens)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    decode = torch.compile(model, fullgraph=True, backend="aot_eager")
    for begin in (3, 9):
        cache = Cache(model, 2)
        model(tokens[:, :begin], cache=cache)
        for i in range(begin, CONTEXT):
            logits = decode(tokens[:, i : i + 1], cache=cache)
            assert (logits[:, 0] - full[:, i]).abs().max() <= 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for shift in (1, 2):
        cache = Cache(model, 2, padding=torch.tensor([0, shift]))
        model(torch.cat([tokens[:1, :6], tokens[1:, :6].roll(shift)]), cache=cache)
        for i in range(6, 12):
            new = torch.stack([tokens[0, i], tokens[1, i - shift]])[:, None]
            logits = decode(new, cache=cache)
            assert (logits[0, 0] - full[0, i]).abs().max() <= 1e-5
            assert (logits[1, 0] - full[1, i - shift]).abs().max() <= 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@torch.no_grad()
def test_a_cache_is_written_in_place():
    """What a captured graph relies on: the same memory, the same shapes."""
    model, tokens = lively(), random_tokens(2, 9)
    cache = Cache(model, 2, 12)
    held = [t for pair in cache.entries.values() for t in pair] + [cache.length]
    places = [t.data_ptr() for t in held]
    model(tokens[:, :5], cache=cache)
    for i in range(5, 9):
        model(tokens[:, i : i + 1], cache=cache)
    held = [t for pair in cache.entries.values() for t in pair] + [cache.length]
    assert [t.data_ptr() for t in held] == places
    assert [t.shape for t in held[:-1]] == [(2, 2, 12, 8)] * 6
    assert cache.length.item() == 9
    for t in held[:-1]:
        assert (t[:, :, :9] != 0).any(-1).all()
        assert (t[:, :, 9:] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["prenorm", "mgr-competitive"])
def test_the_cache_pays(residual, capsys):
    """8 prompts of 16 tokens at the tiny scale, 200 new ones each; a single prompt is bound by the
    cost of calling operators, and gains less."""
    torch.manual_seed(0)
    model, ratios = mg.GPT(mg.preset("tiny", residual=residual)), {}

    @torch.no_grad()
    def without(tokens):
        for _ in range(200):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)

    def seconds(function):
        best = math.inf
        for _ in range(2):
            begin = time.perf_counter()
            function()
            best = min(best, time.perf_counter() - begin)
        return best

    for batch in (1, 8):
        prompt = torch.randint(256, (batch, 16))
        cached = seconds(lambda p=prompt: mg.generate(model, p, 200, temperature=0))
        ratios[batch] = seconds(lambda p=prompt: without(p)) / cached
    with capsys.disabled():
        print(f" {residual}: {ratios[1]:.1f} times as fast alone, {ratios[8]:.1f} in a batch of 8")
    assert ratios[1] > 1.3
    assert ratios[8] >= 5


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["plain", "moda-ffn"])
@pytest.mark.parametrize("residual", mg.residual_names())
@torch.no_grad()
def test_gpu_decodes_what_the_cpu_decodes(residual, attention):
    model, tokens = lively(residual, attention=attention), random_tokens(2, CONTEXT)
    full = model(tokens)
    rows = mg.generate(model, PROMPTS, 14, temperature=0)
    model.cuda()
    cache = Cache(model, 2)
    found = [model(tokens[:, :4].cuda(), cache=cache)]
    found += [model(tokens[:, i : i + 1].cuda(), cache=cache) for i in range(4, CONTEXT)]
    torch.testing.assert_close(torch.cat(found, dim=1).cpu(), full, rtol=1e-4, atol=1e-4)
    on_gpu = mg.generate(model, PROMPTS, 14, temperature=0)
    assert [row.tolist() for row in on_gpu] == [row.tolist() for row in rows]


@pytest.mark.parametrize(
    ("stream_dtype", "rounded"), [("auto", True), ("bfloat16", True), ("float32", False)]
)
@torch.no_grad()
def test_weights_cast_once_give_what_autocast_gives(stream_dtype, rounded):
    """The embedding stays as it is where the streams are float32; gates and norms always do."""
    model, tokens = lively(stream_dtype=stream_dtype), random_tokens(2, 7)
    steps = []
    with torch.autocast("cpu", torch.bfloat16):
        for weights in (decode.cast_weights(model), None):
            cache = Cache(model, 2)
            model(tokens[:, :6], cache=cache)
            step = Decode(model, cache, CONTEXT)
            assert not step.captures
            step.weights = weights
            steps.append(step)
        first, second = (step(tokens[:, 6:]) for step in steps)
    assert torch.equal(first, second)
    weights = steps[0].weights
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert ("embed.weight" in weights) == rounded
    wanted = {f"stack.sublayers.{i}.{w}.weight" for i in (0, 2, 4) for w in ("q", "k", "v", "out")}
    wanted |= {f"stack.sublayers.{i}.{w}.weight" for i in (1, 3, 5) for w in ("up", "down")}
    assert set(weights) - {"embed.weight"} == wanted
    assert decode.cast_weights(model) is None


@torch.no_grad()
def test_only_weights_of_plain_linear_layers_are_cast():
    """A parametrised weight is not there to be replaced."""
    model = lively()
    torch.nn.utils.parametrizations.weight_norm(model.stack.sublayers[0].q)
    with torch.autocast("cpu", torch.bfloat16):
        weights = decode.cast_weights(model)
        assert "stack.sublayers.0.k.weight" in weights
        assert not any(name.startswith("stack.sublayers.0.q.") for name in weights)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("attention", ["plain", "moda-ffn"])
@pytest.mark.parametrize("residual", mg.residual_names())
def test_a_step_that_is_run_again_decodes_every_position(
    residual, attention, autocast, monkeypatch
):
    """Of 30 tokens the prompt gives one and the first step another."""
    model = lively(residual, attention=attention, context=64)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = mg.generate(model, PROMPTS, 30, temperature=0)
        graphs = pretend(monkeypatch)
        rows = mg.generate(model, PROMPTS, 30, temperature=0)
    assert [row.tolist() for row in rows] == [row.tolist() for row in plain]
    assert [graph.replays for graph in graphs] == [28]
    assert all(isinstance(p, torch.nn.Parameter) for p in model.parameters())


def test_few_steps_and_a_context_that_slides_are_not_captured(monkeypatch):
    model, graphs = lively(context=32), pretend(monkeypatch)
    # The prompt gives the first token, so that 16 are left.
    for steps, replays in ((16, []), (17, [15]), (40, [32 - 8 - 1])):
        del graphs[:]
        rows = mg.generate(model, PROMPTS[2:3], steps, temperature=0)
        assert rows[0].tolist() == by_hand(model, PROMPTS[2], steps)
        assert [graph.replays for graph in graphs] == replays


def test_steps_that_somebody_watches_are_not_captured(monkeypatch):
    model, graphs = lively(context=64), pretend(monkeypatch)
    hook = model.stack.sublayers[0].register_forward_hook(lambda *_: None)
    mg.generate(model, PROMPTS, 30)
    hook.remove()
    hook = model.embed.register_forward_pre_hook(lambda *_: None)
    mg.generate(model, PROMPTS, 30)
    hook.remove()
    with model.stack.residual.recording():
        mg.generate(model, PROMPTS, 30)
    assert graphs == []
    mg.generate(model, PROMPTS, 30)
    assert len(graphs) == 1


def decoding(model, size, steps=CONTEXT):
    """The prompts of two rows are read, six tokens each."""
    cache = Cache(model, 2, size)
    model(random_tokens(2, 6), cache=cache)
    return cache, Decode(model, cache, steps)


@torch.no_grad()
def test_replayed_steps_take_slots_until_there_are_none(monkeypatch):
    graphs, model, token = pretend(monkeypatch), lively(), random_tokens(2, 1)
    cache, step = decoding(model, 10)
    for used in (7, 8, 9, 10):
        step(token)
        assert (cache.used, cache.length.item()) == (used, used)
    assert graphs[0].replays == 3
    with pytest.raises(ValueError, match="has 10 slots and 10 are in use, 1 more do not fit"):
        step(token)
    assert (cache.used, cache.length.item()) == (10, 10)


@torch.no_grad()
def test_a_capture_that_does_not_fit_takes_no_slot(monkeypatch):
    pretend(monkeypatch)
    model, token = lively(), random_tokens(2, 1)
    cache, step = decoding(model, 7)
    step(token)
    for _ in range(3):
        with pytest.raises(ValueError, match="has 7 slots and 7 are in use"):
            step(token)
    assert (cache.used, cache.length.item()) == (7, 7)


@pytest.mark.parametrize("where", ["before its slot is taken", "after it"])
@torch.no_grad()
def test_steps_go_on_where_they_cannot_be_captured(where, monkeypatch, caplog):
    graphs, model, tokens = pretend(monkeypatch), lively(), random_tokens(2, 10, seed=6)
    expected, (cache, step) = decoding(model, 10, steps=0)[1], decoding(model, 10)

    of, name = (mg.GPT, "stream_dtype") if where.startswith("before") else (mg.Stack, "forward")
    plain = getattr(of, name)

    def looks(module, x, *given):
        x.sum().item()
        return plain(module, x, *given)

    monkeypatch.setattr(of, name, looks)
    for i in range(6, 10):
        assert torch.equal(step(tokens[:, i : i + 1]), expected(tokens[:, i : i + 1]))
        assert (cache.used, cache.length.item()) == (i + 1, i + 1)
    assert [graph.replays for graph in graphs] == [0]
    (line,) = [r.message for r in caplog.records]
    assert line.endswith("without a CUDA graph: operation not permitted when stream is capturing")


def test_a_text_that_is_left_half_way_holds_no_graph(monkeypatch):
    graphs, model = pretend(monkeypatch), lively(context=64)
    stream = generate_stream(model, PROMPTS, 30, temperature=0)
    for _ in range(5):
        next(stream)
    held = weakref.ref(graphs.pop())
    assert held().replays == 3
    gc.disable()
    try:
        del stream
        assert held() is None
    finally:
        gc.enable()


def test_threads_that_generate_at_once_leave_the_weights_alone(monkeypatch):
    """One has to wait while the other has put its cast weights into the model."""
    pretend(monkeypatch)
    model = lively(context=64)
    before = dict(model.named_parameters())
    inside, most, plain = [], [], decode.functional_call

    def slowly(*given):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        out = plain(*given)
        inside.pop()
        return out

    monkeypatch.setattr(decode, "functional_call", slowly)
    rows = {}

    def write(seed):
        with torch.autocast("cpu", torch.bfloat16):
            rows[seed] = mg.generate(model, PROMPTS, 20, temperature=0)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rows) == 3
    assert most == [1] * 6
    assert all(p is before[name] for name, p in model.named_parameters())


def greedy(model, steps=30, graph=True):
    """Greedy rows on a GPU, and how many of the steps were replayed."""
    replays, replay = [], torch.cuda.CUDAGraph.replay
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", lambda g: (replays.append(g), replay(g))[1])
        if not graph:
            patch.setattr(decode, "can_capture", lambda model: False)
        rows = mg.generate(model, PROMPTS, steps, temperature=0)
    return [row.tolist() for row in rows], len(replays)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("attention", ["plain", "moda-ffn"])
@pytest.mark.parametrize("residual", mg.residual_names())
def test_gpu_replays_the_tokens_of_the_step_it_captured(residual, attention, autocast):
    """Of 30 tokens the prompt gives one and the first step another."""
    model = lively(residual, attention=attention, context=64).cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        plain, none = greedy(model, graph=False)
        rows, replays = greedy(model)
    assert (none, replays) == (0, 28)
    assert rows == plain


@pytest.mark.gpu
def test_gpu_graph_does_not_outlive_its_text():
    """Another text, changed weights, a context that slides: nothing of the last graph is left."""
    model = lively(context=32).cuda()
    first, _ = greedy(model)
    with torch.no_grad():
        model.embed.weight.mul_(-1)
    changed, replays = greedy(model)
    assert changed != first
    assert replays == 32 - 8 - 1
    assert changed == greedy(model, graph=False)[0]


@pytest.mark.gpu
def test_gpu_steps_that_somebody_watches_are_not_captured():
    model, calls = lively(context=64).cuda(), []
    rows, _ = greedy(model)
    hook = model.stack.sublayers[0].register_forward_hook(lambda *_: calls.append(1))
    assert greedy(model) == (rows, 0)
    assert len(calls) == 30
    hook.remove()
    with model.stack.residual.recording() as record:
        assert greedy(model) == (rows, 0)
    assert record[0]["alpha"].shape[:2] == (4, 1)
    assert greedy(model)[1] == 28


@pytest.mark.gpu
def test_gpu_goes_on_where_a_step_cannot_be_captured(monkeypatch, caplog):
    model = lively(context=64).cuda()
    rows, _ = greedy(model)
    plain = mg.GPT.stream_dtype

    def looks(model, x):
        x.sum().item()
        return plain(model, x)

    monkeypatch.setattr(mg.GPT, "stream_dtype", looks)
    stream = torch.cuda.current_stream()
    assert greedy(model) == (rows, 0)
    assert torch.cuda.current_stream() == stream
    (line,) = [r.message for r in caplog.records if "graph" in r.message]
    assert line.startswith("decoding without a CUDA graph: ")
    monkeypatch.undo()
    assert greedy(model) == (rows, 28)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_captures_on_the_device_of_the_model():
    """Also where another one is current, and was when a graph was captured before."""
    model = lively(context=64)
    rows, _ = greedy(model.to("cuda:0"))
    assert greedy(model.to("cuda:1")) == (rows, 28)
    assert torch.cuda.current_device() == 0
