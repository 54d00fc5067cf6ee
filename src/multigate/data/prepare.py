"""Text to token shards: `prepare(PrepareConfig(...))`.

The work goes in units. A unit's shards are written aside and renamed, then `progress.json` is
replaced; so a preparation that was killed goes on after its last whole unit, and ends with the same
bytes as one that was not. `data.json` comes last: where it is, the data is whole.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bar import Progress, progress_bar
from .cut import cut
from .encode import Encoder, cores, split_of
from .folder import discard, is_finished, locked, read_progress, said, tidy
from .shards import FORMAT, HEADER, PROGRESS, TokenData, open_data
from .sources import Part, open_source
from .tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from .units import Cursor, Stage, measured, write_unit
from .writer import write_json, write_whole

if TYPE_CHECKING:
    from rich.console import Console

START = {"stage": 0, "part": 0, "documents": 0, "mark": None, "bytes": 0}


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare, and how."""

    out: Path
    """A new folder, or the one of an interrupted preparation of the same settings."""
    sources: tuple[str, ...] = ("stdlib",)
    """Text to train on: stdlib, fineweb, owner/name of a Hugging Face dataset, files, folders."""
    val: tuple[str, ...] = ()
    """Text to validate on; without it a share of the sources is held out."""
    test: tuple[str, ...] = ()
    """Text for final numbers."""
    tokenizer: str = "bytes"
    """bytes, bpe:SIZE, gpt2, or the path of a .tiktoken or tokenizer.json file."""
    val_share: float = 0.01
    """Share of the documents that is held out, where `val` is empty; of a few text files, the end
    of each."""
    seed: int = 0
    """Another seed holds out other documents."""
    text_key: str = "text"
    """Where the text is in JSON lines, parquet and datasets."""
    pattern: str = "*"
    """Which files of a folder to take."""
    processes: int = 0
    """Processes that encode; 0 is one for every core. The result is the same."""
    unit_mb: float = 256
    """MB of text a shard holds at most (up to one document more)."""
    eot: str | None = None
    """The end-of-text token of a tokenizer.json, where it is none of the usual ones."""
    bpe_sample_mb: float = 100
    """MB of text that bpe:SIZE is trained on."""
    limit_mb: float | None = None
    """Take only the first so many MB of the sources."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))
        for name in ("sources", "val", "test"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"prepare: {name} must be a tuple of sources, not one text.")
        if not self.sources:
            raise ValueError("prepare: there must be at least one source.")
        if not 0 <= self.val_share < 1:
            raise ValueError(
                f"prepare: val_share must be at least 0 and below 1, got {self.val_share}."
            )
        if self.processes < 0:
            raise ValueError(f"prepare: processes must not be negative, got {self.processes}.")
        for name in ("unit_mb", "bpe_sample_mb", "limit_mb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"prepare: {name} must be more than 0, got {value}.")


def prepare(
    config: PrepareConfig,
    progress: Callable[[Progress], None] | None = None,
    console: "Console | None" = None,
) -> TokenData:
    """Prepare data, or go on with it, or find it done.

    `progress` hears how it goes; without it a bar is drawn on `console`, or on the terminal.
    """
    if progress is None:
        with progress_bar(console) as show:
            return prepare(config, show)
    out = config.out
    stages = open_stages(config)
    settings = settings_of(config, stages)
    with said(out):
        if is_finished(out, settings):
            progress(Progress(note=f"{out} holds this data already."))
            return open_data(out, verify=False)
        out.mkdir(parents=True, exist_ok=True)
        with locked(out):
            state = read_progress(out, settings)
            if state is None:
                state = {"settings": settings, "next": START, "splits": {}, "tokenizer": None}
                write_json(out / PROGRESS, state)
            elif state["splits"]:
                count = sum(len(split["shards"]) for split in state["splits"].values())
                progress(Progress(note=f"{out}: going on after {count} finished shards."))
            tidy(out, state)
            tokenizer = obtain_tokenizer(config, stages[-1], state, progress)
            run_stages(config, stages, state, tokenizer, progress)
            finish(out, state, tokenizer)
    progress(Progress(note=summary(out, state["splits"], stages[-1].val_share)))
    return open_data(out, verify=False)


def summary(out: Path, splits: dict[str, Any], val_share: float) -> str:
    parts = [
        f"{name} {s['tokens']:,} tokens of {s['documents']:,} documents"
        for name, s in splits.items()
    ]
    if val_share and "val" not in splits:
        parts.append("no val, the documents are too few to hold any out")
    return f"{out}: {', '.join(parts)}."


def open_stages(config: PrepareConfig) -> list[Stage]:
    """What is read, in order: what is small and given for a purpose before what may take hours."""

    def parts(sources: tuple[str, ...]) -> list[Part]:
        return [p for s in sources for p in open_source(s, config.text_key, config.pattern)]

    named = {"val": parts(config.val), "test": parts(config.test)}
    train = parts(config.sources)
    share = 0.0 if config.val else config.val_share
    halves = cut(train, share)
    if halves is not None:
        (train, named["val"]), share = halves, 0.0
    limit = float("inf") if config.limit_mb is None else config.limit_mb * 1e6
    stages = [Stage(split, found) for split, found in named.items() if found]
    return [*stages, Stage("train", train, share, limit)]


def settings_of(config: PrepareConfig, stages: list[Stage]) -> dict[str, Any]:
    """Everything the result follows from, as it is kept in JSON."""
    settings = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(config).items()}
    del settings["out"], settings["processes"]
    for stage in stages:
        stamps = "\n".join(part.stamp() for part in stage.parts)
        settings[f"{stage.split}_stamp"] = hashlib.sha256(stamps.encode()).hexdigest()
    file = Path(config.tokenizer).expanduser()
    if file.is_file():
        settings["tokenizer_stamp"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return settings


def obtain_tokenizer(
    config: PrepareConfig,
    stage: Stage,
    state: dict[str, Any],
    progress: Callable[[Progress], None],
) -> Tokenizer:
    """The tokenizer, saved in the folder; that of an earlier try where there is one."""
    if state["tokenizer"] is not None:
        return load_tokenizer(config.out, state["tokenizer"], state["eot"])
    if config.tokenizer.startswith("bpe:"):
        progress(Progress(note=f"training {config.tokenizer} on the first text of the sources."))
    tokenizer = make_tokenizer(config.tokenizer, lambda: sample(config, stage), config.eot)
    if config.tokenizer.startswith("bpe:") and tokenizer.vocab_size < int(config.tokenizer[4:]):
        progress(Progress(note=f"the text is enough for {tokenizer.vocab_size} tokens only."))
    if tokenizer.file is not None:
        write_whole(config.out / tokenizer.file, tokenizer.to_bytes())
    state.update(tokenizer=tokenizer.entry(), eot=tokenizer.eot)
    write_json(config.out / PROGRESS, state)
    return tokenizer


def sample(config: PrepareConfig, stage: Stage) -> Iterator[str]:
    """The first training documents; none that is held out."""
    taken = 0
    limit = min(stage.limit, config.bpe_sample_mb * 1e6)
    for part in stage.parts:
        for text in part.read():
            if taken >= limit:
                return
            text, size = measured(text)
            if split_of(text.encode(), config.seed, stage.val_share) == "train":
                taken += size
                yield text


def run_stages(
    config: PrepareConfig,
    stages: list[Stage],
    state: dict[str, Any],
    tokenizer: Tokenizer,
    progress: Callable[[Progress], None],
) -> None:
    """Work off the units that are not finished yet."""
    out, splits = config.out, state["splits"]
    sizes = [stage.size() for stage in stages]
    total = None if None in sizes else sum(size or 0 for size in sizes)

    def report() -> None:
        sums = {k: sum(s[k] for s in splits.values()) for k in ("bytes", "tokens", "documents")}
        progress(Progress(total=total, **sums))

    encoder = Encoder(tokenizer, config.processes or cores())
    try:
        while state["next"]["stage"] < len(stages):
            number = state["next"]["stage"]
            cursor = Cursor(stages[number], state["next"])
            while not cursor.done:
                chunks = cursor.chunks(config.unit_mb * 1e6, config.seed)
                write_unit(out, chunks, encoder, splits, report)
                place = {**START, "stage": number + 1} if cursor.done else cursor.place()
                state["next"] = {"stage": number, **place}
                write_json(out / PROGRESS, state)
            check_not_empty(out, stages[number], splits)
    finally:
        encoder.close()


def check_not_empty(out: Path, stage: Stage, splits: dict[str, Any]) -> None:
    if stage.split in splits:
        return
    discard(out)
    if stage.val_share and "val" in splits:
        raise ValueError(
            f"all documents ({splits['val']['documents']}) fell into the held-out share of "
            f"{stage.val_share}: give more documents, val sources, or another seed."
        )
    names = ", ".join(part.name for part in stage.parts[:3])
    raise ValueError(f"the sources for {stage.split} hold no text ({names}).")


def finish(out: Path, state: dict[str, Any], tokenizer: Tokenizer) -> None:
    # The package imports this module.
    from multigate import __version__

    splits = state["splits"]
    header = {
        "format": FORMAT,
        "multigate": __version__,
        "tokenizer": state["tokenizer"],
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "dtype": tokenizer.dtype.name,
        "settings": state["settings"],
        "splits": {name: splits[name] for name in ("train", "val", "test") if name in splits},
    }
    write_json(out / HEADER, header)
    (out / PROGRESS).unlink(missing_ok=True)
