"""Decoding on a GPU: the step of one new token a row is captured once and replayed for every token.

A step is some hundred small kernels, and to start them one by one takes longer than to run them.
"""

import logging
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .cache import Cache
from .gpt import GPT
from .numerics import autocast_is_on

WORTH = 16
"""Tokens from which on a graph pays: to capture one takes as long as some steps without."""

logger = logging.getLogger("multigate")


class Decode:
    """The logits [B, V] of the token after tokens [B, 1], which are appended to a cache.

    Where a CUDA graph pays, the first call runs the kernels, the second captures them, and it and
    all others replay the graph. The logits of a call are then overwritten by the next.
    """

    def __init__(self, model: GPT, cache: Cache, steps: int) -> None:
        """For about `steps` calls, under the autocast of this moment."""
        self.model, self.cache = model, cache
        self.captures = steps >= WORTH and can_capture(model)
        self.weights = cast_weights(model) if self.captures else {}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.tokens: Tensor | None = None
        self.logits: Tensor

    def __call__(self, tokens: Tensor) -> Tensor:
        if self.graph is not None and self.tokens is not None:
            self.cache.count(1)
            self.tokens.copy_(tokens)
            self.graph.replay()
            return self.logits
        if not self.captures:
            return self._run(tokens)
        if self.tokens is None:
            self.tokens = tokens.clone()
            return self._run(tokens)
        self.captures = False
        try:
            self._capture(self.tokens)
        except RuntimeError as error:
            logger.warning("decoding without a CUDA graph: %s", str(error).partition("\n")[0])
            # A failed capture leaves its error behind: it is not that of the next call.
            with suppress(RuntimeError):
                torch.cuda.synchronize()
        return self(tokens)

    def _capture(self, tokens: Tensor) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may do what they like meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.logits = self._run(tokens)
        finally:
            # Nothing has run yet.
            self.cache.count(-1)
        self.graph = graph

    def _run(self, tokens: Tensor) -> Tensor:
        device = tokens.device.type
        if not self.weights:
            return self.model(tokens, cache=self.cache, last=1)[:, -1]
        # A cast that autocast remembers from within a capture would hold nothing yet.
        with torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=False):
            options = {"cache": self.cache, "last": 1}
            return functional_call(self.model, self.weights, (tokens,), options)[:, -1]


def can_capture(model: GPT) -> bool:
    """Whether the model is on a CUDA GPU and nobody looks at what its calls do on the way."""
    device = model.embed.weight.device
    watched = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return device.type == "cuda" and not watched and not model.stack.residual.is_recording


def cast_weights(model: GPT) -> dict[str, Tensor]:
    """The weights that autocast would cast for every token, cast once."""
    device = model.embed.weight.device.type
    if not autocast_is_on(device):
        return {}
    dtype = torch.get_autocast_dtype(device)
    names = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("stack.sublayers.")
    ]
    # The embedding is the head as well. Its rows may be rounded only if the streams are.
    if model.stream_dtype(model.embed.weight) == dtype:
        names.append("embed.weight")
    return {name: model.get_parameter(name).detach().to(dtype) for name in names}
