"""What was recorded, for people who plot themselves: npz, JSON and CSV."""

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .running import Array, Arrays


def save(measured: Mapping[str, Mapping[str, Arrays]], folder: Path) -> list[Path]:
    """RUN.npz and RUN.json with all arrays of a run as FAMILY.NAME; FAMILY.csv with all runs.

    A line of the CSV is one number and where it stands; what does not exist has none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for label, families in measured.items():
        flat = {
            f"{f}.{name}": array for f, arrays in families.items() for name, array in arrays.items()
        }
        stem = file_name(label)
        written += [folder / f"{stem}.npz", folder / f"{stem}.json"]
        np.savez_compressed(written[-2], allow_pickle=False, **flat)
        text = json.dumps({name: listed(array) for name, array in flat.items()})
        written[-1].write_text(text, encoding="utf-8")
    for family in dict.fromkeys(f for families in measured.values() for f in families):
        written.append(folder / f"{family}.csv")
        with written[-1].open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["run", "array", "index_0", "index_1", "index_2", "value"])
            for label, families in measured.items():
                for name, array in families.get(family, {}).items():
                    table.writerows(lines(label, name, array))
    return written


def lines(label: str, name: str, array: Array) -> list[list[Any]]:
    """A line for each finite number; of counts, for those that are not 0."""
    there = array != 0 if array.dtype.kind in "iu" else np.isfinite(array)
    return [
        [label, name, *place, *[""] * (3 - len(place)), array[tuple(place)].item()]
        for place in np.argwhere(there).tolist()
    ]


def listed(array: Array) -> Any:
    """As nested lists, with null for what JSON has no number for."""
    if array.ndim:
        return [listed(part) for part in array]
    value = array.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def file_name(label: str) -> str:
    """A label as the name of a file."""
    return "".join(c if c.isalnum() or c in "-_.=" else "-" for c in label).strip(".-") or "run"
