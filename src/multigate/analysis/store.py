"""What was recorded, for people who plot themselves: npz, JSON and CSV."""

import csv
import json
import math
import re
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
    written, taken = [], set[str]()
    for label, families in measured.items():
        flat = flattened(families)
        stem = free_name(label, taken)
        written += [folder / f"{stem}.npz", folder / f"{stem}.json"]
        np.savez_compressed(written[-2], **flat)  # type: ignore[arg-type]
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


def flattened(families: Mapping[str, Arrays]) -> Arrays:
    """All arrays of a run as FAMILY.NAME."""
    return {
        f"{f}.{name}": array for f, arrays in families.items() for name, array in arrays.items()
    }


def restored(numbers: Mapping[str, Any]) -> dict[str, Arrays]:
    """The families of a run from what `listed` has made of its arrays, NaN where that has null."""
    families: dict[str, Arrays] = {}
    for key, values in numbers.items():
        family, _, name = key.partition(".")
        array = np.array(values)
        whole = array if array.dtype != object else np.array(values, float)
        families.setdefault(family, {})[name] = whole
    return families


def lines(label: str, name: str, array: Array) -> list[list[Any]]:
    """A line for each finite number; of counts, for those that are not 0."""
    there = array != 0 if array.dtype.kind in "iu" else np.isfinite(array)
    return [
        [label, name, *place, *[""] * (3 - len(place)), array[tuple(place)].item()]
        for place in np.argwhere(there).tolist()
    ]


def listed(array: Array, digits: int | None = None) -> Any:
    """As nested lists, with null for what JSON has no number for; all digits unless told."""
    if array.ndim:
        return [listed(part, digits) for part in array]
    value = array.item()
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return value if digits is None else float(f"{value:.{digits}g}")


def free_name(label: str, taken: set[str]) -> str:
    """`label` as the name of a file that is not `taken` yet, whatever the case of its letters."""
    safe = re.sub(r"[^\w.=-]+", "-", label).strip("-.")[:60] or "run"
    found, count = safe, 1
    while found.casefold() in taken:
        count += 1
        found = f"{safe}-{count}"
    taken.add(found.casefold())
    return found
