"""A run of the trainer as a model and a tokenizer of Transformers."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from multigate.checkpoint import open_run
from multigate.data.optional import optional
from multigate.data.tokenizer import Tokenizer
from multigate.gpt import GPT

from .tokenizer import to_transformers, tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from .model import MultigateForCausalLM


class Trained(NamedTuple):
    """A checkpoint and what it holds."""

    path: Path
    state: dict[str, Any]
    gpt: GPT
    tokenizer: Tokenizer


def from_run(
    run: Path | str, which: str = "best", data: Path | None = None
) -> "tuple[MultigateForCausalLM, PreTrainedTokenizerFast]":
    """The model of a run, with its weights, and its tokenizer.

    `run` is the folder of a run or one of its checkpoints; `which` of a run's checkpoints is "last"
    or "best", the one with the lowest val loss. `data` is a prepared folder with the run's
    tokenizer, if the one that the run was trained on is no longer there.
    """
    return to_both(read_run(Path(run), which, data))


def read_run(run: Path, which: str, data: Path | None) -> Trained:
    for package, extra in (("transformers", "hf"), ("tyro", "train"), ("rich", "train")):
        optional(package, extra, "a run as a model of Transformers")
    # They belong to commands, whose packages `multigate.hf` does not need otherwise.
    from multigate.evaluate import load_model
    from multigate.sample import run_tokenizer

    if which not in ("best", "last"):
        raise ValueError(f"which must be best or last, got {which!r}.")
    path, state = open_run(run, which)
    tokenizer = run_tokenizer(path, state, data)
    gpt = load_model(path, state)
    if tokenizer.vocab_size > gpt.config.vocab_size:
        raise ValueError(
            f"the tokenizer of {path} has {tokenizer.vocab_size} ids, more than the vocabulary of "
            f"{gpt.config.vocab_size} of its model: it is not the one the run was trained with."
        )
    return Trained(path, state, gpt, tokenizer)


def to_both(trained: Trained) -> "tuple[MultigateForCausalLM, PreTrainedTokenizerFast]":
    """The model and the tokenizer for Transformers, which know of each other."""
    _, state, gpt, tokenizer = trained
    made = to_transformers(tokenizer, gpt.config.context)
    prints = [state["tokenizer"], tokenizer_fingerprint(made, tokenizer.eot)]
    model = from_gpt(gpt, tokenizer_fingerprints=prints)
    model.generation_config = generation_config(gpt, tokenizer)
    return model, made


def from_gpt(gpt: GPT, **settings: Any) -> "MultigateForCausalLM":
    """A model of Transformers around `gpt` itself; nothing is copied.

    `settings` are further ones of `MultigateConfig`.
    """
    optional("transformers", "hf", "from_gpt")
    from .config import MultigateConfig
    from .model import MultigateForCausalLM

    config = MultigateConfig(**asdict(gpt.config), **settings)
    with torch.device("meta"):
        model = MultigateForCausalLM(config)
    model.model = gpt
    return model.eval()


def generation_config(gpt: GPT, tokenizer: Tokenizer) -> Any:
    """What generate() begins and ends with; ids that only pad the vocabulary are never written."""
    hf = optional("transformers", "hf", "generate()")
    end, padding = tokenizer.eot, range(tokenizer.vocab_size, gpt.config.vocab_size)
    return hf.GenerationConfig(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        suppress_tokens=list(padding) or None,
    )
