"""A folder that `save_pretrained` has written, read without Transformers."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from multigate.checkpoint import CheckpointError, read_tensors
from multigate.gpt import GPT

from .settings import build_gpt, check_kinds, gpt_config
from .weights import check_weights

PREFIX = "model."
"""Of the names of a GPT's weights in such a folder."""


def is_saved_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not (folder / "state.json").exists()


def read_saved_config(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings of its GPT, and the fingerprints of its tokenizer, as far as they are known."""
    file = folder / "config.json"
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} holds no model: there is no config.json.") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as a configuration ({error}).") from None
    kind = table.get("model_type") if isinstance(table, dict) else None
    if kind != "multigate":
        raise ValueError(f"{file} is not the configuration of a multigate GPT, but of {kind!r}.")
    tokenizers = table.get("tokenizer_fingerprints", [])
    try:
        check_kinds({"tokenizer_fingerprints": tokenizers})
        settings = asdict(gpt_config(table))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    check_weights(folder, {})
    return settings, tokenizers


def to_gpt(folder: Path | str) -> GPT:
    """The GPT in a folder made by `multigate export` or `save_pretrained`, with its weights."""
    folder = Path(folder)
    settings, _ = read_saved_config(folder)
    config = gpt_config(settings)
    # Without memory first: the configuration may claim any size, the file cannot.
    with torch.device("meta"):
        read_weights(folder, build_gpt(config))
    gpt = build_gpt(config)
    read_weights(folder, gpt)
    return gpt


def read_weights(folder: Path, gpt: GPT) -> None:
    """Put the weights of such a folder into a GPT of the same architecture."""
    try:
        read_tensors(folder, {PREFIX + name: t for name, t in gpt.state_dict().items()})
    except CheckpointError as error:
        raise ValueError(
            f"the weights in {folder} are damaged: copy or export them once more."
        ) from error
