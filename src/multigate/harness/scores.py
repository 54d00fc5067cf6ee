"""What a run scored: a table for the terminal, a file beside the run."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from multigate.data.writer import write_whole

ARROWS = {True: "\N{UPWARDS ARROW}", False: "\N{DOWNWARDS ARROW}", None: ""}


def rows(results: Mapping[str, Any]) -> Iterator[tuple[str, str, str, float, Any]]:
    """Task, metric, filter, value and standard error of every score."""
    for task, scores in results.items():
        for key, value in scores.items():
            metric, comma, filtered = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                yield task, metric, filtered, value, scores.get(f"{metric}_stderr,{filtered}")


def score_table(record: Mapping[str, Any]) -> Table:
    """A row for every score; groups have their tasks below them."""
    inside = {task for members in record["group_subtasks"].values() for task in members}
    found = list(rows(record["results"]))
    filters = any(filtered != "none" for _, _, filtered, _, _ in found)
    table = Table(title=record["checkpoint"], title_justify="left")
    for name in ("task", "metric", *(["filter"] if filters else [])):
        table.add_column(name)
    for name in ("shots", "documents", "score", "\N{PLUS-MINUS SIGN}"):
        table.add_column(name, justify="right")
    for task, metric, filtered, value, error in found:
        arrow = ARROWS[record["higher_is_better"].get(task, {}).get(metric)]
        table.add_row(
            ("  " if task in inside else "") + task,
            f"{metric} {arrow}".strip(),
            *([filtered] if filters else []),
            str(record["n-shot"].get(task, "")),
            str(record["n-samples"].get(task, {}).get("effective", "")),
            _number(value),
            _number(error),
        )
    return table


def show(record: Mapping[str, Any], console: Console) -> None:
    console.print(score_table(record))
    for note in record["notes"]:
        console.print(f"Note: {note}", markup=False, highlight=False, soft_wrap=True)


def keep(record: dict[str, Any], file: Path, samples: Mapping[str, Any] | None) -> None:
    """Write the record, and every document's questions and answers into a file for each task."""
    try:
        file.parent.mkdir(exist_ok=True)
        for task, answers in (samples or {}).items():
            lines = "".join(as_json(answer) + "\n" for answer in answers)
            name = re.sub(r"[^\w.-]", "-", task)
            write_whole(file.with_name(f"{file.stem}-{name}.jsonl"), lines.encode())
        write_whole(file, (as_json(record, indent=1) + "\n").encode())
    except OSError as error:
        raise OSError(f"the scores could not be kept in {file} ({error.strerror}).") from error


def as_json(content: Any, indent: int | None = None) -> str:
    """JSON; what has no form there, like a function in a task's settings, by its name."""
    return json.dumps(content, indent=indent, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    return sorted(value, key=str) if isinstance(value, set) else str(value)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"
    return "" if value in (None, "N/A") else str(value)
