"""`multigate sample`: a trained run continues text, shown while it is written."""

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import tyro
from torch import Tensor

from .checkpoint import open_run
from .data.shards import TokenData, check_hash, read_header
from .data.tokenizer import Tokenizer
from .device import choose
from .evaluate import load_model
from .generate import check_sampling, generate_stream

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of a character decode to while some are missing."""
CONTROLS = {c: UNFINISHED for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}
"""A model may write what would move the cursor of a terminal, or worse."""


@dataclass(frozen=True)
class SampleConfig:
    """Let a trained run continue text. Without --prompt, what comes in through a pipe is continued
    (less the newline at its end), or else a new text is begun."""

    run: Path
    """The run's folder, or one of its checkpoints."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; may be given several times."""
    tokens: int = 200
    """The most tokens to write for each prompt; fewer if the text ends."""
    temperature: float = 0.8
    """0 always takes the likeliest token."""
    top_k: int | None = None
    """Choose among the k likeliest tokens only."""
    top_p: float | None = None
    """Choose among the fewest likeliest tokens that have this much probability together."""
    seed: int = 0
    """Of the first prompt; the next has the next number."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text before which to stop; may be given several times."""
    slide: bool = False
    """When the context is full, go on with the last tokens that fit; slow."""
    checkpoint: Literal["best", "last"] = "best"
    """best: of the checkpoints that were kept, the one with the lowest val loss."""
    data: Path | None = None
    """A prepared folder with the run's tokenizer; None takes the one the run was trained on."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}.")
        if "" in self.prompt or "" in self.stop:
            raise ValueError("an empty --prompt or --stop says nothing: leave it out.")
        check_sampling(self.temperature, self.top_k, self.top_p)


class Continuation:
    """The text of tokens that come one by one, as far as it is certain.

    A character of several tokens is held back until it is whole, and what may become a `stop` text
    until it is clear that it does not.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.ids = list(prompt)
        self.text = ""
        """All that was handed on."""
        self.ended = False
        # Tokens from `begin` on are decoded: what a token means can depend on the one before it.
        self.begin, self.known = 0, len(self.ids)
        self.shown = len(tokenizer.decode(self.ids))
        """How many of their characters are certain."""
        self.held = ""

    def add(self, token: int) -> str:
        """What is certain now, beyond what was before."""
        if token == self.tokenizer.eot:
            return self.end()
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids[self.begin :])
        whole = not text.endswith(UNFINISHED)
        self.held += text[self.shown : None if whole else -1]
        self.shown = len(text) - (not whole)
        if whole:
            self.begin, self.known = self.known, len(self.ids)
            self.shown = len(self.tokenizer.decode(self.ids[self.begin :]))
        places = [self.held.find(stop) for stop in self.stop if stop in self.held]
        if places:
            self.ended, self.held = True, self.held[: min(places)]
        return self._release(0 if places else self._doubtful())

    def end(self) -> str:
        """The rest: nothing comes any more."""
        self.ended = True
        self.held += self.tokenizer.decode(self.ids[self.begin :])[self.shown :]
        return self._release(0)

    def _doubtful(self) -> int:
        """How many of the last characters may be the beginning of a stop text."""
        sizes = [
            n for stop in self.stop for n in range(1, len(stop)) if self.held.endswith(stop[:n])
        ]
        return max(sizes, default=0)

    def _release(self, kept: int) -> str:
        cut = len(self.held) - kept
        new, self.held = self.held[:cut], self.held[cut:]
        self.text += new
        return new


class Screen:
    """Shows texts that grow at the same time, one below the other, each as it grows."""

    def __init__(self, prompts: Sequence[str], out: TextIO) -> None:
        self.out, self.current, self.rows = out, 0, len(prompts)
        self.encoding = out.encoding or "utf-8"
        self.waiting = list(prompts)
        if self.rows > 1:
            self.waiting = [
                f"--- {n} of {self.rows} ---\n{text}" for n, text in enumerate(prompts, 1)
            ]
        self.finished = [False] * self.rows
        self._show()

    def add(self, row: int, text: str, finished: bool) -> None:
        self.waiting[row] += text
        if finished:
            self.finished[row] = True
            self.waiting[row] += "\n"
        self._show()

    def _show(self) -> None:
        for row in range(self.current, self.rows):
            self._write(self.waiting[row])
            self.waiting[row] = ""
            if not self.finished[row]:
                break
            self.current += 1
        self.out.flush()

    def _write(self, text: str) -> None:
        if self.out.isatty():
            text = text.translate(CONTROLS)
        self.out.write(text.encode(self.encoding, "replace").decode(self.encoding))


def sample(config: SampleConfig, out: TextIO | None = None) -> list[str]:
    """Write what the run makes of every prompt to `out` (None: to the terminal); the new texts."""
    path, state = open_run(config.run, config.checkpoint)
    tokenizer = run_tokenizer(path, state, config.data)
    prompts = list(config.prompt) or [piped()]
    ids = [encode(tokenizer, prompt) for prompt in prompts]
    compute = choose(config.device, config.precision)
    model = load_model(path, state).to(compute.device).eval()
    with compute.autocast():
        stream = generate_stream(
            model,
            ids,
            config.tokens,
            config.temperature,
            config.top_k,
            config.top_p,
            seed=[config.seed + n for n in range(len(ids))],
            stop=[tokenizer.eot],
            vocab_size=tokenizer.vocab_size,
            slide=config.slide,
        )
        rows = [Continuation(tokenizer, prompt, config.stop) for prompt in ids]
        follow(stream, rows, Screen(prompts, out or sys.stdout))
    return [row.text for row in rows]


def follow(stream: Iterable[Tensor], rows: Sequence[Continuation], screen: Screen) -> None:
    """Show the rows of a stream of tokens until all have ended; say how fast it was."""
    begin, first, count = time.perf_counter(), None, 0
    for step in stream:
        for number, (row, token) in enumerate(zip(rows, step.tolist(), strict=True)):
            if not row.ended:
                count += 1
                screen.add(number, row.add(token), row.ended)
        first = first or time.perf_counter() - begin
        if all(row.ended for row in rows):
            break
    for number, row in enumerate(rows):
        if not row.ended:
            screen.add(number, row.end(), True)
    took = time.perf_counter() - begin
    print(
        f"{count} tokens in {took:.2f} s, {count / took:,.0f} a second; the first after "
        f"{first or took:.2f} s",
        file=sys.stderr,
    )


def run_tokenizer(path: Path, state: dict[str, Any], given: Path | None) -> Tokenizer:
    """The tokenizer of a run; of the data it was trained on, no more than that has to be there."""
    folder = Path(state["data"]) if given is None else given
    try:
        header = read_header(folder)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} needs its tokenizer, and {folder} holds no prepared data: name a folder that "
            "was prepared with the same tokenizer with --data."
        ) from None
    data = TokenData(folder, header)
    if data.tokenizer_fingerprint != state["tokenizer"]:
        raise ValueError(
            f"{path} was trained with another tokenizer than that of {folder}: name a folder that "
            "was prepared with the run's with --data."
        )
    entry = header["tokenizer"]
    if entry["file"] is not None:
        check_hash(folder / entry["file"], entry["sha256"])
    return data.tokenizer()


def piped() -> str:
    """What comes in through a pipe, less the newline at its end; nothing from a terminal."""
    return "" if sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of a prompt; without text, those of where a new text begins."""
    return [int(i) for i in tokenizer.encode_batch([prompt])[0]] if prompt else [tokenizer.eot]
