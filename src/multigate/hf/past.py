"""What a call by Transformers brings along: its cache, its padding, its positions.

Shapes: B batch, H heads, T new positions, S positions attended to, K numbers a head.
"""

from typing import Any

import torch
from torch import Tensor


class Past:
    """Stands where a `multigate.cache.Cache` can, and is the `Places` of the one call it is for.

    `cache` is any of Transformers', or None. `mask` is 1 where there is text, [B, S], or already
    says what every position sees, [B, 1, T, S]. Positions that are not given count the text.
    Without a mask and a cache, positions that begin anew belong to another text in the same row.
    """

    def __init__(
        self, cache: Any, mask: Tensor | None, positions: Tensor | None, context: int
    ) -> None:
        self.cache, self.context = cache, context
        self._given_mask, self._given_positions = mask, positions
        self.mask: Tensor | None = None
        """Which keys each position sees, broadcast over [B, H, T, S]; None: simply causal."""
        self.positions: Tensor
        """[B, T] or [1, T]."""

    def append(self, tokens: Tensor) -> "Past":
        """Places for `tokens` [B, T]."""
        count, given = tokens.shape[1], self._given_mask
        begin, size, first = 0, count, 0
        if self.cache is not None:
            begin = self.cache.get_seq_length()
            size, first = self.cache.get_mask_sizes(count, 0)
        slots = begin + torch.arange(count, device=tokens.device)
        text = self._text(tokens, given, begin + count) if given is not None else None
        self.positions = self._positions(slots, text)
        self._check_context(begin + count)
        if given is not None and given.ndim == 4:
            # As a mask that is added: 0 where a position sees.
            self.mask = given if given.dtype == torch.bool else given == 0
        else:
            self.mask = self._mask(slots, first + torch.arange(size, device=tokens.device), text)
        return self

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values [B, H, T, K] of a sublayer; those to attend to come back."""
        # Every other sublayer is an attention.
        return (k, v) if self.cache is None else self.cache.update(k, v, layer // 2)

    def _check_context(self, total: Any) -> None:
        # Compiled code cannot look at a value, nor see that the slots are used up.
        if torch.compiler.is_compiling() or total <= self.context:
            return
        # Padding takes slots, but no positions.
        most = int(self.positions.max()) + 1
        if most > self.context:
            raise ValueError(
                f"{most} tokens are more than this model's context of {self.context}: shorten the "
                "prompt, or generate fewer tokens."
            )

    def _text(self, tokens: Tensor, mask: Tensor, total: Any) -> Tensor | None:
        """[B, S] where there is text; None where there is nothing else."""
        if mask.ndim == 4:
            return None
        if mask.ndim != 2 or mask.shape[0] != tokens.shape[0] or mask.shape[1] < total:
            raise ValueError(
                f"the attention mask must have a number for each of {tokens.shape[0]} x "
                f"{int(total)} tokens (those in the cache count), got {tuple(mask.shape)}."
            )
        text = mask[:, : int(total)].bool()
        return None if bool(text.all()) else text

    def _positions(self, slots: Tensor, text: Tensor | None) -> Tensor:
        if self._given_positions is not None:
            return self._given_positions
        if text is None:
            return slots[None]
        return (text.long().cumsum(-1) - 1).clamp(min=0)[:, -len(slots) :]

    def _mask(self, slots: Tensor, keys: Tensor, text: Tensor | None) -> Tensor | None:
        own, given = slots[:, None], self._given_positions
        packed = None
        if given is not None and self.cache is None and text is None:
            packed = (given.diff(dim=-1, prepend=given[:, :1] - 1) != 1).cumsum(-1)
            packed = packed if bool(packed.any()) else None
        if text is None and packed is None and len(keys) == len(slots):
            return None
        seen = keys <= own
        if packed is not None:
            return (seen & (packed[:, None] == packed[:, :, None]))[:, None]
        if text is None:
            return seen
        there = text.new_zeros(len(text), len(keys))
        width = min(text.shape[1], len(keys))
        there[:, :width] = text[:, :width]
        # Padding sees itself: a softmax over nothing would be NaN, and 0 times NaN is NaN.
        return ((seen & there[:, None]) | (keys == own))[:, None]
