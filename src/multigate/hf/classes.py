"""The classes of the models with a residual, known to the Auto classes of Transformers.

For every family there are two, like `MultigateLlamaConfig` (model type "multigate_llama") and
`MultigateLlamaForCausalLM`. They are made when they are first needed, because Transformers is an
optional package. A folder that such a model was saved to cannot be mistaken for a plain Llama.
"""

from functools import cache
from typing import Any, NamedTuple, cast

from torch import nn

from multigate.data.optional import optional

from .decoder import FAMILIES, Family, build_layers, install
from .layers import Layers
from .weights import check_keys, check_weights, only_safetensors, readable, renew_buffers


class WithResidual(nn.Module):
    """What a causal language model of Transformers gains by a residual.

    It stands before the plain class. The configuration has an entry `multigate` with the residual,
    its streams and its options.
    """

    family: Family

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # The plain layers are initialised by now; the residual keeps its own initialisation.
        install(self, self.family, build_layers(self, self.family, config))

    @property
    def stack(self) -> Layers:
        """All attention and MLP sublayers, and the residual between them."""
        return getattr(cast(Any, self).base_model, self.family.layers)[0]

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in Transformers, but only from safetensors, and a weight that is missing or left over
        is an error."""
        folder = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        check_weights(folder, kwargs)
        parent = cast(Any, super())
        with readable(folder):
            model, info = parent.from_pretrained(*args, output_loading_info=True, **kwargs)
        advice = ": load plain weights into the plain model and give that to with_residual"
        check_keys(cls.__name__, info, advice)
        entry = model.config.multigate
        renew_buffers(model.stack.residual, entry["streams"], entry["options"])
        return (model, info) if output_loading_info else model

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As in Transformers, but never from a pickle."""
        only_safetensors(checkpoint_files or [])
        parent = cast(Any, super())
        return parent._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)


class Classes(NamedTuple):
    plain: Any
    config: Any
    model: Any


@cache
def classes(model_type: str) -> Classes:
    """The plain model class of a family, and the two with a residual."""
    hf = optional("transformers", "hf", "multigate.hf")
    plain_config = hf.CONFIG_MAPPING[model_type]
    plain = hf.MODEL_FOR_CAUSAL_LM_MAPPING[plain_config]
    names = {"__module__": __name__, "model_type": f"multigate_{model_type}"}
    config = type(f"Multigate{plain_config.__name__}", (plain_config,), names)
    parts = {"__module__": __name__, "config_class": config, "family": FAMILIES[model_type]}
    model = type(f"Multigate{plain.__name__}", (WithResidual, plain), parts)
    hf.AutoConfig.register(names["model_type"], config)
    hf.AutoModelForCausalLM.register(config, model)
    return Classes(plain, config, model)


def register() -> None:
    """Make the classes known to the Auto classes; without Transformers there is nothing to do."""
    try:
        import transformers
    except ModuleNotFoundError:
        return
    for model_type in FAMILIES:
        classes(model_type)
    from .config import MultigateConfig
    from .model import MultigateForCausalLM

    transformers.AutoConfig.register(MultigateConfig.model_type, MultigateConfig)
    transformers.AutoModelForCausalLM.register(MultigateConfig, MultigateForCausalLM)


def __getattr__(name: str) -> Any:
    """The classes by name: what pickle looks them up by."""
    if name.startswith("Multigate"):
        for model_type in FAMILIES:
            for found in classes(model_type):
                if found.__name__ == name:
                    return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
