"""`MultigateForCausalLM`: the GPT of multigate as a model of Transformers."""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, MaxLengthCriteria, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from .config import MultigateConfig
from .past import Past
from .settings import build_gpt
from .weights import check_files, check_keys, check_weights, readable, renew_buffers


class MultigateForCausalLM(PreTrainedModel, GenerationMixin):
    """A GPT with any residual. `model.model` is the `multigate.GPT`, and all weights are in it.

    generate() with any cache of Transformers, up to the end of the context; padding on either side
    (for generate() on the left), labels, gradient checkpointing (of every sublayer),
    save_pretrained, and, once multigate.hf is imported, AutoModelForCausalLM.from_pretrained. The
    logits are those of the GPT, bit for bit. There are no output_hidden_states or attentions.
    """

    config_class = MultigateConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    # The residual's state goes from sublayer to sublayer on one device.
    _no_split_modules = {"GPT"}

    def __init__(self, config: MultigateConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.model = build_gpt(config.gpt())
        # Set by Transformers.
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, V], and with `labels` (the tokens themselves, -100 where none counts) the
        mean cross entropy of predicting each from those before it."""
        self._refuse(kwargs)
        self._check_ids(input_ids)
        caches = self.config.use_cache and not self.training if use_cache is None else use_cache
        checkpoints = self.gradient_checkpointing and self.training
        if checkpoints and past_key_values is not None:
            raise ValueError(
                "with gradient checkpointing a sublayer is computed twice and would write into the "
                "cache twice: use model.eval() or use_cache=False."
            )
        if caches and not checkpoints and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        self.model.stack.checkpointing = checkpoints
        past: Any = None
        if past_key_values is not None or attention_mask is not None or position_ids is not None:
            past = Past(past_key_values, attention_mask, position_ids, self.config.context)
        logits = self.model(input_ids, cache=past, last=logits_to_keep)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in Transformers, but only from safetensors, and a weight that is missing or left over
        is an error: Transformers does not know how a residual starts."""
        folder = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        check_weights(folder, kwargs)
        parent = cast(Any, super())
        with readable(folder):
            model, info = parent.from_pretrained(*args, output_loading_info=True, **kwargs)
        check_keys(cls.__name__, info)
        model.model._make_rope()
        config = model.model.config
        renew_buffers(model.model.stack.residual, config.streams, config.options())
        return (model, info) if output_loading_info else model

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As in Transformers, once it is clear that the files are what they should be."""
        if checkpoint_files is not None:
            check_files(type(model).__name__, model.state_dict(), checkpoint_files)
        parent = cast(Any, super())
        return parent._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        """As in Transformers, and generate() ends where the context does."""
        criteria = cast(Any, super())._get_stopping_criteria(*args, **kwargs)
        criteria.append(MaxLengthCriteria(self.config.context))
        return criteria

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.model.embed

    def set_input_embeddings(self, value: Any) -> None:
        """Also the head's weights; what resize_token_embeddings ends with."""
        self.model.embed = value
        self.model.config = replace(self.model.config, vocab_size=value.num_embeddings)

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: the GPT and its residual have initialised themselves."""

    def _check_ids(self, ids: Tensor | None) -> None:
        if ids is None:
            raise ValueError("this model needs input_ids: it does not take embeddings.")
        if torch.compiler.is_compiling() or ids.is_meta or ids.numel() == 0:
            return
        # Looking at a value waits for the device: there, prompts only.
        if ids.device.type != "cpu" and (torch.is_grad_enabled() or ids.shape[1] == 1):
            return
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"the token {low if low < 0 else high} is not in this model's vocabulary of "
                f"{self.config.vocab_size}: is the tokenizer that of another model?"
            )

    def _refuse(self, given: dict[str, Any]) -> None:
        for name in ("output_hidden_states", "output_attentions", "inputs_embeds"):
            asked = given.pop(name, None)
            if asked is None:
                asked = getattr(self.config, name, None)
            if asked is not None and asked is not False:
                raise ValueError(
                    f"{name} is not there in this model, whose layers pass on streams: leave it "
                    "out, or put forward hooks on model.model.stack.sublayers."
                )
