"""TABLE.md: what was run, what was seen, and what cannot be told."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

NOTHING = "-"
NAMES = {"source": "digest of the code"}
"""Words for what a run was made with, where its own name does not say it."""
Result = Mapping[str, Any]


def page(found: Result) -> str:
    """The tables of a study as Markdown, from `results`."""
    parts = [f"# {found['title']}, scale {found['config']['scale']}", *about(found)]
    for group in found["groups"]:
        parts += [f"## {group['title']}", *([group["about"]] if group["about"] else [])]
        parts.append(group_table(group, found))
    parts += pairs(found)
    parts += learning_rate(found["learning_rate"])
    parts += inside(found.get("inside"))
    parts += figures(found.get("figures"))
    parts += shortcomings(found)
    return "\n\n".join(parts) + "\n"


def about(found: Result) -> Iterator[str]:
    """What all runs have in common, and how to read the columns."""
    verdict_on = "test" if "test" in scored(found) else "val, for there is no test text"
    config, data = found["config"], found["data"]
    optim, factor = config["optim"], found["learning_rate"]["factor"] or 1.0
    splits = ", ".join(f"{name} {tokens:,}" for name, tokens in data["tokens"].items())
    yield (
        f"{len(found['runs'])} finished runs of {config['steps']:,} steps of "
        f"{config['tokens_per_step']:,} tokens. Text `{data['name']}` (tokens: {splits}; "
        f"fingerprint {data['fingerprint'][:12]}). Muon {factor * optim['lr_muon']:g}, AdamW "
        f"{factor * optim['lr_adamw']:g}, warm-up {optim['warmup']} steps. Within a seed all runs "
        "have the same data in the same order, the same hyper-parameters and the same rules of "
        "initialisation."
    )
    yield (
        "Losses are in nats a token: `train` is the mean of the last 200 steps; `val` and `test` "
        "are over every token of the split, with the weights of the last step. They are given as "
        "mean ± standard deviation over seeds. A difference is the mean over seeds of the "
        "difference within a seed, ± its 95% interval by Student's t. The verdict is on "
        f"{verdict_on}: a *lower* or "
        "*higher* loss, or *cannot tell* where the difference is within its interval; one seed has "
        "no interval. Choices were made on val."
    )
    yield from pooled_noise(found)
    yield speeds(found)
    papers = [row["paper"] for group in found["groups"] for row in group["rows"] if row["paper"]]
    if papers and papers[0]["scale"] != config["scale"]:
        yield (
            f"The paper has no scale {config['scale']}. Its figures beside are those of S, a "
            "larger model on other text: compare the differences, not the losses."
        )
    made = found["made_with"]
    there = {name: [str(v) for v in values if v is not None] for name, values in made.items()}
    words = [
        f"{NAMES.get(name, name)} {' and '.join(values)}"
        for name, values in there.items()
        if values
    ]
    if words:
        yield f"Made with: {'; '.join(words)}."
    commands = [f"`{command}`" for command in found["commands"]]
    yield (
        f"By {' and '.join(commands)}. `multigate repro summary` with this folder makes the tables "
        "anew from the logs in `runs/`."
    )


def pooled_noise(found: Result) -> Iterator[str]:
    """How noisy runs are, and what a verdict by that noise takes for granted."""
    split = decisive(found)
    if split not in found["noise"]:
        return
    noise = found["noise"][split]
    yield (
        "The interval of a verdict is by a row's own few seeds, a poor estimate of noise. *Pooled* "
        "is by one estimate from all rows that have several seeds: what row and seed do not "
        f"explain of a {split} loss has a standard deviation of {noise['deviation']:.4f} "
        f"({noise['freedom']} degrees of freedom). It takes all rows to be equally noisy, and "
        "gives an interval for one seed too."
    )


def scored(found: Result) -> Sequence[str]:
    """The splits that there are."""
    return ("val", "test") if "test" in found["data"]["tokens"] else ("val",)


def decisive(found: Result) -> str:
    """The split that verdicts are on."""
    return scored(found)[-1]


def speeds(found: Result) -> str:
    """What tokens/s are of."""
    rows = [row for group in found["groups"] for row in group["rows"]]
    if any(row["alone"] for row in rows):
        others = any(row["tokens_per_second"] and not row["alone"] for row in rows)
        mixed = " Without a percentage they are of the run, whole steps: do not compare those."
        return (
            "Tokens/s are those of a forward and a backward pass of one micro-batch with nothing "
            "beside it on the device, and how much longer that takes than PreNorm's, turn by turn "
            f"with it.{mixed if others else ''} Peak GiB are those of a run."
        )
    shared = any(row["at_once"] > 1 for row in rows)
    apart = " Runs shared a device: do not compare these between rows." if shared else ""
    return f"Tokens/s are the median over the second half of a run.{apart}"


def group_table(group: Result, found: Result) -> str:
    rows = group["rows"]
    others = {row["against"] for row in rows if row["against"]}
    several = len(others) > 1
    beside = f"- {next(iter(others))}" if len(others) == 1 else "difference"
    papers = [row["paper"] for row in rows if row["paper"]]
    at = papers[0]["scale"].upper() if papers else ""
    splits = scored(found)
    test = "test" in splits
    head = ["model", "parameters", "seeds", "train", *splits]
    head += [f"val {beside}", *([f"test {beside}"] if test else []), "verdict"]
    head += ["pooled"] if found["noise"] else []
    head += [*(["compared with"] if several else [])]
    head += [f"paper {at}: train / val", f"paper {at}: val {beside}"] if papers else []
    head += ["tokens/s", "peak GiB"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        cells = [row["label"], number(row["parameters"]), str(len(row["seeds"]))]
        cells += [spread(row["losses"][name]) for name in ("train", *splits)]
        cells += [difference(row["differences"].get(name)) for name in splits]
        cells += verdicts(row["differences"].get(splits[-1]), found)
        if several:
            cells.append(row["against"] or NOTHING)
        if papers:
            cells += paper(row["paper"])
        cells.append(speed(row))
        cells.append(NOTHING if row["memory_gib"] is None else f"{row['memory_gib']:.2f}")
        lines.append(cells)
    return markdown(lines)


def speed(row: Result) -> str:
    if row["alone"] is not None:
        return f"{row['alone']:,.0f} ({row['overhead']:+.1%})"
    shown = number(row["tokens_per_second"])
    return shown if row["at_once"] == 1 else f"{shown} ({row['at_once']} at once)"


def pairs(found: Result) -> Iterator[str]:
    """Rows beside each other, which intervals of their own cannot tell."""
    if not found["pairs"]:
        return
    splits = scored(found)
    scale = found["config"]["scale"]
    at = (scale if scale in ("s", "m", "l") else "s").upper()
    said = ["verdict", *(["pooled"] if found["noise"] else [])]
    lines = [["model", "compared with", *splits, *said, f"paper {at}: val"]]
    lines.append(["---", "---", *["---:"] * (len(lines[0]) - 2)])
    for pair in found["pairs"]:
        differences = [pair["differences"].get(name) for name in splits]
        paper = NOTHING if pair["paper"] is None else f"{pair['paper']:+.4f}"
        cells = [pair["label"], pair["against"], *map(difference, differences)]
        lines.append([*cells, *verdicts(differences[-1], found), paper])
    yield "## Beside each other"
    yield (
        "The first minus the second, seed by seed, with intervals of their own: that two rows are "
        "both better than a third does not say which of them is."
    )
    yield markdown(lines)


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """A table of these lines: its head, the rule under it, its rows."""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"


def spread(value: Result | None) -> str:
    if value is None:
        return NOTHING
    mean = f"{value['mean']:.4f}"
    return mean if value["deviation"] is None else f"{mean} ± {value['deviation']:.4f}"


def difference(value: Result | None) -> str:
    if value is None:
        return NOTHING
    mean = f"{value['mean']:+.4f}"
    return mean if value["half"] is None else f"{mean} ± {value['half']:.4f}"


def verdicts(value: Result | None, found: Result) -> list[str]:
    """By the interval of its own seeds and, where there is any, by the noise of all rows."""
    own = value["verdict"] if value else NOTHING
    return [own, pooled(value)] if found["noise"] else [own]


def pooled(value: Result | None) -> str:
    if value is None or value["pooled"] is None:
        return NOTHING
    return f"{value['pooled_verdict']} (± {value['pooled']:.4f})"


def paper(value: Result | None) -> Sequence[str]:
    if value is None:
        return (NOTHING, NOTHING)
    apart = NOTHING if not value["difference"] else f"{value['difference']:+.4f}"
    return (f"{value['train']:.4f} / {value['val']:.4f}", apart)


def learning_rate(check: Result) -> Iterator[str]:
    """The check on PreNorm, if there was one."""
    if not check["checked"]:
        return
    yield "## Learning rates, chosen on val by PreNorm"
    names = [name for name in ("train", "val", "test") if any(name in c for c in check["checked"])]
    lines = [["times the recipe", "Muon", "AdamW", *names], ["---:"] * (3 + len(names))]
    for c in check["checked"]:
        chosen = " (chosen)" if c["factor"] == check["factor"] else ""
        numbers = [f"{c[name]:.4f}" if name in c else NOTHING for name in names]
        lines.append(
            [f"{c['factor']:g}{chosen}", f"{c['lr_muon']:g}", f"{c['lr_adamw']:g}", *numbers]
        )
    yield markdown(lines)
    yield (
        "All rows have the learning rates that PreNorm chose. Its run at them is its run of that "
        "seed in the table, so the choice favours PreNorm if anything."
    )
    factors = [c["factor"] for c in check["checked"]]
    if check["factor"] in (min(factors), max(factors)):
        yield (
            "The choice is at an end of what was tried: learning rates beyond it may be better. "
            "`--lr-factors` with one more goes on from here."
        )


def inside(measures: Sequence[Result] | None) -> Iterator[str]:
    """What `multigate analyze` measures of the runs, in a few numbers."""
    if not measures:
        return
    yield "## Inside"
    yield (
        "By `multigate analyze`, on val, with the weights of the last step. *Deep* is the second "
        "half of the blocks, *shallow* the first half without block 1, which reads the embedding."
    )
    names = [name for name in dict.fromkeys(n for m in measures for n in m) if name != "run"]
    lines = [["run", *names], ["---", *["---:"] * len(names)]]
    for measure in measures:
        found = [measure.get(name) for name in names]
        values = [NOTHING if value is None else f"{value:.4g}" for value in found]
        lines.append([measure["run"], *values])
    yield markdown(lines)


def figures(charts: Sequence[Result] | None) -> Iterator[str]:
    """Every figure of `multigate analyze`, with the paper's claim and what was seen."""
    if not charts:
        return
    yield "## Figures, first seed"
    for chart in charts:
        yield f"### {chart['title']}"
        yield f"![{chart['title']}]({chart['file']})"
        yield chart["shows"]
        if chart["claim"]:
            yield f"The paper: {chart['claim']}"
        if chart["seen"] or chart["absent"]:
            yield " ".join(part for part in (chart["seen"], chart["absent"]) if part)


def shortcomings(found: Result) -> Iterator[str]:
    """What is missing, what went wrong, and what may not be alike."""
    lines = [f"- `{name}` failed at {why}" for name, why in found["failed"].items()]
    lines += [f"- {label}: {why}" for label, why in found["left_out"].items()]
    if found["missing"]:
        names = ", ".join(f"`{name}`" for name in found["missing"])
        lines.append(f"- not run yet, {len(found['missing'])}: {names}")
    for name, values in found["made_with"].items():
        if len(values) > 1:
            word = NAMES.get(name, name)
            lines.append(f"- not all runs have the same {word}: {', '.join(map(str, values))}")
    rows = [row for group in found["groups"] for row in group["rows"]]
    if any(row["at_once"] > 1 and row["alone"] is None for row in rows):
        lines.append(
            "- where several runs shared a device, tokens/s are not those of one alone: "
            "`multigate repro speed` with this folder measures those"
        )
    if lines:
        yield "## What is missing or not alike"
        yield "\n".join(lines)
