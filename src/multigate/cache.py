"""Keys and values of earlier positions: a new token then costs one position instead of all.

Only attention looks at other positions. Streams belong to one token and need no cache.

Shapes: B batch, H heads, S slots, T new positions, K numbers a head.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .numerics import autocast_is_on

if TYPE_CHECKING:
    from .gpt import GPT


class Cache:
    """Room for the keys and values of every attention of a GPT, [B, H, S, K] each.

    `model(tokens, cache=cache)` appends tokens [B, T] to the rows that were given so far. Slot s of
    row b holds position s - padding[b]; the first padding[b] slots hold no text and nobody reads
    them. Keys have the compute dtype of where the cache is made: under autocast, autocast's.

    How far the rows are is a tensor, and no shape depends on it: once the prompt is read, one
    compiled or captured call with tokens [B, 1] serves every position. Such a call cannot see that
    the slots are used up, so its caller has to `count`; any other call says so.
    """

    def __init__(
        self, model: "GPT", batch: int, size: int | None = None, padding: Tensor | None = None
    ) -> None:
        """Empty, with `size` slots for each of `batch` rows (None: the model's context)."""
        c, weight = model.config, model.embed.weight
        self.batch, self.size = batch, c.context if size is None else size
        if not 0 < self.size <= c.context:
            raise ValueError(
                f"a cache of this GPT has 1 to {c.context} slots, its context, got {size}."
            )
        device, self.dtype = weight.device, weight.dtype
        if autocast_is_on(device.type):
            self.dtype = torch.get_autocast_dtype(device.type)
        shape = (batch, c.heads, self.size, c.width // c.heads)
        # Zeros, because what a mask hides is still multiplied by 0.
        self.entries = {
            layer: (
                torch.zeros(shape, dtype=self.dtype, device=device),
                torch.zeros(shape, dtype=self.dtype, device=device),
            )
            for layer in range(0, 2 * c.blocks, 2)
        }
        """Keys and values, by the number of the sublayer."""
        self.slots = torch.arange(self.size, device=device)
        self.length = torch.zeros((), dtype=torch.long, device=device)
        """Slots in use."""
        self.padding = padding
        self.begun = False
        """Whether anything was appended: a flag, because compiled code depends on it."""
        self.used = 0
        """As `length`, but a number, so that nobody waits for the device to know it."""

    def append(self, tokens: Tensor) -> "Places":
        """Slots for `tokens` [B, T], taken from now on."""
        if torch.is_grad_enabled():
            raise ValueError(
                "a cache keeps nothing for a backward pass: call the GPT under torch.no_grad()."
            )
        rows, count = tokens.shape
        if rows != self.batch:
            raise ValueError(f"the cache is for {self.batch} rows of tokens, got {rows}.")
        self.count(count)
        slots = self.length + self.slots[:count]
        places = Places(self, slots, self.begun)
        self.length.add_(count)
        if not self.begun:
            self.begun = True
        return places

    def count(self, tokens: int) -> None:
        """Take note of `tokens` more slots in use: `append` does, but not in a replayed graph."""
        # A number that changes would have the decode step compiled again for every position.
        if torch.compiler.is_compiling():
            return
        if self.used + tokens > self.size:
            raise ValueError(
                f"the cache has {self.size} slots and {self.used} are in use, {tokens} more do "
                "not fit: make it larger, or generate fewer tokens."
            )
        self.used += tokens


class Places:
    """Where T new positions are in a cache, and what they see."""

    def __init__(self, cache: Cache, slots: Tensor, continues: bool) -> None:
        self.cache, self.slots, self.continues = cache, slots, continues
        padding = cache.padding
        self.positions = slots[None]
        """[B, T], or [1, T] where all rows are alike. Slots of padding count as position 0."""
        if padding is not None:
            self.positions = (slots - padding[:, None]).clamp(min=0)
        seen = self._seen(cache.slots if continues else slots, padding)
        self.mask: Tensor | None = None
        """0 where a position sees a slot, else -inf, broadcast over [B, H, T, S]; None: simply
        causal. Numbers, because every attention would make the same ones of truth values."""
        if seen is not None:
            self.mask = torch.where(seen, 0.0, -torch.inf).to(cache.dtype)

    def _seen(self, slots: Tensor, padding: Tensor | None) -> Tensor | None:
        if padding is None and not self.continues:
            return None
        own = self.slots[:, None]
        seen = slots <= own
        if padding is None:
            return seen
        # Padding sees itself: a softmax over nothing would be NaN, and 0 times NaN is NaN.
        seen = (seen & (slots >= padding[:, None, None])) | (slots == own)
        return seen[:, None]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values [B, H, T, K] of a layer; those to attend to come back.

        At the beginning that is the new ones, later all slots.
        """
        keys, values = self.cache.entries[layer]
        if k.dtype != keys.dtype:
            raise ValueError(
                f"the cache holds {keys.dtype} and attention computes in {k.dtype}: make the cache "
                "under the autocast that the model is called with."
            )
        keys.index_copy_(2, self.slots, k)
        values.index_copy_(2, self.slots, v)
        return (keys, values) if self.continues else (k, v)
