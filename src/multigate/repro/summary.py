"""Every table and figure of a folder, made from what is kept there and from nothing else."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from multigate.analysis.chart import Chart
from multigate.data.writer import write_whole

from .figure import draw
from .kept import read_all
from .look import FIGURES, Numbers, charts, draw_all, kept_numbers, measure
from .plan import split_name
from .results import Finished, results
from .settings import read_settings
from .studies import STUDIES, Study
from .table import decisive, page


def summarize(out: Path, figures: bool, say: Callable[[str], None]) -> list[Path]:
    """Write the numbers, the tables and the figures of every study in `out`; returns the files."""
    settings = read_settings(out)
    written = list[Path]()
    for name in settings.studies:
        found = results(out, settings, name)
        study = STUDIES[name](settings.config["scale"])
        drawn = dict[str, Chart]()
        if study.analyze:
            seen = looked_into(out, found["runs"])
            drawn = charts(first_seed(seen, study))
            found["inside"] = [{"run": run, **measure(numbers)} for run, numbers in seen.items()]
            found["figures"] = [shown(file, chart) for file, chart in drawn.items()]
        text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
        write_whole(out / study.numbers, text.encode())
        write_whole(out / study.page, page(found).encode())
        written += [out / study.numbers, out / study.page]
        if figures:
            path = (out / study.page).with_suffix(".png")
            finished = Finished(read_all(out), settings.lr_factor or 1.0, cells=study.cells())
            title = f"{study.title}, {settings.config['scale']}"
            try:
                rows = found["groups"][0]["rows"]
                if draw(rows, finished, decisive(found), path, title):
                    written.append(path)
                if study.analyze:
                    written += draw_all(drawn, out / FIGURES)
            except ValueError as error:
                say(f"no figure: {error}")
    return written


def looked_into(out: Path, runs: Iterable[str]) -> dict[str, Numbers]:
    """What was measured inside these runs, where it was."""
    found = {run: kept_numbers(out / "runs" / run) for run in runs}
    return {run: numbers for run, numbers in found.items() if numbers is not None}


def first_seed(seen: dict[str, Numbers], study: Study) -> dict[str, Numbers]:
    """Of each cell the run with the lowest seed, by the cell's label, in the table's order."""
    by_cell = dict[str, Numbers]()
    for run in sorted(seen, key=lambda run: split_name(run)[1]):
        by_cell.setdefault(split_name(run)[0], seen[run])
    return {cell.label: by_cell[key] for key, cell in study.cells().items() if key in by_cell}


def shown(file: str, chart: Chart) -> dict[str, str]:
    """What the page says of a figure."""
    words = {name: getattr(chart, name) for name in ("title", "shows", "claim", "seen")}
    return {"file": f"{FIGURES}/{file}.png", **words, "absent": " ".join(chart.absent)}
