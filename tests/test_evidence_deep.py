"""What the evidence page says of the deep models, against what is kept of them."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from multigate.ops.gate_pool import reference
from multigate.residuals import build_residual

ROOT = Path(__file__).resolve().parents[1]
PRENORM, BLOCK, FULL, MGR = (
    *("prenorm", "attnres-block-8-scaled", "attnres-full-scaled", "mgr-independent-8"),
)
ALL = (PRENORM, BLOCK, FULL, MGR)
HALF = 18
SHALLOW, DEEP = slice(1, HALF), slice(HALF, None)


@pytest.fixture(scope="module")
def text():
    return " ".join((ROOT / "docs/evidence.md").read_text().split())


def kept(name):
    return json.loads((ROOT / "repro" / name).read_text())


def inside(name):
    """A statistic of every model, by its own name."""
    return {model: read(model)[name] for model in ALL}


def read(model):
    file = ROOT / f"repro/deep/runs/deep-{model}-lr2-seed0/inside.json.gz"
    return {
        k: np.array(v, float) for k, v in json.loads(gzip.decompress(file.read_bytes())).items()
    }


def seen(title):
    (chart,) = (chart for chart in kept("deep/deep.json")["figures"] if chart["title"] == title)
    return chart["seen"]


def test_losses(text):
    rows = {
        row["cell"].removeprefix("deep-"): row
        for row in kept("deep/deep.json")["groups"][0]["rows"]
    }
    assert {model for model, row in rows.items() if row["seeds"]} == set(ALL)
    sizes = [rows[model]["parameters"] / 1e6 for model in ALL]
    assert f"36 blocks of width 256 ({min(sizes):.1f} to {max(sizes):.1f} M parameters)" in text
    runs = kept("deep/deep.json")["runs"]
    once, twice = (runs[f"deep-prenorm{at}-seed0"]["val"] for at in ("", "-lr2"))
    assert f"takes twice ({twice:.4f} on val, {once:.4f} with once)" in text
    test = {model: runs[f"deep-{model}-lr2-seed0"]["test"] for model in ALL}
    block, full = (test[MGR] - test[model] for model in (BLOCK, FULL))
    words = f"is behind Block AttnRes by {block:.4f} and behind Full AttnRes by {full:.4f} on test."
    assert words in text
    assert f"one seed, independent MGR is {full:.3f} behind |" in text
    assert f"one seed, independent MGR is {block:.3f} behind Block AttnRes |" in text
    wide = kept("mini/results.json")
    half = {
        len(row["differences"]["test"]["seeds"]): row["differences"]["test"]["pooled"]
        for group in wide["groups"]
        for row in group["rows"]
        if row["differences"]
    }
    assert f"one seed had an interval of ± {half[1]:.4f}, and ± 0.012" in text
    assert half[1] < block < 0.012 < full
    lead = {model: test[PRENORM] - test[model] for model in (BLOCK, FULL, MGR)}
    loss = {model: wide["runs"][f"{model}-lr2-seed0"]["test"] for model in ALL}
    before = {model: loss[PRENORM] - loss[model] for model in (BLOCK, FULL, MGR)}
    told = {model: f"{before[model]:.3f} to {lead[model]:.3f}" for model in (BLOCK, FULL)}
    words = f"in the same seed ({lead[MGR]:.3f} and {before[MGR]:.3f}), while that of Block AttnRes"
    assert f"{words} went from {told[BLOCK]} and that of Full AttnRes from {told[FULL]}." in text
    assert f"with 1/sqrt(d) go from {told[BLOCK]} and from {told[FULL]} |" in text
    words = f"leads by {lead[MGR]:.3f}, no more than with 12 ({before[MGR]:.3f}), and is behind"
    assert words in text
    words = f"eight streams is ahead by {lead[MGR]:.3f}, as at 12 x 384 ({before[MGR]:.3f});"
    assert words in text
    pairs = {(pair["label"], pair["against"]): pair for pair in wide["pairs"]}
    verdicts = [
        pairs["Independent MGR (n=8)", f"{other}, 1/sqrt(d)"]["differences"]["test"][
            "pooled_verdict"
        ]
        for other in ("Block AttnRes (n=8)", "Full AttnRes")
    ]
    assert verdicts == ["lower", "cannot tell"]
    assert "it was ahead of Block AttnRes and level with Full." in text
    worse = wide["runs"]["mgr-independent-8-lr2-seed0"]["test"]
    better = kept("mini/ablations.json")["runs"]["mgr-independent-8-calibrated-lr2-seed0"]["test"]
    assert f"calibrated ones were [{worse - better:.4f} better](#the-initial-bias" in text
    formula, calibrated = (
        [starts(depth, bias_init=init) for depth in (24, 72)] for init in ("paper", "calibrated")
    )
    words = f"begin at {formula[0]:.3f} by it and at {calibrated[0]:.3f} calibrated, calibrated"
    assert words in text
    assert f"would begin at {formula[1]:.3f} and {calibrated[1]:.3f}, so" in text


def starts(depth, **options):
    """The gates of independent MGR with eight streams before training."""
    step = build_residual("mgr-independent", dim=8, depth=depth, streams=8, **options).steps[7]
    streams = torch.ones(1, 8, 8)
    return reference.gate(streams, step.w1, step.b1, "independent", 1e-6)[0, 0].item()


def test_massive_values(text):
    top = {model: values[:, 0] for model, values in inside("massive.hidden").items()}
    mean = inside("massive.mean")
    plain = top[PRENORM]
    (high,) = np.nonzero(plain > 550)
    blocks = sorted(set(high // 2 + 1))
    assert [*high] == [*range(high[0], high[-1] + 1)]
    words = f"rise to {plain.max():.0f}, are above 550 from block {blocks[0]} to {blocks[-1]}, and"
    assert f"{words} fall to {plain[-1]:.0f} at the output" in text
    assert f"has single values of {plain.max():.0f};" in text
    assert plain[-1] < plain.max() / 2
    attention, mlp = top[BLOCK][0::2], top[BLOCK][1::2]
    assert (mlp > 200).sum() == 5
    words = (
        f"Block AttnRes reaches {mlp.max():.0f}, and more than 200 after five of its 36 MLPs, but"
    )
    assert f"{words} never more than {attention.max():.0f} after attention." in text
    assert max(top[FULL].max(), top[MGR].max()) < 20
    streams = np.nanmax(read(MGR)["massive.streams"], axis=1)
    assert f"MGR's streams themselves reach {streams.max():.0f}, early on" in text
    assert streams[24:].max() < 20
    most = [f"{top[model].max():.0f}" for model in ALL]
    words = "the largest is {} in PreNorm, {} in Block AttnRes, {} in Full AttnRes and {} in MGR"
    assert words.format(*most) in text
    times = {model: (top[model] / mean[model]).max() for model in ALL}
    assert max(times, key=times.get) == BLOCK
    assert "of the mean {:.0f}, {:.0f}, {:.0f} and {:.0f}.".format(*times.values()) in text
    ends = {model: (values[1::2].min(), values[1::2].max()) for model, values in top.items()}
    words = (
        "between {:.0f} and {:.0f}; those of Full AttnRes lie between {:.0f} and {:.0f}, those of"
    )
    assert words.format(*ends[BLOCK], *ends[FULL]) in text
    assert "MGR between {:.0f} and {:.0f}.]".format(*ends[MGR]) in text


def test_outputs_and_gradients(text):
    rms, gradient = inside("dynamics.output_rms"), inside("dynamics.grad_rms")
    grown = {model: values[-1] / values[0] for model, values in rms.items()}
    assert f"{grown[PRENORM]:.0f}" == "6"
    assert text.count("grows sixfold") + text.count("grow sixfold") == 3
    assert [grown[FULL], grown[MGR]] == pytest.approx([0.25, 0.25], abs=0.02)
    varied = {model: abs(np.diff(np.log(values))).mean() for model, values in rms.items()}
    assert max(varied, key=varied.get) == BLOCK
    without, with_it = (
        {model: of[first:HALF].mean() / of[DEEP].mean() for model, of in gradient.items()}
        for first in (1, 0)
    )
    words = "ones: {:.2f} (PreNorm), {:.2f} (MGR), {:.2f} (Full)"
    assert words.format(*(without[model] for model in (PRENORM, MGR, FULL))) in text
    words = (
        "Shallow blocks of PreNorm have {:.2f} times the gradient of deep ones, MGR's {:.2f} times"
    )
    assert words.format(without[PRENORM], without[MGR]) in text
    assert f", Full AttnRes' {without[FULL]:.2f}." in text
    words = "of the last block in all three, {:.2f}, {:.2f} and {:.2f} |"
    assert words.format(*(with_it[model] for model in (PRENORM, MGR, FULL))) in text
    first = {model: of[0] / of[-1] for model, of in gradient.items()}
    assert (round(min(first.values())), round(max(first.values()))) == (3, 5)
    assert [first[model] for model in (PRENORM, MGR, FULL)] == pytest.approx([5] * 3, abs=0.5)
    assert max(gradient[model][SHALLOW].mean() for model in (BLOCK, FULL, MGR)) < (
        0.8 * gradient[PRENORM][SHALLOW].mean()
    )


def test_angles(text):
    def apart(model, blocks):
        """Without block 1."""
        return np.diagonal(hidden[model], blocks)[1:]

    hidden = inside("angles.hidden")
    steps = {model: apart(model, 1) for model in ALL}
    shallow = {model: of[: HALF - 1].mean() for model, of in steps.items()}
    deep = {model: of[HALF - 1 :].mean() for model, of in steps.items()}
    ratios = [of[PRENORM] / of[model] for of in (shallow, deep) for model in ALL[1:]]
    assert f"turns by {min(ratios):.2f} to {max(ratios):.2f} of what the others do" in text
    assert f"than in shallow ones ({deep[PRENORM]:.3f} and {shallow[PRENORM]:.3f})" in text
    words = (
        f"turn by {shallow[PRENORM]:.3f} a block (shallow) and {deep[PRENORM]:.3f} (deep), MGR's"
    )
    assert f"{words} by {shallow[MGR]:.3f} and {deep[MGR]:.3f}." in text
    far = [apart(model, 16).mean() for model in (PRENORM, MGR)]
    words = "Over sixteen blocks PreNorm and MGR turn alike ({:.3f} and {:.3f}, without block 1)"
    assert words.format(*far) in text
    streams = read(MGR)["angles.streams"]
    turns = [np.diagonal(stream, 1) for stream in streams]
    least = min(np.nanmean(of) for of in turns)
    assert f"one hardly turns, {least:.3f} a block" in text
    assert sum(np.nanmean(of) < 2 * least for of in turns) == 1
    alike = np.corrcoef([of[8:] for of in turns])
    four = alike[np.ix_((0, 3, 5, 7), (0, 3, 5, 7))].min()
    assert f"correlate by {int(100 * four) / 100:.2f} or more), and so do two others" in text
    assert f"two others ({int(100 * alike[4, 6]) / 100:.2f})" in text


def test_blocks_and_gates(text):
    lost, perplexity = inside("pruning.delta_loss"), inside("pruning.delta_ppl")
    first = [lost[model][0] for model in (PRENORM, BLOCK, FULL)]
    assert f"break down (by {min(first):.1f} to {max(first):.1f} nats)" in text
    assert (
        f"without block 1 PreNorm loses {first[0]:.1f} nats, and Full AttnRes {first[2]:.1f}."
        in text
    )
    assert [*np.isnan(lost[MGR])] == 4 * [True] + 32 * [False]
    for model in (PRENORM, MGR):
        assert np.nanargmax(lost[model][1:]) == 34
    last = [lost[model][-1] for model in (PRENORM, MGR)]
    assert "the last costs most, {:.2f} and {:.2f}.".format(*last) in text
    median = {model: np.median(of[DEEP]) for model, of in lost.items()}
    others = [median[model] for model in ALL[1:]]
    words = f"Deep blocks cost PreNorm {median[PRENORM]:.3f} at the median and the others"
    assert (
        f"{words} {min(others):.3f} to {max(others):.3f}, but in the mean PreNorm and MGR" in text
    )
    mean = [lost[model][DEEP].mean() for model in (PRENORM, MGR)]
    assert "the same, {:.3f} and {:.3f}.".format(*mean) in text
    words = f"cost {median[PRENORM]:.3f} (PreNorm) and {median[MGR]:.3f} (MGR) at the median, "
    assert words + "{:.3f} and {:.3f} in the mean".format(*mean) in text
    least = {model: np.nanmin(of) for model, of in lost.items()}
    of, block = BLOCK, int(np.nanargmin(lost[BLOCK])) + 1
    assert min(least, key=least.get) == of
    assert f"the least is {least[of]:.3f} (block {block} of Block AttnRes), of deep" in text
    deep = {model: values[DEEP].min() for model, values in lost.items()}
    assert min(deep, key=deep.get) == MGR
    block = HALF + int(lost[MGR][DEEP].argmin()) + 1
    assert f"of deep ones {deep[MGR]:.3f} (block {block} of MGR)." in text
    spans = [
        np.nanmax(perplexity[m][1:]) / np.nanmin(perplexity[m][1:]) for m in (MGR, PRENORM, FULL)
    ]
    words = (
        "costs in MGR span {:.0f} times, those of PreNorm's blocks after the first {:.0f} times,"
    )
    assert (words + " those of Full AttnRes' {:.0f} times;").format(*spans) in text
    ends = [f(of[1:]) for f in (np.nanmin, np.nanmax) for of in perplexity.values()]
    assert f"without any other, all rise by {min(ends):.1f} to {max(ends):.0f}.]" in text
    below, high = re.search(
        r"([\d.]+)% below 0.1, the largest ([\d.]+) ", seen("Gates (beta)")
    ).groups()
    assert f"{float(below):.0f}% of MGR's are below 0.1, and the largest is {high}." in text


def test_other_pages_say_the_same():
    readme, choosing = (
        " ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/choosing.md")
    )
    assert (
        "only independent MGR has been trained so far, both Attention Residuals are ahead" in readme
    )
    assert "one seed, independent MGR is behind both Attention Residuals." in choosing
