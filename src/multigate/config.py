"""Typed configuration: dataclasses, the recipes of the scales, TOML files and their resolution.

Later wins: the defaults here, the recipe of the scale (`configs/<scale>.toml`), the files given
with --config, the flags of the command line.
"""

import json
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .gpt import PRESETS, GPTConfig
from .names import unknown
from .optim import OptimConfig

T = TypeVar("T")
VOCABULARY_MULTIPLE = 128
"""A vocabulary is padded to a multiple of this; the matrix products of the head want it."""


@dataclass(frozen=True)
class ModelChanges:
    """What differs from the scale's model; None keeps the scale's own value."""

    blocks: int | None = None
    """Transformer blocks; each is two sublayers."""
    width: int | None = None
    heads: int | None = None
    context: int | None = None
    """Tokens in a training window, and the longest sequence."""
    streams: int | None = None
    """Streams (or blocks, for attnres-block) of the residual."""
    residual_options: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Further options of the residual, as name and value in turn."""
    memory: Literal["store", "recompute", "invert", "exact"] = "store"
    """What the residual keeps for the backward pass, where it has a choice; --dry-run compares."""
    attention: Literal["plain", "moda", "moda-ffn"] = "plain"
    """moda: attention also reads what earlier sublayers wrote at the position."""
    stream_dtype: Literal["auto", "bfloat16", "float32"] = "auto"


@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT with any residual, at any scale, on any prepared text."""

    scale: Literal["tiny", "mini", "s", "m", "l"] = "tiny"
    """The size of the model, and the recipe that goes with it; s, m and l are the paper's."""
    residual: str = "mgr-competitive"
    """Any of `multigate.residual_names()`."""
    data: str = "stdlib"
    """A folder made by `multigate prepare`, or text that can be prepared: stdlib, a file, a folder
    of text, fineweb, ..."""
    tokenizer: str = "bytes"
    """For data that is still to be prepared: bytes, bpe:16384, gpt2 or a tokenizer file."""

    out: Path = Path("runs")
    """Where runs are kept."""
    name: str | None = None
    """The run's folder in `out`; None makes a name of scale, residual, data and seed."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest checkpoint of the run, if there is one."""
    init: Path | None = None
    """Another run, or a folder made by `multigate export` or save_pretrained of Transformers, whose
    weights this one starts from."""

    steps: int = 1000
    tokens_per_step: int = 2048
    """Over all devices and micro-batches."""
    micro_batch: int | None = None
    """Windows a device computes at once; None chooses. Accumulation follows from it."""
    seed: int = 0

    eval_every: int = 100
    """Steps between evaluations on held-out text."""
    eval_tokens: int = 65536
    """Tokens of the held-out text, spread evenly over it, that are read each time."""
    save_every: int = 250
    """Steps between checkpoints; one is written at the end in any case."""
    keep: int = 2
    """How many of the newest checkpoints to keep, beside the best one."""
    bad_steps: int = 10
    """Stop after so many steps in a row whose loss or gradient is not finite."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Of the matrix products; weights and optimizer are float32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto: on a GPU."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: the whole model on every device, or its parameters spread over them."""
    checkpoint_activations: bool = False
    """Recompute the sublayers in the backward pass: less memory, about a third more time."""
    verify_data: bool = True
    """Check the sha256 of the data before training."""
    log: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where to log beside the run's own log.jsonl."""

    model: ModelChanges = field(default_factory=ModelChanges)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        least = {"steps": 1, "tokens_per_step": 1, "eval_every": 1, "save_every": 1}
        least |= {"eval_tokens": 1, "keep": 1, "bad_steps": 1, "micro_batch": 1, "seed": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f"{name} must be at least {smallest}, got {value}.")

    def gpt(self, tokens: int) -> GPTConfig:
        """The model for a tokenizer of `tokens` ids."""
        changed = {k: v for k, v in vars(self.model).items() if v is not None}
        padded = -(-tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        preset = PRESETS[self.scale]
        return replace(preset, residual=self.residual, vocab_size=padded, **changed)

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        data = Path(self.data).name.replace(":", "-")
        return self.out / (self.name or f"{self.scale}-{self.residual}-{data}-{self.seed}")


# What may differ between a run and its continuation: none of it changes what is computed, except
# by rounding. The data is compared by what it holds, not by where it lies.
FREE = {
    *("out", "name", "resume", "init", "data", "tokenizer", "verify_data"),
    *("eval_every", "eval_tokens", "save_every", "keep", "bad_steps", "log"),
    *("device", "precision", "compile", "parallel", "micro_batch", "checkpoint_activations"),
}
FREE_OPTIONS = {"memory", "keep", "every"}
"""The same of a residual's options: where its backward pass has the streams from."""


def to_table(config: Any) -> dict[str, Any]:
    """A configuration as plain values, for JSON and TOML."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, tuple):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, Path) else value

    return plain(asdict(config))


def from_table(default: T, table: Mapping[str, Any], where: str) -> T:
    """`default`, a dataclass, with the values of `table`; `where` names it in errors."""
    hints = get_type_hints(type(default))
    changes: dict[str, Any] = {}
    for key, value in table.items():
        if key not in hints:
            raise ValueError(f"{where}: " + unknown("setting", key, hints))
        old = getattr(default, key)
        if is_dataclass(old) and isinstance(value, Mapping):
            changes[key] = from_table(old, value, f"{where}, [{key}]")
        else:
            changes[key] = _typed(value, hints[key], f"{where}: {key}")
    return replace(default, **changes)  # type: ignore[type-var]


def _typed(value: Any, hint: Any, what: str) -> Any:
    """`value` as the type `hint` asks for, or one sentence."""
    choices = get_args(hint)
    if get_origin(hint) is Literal:
        if value not in choices:
            raise ValueError(f"{what} must be one of {', '.join(choices)}, got {value!r}.")
        return value
    if get_origin(hint) is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_typed(item, choices[0], what) for item in items)
    if get_origin(hint) is dict:
        if isinstance(value, Mapping):
            return dict(value)
    elif get_origin(hint) in (Union, types.UnionType):
        if value is None and type(None) in choices:
            return None
        return _typed(value, next(c for c in choices if c is not type(None)), what)
    elif hint is Path and isinstance(value, str | Path):
        return Path(value)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint in (bool, int, str) and type(value) is hint:
        return value
    kind = getattr(hint, "__name__", str(hint))
    raise ValueError(f"{what} must be of type {kind}, got {value!r}.")


def to_toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """TOML of nested plain values; what is None is left out."""
    lines, tables = list[str](), list[str]()
    for key, value in table.items():
        if isinstance(value, Mapping):
            inner = to_toml(value, f"{prefix}{key}.")
            if inner:
                tables.append(f"\n[{prefix}{key}]\n{inner}")
        elif value is not None:
            lines.append(f"{key} = {json.dumps(value)}\n")
    return "".join(lines + tables)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no configuration file {path}.") from None
    except OSError as error:
        raise OSError(f"{path} cannot be read as a configuration: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}.") from None


def recipe_path(scale: str) -> Path:
    """The recipe of a scale: beside the package when installed, in configs/ of a checkout."""
    here = Path(__file__).parent
    installed = here / "configs" / f"{scale}.toml"
    return installed if installed.exists() else here.parents[1] / "configs" / f"{scale}.toml"


def resolve(scale: str | None = None, files: Sequence[Path] = ()) -> TrainConfig:
    """The configuration before any flag: the scale's recipe, then `files` in order.

    The scale is the one given, else the one a file names, else the default.
    """
    tables = [(str(path), read_toml(path)) for path in files]
    named = [table["scale"] for _, table in tables if "scale" in table]
    chosen = scale or (named[-1] if named else TrainConfig.scale)
    if not isinstance(chosen, str) or chosen not in PRESETS:
        raise ValueError(unknown("scale", chosen, PRESETS))
    recipe = recipe_path(chosen)
    config = from_table(TrainConfig(), read_toml(recipe), str(recipe))
    for where, table in tables:
        config = from_table(config, table, where)
    return from_table(config, {"scale": chosen}, "the command line")


def compared(model: Mapping[str, Any]) -> dict[str, Any]:
    """What counts of a model's configuration where two are compared: all but its memory mode."""
    options = model.get("residual_options", {})
    kept = {name: value for name, value in options.items() if name not in FREE_OPTIONS}
    rest = {name: value for name, value in model.items() if name != "memory"}
    return {**rest, "residual_options": kept}


def differences(old: Mapping[str, Any], new: TrainConfig) -> list[str]:
    """What changed between a run's stored configuration and this one, of what must not."""
    now = to_table(new)
    found = list[str]()
    for f in fields(new):
        if f.name in FREE:
            continue
        before, after = old.get(f.name), now[f.name]
        if f.name == "model" and isinstance(before, dict):
            before, after = compared(before), compared(after)
        if before == after:
            continue
        if isinstance(after, dict) and isinstance(before, dict):
            changed = [k for k in after if before.get(k) != after[k]]
            found += [f"{f.name}.{k} {before.get(k)} -> {after[k]}" for k in changed]
        else:
            found.append(f"{f.name} {before} -> {after}")
    return found
