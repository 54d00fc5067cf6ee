"""The seam: what a residual architecture is, and the registry of them.

A *sublayer* (one attention, one MLP) is the unit everywhere; `depth` counts sublayers.

    h, state = residual.start(x)            # x [..., D]: the embedding; h: the input of sublayer 0
    y        = sublayer(h)
    h, state = residual.step(i, y, state)   # write y, read the next input; i = 0 .. depth-1

The h of the last step is the output. Three more needs are part of the seam:

    residual.step(i, None, state)           # read without writing: sublayer i is skipped
    residual.step(i, y, state, norm)        # h comes back as norm(h), ready for the next sublayer
    with residual.recording() as steps:     # steps[i]["beta"]: the coefficients of step i by name

Analysis looks at a state by two more, and never needs to know which residual it has:

    residual.carried(i, state)              # the streams [..., m, D] before sublayer i
    residual.mixture(i, steps[i])           # step i as a linear map of streams and output

And two verbs for a pipeline, whose next stage goes on with sublayer i in another process:

    sent     = residual.handover(i, h, state)    # the fewest tensors that it needs
    h, state = residual.resume(i, sent)          # there: the same h and state
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from multigate.names import unknown
from multigate.norm import RMSNorm
from multigate.numerics import without_autocast

from .layout import Layout, filled, numbered, usual_layout

State = tuple[Any, ...]
"""What a residual carries between steps: tensors in (possibly nested) tuples, opaque to callers."""


def flatten_state(state: State) -> list[Tensor]:
    """The tensors of a state, in order."""
    return [
        t for part in state for t in ([part] if isinstance(part, Tensor) else flatten_state(part))
    ]


def check_sizes(name: str, dim: int, depth: int, streams: int) -> None:
    for what, value in (("dim", dim), ("depth", depth), ("streams", streams)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: {what} must be a whole number of at least 1, got {value!r}.")


class Residual(nn.Module):
    """A residual architecture over `depth` sublayers of width `dim`.

    A subclass implements `_start`, `_step` and `state_size`; where it differs from the default also
    `_batch_shape`, `_step_normed`, `can_skip`, `structural_zeros` and `undecayed`, for analysis
    `carried`, `mixture`, `norm_apart` and `summed`, and, to hand over less than h and the whole
    state, `_handover`, `_resume`, `_resume_normed` and `handover_size`.

    Streams keep the dtype of x. Mixing is computed in float32 (float64 if x is), whatever autocast
    says, and rounded once when it is stored.
    """

    name: ClassVar[str] = "residual"
    _record: dict[int, dict[str, Tensor]] | None = None

    def __init__(self, dim: int, depth: int, streams: int = 1, eps: float = 1e-6) -> None:
        super().__init__()
        check_sizes(self.name, dim, depth, streams)
        self.dim, self.depth, self.streams, self.eps = dim, depth, streams, eps
        self._layouts: dict[tuple[int, torch.dtype], tuple[Layout, int]] = {}

    def start(self, x: Tensor, norm: nn.Module | None = None) -> tuple[Tensor, State]:
        """Begin with the embedding `x` [..., D]: the input of sublayer 0, and the first state."""
        self._check(x, "x")
        self._check_device(x, "x is")
        with without_autocast(x.device.type):
            h, state = self._start(x)
        return (h if norm is None else norm(h)), state

    def step(
        self, i: int, y: Tensor | None, state: State, norm: nn.Module | None = None
    ) -> tuple[Tensor, State]:
        """Write sublayer i's output `y` (None: write nothing), read the input of sublayer i + 1."""
        if not 0 <= i < self.depth:
            raise ValueError(
                f"{self.name}: step {i} does not exist, there are steps 0 to {self.depth - 1}."
            )
        device = flatten_state(state)[0].device
        if y is not None:
            self._check(y, f"the output of sublayer {i}")
            if y.device != device:
                raise ValueError(
                    f"{self.name}: the output of sublayer {i} is on {y.device} but the state is on "
                    f"{device}: move one of them with .to(device)."
                )
            batch = self._batch_shape(i, state)
            if y.shape[:-1] != batch:
                raise ValueError(
                    f"{self.name}: the output of sublayer {i} must have the shape of x, "
                    f"{(*batch, self.dim)}, got {tuple(y.shape)}."
                )
        elif not self.can_skip(i):
            raise ValueError(
                f"{self.name}: sublayer {i} cannot be skipped, its output becomes a stream itself."
            )
        with without_autocast(device.type):
            if norm is not None:
                fused = self._step_normed(i, y, state, norm)
                if fused is not None:
                    return fused
            h, state = self._step(i, y, state)
        return (h if norm is None else norm(h)), state

    def state_size(self, i: int) -> int:
        """Numbers kept per token before sublayer i (i = depth: after the last step)."""
        raise NotImplementedError

    def handover(self, i: int, h: Tensor, state: State) -> tuple[Tensor, ...]:
        """The fewest tensors to go on from with sublayer i = 1 .. depth-1 in another process.

        `h` is what step i - 1 has read, without a norm.
        """
        self._check_boundary(i)
        return self._handover(i, h, state)

    def resume(
        self, i: int, sent: Sequence[Tensor], norm: nn.Module | None = None
    ) -> tuple[Tensor, State]:
        """The input of sublayer i and the state before it, from what `handover` gave."""
        self._check_boundary(i)
        if not sent:
            raise ValueError(f"{self.name}: there is nothing to resume sublayer {i} from.")
        self._check_device(sent[0], "what was handed over is")
        with without_autocast(sent[0].device.type):
            if norm is not None:
                fused = self._resume_normed(i, tuple(sent), norm)
                if fused is not None:
                    return fused
            h, state = self._resume(i, tuple(sent))
        return (h if norm is None else norm(h)), state

    def handover_size(self, i: int) -> int:
        """Numbers per token that `handover` gives at sublayer i, if none was skipped."""
        self._check_boundary(i)
        parameter = next(self.parameters(), torch.empty(0))
        _, size = usual_layout(self, i, parameter.device, torch.float32)
        return size

    def can_skip(self, i: int) -> bool:
        """Whether `step(i, None, state)` has a meaning."""
        return True

    def carried(self, i: int, state: State) -> Tensor | None:
        """The streams [..., m, D] before sublayer i (i = depth: after the last step).

        None where a token carries no vectors that sublayers change, only what they have written.
        """
        return None

    def mixture(self, i: int, coefficients: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """What step i does to the streams, from the coefficients it has noted:

            new_k = sum_j keep[k, j] old_j + take_k y

        as keep [..., m', m] and take [..., m']; None where it is nothing of the kind.
        """
        return None

    def norm_apart(self, i: int) -> bool:
        """Whether step i followed by its norm is the same as step i with it handed over."""
        return True

    def summed(self, i: int) -> int:
        """How many streams the h of step i is the plain sum of, and as many times as large."""
        return 1

    def structural_zeros(self) -> set[str]:
        """Names of the parameters whose gradient the method's algebra makes zero for any data."""
        return set()

    def undecayed(self) -> set[str]:
        """Names of the parameters that weight decay must leave alone: all below two dimensions."""
        return {name for name, p in self.named_parameters() if p.ndim < 2}

    @contextmanager
    def recording(self) -> Iterator[dict[int, dict[str, Tensor]]]:
        """Collect the coefficients of every step by name; entry -1 holds those of `start`."""
        self._record = {}
        try:
            yield self._record
        finally:
            self._record = None

    @property
    def is_recording(self) -> bool:
        """Whether somebody collects coefficients at this moment."""
        return self._record is not None

    def note(self, i: int, **coefficients: Tensor) -> None:
        """Hand the coefficients of step i to whoever is recording; free when nobody is."""
        if self._record is not None:
            self._record.setdefault(i, {}).update({k: v.detach() for k, v in coefficients.items()})

    def extra_repr(self) -> str:
        return f"{self.name}, dim={self.dim}, depth={self.depth}, streams={self.streams}"

    def _start(self, x: Tensor) -> tuple[Tensor, State]:
        raise NotImplementedError

    def _step(self, i: int, y: Tensor | None, state: State) -> tuple[Tensor, State]:
        raise NotImplementedError

    def _step_normed(
        self, i: int, y: Tensor | None, state: State, norm: nn.Module
    ) -> tuple[Tensor, State] | None:
        """The step with `norm` fused into it, or None where this norm cannot be fused."""
        return None

    def _fuses(self, norm: nn.Module) -> TypeGuard[RMSNorm]:
        """Whether `norm` is the one that the fused operations can end with."""
        return type(norm) is RMSNorm and norm.eps == self.eps

    def _handover(self, i: int, h: Tensor, state: State) -> tuple[Tensor, ...]:
        """Unless overridden: h and the tensors of the state, each of them once."""
        sent: list[Tensor] = []
        layout = numbered((h, state), sent)
        if layout != usual_layout(self, i, h.device, h.dtype)[0]:
            raise ValueError(
                f"{self.name}: the state before sublayer {i} is not made up as it is when every "
                "sublayer has written: skip none, or give the residual its own _handover and "
                "_resume."
            )
        return tuple(sent)

    def _resume(self, i: int, sent: tuple[Tensor, ...]) -> tuple[Tensor, State]:
        layout, _ = usual_layout(self, i, sent[0].device, sent[0].dtype)
        h, state = filled(layout, sent)
        return h, state

    def _resume_normed(
        self, i: int, sent: tuple[Tensor, ...], norm: nn.Module
    ) -> tuple[Tensor, State] | None:
        """`_resume` with `norm` fused into it, or None where this norm cannot be fused."""
        return None

    def _batch_shape(self, i: int, state: State) -> torch.Size:
        """The leading dimensions of x, from the state before sublayer i."""
        return flatten_state(state)[0].shape[:-1]

    def _check_boundary(self, i: int) -> None:
        if not 0 < i < self.depth:
            raise ValueError(
                f"{self.name}: there is no handover at sublayer {i}, only at 1 to {self.depth - 1}."
            )

    def _check_device(self, x: Tensor, what: str) -> None:
        parameter = next(self.parameters(), None)
        if parameter is not None and parameter.device != x.device:
            raise ValueError(
                f"{self.name}: {what} on {x.device} but the residual is on {parameter.device}: "
                "move one of them with .to(device)."
            )

    def _check(self, x: Tensor, what: str) -> None:
        if not x.is_floating_point():
            raise ValueError(
                f"{self.name}: {what} must be floating point, got {x.dtype}: embed tokens first."
            )
        if x.ndim == 0 or x.shape[-1] != self.dim:
            raise ValueError(
                f"{self.name}: {what} must have {self.dim} numbers in its last dimension, "
                f"got shape {tuple(x.shape)}."
            )


_REGISTRY: dict[str, type[Residual]] = {}
R = TypeVar("R", bound=type[Residual])


def register_residual(name: str) -> Callable[[R], R]:
    """Class decorator: make a `Residual` available everywhere under `name`."""
    if name in _REGISTRY:
        raise ValueError(f"the residual {name!r} exists already: choose another name.")

    def decorate(cls: R) -> R:
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return decorate


def residual_names() -> list[str]:
    """Every registered residual, simplest first."""
    return list(_REGISTRY)


def default_streams(name: str) -> int | None:
    """How many streams (or blocks) the residual `name` has unless told; None if it takes none."""
    if name not in _REGISTRY:
        raise ValueError(unknown("residual", name, residual_names()))
    parameter = inspect.signature(_REGISTRY[name]).parameters.get("streams")
    return None if parameter is None else parameter.default


def build_residual(
    name: str, dim: int, depth: int, streams: int | None = None, **options: Any
) -> Residual:
    """Build a registered residual for `depth` sublayers of width `dim`.

    `streams` is n for the multi-stream methods and the number of blocks for attnres-block; a
    single-stream residual takes none. The other options are those of the residual's class.
    """
    if name not in _REGISTRY:
        raise ValueError(unknown("residual", name, residual_names()))
    cls = _REGISTRY[name]
    known = [p for p in inspect.signature(cls).parameters if p not in ("dim", "depth")]
    if streams is not None:
        if "streams" not in known:
            raise ValueError(f"{name} takes no number of streams: leave streams={streams} out.")
        options["streams"] = streams
    for option in options:
        if option not in known:
            raise ValueError(unknown(f"option of {name}", option, known))
    check_sizes(name, dim, depth, options.get("streams", 1))
    return cls(dim, depth, **options)
