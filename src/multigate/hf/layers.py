"""The decoder layers of a Transformers model as one `Stack`."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from multigate.residuals import Residual, Stack


class AttentionSublayer(nn.Module):
    """norm and attention of one layer, as they were; the attention weights are left to hooks."""

    def __init__(self, norm: nn.Module, attention: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.attention = attention

    def forward(self, h: Tensor, **given: Any) -> Tensor:
        return self.attention(self.norm(h), **given)[0]


class MLPSublayer(nn.Module):
    """norm and MLP of one layer, as they were; what the attentions are given is not for it."""

    def __init__(self, norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.mlp = mlp

    def forward(self, h: Tensor, **_: Any) -> Tensor:
        return self.mlp(self.norm(h))


class Layers(Stack):
    """All layers of a decoder in the place of its first, so that its loop runs once.

    `order` names the positional arguments of the original layers after the hidden states. The
    attentions keep their layer_idx, and with it their place in a KV cache.

    `gradient_checkpointing` and `_gradient_checkpointing_func` are set by Transformers; every
    sublayer is then computed again in the backward pass.
    """

    gradient_checkpointing = False
    _gradient_checkpointing_func: Callable[..., Any]

    def __init__(
        self,
        sublayers: Iterable[nn.Module],
        residual: Residual,
        order: tuple[str, ...],
    ) -> None:
        super().__init__(sublayers, residual)
        self.order = order

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.order, args, strict=False)), **kwargs}
        if self.gradient_checkpointing and self.training:
            # A sublayer that is computed twice would write into a cache twice.
            given.update(past_key_values=None, use_cache=False)
        return super().forward(x, **given)

    def _call(self, sublayer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(partial(sublayer, **kwargs), *args)
        return sublayer(*args, **kwargs)
