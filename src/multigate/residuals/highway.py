"""Highway networks: one stream, and a gate that trades the old value for the new one."""

import torch
from torch import Tensor, nn

from multigate.names import unknown
from multigate.numerics import score, wide

from .base import Residual, State, register_residual
from .init import gate_bias_init


@register_residual("highway")
class Highway(Residual):
    """A gate between keeping the stream and taking the sublayer's output (Srivastava et al., 2015).

        x <- (1 - g) x + g y,    h = x
        gate="scalar":  g = sigmoid( w . rms(x) / sqrt(D) + b ), one number a token
        gate="vector":  g = sigmoid( W x + b ), one number a channel: D^2 more parameters a sublayer

    w and W start at zero; b starts negative, at the value of the Multi-Gate rule for one stream, so
    that the network begins by carrying. Recorded: `beta`, the gate.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        gate: str = "scalar",
        bias: float | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(dim, depth, eps=eps)
        if gate not in ("scalar", "vector"):
            raise ValueError(unknown("highway gate", gate, ("scalar", "vector")))
        self.vector = gate == "vector"
        b = -gate_bias_init(depth, 1) if bias is None else bias
        weight_shape, bias_shape = ((dim, dim), (dim,)) if self.vector else ((dim,), ())
        self.weight = nn.ParameterList(torch.zeros(weight_shape) for _ in range(depth))
        self.bias = nn.ParameterList(torch.full(bias_shape, b) for _ in range(depth))

    def state_size(self, i: int) -> int:
        return self.dim

    def carried(self, i: int, state: State) -> Tensor:
        return state[0].unsqueeze(-2)

    def mixture(self, i: int, coefficients: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        if self.vector:
            return None
        gate = coefficients["beta"]
        return (1 - gate).unsqueeze(-1), gate

    def _start(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def _step(self, i: int, y: Tensor | None, state: State) -> tuple[Tensor, State]:
        (x,) = state
        if y is not None:
            g = self._gate(i, x)
            self.note(i, beta=g)
            old = wide(x)
            x = torch.lerp(old, y.to(old.dtype), g).to(x.dtype)
        return x, (x,)

    def _gate(self, i: int, x: Tensor) -> Tensor:
        x = wide(x)
        weight, bias = self.weight[i].to(x.dtype), self.bias[i].to(x.dtype)
        if self.vector:
            return (x @ weight.mT + bias).sigmoid()
        return (score(x, weight, self.eps) * self.dim**-0.5 + bias).sigmoid().unsqueeze(-1)
