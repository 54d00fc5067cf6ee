"""Multi-Gate Residuals: n streams, a gate to write them and attention to read them."""

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from multigate.names import unknown
from multigate.ops import depth_pool, gate_pool
from multigate.ops.depth_pool.reference import depth_weights
from multigate.ops.gate_pool import reference as maths

from .base import Residual, State, register_residual
from .init import gate_bias_init
from .memory import Memory


class MultiGateResidual(nn.Module):
    """One Multi-Gate step, with the signature and the parameter names of the paper's listing.

        z_i  = w1 . rms(s_i) / sqrt(D) + b_i
        beta = softmax([b_0, z_1 .. z_n])[1:]  (competitive)   or   sigmoid(z)  (independent)
        s_i <- s_i + beta_i (layer_output - s_i)
        h    = sum_i softmax_i( w2 . rms(s_i) / sqrt(D) ) s_i

    `gate_variant` is "competitive" (a softmax over the streams and a carry logit, b1 has n + 1
    entries) or "independent" (a sigmoid a stream, b1 has n).
    """

    def __init__(
        self,
        d_model: int,
        n_stream: int,
        gate_variant: str = "competitive",
        init_bias: float = 0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if gate_variant not in maths.VARIANTS:
            raise ValueError(unknown("gate variant", gate_variant, maths.VARIANTS))
        if d_model < 1 or n_stream < 1:
            raise ValueError(
                "MultiGateResidual needs a width and a number of streams of at least 1, got "
                f"d_model={d_model} and n_stream={n_stream}."
            )
        self.d_model = d_model
        self.n_stream = n_stream
        self.gate_variant = gate_variant
        self.eps = eps
        self.w1 = nn.Parameter(torch.zeros(d_model))
        self.w2 = nn.Parameter(torch.zeros(d_model))
        if gate_variant == "competitive":
            self.b1 = nn.Parameter(torch.zeros(n_stream + 1))
            self.b1.data[0] = init_bias
        else:
            self.b1 = nn.Parameter(torch.full((n_stream,), float(init_bias)))

    def forward(
        self,
        layer_output: Tensor,
        streams: Tensor | Sequence[Tensor],
        norm_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """layer_output [..., D], streams [..., n, D] -> h [..., D], new streams [..., n, D].

        The streams may also come as n tensors [..., D].
        """
        return gate_pool(
            layer_output,
            streams,
            self.w1,
            self.w2,
            self.b1,
            self.gate_variant,
            norm_weight,
            self.eps,
        )

    def read(self, streams: Tensor, norm_weight: Tensor | None = None) -> Tensor:
        """The pool alone: h from streams that stay as they are."""
        h, _ = maths.pool(streams, self.w2, norm_weight, self.eps)
        return h.to(streams.dtype)

    def coefficients(self, layer_output: Tensor | None, streams: Tensor) -> dict[str, Tensor]:
        """beta and alpha [..., n] of a step (alpha alone if nothing is written)."""
        if layer_output is None:
            return {"alpha": maths.pool_weights(streams, self.w2, self.eps)}
        beta = maths.gate(streams, self.w1, self.b1, self.gate_variant, self.eps)
        new_streams = maths.lerp(layer_output, streams, beta)
        return {"beta": beta, "alpha": maths.pool_weights(new_streams, self.w2, self.eps)}


class GrowthPool(nn.Module):
    """The reader of a step that appends its sublayer's output as a new stream."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w2 = nn.Parameter(torch.zeros(dim))


class MultiGate(Residual):
    """Multi-Gate Residuals over a whole network (2605.23259).

    Growth: the embedding is stream 0, and the outputs of sublayers 0 .. n-2 are appended as
    streams 1 .. n-1. From sublayer n-1 on, every output is mixed into every stream by a gate, a
    convex step, so that no stream outgrows the largest thing written. After each sublayer the
    next input is pooled from the streams there are:

        growth:  s_m = y                                    lerp:  s_i <- s_i + beta_i (y - s_i)
        h = sum_i alpha_i s_i,    alpha = softmax_i( w2 . rms(s_i) / sqrt(D) )

    `bias_init`: "paper" is the paper's formula with n = streams for both gates; "calibrated"
    takes n = 1 in it for the independent gate, which then starts with the same beta as the
    competitive one; a number b sets the independent gate's biases to b and the competitive gate's
    carry logit to -b. Recorded: `alpha`, and `beta` where there is a gate.

    `memory`, `keep` and `every` say what is kept for the backward pass, see memory.py.

    State: the m streams as a tuple while they grow; the first gate makes one tensor [..., n, D],
    beside which a memory mode may put what it owes.
    """

    variant: ClassVar[str]

    def __init__(
        self,
        dim: int,
        depth: int,
        streams: int = 4,
        bias_init: str | float = "paper",
        eps: float = 1e-6,
        memory: str = "store",
        keep: float = 0.01,
        every: int | None = None,
    ) -> None:
        super().__init__(dim, depth, streams, eps)
        self.memory = Memory(memory, keep, every)
        growth = min(streams - 1, depth)
        bias = self._initial_bias(bias_init, depth - growth)
        self.lost: Tensor
        self.register_buffer("lost", torch.zeros((), dtype=torch.int64), persistent=False)
        self.steps = nn.ModuleList(GrowthPool(dim) for _ in range(growth))
        self.steps.extend(
            MultiGateResidual(dim, streams, self.variant, bias, eps) for _ in range(depth - growth)
        )

    def _initial_bias(self, bias_init: str | float, lerp_depth: int) -> float:
        """init_bias of the gates; with more streams than sublayers there are none, and no bias."""
        sign = 1.0 if self.variant == "competitive" else -1.0
        if not isinstance(bias_init, str):
            return -sign * bias_init
        if bias_init not in ("paper", "calibrated"):
            raise ValueError(unknown("bias_init", bias_init, ("paper", "calibrated")))
        if lerp_depth == 0:
            return 0.0
        calibrated = bias_init == "calibrated" and self.variant == "independent"
        return sign * gate_bias_init(lerp_depth, 1 if calibrated else self.streams)

    def state_size(self, i: int) -> int:
        return min(i + 1, self.streams) * self.dim

    def handover_size(self, i: int) -> int:
        return self.state_size(i)

    def can_skip(self, i: int) -> bool:
        return i >= self.streams - 1

    def carried(self, i: int, state: State) -> Tensor:
        return state[0] if self._packed(i, state) else torch.stack(state, dim=-2)

    def mixture(self, i: int, coefficients: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if "beta" in coefficients:
            beta = coefficients["beta"]
            return torch.diag_embed(1 - beta), beta
        streams = torch.eye(i + 2).to(coefficients["alpha"])
        return streams[:, :-1], streams[-1]

    def structural_zeros(self) -> set[str]:
        return {f"steps.{i}.w2" for i in range(self.depth)} if self.streams == 1 else set()

    def _start(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x.unsqueeze(-2) if self.streams == 1 else x,)

    def _step(self, i: int, y: Tensor | None, state: State) -> tuple[Tensor, State]:
        return self._advance(i, y, state, None)

    def _step_normed(
        self, i: int, y: Tensor | None, state: State, norm: nn.Module
    ) -> tuple[Tensor, State] | None:
        if self._fuses(norm):
            return self._advance(i, y, state, norm.weight)
        return None

    def _handover(self, i: int, h: Tensor, state: State) -> tuple[Tensor, ...]:
        if not self._packed(i, state):
            return state
        return (self.memory.end(state, cast(MultiGateResidual, self.steps[-1])),)

    def _resume(self, i: int, sent: tuple[Tensor, ...]) -> tuple[Tensor, State]:
        return self._read_again(i, sent, None)

    def _resume_normed(
        self, i: int, sent: tuple[Tensor, ...], norm: nn.Module
    ) -> tuple[Tensor, State] | None:
        if self._fuses(norm):
            return self._read_again(i, sent, norm.weight)
        return None

    def _batch_shape(self, i: int, state: State) -> torch.Size:
        return state[0].shape[:-2] if self._packed(i, state) else state[0].shape[:-1]

    def _packed(self, i: int, state: State) -> bool:
        """Whether the state before sublayer i is one tensor [..., n, D]."""
        alone = len(state) == 1 or isinstance(state[1], tuple)
        return i >= self.streams - 1 and alone

    def _advance(
        self, i: int, y: Tensor | None, state: State, norm_weight: Tensor | None
    ) -> tuple[Tensor, State]:
        step = self.steps[i]
        if isinstance(step, GrowthPool):
            assert y is not None, "step() has refused to skip a growth step"
            streams = (*state, y.to(state[0].dtype))
            return self._pool(i, step.w2, streams, norm_weight), streams
        step = cast(MultiGateResidual, step)
        packed = self._packed(i, state)
        if y is None and not packed:
            return self._pool(i, step.w2, state, norm_weight), state
        if self._record is not None:
            self.note(i, **step.coefficients(y, state[0] if packed else torch.stack(state, -2)))
        if y is None:
            if self._ends(i):
                state = (self.memory.end(state, step),)
            return step.read(state[0], norm_weight), state
        if self.memory.mode == "store" or not torch.is_grad_enabled():
            h, new_streams = step(y, state[0] if packed else state, norm_weight)
            return h, (new_streams,)
        if packed:
            h, state, lost = self.memory.step(step, y, state, norm_weight, self._ends(i))
            if lost is not None:
                if self.lost.is_meta:
                    # Loading has moved the parameters off the meta device, not this.
                    self.lost = torch.zeros_like(lost)
                self.lost += lost
            return h, state
        h, new_streams = step(y, state, norm_weight)
        return h, (new_streams,) if self.memory.mode == "recompute" else (new_streams, ())

    def _ends(self, i: int) -> bool:
        """Whether a chain of steps that keep no streams ends at step i."""
        growth = min(self.streams - 1, self.depth)
        return self.memory.ends(i - growth, self.depth - growth)

    def _read_again(self, i: int, state: State, norm_weight: Tensor | None) -> tuple[Tensor, State]:
        """What step i - 1 has read, from the state it has left."""
        step = self.steps[i - 1]
        if isinstance(step, GrowthPool):
            return self._pool(i - 1, step.w2, state, norm_weight), state
        return self._advance(i - 1, None, state, norm_weight)

    def _pool(self, i: int, query: Tensor, streams: State, norm_weight: Tensor | None) -> Tensor:
        scale = self.dim**-0.5
        if self._record is not None:
            self.note(i, alpha=depth_weights(streams, query, scale, self.eps))
        return depth_pool(streams, query, scale=scale, norm_weight=norm_weight, eps=self.eps)


@register_residual("mgr-independent")
class IndependentMultiGate(MultiGate):
    """Multi-Gate Residuals in which every stream decides for itself (see `MultiGate`).

    beta_i = sigmoid( w1 . rms(s_i) / sqrt(D) + b_i )
    """

    variant = "independent"


@register_residual("mgr-competitive")
class CompetitiveMultiGate(MultiGate):
    """Multi-Gate Residuals in which the streams compete for the output (see `MultiGate`).

        z_i = w1 . rms(s_i) / sqrt(D) + b_i,    beta_i = e^{z_i} / (e^{b_0} + sum_j e^{z_j})

    b_0 is the carry logit: the larger it is, the less all streams together take.
    """

    variant = "competitive"
