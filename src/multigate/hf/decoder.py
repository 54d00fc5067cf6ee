"""Taking the layers of a Transformers decoder apart and putting them back as one `Stack`."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from multigate.residuals import build_residual

from .layers import AttentionSublayer, Layers, MLPSublayer


@dataclass(frozen=True)
class Family:
    """Where the parts of a decoder are: its layers; in a layer (norm, attention), (norm, MLP)."""

    layers: str
    attention: tuple[str, str]
    mlp: tuple[str, str]


_LLAMA = Family("layers", ("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp"))
FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gpt2": Family("h", ("ln_1", "attn"), ("ln_2", "mlp")),
}
ENTRY = ("residual", "streams", "options")
"""What the entry `multigate` of a configuration holds."""


def check_config(config: Any) -> None:
    """Refuse what one call of all layers cannot do, and an entry that says nothing usable."""
    entry = getattr(config, "multigate", None)
    if (
        not isinstance(entry, dict)
        or set(entry) != set(ENTRY)
        or not isinstance(entry["residual"], str)
        or not isinstance(entry["options"], dict)
    ):
        raise ValueError(
            "the entry 'multigate' of the configuration must hold the name of a residual, its "
            f"streams (or null) and its options, got {entry!r}."
        )
    for taken in ("name", "dim", "depth", "streams"):
        if taken in entry["options"]:
            raise ValueError(
                f"{taken} is not an option of a residual in with_residual: leave it out."
            )
    types = sorted(set((getattr(config, "layer_types", None) or [])[: config.num_hidden_layers]))
    if len(types) > 1:
        raise ValueError(
            f"with_residual needs layers of one kind, but layer_types has {' and '.join(types)}: "
            "choose one of them for all layers."
        )
    if getattr(config, "add_cross_attention", False):
        raise ValueError("with_residual has no cross attention: set add_cross_attention=False.")


def build_layers(model: Any, family: Family, config: Any) -> Layers:
    """The `Stack` of the model's own norms, attentions and MLPs; the model stays as it is."""
    check_config(config)
    layers = getattr(model.base_model, family.layers)
    sublayers: list[nn.Module] = []
    for layer in layers:
        sublayers.append(AttentionSublayer(*(getattr(layer, name) for name in family.attention)))
        sublayers.append(MLPSublayer(*(getattr(layer, name) for name in family.mlp)))
    entry, depth = config.multigate, len(sublayers)
    residual = build_residual(
        entry["residual"], config.hidden_size, depth, entry["streams"], **entry["options"]
    )
    if not residual.norm_apart(depth - 1):
        raise ValueError(
            f"{residual.name}: with these options the last step needs the final norm, which a "
            "Transformers model keeps outside of its layers: choose other options."
        )
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise ValueError(
            "with_residual needs a model on one device, this one is spread over "
            f"{' and '.join(sorted(map(str, devices)))}."
        )
    residual.to(devices.pop(), model.dtype)
    order = tuple(inspect.signature(type(layers[0]).forward).parameters)[2:]
    stack = Layers(sublayers, residual, order).train(layers[0].training)
    if layers[0].gradient_checkpointing:
        stack.gradient_checkpointing = True
        stack._gradient_checkpointing_func = layers[0]._gradient_checkpointing_func
    return stack


def install(model: Any, family: Family, stack: Layers) -> None:
    """Put `stack` in the place of the model's layers."""
    setattr(model.base_model, family.layers, nn.ModuleList([stack]))
    model.base_model.register_forward_pre_hook(refuse_hidden_states, with_kwargs=True)
    # The residual's state goes from sublayer to sublayer on one device.
    model._no_split_modules = {Layers.__name__}


def refuse_hidden_states(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Transformers collects them by hooks on the layers, of which there is only one now."""
    asked = kwargs.get("output_hidden_states")
    if asked if asked is not None else getattr(decoder.config, "output_hidden_states", False):
        raise ValueError(
            "output_hidden_states is not there in a model with a multigate residual, whose layers "
            "pass on streams: leave it out, or put forward hooks on model.stack.sublayers."
        )
