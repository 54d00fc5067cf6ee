"""A GPT in stages, a process for each, over the residual seam and `torch.distributed.pipelining`.

    stage = split(model, [12])[rank]                   # two stages, cut before sublayer 12
    schedule = build_schedule(stage, micro_batches=8, shape=(4, 1024))
    schedule.step(tokens)                              # on the first stage, 8 x 4 sequences
    schedule.step(target=targets, losses=losses)       # on the last stage
    tie_gradients(stage)                               # on all; then the optimizer steps

`python -m multigate.pipeline` prints how many bytes cross a boundary with each residual.
"""

import copy
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from .gpt import GPT, preset, remake_rope
from .names import unknown
from .nn import rotary_table, to_compute
from .numerics import autocast_is_on, wide
from .residuals import Residual, Stack, State, Sublayer, build_residual, residual_names

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}


class Received(torch.autograd.Function):
    """The tensors that arrived, as they are; those that nothing reads get a gradient of zeros.

    The stage before waits for a gradient of every one of them, and older torch sends no None.
    """

    @staticmethod
    def forward(ctx: Any, *sent: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in sent)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


class Stage(GPT):
    """The sublayers begin .. end-1 of a GPT, as a copy; parameters keep their names in the GPT.

    The first stage has the embedding and takes tokens; the last has the output norm and the head,
    tied to an embedding of its own, and returns logits. Between stages goes what the residual
    hands over. Every stage holds the whole residual, which is small beside the sublayers, but
    only the parameters that its own steps need have `requires_grad`.
    """

    def __init__(self, model: GPT, cuts: Sequence[int], index: int) -> None:
        nn.Module.__init__(self)
        self.config = model.config
        self.index, self.count = index, len(cuts) - 1
        self.begin, self.end = cuts[index], cuts[index + 1]
        self.first, self.last = index == 0, index == self.count - 1
        self.shared: dict[str, tuple[int, ...]] = {}
        """The parameters that other stages train too, and all stages that do."""
        self.shape: tuple[int, int] | None = None
        """Sequences and positions of a micro-batch, once there is a schedule."""
        self.compute_dtype: torch.dtype | None = None
        """What the forward pass is autocast to, if anything."""
        has_embedding = self.first or self.last
        self.register_module("embed", copy.deepcopy(model.embed) if has_embedding else None)
        own = range(self.begin, self.end)
        self.stack = Stack(
            (
                copy.deepcopy(f) if i in own else nn.Identity()
                for i, f in enumerate(model.stack.sublayers)
            ),
            copy.deepcopy(model.stack.residual),
            out_norm=copy.deepcopy(model.stack.out_norm) if self.last else None,
        )
        self.stack.checkpointing = model.stack.checkpointing
        self.idle = {f"stack.residual.{name}" for name in self._idle_residual()}
        """The residual's parameters that only other stages need."""
        for name in self.idle:
            self.get_parameter(name).requires_grad_(False)
        self._make_rope()
        self.register_load_state_dict_post_hook(remake_rope)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:  # type: ignore[override]
        if self.shape is not None and autocast_is_on(inputs[0].device.type):
            raise ValueError(
                "autocast around a schedule would reach its backward passes: give build_schedule "
                "a compute_dtype instead."
            )
        with self._autocast():
            return self._run(*inputs)

    def _run(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        residual, norms = self.stack.residual, self._norms()
        if self.first:
            x = self._embedded(*inputs)
            h, state = residual.start(x, norms[0])
        else:
            h, state = residual.resume(self.begin, Received.apply(*inputs), norms[self.begin])
        length = h.shape[-2]
        rotary = (self.rope_cos[:length], self.rope_sin[:length])
        for i in range(self.begin, self.end):
            y = self.stack._call(self.stack.sublayers[i], h, rotary, None, normed=True)
            h, state = residual.step(i, y, state, norms[i + 1])
        if self.last:
            return F.linear(to_compute(h, self.embed.weight), self.embed.weight)
        return tuple(t.contiguous() for t in residual.handover(self.end, h, state))

    def part(self) -> dict[str, Tensor]:
        """This stage's part of the GPT's state dict; the parts of all stages make up the whole."""
        return {name: t for name, t in self.state_dict().items() if name not in self.idle}

    def example_inputs(self, shape: tuple[int, int]) -> tuple[Tensor, ...]:
        """What `forward` takes for micro-batches of `shape`, on the meta device."""
        if self.first:
            return (torch.zeros(shape, dtype=torch.long, device="meta"),)
        return self._crossing(self.begin, shape)

    def example_outputs(self, shape: tuple[int, int]) -> tuple[Tensor, ...]:
        """What `forward` returns for micro-batches of `shape`, on the meta device."""
        if not self.last:
            return self._crossing(self.end, shape)
        weight = self.embed.weight
        dtype = self.compute_dtype or weight.dtype
        return (torch.zeros(*shape, len(weight), dtype=dtype, device="meta", requires_grad=True),)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.compute_dtype is None:
            return nullcontext()
        return torch.autocast(next(self.parameters()).device.type, self.compute_dtype)

    def _crossing(self, i: int, shape: tuple[int, int]) -> tuple[Tensor, ...]:
        residual = meta_copy(self.stack.residual)
        with self._autocast():
            dtype = self.stream_dtype(next(self.parameters()))
        x = torch.zeros(*shape, residual.dim, dtype=dtype, device="meta")
        sent = residual.handover(i, *state_before(residual, i, x))
        return tuple(torch.empty_like(t.contiguous(), requires_grad=True) for t in sent)

    def _embedded(self, tokens: Tensor) -> Tensor:
        self._check("token ids", tokens)
        if self.shape is not None and tokens.shape != self.shape:
            raise ValueError(
                f"the schedule was built for micro-batches of shape {self.shape}, got "
                f"{tuple(tokens.shape)}: every stage must await the same."
            )
        x = self.embed(tokens)
        return x.to(self.stream_dtype(x))

    def _norms(self) -> list[nn.Module | None]:
        """Of every own sublayer and of the output; None where another stage has the norm."""
        norms = [f.norm if isinstance(f, Sublayer) else None for f in self.stack.sublayers]
        return [*norms, self.stack.out_norm]

    def _idle_residual(self) -> set[str]:
        residual = meta_copy(self.stack.residual)
        h, state = state_before(residual, self.begin, torch.zeros(residual.dim, device="meta"))
        if not self.first:
            sent = residual.handover(self.begin, h, state)
            h, state = residual.resume(self.begin, [t.detach() for t in sent])
        used = [h]
        for i in range(self.begin, self.end):
            y = torch.zeros(residual.dim, device="meta")
            h, state = residual.step(i, y, state, nn.Identity() if i + 1 == self.end else None)
            used.append(h)
        if not self.last:
            # What the last step reads, the next stage reads again.
            used[-1:] = residual.handover(self.end, h, state)
        names = [name for name, _ in residual.named_parameters()]
        total = sum((t.sum() for t in used), start=torch.zeros((), device="meta"))
        if not names or not total.requires_grad:
            return set(names)
        gradients = torch.autograd.grad(total, list(residual.parameters()), allow_unused=True)
        return {name for name, g in zip(names, gradients, strict=True) if g is None}

    def _make_rope(self) -> None:
        c, device = self.config, next(self.parameters()).device
        tables = rotary_table(c.context, c.width // c.heads, c.rope_base)
        for name, table in zip(("rope_cos", "rope_sin"), tables, strict=True):
            self.register_buffer(name, table.to(device), persistent=False)


def meta_copy(residual: Residual) -> Residual:
    """The residual without its numbers, to see what depends on what and how large it is."""
    return copy.deepcopy(residual).to("meta").requires_grad_()


def state_before(residual: Residual, i: int, x: Tensor) -> tuple[Tensor, State]:
    """h and the state before sublayer i, if all sublayers write zeros."""
    h, state = residual.start(x)
    for k in range(i):
        h, state = residual.step(k, torch.zeros_like(x), state)
    return h, state


def split(model: GPT, boundaries: Sequence[int]) -> list[Stage]:
    """Cut a GPT into stages before each of the sublayers in `boundaries`; the model stays whole.

    Each process keeps its own stage. A model built on the meta device can be split too; its stages
    are then filled by `to_empty` and `load_state_dict`.
    """
    depth = len(model.stack.sublayers)
    cuts = [0, *boundaries, depth]
    if len(cuts) < 3 or any(a >= b for a, b in zip(cuts, cuts[1:], strict=False)):
        raise ValueError(
            f"a GPT of {depth} sublayers is split at rising boundaries from 1 to {depth - 1}, got "
            f"{list(boundaries)}."
        )
    if model.config.attention != "plain":
        raise ValueError(
            f"attention={model.config.attention!r} cannot be split into stages: what its sublayers "
            'write for later attention would have to cross as well; use attention="plain".'
        )
    stages = [Stage(model, cuts, index) for index in range(len(cuts) - 1)]
    trained = [{n for n, p in stage.named_parameters() if p.requires_grad} for stage in stages]
    for stage in stages:
        for name in sorted(trained[stage.index]):
            holders = tuple(k for k, names in enumerate(trained) if name in names)
            if len(holders) > 1:
                stage.shared[name] = holders
    return stages


def build_schedule(
    stage: Stage,
    micro_batches: int,
    shape: tuple[int, int],
    kind: str = "1f1b",
    compute_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> "PipelineScheduleSingle":
    """The schedule ("gpipe" or "1f1b") that runs `stage`, in the process of that rank in `group`.

    `shape`: sequences and positions of a micro-batch. `compute_dtype`: what the forward passes are
    autocast to; bfloat16 sends bfloat16. The loss is the mean over all tokens.
    """
    import torch.distributed.pipelining as pipelining

    if kind not in SCHEDULES:
        raise ValueError(unknown("schedule", kind, SCHEDULES))
    if shape[1] > stage.config.context:
        raise ValueError(
            f"{shape[1]} tokens are more than this model's context of {stage.config.context}."
        )
    if dist.get_rank(group) != stage.index or dist.get_world_size(group) != stage.count:
        raise ValueError(
            f"stage {stage.index} of {stage.count} belongs to rank {stage.index} of as many "
            f"processes, this is rank {dist.get_rank(group)} of {dist.get_world_size(group)}."
        )
    stage.shape, stage.compute_dtype = shape, compute_dtype
    built = pipelining.PipelineStage(
        stage,
        stage.index,
        stage.count,
        next(stage.parameters()).device,
        input_args=stage.example_inputs(shape),
        output_args=stage.example_outputs(shape),
        group=group,
    )
    return getattr(pipelining, SCHEDULES[kind])(built, micro_batches, loss_fn=token_loss)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of `GPT`, from logits: the mean cross entropy in nats."""
    return F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten())


def tie_gradients(stage: Stage, group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients of what several stages hold, the tied embedding above all.

    Call it on every stage, once after each step of the schedule; equal optimizers then keep the
    copies equal.
    """
    for name, holders in stage.shared.items():
        parameter = stage.get_parameter(name)
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = {k: own if k == stage.index else torch.empty_like(own) for k in holders}
        transfers = []
        for k in holders:
            if k != stage.index:
                peer = k if group is None else dist.get_global_rank(group, k)
                transfers.append(dist.P2POp(dist.isend, own, peer, group))
                transfers.append(dist.P2POp(dist.irecv, gradients[k], peer, group))
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        # In the order of the stages, so that every copy gets the same bits.
        parameter.grad = torch.zeros_like(own)
        for k in holders:
            parameter.grad += gradients[k]


def boundary_table(names: Iterable[str] | None = None) -> str:
    """What crosses a boundary in bfloat16, by residual, scale and depth, in Markdown."""
    names = list(names or residual_names())
    lines: list[str] = []
    for scale in ("s", "l"):
        config = preset(scale)
        depth = 2 * config.blocks
        cuts = [depth * quarter // 4 for quarter in (1, 2, 3)]
        places = " | ".join(f"at {cut}" for cut in cuts)
        lines += [
            f"Scale {scale.upper()}: {depth} sublayers of width {config.width}.",
            "",
            f"| residual | bytes a token {places} | MB a micro-batch {places} |",
            "|---|" + 6 * "---:|",
        ]
        for name in names:
            with torch.device("meta"):
                residual = build_residual(name, config.width, depth)
            sizes = [2 * residual.handover_size(cut) for cut in cuts]
            cells = [f"{size:,}" for size in sizes]
            cells += [f"{size * 32 * 1024 / 1e6:,.1f}" for size in sizes]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(boundary_table(), end="")
