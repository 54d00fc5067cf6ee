"""Every table and figure of a folder, made from what is kept there and from nothing else."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from multigate.analysis.chart import Chart
from multigate.data.writer import write_whole

from .figure import draw, draw_differences
from .kept import read_all
from .look import FIGURES, Numbers, charts, draw_all, kept_numbers, measure
from .plan import run_name, split_name
from .results import Finished, results
from .settings import Settings, read_settings
from .studies import STUDIES, Study
from .table import decisive, page


def summarize(out: Path, figures: bool, say: Callable[[str], None]) -> list[Path]:
    """Write the numbers, the tables and the figures of every study in `out`; returns the files."""
    settings = read_settings(out)
    written = list[Path]()
    for name in settings.studies:
        found = results(out, settings, name)
        study = STUDIES[name](settings.config["scale"])
        if figures:
            try:
                written += drawings(out, settings, study, found)
            except ValueError as error:
                say(f"no figure: {error}")
        if study.analyze:
            runs = looked_into(out, settings, found["runs"])
            found["inside"] = [{"run": run, **measure(numbers)} for run, numbers in runs.items()]
        text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
        write_whole(out / study.numbers, text.encode())
        write_whole(out / study.page, page(found).encode())
        written += [out / study.numbers, out / study.page]
    return written


def drawings(out: Path, settings: Settings, study: Study, found: dict[str, Any]) -> list[Path]:
    """Draw the figures of a study, and note in `found` those that its page shows."""
    finished = Finished(read_all(out), settings.lr_factor or 1.0)
    title = f"{study.title}, {settings.config['scale']}"
    path = (out / study.page).with_suffix(".png")
    if study.curves:
        rows = found["groups"][0]["rows"] if found["groups"] else []
        drawn = draw(rows, finished, decisive(found), path, title)
    else:
        drawn = draw_differences(found["groups"], decisive(found), path, title)
    written = [path] if drawn else []
    if study.analyze:
        inside = charts(first_seed(looked_into(out, settings, found["runs"]), study))
        written += draw_all(inside, out / FIGURES)
        found["figures"] = [shown(file, chart) for file, chart in inside.items()]
    return written


def looked_into(out: Path, settings: Settings, runs: Iterable[str]) -> dict[str, Numbers]:
    """What was measured inside those of these runs that have the learning rate of the tables."""
    factor, found = settings.lr_factor or 1.0, dict[str, Numbers]()
    for run in runs:
        numbers = kept_numbers(out / "runs" / run)
        if numbers is not None and run == run_name(*split_name(run), factor):
            found[run] = numbers
    return found


def first_seed(seen: Mapping[str, Numbers], study: Study) -> dict[str, Numbers]:
    """The runs of the lowest seed, by the labels of their cells, in the order of the table."""
    named = {split_name(run): numbers for run, numbers in seen.items()}
    seed = min((seed for _, seed in named), default=0)
    cells = study.cells().items()
    return {cell.label: named[key, seed] for key, cell in cells if (key, seed) in named}


def shown(file: str, chart: Chart) -> dict[str, str]:
    """What the page says of a figure."""
    words = {name: getattr(chart, name) for name in ("title", "shows", "claim", "seen")}
    return {"file": f"{FIGURES}/{file}.png", **words, "absent": " ".join(chart.absent)}
