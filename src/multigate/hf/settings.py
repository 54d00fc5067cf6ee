"""The settings of a GPT as a config.json has them; whoever wrote it need not mean well."""

import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from multigate.gpt import GPT, GPTConfig

LARGEST = {
    **{"vocab_size": 1 << 24, "blocks": 1 << 12, "width": 1 << 16, "context": 1 << 20},
    "streams": 1 << 8,
}
LARGEST_TABLE = 1 << 28
"""Of context times the width of a head: the angles of all positions are made ahead of time."""
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("vocab_size", "blocks", "width", "heads", "context"), (int,)),
    **dict.fromkeys(("residual", "memory", "attention", "stream_dtype"), (str,)),
    **dict.fromkeys(("rope_base", "eps"), (int, float)),
    "streams": (int, type(None)),
    "residual_options": (dict,),
    "tokenizer_fingerprints": (list,),
    "use_cache": (bool,),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), (int, list, type(None))),
    **dict.fromkeys(("id2label", "label2id", "quantization_config"), (dict, type(None))),
}


def gpt_defaults() -> dict[str, Any]:
    """The settings of a GPT by name, with what they are unless told."""
    return {
        f.name: f.default_factory() if f.default_factory is not MISSING else f.default
        for f in fields(GPTConfig)
    }


def check_kinds(values: Mapping[str, Any]) -> None:
    """One sentence for a value of the wrong type."""
    for name, value in values.items():
        kinds = KINDS[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            said = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
            raise ValueError(
                f"the setting {name} of the configuration must be of type {said}, got {value!r}."
            )


def gpt_config(values: Mapping[str, Any]) -> GPTConfig:
    """The GPT that `values` describe; one sentence where it makes no sense, or is beyond all size.

    Settings that are not a GPT's are left to others.
    """
    own = {name: values.get(name, default) for name, default in gpt_defaults().items()}
    check_kinds(own)
    for name, largest in LARGEST.items():
        if (own[name] or 0) > largest:
            raise ValueError(
                f"the setting {name} of the configuration must be at most {largest}, got "
                f"{own[name]}."
            )
    for name in ("rope_base", "eps"):
        # Some whole numbers are too large to be one with a point.
        if not 0 < own[name] <= sys.float_info.max:
            raise ValueError(
                f"the setting {name} of the configuration must be a finite number above 0."
            )
    config = GPTConfig(**{**own, "residual_options": dict(own["residual_options"])})
    if config.context * (config.width // config.heads) > LARGEST_TABLE:
        raise ValueError(
            f"a context of {config.context} with heads of width {config.width // config.heads} is "
            "more than can be meant: use a smaller one in the configuration."
        )
    return config


def build_gpt(config: GPTConfig) -> GPT:
    """The GPT; one sentence where the options of its residual are not of the types it takes."""
    misfit = f"the residual_options of the configuration do not fit {config.residual!r}"
    try:
        gpt = GPT(config)
    except TypeError as error:
        raise ValueError(f"{misfit}: {error}.") from error
    hints = get_type_hints(type(gpt.stack.residual).__init__)
    for name, value in config.options().items():
        hint = hints.get(name, object)
        wide = hint | int if float in (hint, *getattr(hint, "__args__", ())) else hint
        if not isinstance(value, wide) or (isinstance(value, bool) and not isinstance(True, hint)):
            said = getattr(hint, "__name__", str(hint))
            raise ValueError(f"{misfit}: {name} must be of type {said}, got {value!r}.")
    return gpt
