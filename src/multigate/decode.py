"""Decoding on a GPU: the step of one new token a row is captured once and replayed for every token.

A step is some hundred small kernels, and to start them one by one takes longer than to run them.
"""

import functools
import logging
from contextlib import suppress
from threading import RLock

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .cache import Cache
from .gpt import GPT
from .numerics import autocast_is_on

WORTH = 16
"""Tokens from which on a graph pays: to capture one takes as long as some steps without."""

ALONE = RLock()
"""Held while a model has its cast weights and while a graph is captured: one thread at a time."""

logger = logging.getLogger("multigate")


class Decode:
    """The logits [B, V] of the token after tokens [B, 1], which are appended to a cache.

    Where a CUDA graph pays, the first call runs the step kernel by kernel. The second captures it,
    and from then on every call replays the graph: its logits are overwritten by the next call.
    """

    def __init__(self, model: GPT, cache: Cache, steps: int) -> None:
        """For about `steps` calls, under the autocast of this moment."""
        self.model, self.cache = model, cache
        self.captures = steps >= WORTH and can_capture(model)
        self.weights = cast_weights(model) if self.captures else None
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
            return self._run(self.tokens)
        self.captures = False
        try:
            self._capture(self.tokens)
        except RuntimeError as error:
            logger.warning("decoding without a CUDA graph: %s", str(error).partition("\n")[0])
            # A failed capture leaves its error behind: it is not that of the next call.
            with suppress(RuntimeError):
                torch.cuda.synchronize(tokens.device)
        return self(tokens)

    def _capture(self, tokens: Tensor) -> None:
        graph, used = torch.cuda.CUDAGraph(), self.cache.used
        stream = capture_stream(tokens.device)
        try:
            # The outer context goes back to the stream before, which a failed capture would not.
            # Threads that capture nothing may do what they like meanwhile.
            with (
                ALONE,
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                self.logits = self._run(tokens)
        finally:
            # Nothing has run yet.
            self.cache.used = used
        self.graph = graph

    def _run(self, tokens: Tensor) -> Tensor:
        device = tokens.device.type
        if self.weights is None:
            return self.model(tokens, cache=self.cache, last=1)[:, -1]
        # A cast that autocast remembers from within a capture would hold nothing yet.
        autocast = torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=False)
        with ALONE, autocast:
            options = {"cache": self.cache, "last": 1}
            return functional_call(self.model, self.weights, (tokens,), options)[:, -1]


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One a device: torch's own is on the device that was current when it was first needed, and a
    graph captured there would miss the kernels of a model on another one."""
    return torch.cuda.Stream(device)


def can_capture(model: GPT) -> bool:
    """Whether the model is on a CUDA GPU and nobody looks at what its calls do on the way."""
    return model.embed.weight.device.type == "cuda" and not is_watched(model)


def is_watched(model: GPT) -> bool:
    """Whether a hook or a recording would miss the steps that are replayed."""
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return hooked or model.stack.residual.is_recording


def cast_weights(model: GPT) -> dict[str, Tensor] | None:
    """The weights that autocast would cast for every token, cast once; None without autocast."""
    device = model.embed.weight.device.type
    if not autocast_is_on(device):
        return None
    dtype = torch.get_autocast_dtype(device)
    # Not those of a subclass (a parametrised one, say), which may use its weight in another way.
    weights = {
        f"{name}.weight": module.weight
        for name, module in model.stack.sublayers.named_modules(prefix="stack.sublayers")
        if type(module) is nn.Linear
    }
    # The embedding is the head as well. Its rows may be rounded only if the streams are.
    if model.stream_dtype(model.embed.weight) == dtype:
        weights["embed.weight"] = model.embed.weight
    return {name: weight.detach().to(dtype) for name, weight in weights.items()}
