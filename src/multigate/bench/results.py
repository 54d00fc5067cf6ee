"""The file of results: rows that later sittings replace one by one."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .ops import Row

KEY = (
    "case",
    "scale",
    "residual",
    "memory",
    "pass",
    "backend",
    "n",
    "width",
    "tokens",
    "dtype",
    "variant",
    "norm",
    "compile",
)
"""What a row is a measurement of; everything else is what was found."""


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in KEY)


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """`old` with rows of the same key replaced in place, and the others of `new` after them."""
    rows = {key(row): row for row in old}
    rows.update((key(row), row) for row in new)
    return list(rows.values())


class Results:
    """`path` = {"machine": ..., "copy_gb_s": ..., "rows": [...]}, written anew after every row.

    `copy_gb_s` of the file is that of the last sitting; a row keeps the one it was divided by.
    """

    def __init__(self, path: Path, machine: str, copy_gb_s: float, **about: Any) -> None:
        self.path, self.machine, self.copy_gb_s, self.about = path, machine, copy_gb_s, about
        self.rows: list[Row] = []
        if path.exists():
            found = json.loads(path.read_text())
            if found["machine"] != machine:
                raise ValueError(
                    f"{path} holds results of {found['machine']}, not of {machine}: choose "
                    "another file with --machine."
                )
            self.rows = found["rows"]

    def add(self, row: Row) -> Row:
        """Write `row` with what is true of the whole sitting."""
        row = {**row, "copy_gb_s": self.copy_gb_s, **self.about}
        self.rows = merged(self.rows, [row])
        self.write()
        return row

    def write(self) -> None:
        lines = ",\n".join("    " + json.dumps(row, sort_keys=False) for row in self.rows)
        text = (
            "{\n"
            f'  "machine": {json.dumps(self.machine)},\n'
            f'  "copy_gb_s": {json.dumps(self.copy_gb_s)},\n'
            f'  "rows": [\n{lines}\n  ]\n'
            "}\n"
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(text)
        os.replace(part, self.path)
