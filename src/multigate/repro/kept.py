"""What is published of a run: its settings, its environment and its thinned log.

OUT/runs/NAME/config.toml         the resolved configuration, without places on a disk
              environment.json    versions, commit, GPU
              log.jsonl.gz        every tenth step and the last 200, evaluations, final scores

The log comes last, in one rename: where it is, the rest is. What was measured inside a model stands
beside it (see look.py). OUT/speeds.json, if there, says how
fast the model of each cell is alone on a device (see speed.py).
"""

import gzip
import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multigate.config import FREE, TrainConfig, to_table, to_toml
from multigate.data.writer import write_json, write_whole
from multigate.log import MOVING_AVERAGE, parsed

EVERY = 10
"""Of the steps, each so many-th is kept."""
LOG = "log.jsonl.gz"
SPEEDS = "speeds.json"
PLACES = ("out", "resume", "init", "verify_data", "log")
"""Settings that say where a run is kept and not what it is."""
KEPT = {
    "start": ("parameters", "processes", "device"),
    "train": ("loss", "grad_norm", "tokens_per_second"),
    "val": ("loss", "bits_per_byte", "gate_mean", "gate_max", "memory_gib"),
    "score": ("split", "loss", "bits_per_byte", "tokens"),
    "failed": ("reason",),
}
"""Of each kind of record, what is kept; the learning rate and the tokens follow from the step."""


def publishable(config: TrainConfig) -> dict[str, Any]:
    """The settings of a run without places; its data by the folder's name."""
    table = {name: value for name, value in to_table(config).items() if name not in PLACES}
    return {**table, **{k: Path(table[k]).name for k in ("data", "tokenizer")}}


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two published configurations, of what changes a result."""
    before, after = (dict(flat({k: v for k, v in t.items() if k not in FREE})) for t in (old, new))
    return [
        f"{name} {before.get(name)} -> {after.get(name)}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as name.name and value; None, which TOML has no word for, is left out."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def thinned(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records to keep, in order: of the steps the first, each tenth, and as many of the last as
    the training loss is the mean of."""
    records = [record for record in records if record["event"] in KEPT]
    finite = [r["step"] for r in records if r["event"] == "train" and r.get("loss") is not None]
    last = set(finite[-MOVING_AVERAGE:])
    found = list[dict[str, Any]]()
    for record in records:
        event, step = record["event"], record["step"]
        if event == "train" and step != 1 and step % EVERY and step not in last:
            continue
        values = {name: shortened(record[name]) for name in KEPT[event] if name in record}
        found.append({"event": event, "step": step, **values})
    return found


def shortened(value: Any) -> Any:
    """A loss to six places: more than a float32 has, less than it is printed with."""
    return round(value, 6) if isinstance(value, float) else value


def write_kept(
    folder: Path,
    config: TrainConfig,
    environment: Mapping[str, Any],
    records: Iterable[Mapping[str, Any]],
) -> None:
    """Keep a run; the same records make the same bytes."""
    lines = "".join(json.dumps(record) + "\n" for record in thinned(records))
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.toml", to_toml(publishable(config)).encode())
    write_json(folder / "environment.json", dict(environment))
    write_whole(folder / LOG, gzip.compress(lines.encode(), 9, mtime=0))


@dataclass(frozen=True)
class Kept:
    """A run as it was kept."""

    name: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]

    def of(self, event: str) -> list[Mapping[str, Any]]:
        return [record for record in self.records if record["event"] == event]

    @property
    def finished(self) -> bool:
        """Whether it has been measured on val, which comes after training."""
        return any(record["split"] == "val" for record in self.of("score"))

    @property
    def failure(self) -> str | None:
        """Why it ended before its end, and where."""
        failed = self.of("failed")
        return f"step {failed[-1]['step']}: {failed[-1]['reason']}" if failed else None

    @property
    def train(self) -> float:
        """The mean loss of the last 200 steps, as the paper reports it."""
        losses = [r["loss"] for r in self.of("train") if r.get("loss") is not None]
        recent = losses[-MOVING_AVERAGE:]
        return math.fsum(recent) / len(recent) if recent else math.nan

    def score(self, split: str) -> Mapping[str, Any] | None:
        found = [record for record in self.of("score") if record["split"] == split]
        return found[-1] if found else None

    @property
    def parameters(self) -> int | None:
        found = [r["parameters"] for r in self.of("start") if "parameters" in r]
        return found[-1] if found else None

    @property
    def speed(self) -> float | None:
        """Tokens a second: the median over the second half, where compilation is over."""
        steps = [r for r in self.of("train") if r.get("tokens_per_second")]
        half = [r["tokens_per_second"] for r in steps if 2 * r["step"] > steps[-1]["step"]]
        half.sort()
        return (half[(len(half) - 1) // 2] + half[len(half) // 2]) / 2 if half else None

    @property
    def memory(self) -> float | None:
        """The most GiB in use."""
        found = [r["memory_gib"] for r in self.of("val") if "memory_gib" in r]
        return max(found) if found else None


def read_kept(folder: Path) -> Kept:
    try:
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        lines = gzip.decompress((folder / LOG).read_bytes()).splitlines()
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(
            f"{folder} is damaged ({error}): remove it, and its run will be made again."
        ) from None
    records = [record for record in map(parsed, lines) if record is not None]
    return Kept(folder.name, config, environment, records)


def read_all(out: Path) -> dict[str, Kept]:
    """Every run that is kept in OUT, by name."""
    found = sorted((out / "runs").glob(f"*/{LOG}"))
    return {file.parent.name: read_kept(file.parent) for file in found}


def read_speeds(out: Path) -> dict[str, Mapping[str, Any]]:
    """By cell, what was timed of it; nothing where nothing was."""
    path = out / SPEEDS
    found: dict[str, Mapping[str, Any]] = {}
    if path.exists():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["cells"]
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{path} is damaged ({error}): remove it, and time the models again with "
                "`multigate repro speed`."
            ) from None
    return found
