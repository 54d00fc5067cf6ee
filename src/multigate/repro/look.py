"""A look into trained runs: all that `multigate analyze` measures, and its figures.

OUT/runs/NAME/inside.json.gz   every statistic of a run, to six digits
    analysis/*.png             every figure, of the first seed; made from those alone
"""

import gzip
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from multigate.analysis.chart import Chart
from multigate.analysis.draw import draw, named
from multigate.analysis.measure import FAMILIES, Measured, sections
from multigate.analysis.running import BINS, Array
from multigate.analysis.store import flattened, listed, restored
from multigate.analysis.subjects import Text, find
from multigate.checkpoint import checkpoints, open_run
from multigate.config import TrainConfig, differences
from multigate.data.writer import write_whole
from multigate.device import choose

INSIDE = "inside.json.gz"
FIGURES = "analysis"
SAMPLES = 256
"""Windows of the val text."""
PRUNED = 64
"""How many of them are read once more for each block that is pruned."""
KEPT_BINS = 320
"""Of a histogram."""
DPI = 110
Numbers = Mapping[str, Any]


def look_into(config: TrainConfig, folder: Path) -> None:
    """Measure the last weights of a run, and keep the numbers beside its log in `folder`."""
    _, state = open_run(config.folder, "last")
    if state["step"] != config.steps or differences(state["config"], config):
        raise ValueError(f"{config.folder} holds another run than the one that is kept.")
    (subject,), _ = find([config.folder])
    text = Text(Path(config.data), "val", SAMPLES, PRUNED)
    compute = choose(config.device, config.precision)
    subject.look_into("last", text, None, compute, Console(file=io.StringIO()))
    arrays = flattened(subject.measured)
    numbers = {name: listed(brief(name, array), 6) for name, array in arrays.items()}
    packed = gzip.compress(json.dumps(numbers).encode(), 9, mtime=0)
    write_whole(folder / INSIDE, packed)


def brief(name: str, array: Array) -> Array:
    """Histograms with fewer bins: the rest is small."""
    if not name.endswith(".counts"):
        return array
    return array.reshape(len(array), -1, BINS // KEPT_BINS).sum(-1)


def wanted(folder: Path, run: Path) -> bool:
    """Whether a run that is kept in `folder` has yet to be looked into, and can be."""
    return not (folder / INSIDE).exists() and bool(checkpoints(run))


def kept_numbers(folder: Path) -> Numbers | None:
    path = folder / INSIDE
    if not path.exists():
        return None
    try:
        numbers: Numbers = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): remove it, and its run will be looked into again."
        ) from None
    return numbers


def charts(runs: Mapping[str, Numbers]) -> dict[str, Chart]:
    """Every figure of these runs, which are given by label; by the names of the files."""
    # A model without gates, say, has no such numbers; the figures tell.
    none: Measured = {family: {} for family in FAMILIES}
    drawn = sections({label: none | restored(numbers) for label, numbers in runs.items()})
    return named(chart for section in drawn for chart in section.charts)


def draw_all(drawn: Mapping[str, Chart], folder: Path) -> list[Path]:
    """Write the figures as PNG, and remove what is none of them any more."""
    written = draw(drawn.values(), folder, ("png",), DPI) if drawn else []
    for path in set(folder.glob("*.png")) - set(written):
        path.unlink()
    return written


def measure(numbers: Numbers) -> dict[str, float | None]:
    """What the paper says of deep models, one number each: massive values, gradients, angles, and
    the use of blocks. "deep" is the second half of the blocks, "shallow" the first without the
    first block itself, which reads the embedding and is unlike all others.
    """
    arrays = {k: np.array(v, float) for k, v in numbers.items() if k in NEEDED and v is not None}
    if set(arrays) < NEEDED:
        return {}
    largest = arrays["massive.hidden"][:, 0]
    rms, gradient = arrays["dynamics.output_rms"], arrays["dynamics.grad_rms"]
    steps = np.diagonal(arrays["angles.hidden"], 1)
    lost = arrays["pruning.delta_loss"]
    half = len(lost) // 2
    shallow, deep = slice(1, half), slice(half, None)
    values = {
        "largest activation": np.max(largest),
        "largest / mean": np.max(largest / arrays["massive.mean"]),
        "output rms, last / first block": rms[-1] / rms[0],
        "gradient rms, shallow / deep": mean(gradient[shallow]) / mean(gradient[deep]),
        "angle to the next block, shallow": mean(steps[shallow]),
        "the same, deep": mean(steps[deep]),
        "loss without a block, deep, median": np.nanmedian(lost[deep]),
        "the same, smallest": np.nanmin(lost[deep]),
    }
    return {k: round(float(v), 6) if np.isfinite(v) else None for k, v in values.items()}


def mean(values: Array) -> float:
    """NaN, and no warning, where there are none."""
    return float(values.mean()) if len(values) else np.nan


NEEDED = {
    *("massive.hidden", "massive.mean", "dynamics.output_rms", "dynamics.grad_rms"),
    *("angles.hidden", "pruning.delta_loss"),
}
