"""OUT/settings.json: what all runs of a folder have in common, so that nothing else gets in.

{"data": {...}, "config": {...}, "lr_factors": [...], "lr_factor": ..., "lr_runs": [...],
"studies": {...}, "commands": {...}, "left_out": {...}}
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from multigate.config import TrainConfig
from multigate.data.shards import TokenData
from multigate.data.writer import write_json

from .kept import changes, publishable

FILE = "settings.json"


@dataclass(frozen=True)
class Settings:
    config: Mapping[str, Any]
    """The recipe of every run, before cell and seed."""
    data: Mapping[str, Any]
    """The text: its name, its fingerprint, and the tokens of its splits."""
    lr_factors: Sequence[float] = (1.0,)
    lr_factor: float | None = None
    """The one that was chosen; None before the check is over."""
    lr_runs: Sequence[str] = ()
    """The runs of the check, one for each of the factors."""
    studies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By name of a study, the runs that were ever asked for."""
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The same, what was typed for them."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """By label of a cell, why there is no such model at this scale."""

    def write(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / FILE, {**vars(self)})

    def asked(self, study: str, names: Sequence[str], command: str) -> "Settings":
        """With these runs of `study` beside those asked for before."""
        runs = dict.fromkeys([*self.studies.get(study, ()), *names])
        commands = dict.fromkeys([*self.commands.get(study, ()), command])
        return replace(
            self,
            studies={**self.studies, study: list(runs)},
            commands={**self.commands, study: list(commands)},
        )

    def widened(self, asked: Sequence[float] | None) -> "Settings":
        """With more learning rates to choose among, if those of before are among them."""
        if asked is None or not set(asked) > set(self.lr_factors):
            return self
        return replace(self, lr_factors=list(asked), lr_factor=None)


def describe_data(data: TokenData) -> dict[str, Any]:
    splits = {name: data.split(name).tokens for name in data.splits()}
    return {"name": data.folder.name, "fingerprint": data.fingerprint, "tokens": splits}


def read_settings(out: Path) -> Settings:
    try:
        return Settings(**json.loads((out / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{out} holds no results of `multigate repro`: give the folder of its --out."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{out / FILE} is damaged ({error}): take another --out.") from None


def settle(
    out: Path,
    config: TrainConfig,
    data: TokenData,
    asked: Sequence[float] | None,
    usual: Sequence[float],
) -> Settings:
    """The settings of the folder: as they were, or these if it is new. Others are refused, but for
    more learning rates.

    `asked` are the factors of the learning rate, where somebody has; else the folder's, or `usual`.
    """
    factors = usual if asked is None else asked
    new = Settings(publishable(config), describe_data(data), list(factors))
    if not (out / FILE).exists():
        if len(factors) == 1:
            new = replace(new, lr_factor=factors[0])
        return new
    old = read_settings(out).widened(asked)
    found = changes(old.config, new.config)
    if old.data["fingerprint"] != new.data["fingerprint"]:
        found.append(f"data {old.data['name']} -> other text in {data.folder}")
    if asked is not None and list(old.lr_factors) != list(asked):
        found.append(f"lr_factors {list(old.lr_factors)} -> {list(factors)}")
    if found:
        raise ValueError(
            f"{out} holds results of other settings ({'; '.join(found)}): go on with the old ones, "
            "or give another --out and --runs."
        )
    return old
