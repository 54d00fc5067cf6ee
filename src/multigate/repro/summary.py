"""Every table and figure of a folder, made from what is kept there and from nothing else."""

import json
from collections.abc import Callable
from pathlib import Path

from multigate.data.writer import write_whole

from .figure import draw
from .kept import read_all
from .look import measures
from .results import Finished, results
from .settings import read_settings
from .studies import STUDIES
from .table import decisive, page


def summarize(out: Path, figures: bool, say: Callable[[str], None]) -> list[Path]:
    """Write the numbers, the tables and the figure of every study in `out`; returns the files."""
    settings = read_settings(out)
    written = list[Path]()
    for name in settings.studies:
        found = results(out, settings, name)
        study = STUDIES[name](settings.config["scale"])
        if study.analyze:
            found["inside"] = measures(out)
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
            except ValueError as error:
                say(f"no figure: {error}")
    return written
