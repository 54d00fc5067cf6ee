"""The configuration of a GPT of multigate as Transformers keeps it."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from multigate.gpt import GPTConfig
from multigate.names import unknown

from .settings import KINDS, check_kinds, gpt_config, gpt_defaults

ALSO_KNOWN = (
    *("attn_implementation", "auto_map", "bos_token_id", "eos_token_id", "model_type"),
    *("name_or_path", "output_attentions", "pad_token_id", "quantization_config"),
    *("tie_word_embeddings", "torch_dtype"),
    *("_attn_implementation", "_commit_hash", "_name_or_path"),
)
"""What Transformers writes or gives beside the fields of its configurations."""


def check_names(given: Mapping[str, Any]) -> None:
    """What Transformers looks up by name: a type of torch, and a kind of attention. A kind that it
    does not have it would fetch as code from the Hub."""
    dtype = given.get("dtype")
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(
            f"the setting dtype of the configuration must be one like float32, got {dtype!r}."
        )
    for name in ("attn_implementation", "_attn_implementation"):
        if given.get(name) not in (None, "eager", "sdpa"):
            raise ValueError(
                f"the setting {name} of the configuration must be sdpa or eager, got "
                f"{given[name]!r}."
            )


class MultigateConfig(PreTrainedConfig):
    """The settings of a GPT, those of `multigate.GPTConfig` with the same names and defaults.

    `num_hidden_layers`, `hidden_size`, `num_attention_heads` and `max_position_embeddings` are
    other names for blocks, width, heads and context. `tokenizer_fingerprints` say which tokenizer
    the model was trained with, where that is known; the trainer compares them. A setting that
    nobody knows is an error.
    """

    model_type = "multigate"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "blocks",
        "hidden_size": "width",
        "num_attention_heads": "heads",
        "max_position_embeddings": "context",
    }

    def __init__(
        self, *, use_cache: bool = True, tokenizer_fingerprints: Sequence[str] = (), **given: Any
    ) -> None:
        given = {self.attribute_map.get(name, name): value for name, value in given.items()}
        defaults = gpt_defaults()
        known = [*defaults, *ALSO_KNOWN, *(f.name for f in fields(PreTrainedConfig))]
        for name in given:
            if name not in known:
                raise ValueError(unknown("setting of the configuration", name, known))
        own = {name: given.pop(name, value) for name, value in defaults.items()}
        if isinstance(tokenizer_fingerprints, tuple):
            tokenizer_fingerprints = list(tokenizer_fingerprints)
        more = {"use_cache": use_cache, "tokenizer_fingerprints": tokenizer_fingerprints}
        gpt_config(own)
        check_kinds({**{name: given[name] for name in given if name in KINDS}, **more})
        check_names(given)
        for name, value in {**own, **more}.items():
            setattr(self, name, value)
        # The head of a GPT is its embedding; there is no other.
        given.setdefault("tie_word_embeddings", True)
        super().__init__(**given)

    def gpt(self) -> GPTConfig:
        """The same settings for `multigate.GPT`."""
        return gpt_config({name: getattr(self, name) for name in gpt_defaults()})

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Transformers; where to find code is only said where the code is saved as well."""
        if self._auto_class is None:
            self.__dict__.pop("auto_map", None)
        return super().save_pretrained(save_directory, *args, **kwargs)
