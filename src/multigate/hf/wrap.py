"""`with_residual`: a causal language model of Transformers with any residual."""

import copy
import warnings
from typing import Any

import torch

from multigate.data.optional import optional
from multigate.residuals import build_residual

from .classes import classes
from .decoder import FAMILIES, build_layers, install


def with_residual(
    config_or_model: Any,
    residual: str = "mgr-competitive",
    streams: int | None = None,
    **options: Any,
) -> Any:
    """A Llama, Qwen2, Qwen3 or GPT-2 of Transformers whose additive residuals are replaced.

        model = with_residual(LlamaConfig(), "mgr-competitive", streams=4)     # to be trained
        model = with_residual(LlamaForCausalLM.from_pretrained(folder), "hc")  # keeps its weights

    From a configuration the model is initialised by Transformers' rules, and the residual by its
    own. A model that is given is changed in place and returned: its weights are kept, and unless
    the residual is the plain sum it needs training now. With "prenorm" the outputs are those of
    the plain model, bit for bit.

    The result is a `PreTrainedModel`: generate() with a dynamic or static cache, padding, labels,
    gradient checkpointing (of every sublayer), save_pretrained, and, once multigate.hf is imported,
    AutoModelForCausalLM.from_pretrained. `model.stack` is the `Stack` in it. It does not give
    output_hidden_states, and its layers are all of one kind.
    """
    hf = optional("transformers", "hf", "with_residual")
    given = config_or_model
    if not isinstance(given, hf.PreTrainedConfig | hf.PreTrainedModel):
        raise ValueError(
            "with_residual needs a configuration or a model of Transformers, got "
            f"{type(given).__name__}."
        )
    model = given if isinstance(given, hf.PreTrainedModel) else None
    plain_config = given if model is None else model.config
    if getattr(plain_config, "multigate", None) is not None:
        raise ValueError(
            f"this {type(given).__name__} has a multigate residual already: start from a plain one."
        )
    if plain_config.model_type not in FAMILIES:
        raise ValueError(
            f"with_residual does not know models of type {plain_config.model_type!r}: it knows "
            f"{', '.join(FAMILIES)}."
        )
    plain, config_class, model_class = classes(plain_config.model_type)
    if model is not None and type(model) is not plain:
        raise ValueError(
            f"with_residual needs a {plain.__name__} itself, got a {type(model).__name__}."
        )
    # A copy: other models may share the plain configuration.
    config = copy.deepcopy(plain_config)
    config.__class__ = config_class
    config.multigate = {"residual": residual, "streams": streams, "options": options}
    if model is None:
        return hf.AutoModelForCausalLM.from_config(config)
    stack = build_layers(model, model_class.family, config)
    for module in model.modules():
        if getattr(module, "config", None) is plain_config:
            module.config = config
    model.__class__ = model_class
    install(model, model_class.family, stack)
    if not _sums(residual, stack.residual.depth, streams, options):
        warnings.warn(
            f"the weights of this {plain.__name__} were made for plain residuals: with {residual} "
            "it needs training now.",
            stacklevel=2,
        )
    return model


def _sums(name: str, depth: int, streams: int | None, options: dict[str, Any]) -> bool:
    """Whether the residual, as it starts, adds up what is written: h = x + y_0 + ... + y_i."""
    residual = build_residual(name, 4, depth, streams, **options)
    total, *ys = torch.arange(4.0 * (depth + 1)).sin().view(depth + 1, 4)
    with torch.no_grad():
        h, state = residual.start(total)
        for i, y in enumerate(ys):
            h, state = residual.step(i, y, state)
            total = total + y
            if not torch.equal(h, total):
                return False
    return True
