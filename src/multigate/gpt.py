"""The GPT of the paper: embedding, a stack of sublayers with any residual, tied head.

Shapes: B batch, T positions, D width, V vocabulary.

Precision. Weights are float32; the *compute dtype* of the matrix products is autocast's (the
trainer uses bfloat16 on a GPU) or, without autocast, that of the weights. The *stream dtype* is
what the residual stores between sublayers: by default bfloat16 where the compute dtype is
bfloat16 and otherwise the dtype of the weights (so float32 streams under float16 autocast).
Mixing, norms, softmaxes and the loss are computed in float32 in any case.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cache import Cache
from .names import unknown
from .nn import MLP, Attention, DepthEntries, rotary_table, to_compute
from .norm import RMSNorm
from .numerics import autocast_is_on, wide
from .residuals import Stack, Sublayer

ATTENTION = ("plain", "moda", "moda-ffn")
STREAM_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class GPTConfig:
    """What a GPT is made of. `replace` from `dataclasses` makes variants."""

    vocab_size: int = 50304
    """Rows of the tied embedding; GPT-2's 50257 tokens padded to a multiple of 128."""
    blocks: int = 12
    """Transformer blocks; each is two sublayers, attention and MLP."""
    width: int = 768
    heads: int = 6
    context: int = 1024
    """The longest sequence."""
    residual: str = "mgr-competitive"
    """Any of `multigate.residual_names()`."""
    streams: int | None = None
    """Streams of the residual; None takes the residual's own default."""
    residual_options: dict[str, Any] = field(default_factory=dict)
    """Further options of the residual, by name."""
    memory: str = "store"
    """What the residual keeps for the backward pass, where it has a choice; see docs/memory.md."""
    attention: str = "plain"
    """plain; moda: also over what earlier attentions wrote at the position; moda-ffn: and MLPs."""
    stream_dtype: str = "auto"
    """auto, bfloat16 or float32: what the streams are stored in."""
    rope_base: float = 10000.0
    eps: float = 1e-6
    """Of the RMSNorms; a residual's own eps is among its options."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "blocks", "width", "heads", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"GPTConfig: {name} must be a whole number of at least 1, got {value!r}."
                )
        if self.width % (2 * self.heads):
            raise ValueError(
                f"GPTConfig: width {self.width} cannot be {self.heads} heads of even size."
            )
        if self.attention not in ATTENTION:
            raise ValueError(unknown("attention", self.attention, ATTENTION))
        if self.stream_dtype not in STREAM_DTYPES:
            raise ValueError(unknown("stream_dtype", self.stream_dtype, STREAM_DTYPES))
        other = self.residual_options.get("memory", self.memory)
        if self.memory not in ("store", other):
            raise ValueError(
                f"GPTConfig: memory is {self.memory!r} but the residual_options say {other!r}: "
                "leave one of them out."
            )

    def options(self) -> dict[str, Any]:
        """All options of the residual. "store" is what every residual does and needs no option."""
        chosen = {} if self.memory == "store" else {"memory": self.memory}
        return {**self.residual_options, **chosen}


PRESETS = {
    "tiny": GPTConfig(vocab_size=256, blocks=6, width=128, heads=1, context=256),
    "mini": GPTConfig(vocab_size=16384, blocks=12, width=384, heads=3),
    "s": GPTConfig(blocks=12, width=768, heads=6),
    "m": GPTConfig(blocks=24, width=1024, heads=8),
    "l": GPTConfig(blocks=36, width=1280, heads=10),
}


def preset(name: str, **changes: Any) -> GPTConfig:
    """The configuration of a named scale (s, m and l are the paper's), with `changes` applied."""
    if name not in PRESETS:
        raise ValueError(unknown("preset", name, PRESETS))
    for change in changes:
        if change not in GPTConfig.__dataclass_fields__:
            raise ValueError(unknown("GPT setting", change, GPTConfig.__dataclass_fields__))
    return replace(PRESETS[name], **changes)


def remake_rope(model: nn.Module, _: object) -> None:
    """After loading: `assign=True` moves a model off the meta device without casting it."""
    cast(GPT, model)._make_rope()


class GPT(nn.Module):
    """A decoder-only transformer over any residual.

    `model(tokens)` gives logits [B, T, V]; `model(tokens, targets)` the mean cross entropy in nats.
    With a `cache` the tokens of every call follow those of the calls before it. With `last` the
    logits are those of so many last positions only, or of the positions that a tensor names.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.stack = Stack(
            self._sublayers(),
            config.residual,
            config.width,
            config.streams,
            out_norm=RMSNorm(config.width, config.eps),
            **config.options(),
        )
        self._make_rope()
        self.register_load_state_dict_post_hook(remake_rope)
        self._initialise()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: Cache | None = None,
        last: int | Tensor = 0,
    ) -> Tensor:
        self._check("token ids", tokens)
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ValueError(
                f"{length} tokens are more than this model's context of {self.config.context}: "
                "shorten the input, or build the model with a larger context."
            )
        x = self.embed(tokens)
        x = x.to(self.stream_dtype(x))
        depth: DepthEntries | None = None if self.config.attention == "plain" else {}
        if cache is None:
            h = self.stack(x, (self.rope_cos[:length], self.rope_sin[:length]), depth)
        else:
            places = cache.append(tokens)
            rotary = tuple(t[places.positions][:, None] for t in (self.rope_cos, self.rope_sin))
            h = self.stack(x, rotary, depth, places)
        if targets is None:
            h = h[:, slice(-last, None) if isinstance(last, int) else last]
        logits = F.linear(to_compute(h, self.embed.weight), self.embed.weight)
        if targets is None:
            return logits
        self._check("targets", targets)
        if targets.shape != tokens.shape:
            raise ValueError(
                f"GPT needs a target for every token, got {tuple(targets.shape)} targets for "
                f"{tuple(tokens.shape)} tokens."
            )
        return F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten())

    def parameter_count(self) -> int:
        """All parameters; the tied embedding counts once."""
        return sum(p.numel() for p in self.parameters())

    def stream_dtype(self, x: Tensor) -> torch.dtype:
        """What the streams are stored in where the embedded tokens are `x`, under this autocast."""
        chosen = STREAM_DTYPES[self.config.stream_dtype]
        if chosen is not None:
            return chosen
        device = x.device.type
        if autocast_is_on(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
            return torch.bfloat16
        return x.dtype

    def _check(self, what: str, ids: Tensor) -> None:
        if ids.is_floating_point() or ids.ndim != 2:
            raise ValueError(
                f"GPT needs {what} of shape [batch, positions], got {ids.dtype} of shape "
                f"{tuple(ids.shape)}."
            )
        if ids.device != self.embed.weight.device:
            raise ValueError(
                f"the {what} are on {ids.device} but the GPT is on {self.embed.weight.device}: "
                "move one of them with .to(device)."
            )

    def _sublayers(self) -> list[Sublayer]:
        c, sublayers = self.config, list[Sublayer]()
        for block in range(c.blocks):
            # Nobody reads what the last MLP could write.
            writes_depth = c.attention == "moda-ffn" and block < c.blocks - 1
            sublayers.append(Attention(c.width, c.heads, 2 * block, c.eps))
            sublayers.append(MLP(c.width, c.heads, 2 * block + 1, c.eps, writes_depth))
        return sublayers

    def _make_rope(self) -> None:
        c = self.config
        tables = rotary_table(c.context, c.width // c.heads, c.rope_base)
        for name, table in zip(("rope_cos", "rope_sin"), tables, strict=True):
            self.register_buffer(name, table.to(self.embed.weight.device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GPT":
        """Moves and casts like any module, but the rotary tables stay float32 and are made anew:
        angles do not survive bfloat16, and `to_empty` would leave them unset."""
        super()._apply(fn, recurse)
        self._make_rope()
        return self

    def _initialise(self) -> None:
        """nanoGPT's: N(0, 0.02), and N(0, 0.02 / sqrt(2 blocks)) for what ends a sublayer.

        The same for every residual; a residual has initialised its own parameters already.
        """
        nn.init.normal_(self.embed.weight, std=0.02)
        for name, module in self.stack.sublayers.named_modules():
            if isinstance(module, nn.Linear):
                ends = name.endswith((".out", ".down"))
                std = 0.02 / math.sqrt(2 * self.config.blocks) if ends else 0.02
                nn.init.normal_(module.weight, std=std)
