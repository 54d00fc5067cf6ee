"""Generation: the prompts are read once, then every token costs one position.

Shapes: B prompts, T tokens of the longest one, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .cache import Cache
from .decode import Decode
from .gpt import GPT
from .numerics import wide

Prompts = Tensor | Sequence[Sequence[int] | Tensor]


def generate(
    model: GPT,
    prompts: Prompts,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    *,
    generator: torch.Generator | None = None,
    seed: int | Sequence[int] | None = None,
    stop: Sequence[int] = (),
    vocab_size: int | None = None,
    slide: bool = True,
) -> list[Tensor]:
    """Continue `prompts`: token ids [B, T], or B sequences of ids that may differ in length.

    The result is one tensor a prompt, on the model's device: the prompt and the tokens after it,
    the last of which is a `stop` token if one was met. Nothing is padded, so the length says where
    a row has ended. A prompt is continued the same way alone and beside others.

        temperature   0 takes the likeliest token; otherwise the logits are divided by it
        top_k         only the k likeliest tokens
        top_p         of those, only the fewest likeliest that have this much probability together
        seed          a number for each prompt: a row then does not depend on the others; or one
                      number from which the rows draw in turn, of which the first is as it would
                      be alone. Without one, and without a `generator`, torch's own state decides.
        stop          ids that end a row
        vocab_size    only ids below it, where the model's vocabulary is padded beyond the
                      tokenizer's
        slide         what to do when the context is full: go on with the last `context` tokens,
                      all of which are computed anew for every token (True), or refuse before
                      the start
    """
    rows = read_prompts(model, prompts)
    stream = generate_stream(
        model,
        rows,
        max_new_tokens,
        temperature,
        top_k,
        top_p,
        generator=generator,
        seed=seed,
        stop=stop,
        vocab_size=vocab_size,
        slide=slide,
    )
    steps = list(stream)
    if not steps:
        return rows
    new = torch.stack(steps, dim=1)
    return [torch.cat([row, n[n >= 0]]) for row, n in zip(rows, new, strict=True)]


def generate_stream(
    model: GPT,
    prompts: Prompts,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    *,
    generator: torch.Generator | None = None,
    seed: int | Sequence[int] | None = None,
    stop: Sequence[int] = (),
    vocab_size: int | None = None,
    slide: bool = True,
) -> Iterator[Tensor]:
    """As `generate`, but one tensor [B] of new tokens after the other; -1 where a row has ended.

    What is wrong with the arguments is said here, not when the first token is asked for.
    """
    rows = read_prompts(model, prompts)
    longest, context = max(map(len, rows)), model.config.context
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must not be negative, got {max_new_tokens}.")
    if longest > context:
        raise ValueError(
            f"a prompt of {longest} tokens is longer than the model's context of {context}: "
            "shorten it."
        )
    if longest + max_new_tokens > context and not slide:
        raise ValueError(
            f"{longest} tokens of prompt and {max_new_tokens} new ones exceed the context of "
            f"{context}: ask for at most {context - longest}, or let the context slide with "
            "slide=True."
        )
    if vocab_size is not None and not 1 <= vocab_size <= model.config.vocab_size:
        raise ValueError(
            f"vocab_size must be from 1 to {model.config.vocab_size}, got {vocab_size}."
        )
    check_sampling(temperature, top_k, top_p)
    device = rows[0].device
    draws = None
    if temperature > 0:
        draws = draw(len(rows), max_new_tokens, generator, seed).to(device)
    return _steps(
        Text(model, rows, max_new_tokens),
        Choice(temperature, top_k, top_p, draws, vocab_size),
        torch.tensor(list(stop), dtype=torch.long, device=device),
    )


def read_prompts(model: GPT, prompts: Prompts) -> list[Tensor]:
    """The prompts as ids on the model's device, one tensor each; what is wrong is one sentence."""
    device, size = model.embed.weight.device, model.config.vocab_size
    if isinstance(prompts, str) or any(isinstance(row, str) for row in prompts):
        raise ValueError("prompts are token ids, not text: encode it with the run's tokenizer.")
    if isinstance(prompts, Tensor) and prompts.ndim != 2:
        raise ValueError(
            f"prompts in one tensor need the shape [batch, positions], got {tuple(prompts.shape)}."
        )
    rows = [torch.as_tensor(row) for row in prompts]
    if not rows:
        raise ValueError("there is no prompt to continue: give at least one.")
    for number, row in enumerate(rows, 1):
        if row.numel() == 0:
            raise ValueError(f"prompt {number} is empty: begin with at least one token.")
        if row.ndim != 1 or row.is_floating_point() or row.dtype == torch.bool:
            raise ValueError(
                f"prompt {number} must be a sequence of token ids, got {row.dtype} of shape "
                f"{tuple(row.shape)}."
            )
        low, high = (int(bound) for bound in row.aminmax())
        if low < 0 or high >= size:
            raise ValueError(
                f"prompt {number} holds the token {low if low < 0 else high}, which is not in the "
                f"model's vocabulary of {size}."
            )
    return [row.to(device, torch.long) for row in rows]


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be a number of at least 0, got {temperature}.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}.")


def draw(
    rows: int,
    steps: int,
    generator: torch.Generator | None,
    seed: int | Sequence[int] | None,
) -> Tensor:
    """All random numbers of a generation ahead of time, uniform in [0, 1): [B, steps].

    Thus a row's do not depend on how many rows there are or when they end.
    """
    if generator is not None and seed is not None:
        raise ValueError("give a generator or a seed, not both.")
    if isinstance(seed, Sequence):
        if len(seed) != rows:
            raise ValueError(f"there are {len(seed)} seeds for {rows} prompts: give one for each.")
        each: list[torch.Generator | None] = [torch.Generator().manual_seed(s) for s in seed]
    else:
        shared = generator if seed is None else torch.Generator().manual_seed(seed)
        each = [shared] * rows
    device = torch.device("cpu") if generator is None else generator.device
    return torch.stack([torch.rand(steps, generator=g, device=device) for g in each])


def shares(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """The probability of every token [B, V], from logits [B, V] and a temperature above 0."""
    # Without the maximum a tiny temperature would give infinities.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is None and top_p is None:
        return logits.softmax(-1)
    kept, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    share = kept.softmax(-1)
    # With 1, rounding must not cut anything off.
    if top_p is not None and top_p < 1:
        before = share.cumsum(-1) - share
        share = share.masked_fill(before >= top_p, 0)
        share = share / share.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter(-1, ids, share)


def pick(share: Tensor, draws: Tensor) -> Tensor:
    """The token [B] at which the sum of shares [B, V] passes the number drawn [B], in [0, 1)."""
    sums = share.cumsum(-1)
    # The last sum becomes 1 exactly, so that every number has a token with a share above 0.
    sums = sums / sums[:, -1:]
    return torch.searchsorted(sums, draws[:, None].to(sums.dtype).contiguous(), right=True)[:, 0]


class Choice:
    """How one token is chosen from the logits."""

    def __init__(
        self,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        draws: Tensor | None,
        vocab_size: int | None,
    ) -> None:
        self.settings = (temperature, top_k, top_p)
        self.draws, self.vocab_size = draws, vocab_size

    def __call__(self, step: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B] from logits [B, V], and whether all of these are finite."""
        logits = wide(logits[:, : self.vocab_size])
        sound = logits.isfinite().all()
        # Nobody waits for `sound` here, and what is not finite must not stop the device.
        logits = logits.nan_to_num(0, 0, 0)
        if self.draws is None:
            return logits.argmax(-1), sound
        return pick(shares(logits, *self.settings), self.draws[:, step]), sound


class Text:
    """The tokens so far, [B, T + new], each row padded on the left, and the model that reads them.

    While they fit into the context, the model is given new tokens only.
    """

    def __init__(self, model: GPT, rows: list[Tensor], steps: int) -> None:
        self.model, self.steps = model, steps
        self.lengths = [len(row) for row in rows]
        self.begin = self.end = max(self.lengths)
        self.tokens = rows[0].new_zeros(len(rows), self.begin + steps)
        for line, row in zip(self.tokens, rows, strict=True):
            line[self.begin - len(row) : self.begin] = row
        self.decode: Decode | None = None

    def logits(self) -> Tensor:
        """Of the token that comes next: [B, V]."""
        context = self.model.config.context
        if self.decode is not None and self.end <= context:
            return self.decode(self.tokens[:, self.end - 1 : self.end])
        begin = max(0, self.end - context)
        # The last token is not read.
        size = min(context, self.begin + self.steps - 1)
        cache = Cache(self.model, len(self.tokens), size, self._padding(begin))
        self.decode = Decode(self.model, cache, size - self.end)
        return self.model(self.tokens[:, begin : self.end], cache=cache, last=1)[:, -1]

    def add(self, new: Tensor) -> None:
        self.tokens[:, self.end] = new
        self.end += 1

    def _padding(self, begin: int) -> Tensor | None:
        """How many of the tokens from `begin` on are padding, [B]."""
        padding = [max(0, self.begin - length - begin) for length in self.lengths]
        return self.tokens.new_tensor(padding) if any(padding) else None


@torch.no_grad()
def _steps(text: Text, choose: Choice, stop: Tensor) -> Iterator[Tensor]:
    ended = torch.zeros(len(text.tokens), dtype=torch.bool, device=text.tokens.device)
    sound = torch.ones_like(ended[0])
    for step in range(text.steps):
        new, finite = choose(step, text.logits())
        sound &= finite
        # Looking at a value waits for the device: at the first token, and where rows can end.
        if step == 0 or len(stop):
            _check_finite(sound)
        # Before the reader has it, who may write into it.
        text.add(new)
        yield torch.where(ended, -1, new) if len(stop) else new
        if len(stop):
            ended |= torch.isin(new, stop)
            if ended.all():
                return
    _check_finite(sound)


def _check_finite(sound: Tensor) -> None:
    if not sound:
        raise ArithmeticError(
            "the model's logits are not finite, so no token can be chosen: its weights are "
            "damaged, or the precision is too low for them."
        )
