"""`Stack`: any callables with any residual between them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .base import Residual, build_residual


class Sublayer(nn.Module):
    """A sublayer F(h) = body(norm(h)) that lets the residual apply its norm.

    A subclass sets `self.norm` and implements `body`. Called with normed=True the input has been
    through the norm already; an RMSNorm of this library may be fused into the residual's step.
    """

    norm: nn.Module

    def body(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward(self, h: Tensor, *args: Any, normed: bool = False, **kwargs: Any) -> Any:
        return self.body(h if normed else self.norm(h), *args, **kwargs)


class Function(nn.Module):
    """A plain callable as a module, so that a `Stack` holds nothing but modules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Stack(nn.Module):
    """Run any callables [..., D] -> [..., D] with any residual between them.

        stack = Stack([attention, mlp], residual="mgr-competitive", dim=768, streams=2)
        h = stack(x)

    Modules among them are registered; what stands behind a lambda or a method is not. Further
    arguments of the call go to every sublayer as they are. A sublayer may return a tuple: its
    first entry is the output; if any sublayer did, the call returns (h, extras), extras[i] being
    what else sublayer i returned. Each sublayer owns its input norm; where it is a `Sublayer`,
    the residual applies that norm in the step before. `out_norm` is applied to the output in the
    same way.

    With `checkpointing` set, the sublayers keep no activations but their input and are computed
    again in the backward pass.
    """

    checkpointing = False
    skipped: frozenset[int] = frozenset()
    """Sublayers that are not called; the residual reads past them without writing."""

    def __init__(
        self,
        sublayers: Iterable[Callable[..., Any]],
        residual: str | Residual = "mgr-competitive",
        dim: int | None = None,
        streams: int | None = None,
        out_norm: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(
            f if isinstance(f, nn.Module) else Function(f) for f in sublayers
        )
        if isinstance(residual, str):
            if dim is None:
                raise ValueError(
                    f"Stack needs dim, the width of the sublayers, to build {residual!r}."
                )
            residual = build_residual(residual, dim, len(self.sublayers), streams, **options)
        elif dim is not None or streams is not None or options:
            raise ValueError(
                "Stack was given a residual that is built already: dim, streams and options belong "
                "to build_residual."
            )
        elif residual.depth != len(self.sublayers):
            raise ValueError(
                f"the residual is built for {residual.depth} sublayers, got {len(self.sublayers)}."
            )
        self.residual = residual
        self.out_norm = out_norm

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        extras: list[tuple[Any, ...]] = []
        norms = [f.norm if isinstance(f, Sublayer) else None for f in self.sublayers]
        norms.append(self.out_norm)
        h, state = self.residual.start(x, norms[0])
        for i, sublayer in enumerate(self.sublayers):
            if i in self.skipped:
                h, state = self.residual.step(i, None, state, norms[i + 1])
                extras.append(())
                continue
            normed = {} if norms[i] is None else {"normed": True}
            y = self._call(sublayer, h, *args, **normed, **kwargs)
            y, *extra = y if isinstance(y, tuple) else (y,)
            extras.append(tuple(extra))
            if not isinstance(y, Tensor):
                raise ValueError(
                    f"sublayer {i} returned {type(y).__name__}: a sublayer must return a tensor, "
                    "or a tuple that begins with one."
                )
            h, state = self.residual.step(i, y, state, norms[i + 1])
        return (h, extras) if any(extras) else h

    @contextmanager
    def skipping(self, *sublayers: int) -> Iterator[None]:
        """Leave these sublayers out for the length of the context."""
        for i in sublayers:
            if not 0 <= i < len(self.sublayers):
                raise ValueError(
                    f"there is no sublayer {i} to skip, only 0 to {len(self.sublayers) - 1}."
                )
        before, self.skipped = self.skipped, self.skipped | set(sublayers)
        try:
            yield
        finally:
            self.skipped = before

    def _call(self, sublayer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(sublayer, *args, use_reentrant=False, **kwargs)
        return sublayer(*args, **kwargs)
