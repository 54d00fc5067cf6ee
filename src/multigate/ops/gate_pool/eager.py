"""The Multi-Gate step where no kernel runs and nothing is compiled: the gradient by hand.

It goes over the streams half as often as autograd's of the reference, and of their size it keeps
nothing but the streams.

Shapes: y and h [N, D], streams [N, n, D], what is measured [N, n]; N tokens.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from multigate.numerics import (
    dot,
    inverse_rms,
    normed,
    rounded,
    weighted_sum,
    wide,
    without_autocast,
)
from multigate.ops.rows import (
    first_gradients,
    mixed,
    normed_backward,
    scored_backward,
    softmax_backward,
)

from . import reference

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""y, the streams, w_gate, w_pool, bias, norm_weight."""
Gradients = tuple[Tensor | None, ...]
"""Of those."""


class Measured(NamedTuple):
    """Of the old streams s and the new ones s', with z = w . rms(s) / sqrt(D)."""

    z_gate: Tensor
    root_gate: Tensor
    """1 / rms(s)"""
    z_pool: Tensor
    root_pool: Tensor
    """1 / rms(s')"""
    alpha: Tensor
    gates: Tensor
    """beta; the competitive gate's carry before it, [N, 1 + n]."""
    h: Tensor
    """Before the norm, [N, D]."""

    @property
    def beta(self) -> Tensor:
        return self.gates[:, -self.alpha.shape[1] :]


class Step(torch.autograd.Function):
    """`reference.gate_pool`; its gradients have other roundings than autograd's."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        streams: Tensor,
        w_gate: Tensor,
        w_pool: Tensor,
        bias: Tensor,
        norm_weight: Tensor | None,
        variant: str,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        inputs = (y, streams, w_gate, w_pool, bias, norm_weight)
        h, new, measured = step(inputs, variant, eps)
        ctx.set_materialize_grads(False)
        ctx.options = (variant, eps)
        ctx.save_for_backward(*inputs, new, *measured)
        return h, new

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor | None, grad_new: Tensor | None) -> Gradients:
        y, streams, w_gate, w_pool, bias, norm_weight, new, *measured = ctx.saved_tensors
        inputs = (y, streams, w_gate, w_pool, bias, norm_weight)
        variant, eps = ctx.options
        if grad_h is None and grad_new is None:
            return (None,) * 8
        if torch.is_grad_enabled():
            # Somebody wants the gradients of these gradients: autograd knows them.
            found = through_reference(grad_h, grad_new, inputs, variant, eps)
        else:
            found = gradients(grad_h, grad_new, inputs, new, Measured(*measured), eps)
        return (*found, None, None)


def step(inputs: Inputs, variant: str, eps: float) -> tuple[Tensor, Tensor, Measured]:
    """h and the new streams as the reference makes them, to the bit, and what was measured."""
    y, streams = inputs[:2]
    with torch.no_grad(), without_autocast(y.device.type):
        given = flat(inputs)
        new, measured = forward(given, variant, eps)
        h = normed(measured.h, given[-1], eps)
    dtype = streams.dtype
    return rounded(h.view(y.shape), dtype), rounded(new.view(streams.shape), dtype), measured


def gradients(
    grad_h: Tensor | None,
    grad_new: Tensor | None,
    inputs: Inputs,
    new: Tensor,
    measured: Measured,
    eps: float,
) -> Gradients:
    """Of the inputs, in their shapes and dtypes."""
    with torch.no_grad(), without_autocast(new.device.type):
        given = flat(inputs)
        y, streams = given[:2]
        if new.dtype == streams.dtype:
            new = new.reshape(streams.shape)
        else:
            # The pool has read them before they were rounded.
            new = reference.lerp(y, streams, measured.beta)
        dh = None if grad_h is None else grad_h.to(y.dtype).reshape(y.shape)
        dnew = None if grad_new is None else grad_new.to(y.dtype).reshape(streams.shape)
        found = backward(dh, dnew, given, new, measured, eps)
    return tuple(
        None if gradient is None or t is None else rounded(gradient.view_as(t), t.dtype)
        for gradient, t in zip(found, inputs, strict=True)
    )


def forward(given: Inputs, variant: str, eps: float) -> tuple[Tensor, Measured]:
    """The new streams, and what was measured."""
    y, streams, w_gate, w_pool, bias, _ = given
    scale = y.shape[-1] ** -0.5
    root_gate = inverse_rms(streams, eps)
    z_gate = dot(streams, w_gate) * root_gate * scale
    gates = reference.opened(z_gate, bias, variant)
    new = reference.lerp(y, streams, gates[:, -streams.shape[1] :])
    root_pool = inverse_rms(new, eps)
    z_pool = dot(new, w_pool) * root_pool * scale
    alpha = z_pool.softmax(dim=1)
    h = weighted_sum(new.unbind(1), alpha)
    return new, Measured(z_gate, root_gate, z_pool, root_pool, alpha, gates, h)


def backward(
    dh: Tensor | None, dnew: Tensor | None, given: Inputs, new: Tensor, of: Measured, eps: float
) -> Gradients:
    """From the gradients of h and of the new streams to those of everything given.

    ds'   = dnew + alpha dh + (what dz' makes of s', see `scored_backward`)
    dbeta = ds' . (y - s)
    dy    = sum_i beta_i ds'_i
    ds    = (1 - beta) ds' + (what dz makes of s)
    """
    y, streams, w_gate, w_pool, _, norm_weight = given
    scale, beta = y.shape[-1] ** -0.5, of.beta.unsqueeze(-1)
    room = torch.empty_like(streams)
    dw_pool, dnorm = None, None
    if dh is None:
        assert dnew is not None, "one of the two outputs has a gradient"
        total = dnew
    else:
        if norm_weight is not None:
            dh, dnorm = normed_backward(dh, of.h, norm_weight, eps)
        dalpha = torch.mul(new, dh.unsqueeze(1), out=room).sum(-1)
        dz = softmax_backward(dalpha, of.alpha)
        dw_pool = mixed(new, scale * dz * of.root_pool)
        total = scored_backward(dz, of.z_pool, of.root_pool, new, w_pool, scale)
        total.addcmul_(of.alpha.unsqueeze(-1), dh.unsqueeze(1))
        if dnew is not None:
            total += dnew
    dy = weighted_sum(total.unbind(1), of.beta)
    dbeta = torch.sub(y.unsqueeze(1), streams, out=room).mul_(total).sum(-1)
    if of.gates.shape[1] == beta.shape[1]:
        dz = dbias = dbeta * of.beta * (1 - of.beta)
    else:
        dbias = softmax_backward(F.pad(dbeta, (1, 0)), of.gates)
        dz = dbias[:, 1:]
    dw_gate = mixed(streams, scale * dz * of.root_gate)
    dstreams = scored_backward(dz, of.z_gate, of.root_gate, streams, w_gate, scale, room)
    dstreams.addcmul_(total, 1 - beta)
    return dy, dstreams, dw_gate, dw_pool, dbias.sum(0), dnorm


def flat(inputs: Inputs) -> Inputs:
    """The inputs in the precision of all mixing, y and the streams in the shapes of this file."""
    y, streams, w_gate, w_pool, bias, norm_weight = inputs
    streams = wide(streams)
    dtype, (n, width) = streams.dtype, streams.shape[-2:]
    # No -1 for the tokens: there may be none.
    tokens = streams.shape[:-2].numel()
    rows = y.to(dtype).reshape(tokens, width)
    gain = None if norm_weight is None else norm_weight.to(dtype)
    streams = streams.reshape(tokens, n, width).contiguous()
    return rows, streams, w_gate.to(dtype), w_pool.to(dtype), bias.to(dtype), gain


def through_reference(
    grad_h: Tensor | None, grad_new: Tensor | None, inputs: Inputs, variant: str, eps: float
) -> Gradients:
    """The gradients by autograd, which can differentiate them again."""
    y, streams, w_gate, w_pool, bias, norm_weight = inputs
    with without_autocast(y.device.type):
        h, new = reference.gate_pool(y, streams, w_gate, w_pool, bias, variant, norm_weight, eps)
    return first_gradients([(h, grad_h), (new, grad_new)], inputs)
