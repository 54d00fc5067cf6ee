"""How large what the blocks write is, and how large the gradient that comes back to them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multigate.numerics import wide

from .chart import Chart, Line, Panel
from .look import far_apart
from .probe import BLOCK, Probe, Step, blocks_of, depth_of, next_tokens, stack_of, watch
from .running import Array, Arrays, Mean, exact

CLAIM = (
    "PreNorm's outputs grow with depth, its gradients are large in shallow blocks and fade in deep "
    "ones, and Block AttnRes' outputs vary much from block to block; both MGR variants even this "
    "out about as well as Full AttnRes."
)


class Dynamics:
    """Mean over tokens of rms(v) = sqrt(mean_d v_d^2), without eps.

    Recorded: `output_rms` [blocks], of the hidden state after each block (of a residual whose
    output is the sum of n streams, a n-th of that); and `sublayer_rms` [depth], of what each
    sublayer writes, NaN for one that was skipped.
    """

    def __init__(self) -> None:
        self._hidden: dict[int, Mean] = {}
        self._outputs: dict[int, Mean] = {}
        self._depth = 0

    def see(self, step: Step) -> None:
        self._depth = max(self._depth, step.i + 1)
        if step.output is not None:
            self._outputs.setdefault(step.i, Mean()).add(_rms(step.output))
        block, rest = divmod(step.i + 1, BLOCK)
        if block and not rest:
            self._hidden.setdefault(block, Mean()).add(_rms(step.hidden) / step.summed)

    def result(self) -> Arrays:
        written = [
            self._outputs[i].result() if i in self._outputs else np.nan for i in range(self._depth)
        ]
        return {
            "output_rms": np.array([mean.result() for mean in self._hidden.values()]),
            "sublayer_rms": np.array(written),
        }


def _rms(vectors: Tensor) -> Tensor:
    """[...] flattened, of [..., D]."""
    return wide(vectors.detach()).square().mean(-1).sqrt().flatten()


class HiddenGradients:
    """Root of the mean over tokens and channels of (dL/dh)^2, by a hook on every hidden state.

    Recorded: `hidden_grad_rms` [depth + 1], that of the embedding first. dL/dh is all that comes
    back to h: where the residual carries h itself on, as PreNorm does, also what comes by that way.
    """

    def __init__(self, depth: int) -> None:
        self._squares = [Mean() for _ in range(depth + 1)]

    def see(self, step: Step) -> None:
        if step.hidden.requires_grad:
            squares = self._squares[step.i + 1]

            def add(g: Tensor | None) -> None:
                # None: nothing has read h, but something the streams that it was made with.
                if g is not None:
                    squares.add(exact(g).square().mean(-1).flatten())

            step.hidden.register_hook(add)

    def result(self) -> Arrays:
        # A hidden state that nothing reads, before a skipped sublayer, has no gradient: zero.
        means = [0.0 if mean.total is None else mean.result() for mean in self._squares]
        return {"hidden_grad_rms": np.sqrt(np.array(means))}


def gradients(
    model: nn.Module,
    tokens: Tensor,
    batch: int | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Arrays:
    """The gradient of L, the mean loss of all next tokens of `tokens` [samples, T].

    The model is called as model(tokens[:, :-1], tokens[:, 1:]), in batches. Recorded: `grad_rms`
    [blocks], sqrt(mean g^2) over the parameters of the block's sublayers, without those of the
    residual, so that every residual is measured on the same parameters; and what
    `HiddenGradients` records. Parameters that are frozen are measured too. The model is left as
    it was found: its .grad is not touched.
    """
    blocks = [
        [p for i in block for p in stack_of(model).sublayers[i].parameters()]
        for block in blocks_of(model)
    ]
    parameters = list(model.parameters())
    sums: dict[Tensor, Tensor] = {}
    watcher, predicted = HiddenGradients(depth_of(model)), 0
    with torch.inference_mode(False), torch.enable_grad(), _thawed(model), Probe(model, watcher):
        for inputs, targets in next_tokens(model, tokens, batch):
            with autocast():
                loss = model(inputs, targets)
            # Of the sum over the batch's tokens: a batch of another size then counts for what it
            # is, and under float16 nothing is too small to be a number.
            count = targets.numel()
            found = torch.autograd.grad(loss * count, parameters, allow_unused=True)
            for p, g in zip(parameters, found, strict=True):
                if g is not None:
                    sums[p] = wide(g) if p not in sums else sums[p] + wide(g)
            predicted += count
    hidden = {name: values / predicted for name, values in watcher.result().items()}
    return {"grad_rms": np.array([_grad_rms(b, sums) / predicted for b in blocks])} | hidden


def _grad_rms(parameters: list[nn.Parameter], sums: dict[Tensor, Tensor]) -> float:
    """Of one block; a parameter that the loss does not depend on counts as zero."""
    size = sum(p.numel() for p in parameters)
    squares = [exact(sums[p]).square().sum() for p in parameters if p in sums]
    return float(torch.stack(squares).sum().div(size).sqrt()) if squares else 0.0


@contextmanager
def _thawed(model: nn.Module) -> Iterator[None]:
    """Every parameter requires a gradient for the length of the context."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def training_dynamics(model: nn.Module, tokens: Tensor, batch: int | None = None) -> Arrays:
    """`Dynamics` and `gradients` over `tokens` [samples, T].

    The inputs are tokens[:, :-1], for both; the targets are tokens[:, 1:].
    """
    found, dynamics = gradients(model, tokens, batch), Dynamics()
    watch(model, tokens[:, :-1], dynamics, batch=batch)
    return dynamics.result() | found


def charts(runs: Mapping[str, Arrays]) -> list[Chart]:
    """Output RMS and gradient RMS by block, a line for each run."""
    panels, seen = [], []
    missing: dict[str, list[str]] = {}
    for key, what, unit in (
        ("output_rms", "output", "RMS of the hidden state"),
        ("grad_rms", "gradient", "RMS of a parameter's gradient"),
    ):
        lines = []
        for colour, (label, arrays) in enumerate(runs.items()):
            values = arrays.get(key, np.empty(0))
            if len(values):
                lines.append(Line(label, np.arange(1, len(values) + 1), values, colour))
            else:
                missing.setdefault(label, []).append(f"no {what} RMS")
        if lines:
            log = far_apart(np.concatenate([np.asarray(line.y) for line in lines]))
            panels.append(Panel(f"{what} of each block", "block", unit, lines, log))
            ranges = "; ".join(_range(line.label, np.asarray(line.y)) for line in lines)
            seen.append(f"RMS of the {what} from the first block to the last: {ranges}.")
    return [
        Chart(
            name="dynamics",
            title="Training dynamics",
            shows="How large the hidden state is after each block, and how large the gradient of "
            "the loss is, per parameter, in the block's sublayers.",
            panels=panels,
            claim=CLAIM,
            seen=" ".join(seen),
            absent=[
                f"{label} has {' and '.join(what)} on record." for label, what in missing.items()
            ],
        )
    ]


def _range(label: str, values: Array) -> str:
    text = f"{label} {values[0]:.3g} to {values[-1]:.3g}"
    finite = values[np.isfinite(values)]
    if not len(finite) or finite.min() <= 0:
        return text
    return f"{text} (the largest {finite.max() / finite.min():.3g} times the least)"
