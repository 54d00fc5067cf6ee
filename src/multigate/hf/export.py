"""`multigate export`: a run as a folder that Transformers loads, with or without multigate."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from multigate.checkpoint import fsync
from multigate.data.optional import optional

from .bundle import AUTO_MAP, MARK, bundle
from .card import card
from .run import read_run, to_both

CONFIG = "config.json"


@dataclass(frozen=True)
class ExportConfig:
    """Write a trained run as a folder for Transformers: weights as safetensors, tokenizer, model
    card, and the code to load it where multigate is not installed."""

    run: Path
    """The run's folder, or one of its checkpoints."""
    out: Path
    """The folder to write; it must not exist, or be empty."""
    checkpoint: Literal["best", "last"] = "best"
    """best: of the checkpoints that were kept, the one with the lowest val loss."""
    data: Path | None = None
    """A prepared folder with the run's tokenizer; None takes the one the run was trained on."""
    overwrite: bool = False
    """Replace what an earlier export has written to the folder."""


def export(config: ExportConfig) -> Path:
    """Write the folder; it is there as a whole or not at all."""
    out = config.out
    check_folder(out, config.overwrite)
    trained = read_run(config.run, config.checkpoint, config.data)
    model, tokenizer = to_both(trained)
    files = bundle(trained.gpt.stack.residual)
    with aside(out) as folder, without_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        table = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        files[CONFIG] = json.dumps({**table, "auto_map": AUTO_MAP}, indent=2, sort_keys=True) + "\n"
        files["README.md"] = card(out.resolve().name, trained)
        for name, content in files.items():
            (folder / name).write_text(content, encoding="utf-8")
        # Some writers keep their files to one user.
        for file in folder.iterdir():
            shutil.copymode(folder / CONFIG, file)
        check_foreign(out, {file.name for file in folder.iterdir()})
    size = sum(file.stat().st_size for file in out.iterdir())
    print(
        f"{trained.path} is in {out}: {trained.gpt.parameter_count():,} parameters, "
        f"{size / 2**20:.1f} MiB. AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it, "
        "after `import multigate.hf` or with trust_remote_code=True."
    )
    return out


def check_folder(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: name a folder to export to.")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ValueError(
            f"{out} is not empty: name another folder, or replace an earlier export with "
            "--overwrite True."
        )
    if not (out / CONFIG).is_file():
        raise ValueError(f"{out} holds no earlier export to overwrite: name another folder.")


def check_foreign(out: Path, written: set[str]) -> None:
    """Refuse to overwrite a folder with anything in it that no export has written."""
    for file in sorted(out.iterdir()) if out.is_dir() else []:
        if file.name in written or (file.suffix == ".py" and file.is_file() and marked(file)):
            continue
        raise ValueError(
            f"{out} holds {file.name}, which this export would not write: move it, or name another "
            "folder."
        )


def marked(file: Path) -> bool:
    with file.open(encoding="utf-8", errors="replace") as text:
        return text.readline().startswith(MARK)


@contextmanager
def without_bars() -> Iterator[None]:
    """Saving takes no time worth a bar of Transformers."""
    logging = optional("transformers", "hf", "multigate export").utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def aside(out: Path) -> Iterator[Path]:
    """A new folder that takes the place of `out` in the end, if nothing goes wrong."""
    out = out.resolve()
    folder, old = (out.with_name(f".{out.name}.{kind}-{os.getpid()}") for kind in ("new", "old"))
    try:
        folder.mkdir(parents=True)
        yield folder
        for file in (*folder.iterdir(), folder):
            fsync(file)
        if out.exists():
            out.rename(old)
        try:
            folder.rename(out)
        except OSError:
            with suppress(OSError):
                old.rename(out)
            raise
        fsync(out.parent)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None:
            raise
        said = error.strerror if isinstance(error, OSError) else str(error).strip()
        raise OSError(f"{out} cannot be written ({said}): what was there is as it was.") from error
    finally:
        for left in (folder, old):
            shutil.rmtree(left, ignore_errors=True)
