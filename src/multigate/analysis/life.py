"""The life of a stream: how fast it changes with depth, and who wrote what is in it at the end."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from multigate.numerics import wide

from .chart import Chart, Heat, Line, Panel
from .look import far_apart
from .probe import Step, watch
from .running import Array, Arrays, Mean, Table, exact

NAMED = 4
"""The most streams of which each is put into words."""


class Life:
    """How fast streams change, and the exact share of every writer in every final stream.

    The speed of stream k at a step is |s'_k - s_k| / |s_k|. A step does

        s'_k = sum_j keep[k, j] s_j + take_k y_i

    so that a stream is at any depth a sum over writers, the embedding and the outputs y_i, with
    coefficients that follow by the same recursion, token by token:

        s_k = W[k, 0] e + sum_i W[k, i + 1] y_i,    W <- keep W + take (column i + 1)

    W starts as 1 in column 0. Where gates are convex, its rows sum to 1 and are shares; elsewhere
    they are coefficients. A skipped sublayer has written nothing: its column is 0.

    Recorded as means over tokens: `speed` [depth, n], NaN where the stream is not there before the
    step; `shares` [n, depth + 1], the last W of a pass; and `final` [depth + 1], the same of the
    output h = sum_k alpha_k s_k, if the last step has such weights over the streams.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._speed = Table()
        self._written: Tensor | None = None
        self._alpha: Tensor | None = None
        self._shares, self._final = Mean(), Mean()

    @torch.no_grad()
    def see(self, step: Step) -> None:
        if step.i < 0:
            self._close()
            if step.after is not None:
                self._written = torch.ones_like(exact(step.after[..., :1]))
            return
        self._depth = max(self._depth, step.i + 1)
        if step.before is not None and step.after is not None:
            self._speed.add(step.i, speed(step.before, step.after))
        if self._written is not None:
            self._written = self._write(self._written, step)
            self._alpha = step.coefficients.get("alpha")

    def _write(self, written: Tensor, step: Step) -> Tensor | None:
        """W with a column more; None where the step is not linear in the streams."""
        if step.output is None:
            return nn.functional.pad(written, (0, 1))
        if step.mixture is None:
            return None
        keep, take = (exact(part.to(written.device)) for part in step.mixture)
        kept = keep @ written
        return torch.cat([kept, take.expand(kept.shape[:-1]).unsqueeze(-1)], dim=-1)

    def _close(self) -> None:
        """A pass is over: what its streams were made of in the end counts."""
        written, alpha = self._written, self._alpha
        self._written = self._alpha = None
        if written is None:
            return
        self._shares.add(written.reshape(-1, *written.shape[-2:]))
        if alpha is not None and alpha.shape == written.shape[:-1]:
            final = (exact(alpha).unsqueeze(-1) * written).sum(-2)
            self._final.add(final.reshape(-1, final.shape[-1]))

    def result(self) -> Arrays:
        self._close()
        found: Arrays = {}
        if self._speed.rows():
            found["speed"] = self._speed.result(self._depth)
        for name, mean in (("shares", self._shares), ("final", self._final)):
            if mean.count:
                found[name] = mean.result()
        return found


def speed(before: Tensor, after: Tensor) -> Tensor:
    """|s' - s| / |s| [tokens, m] of the streams [..., m, D] after a step; NaN for new ones."""
    new = after.shape[-2] - before.shape[-2]
    before, after = wide(before), wide(after[..., : before.shape[-2], :])
    moved = (after - before).norm(dim=-1) / before.norm(dim=-1)
    return nn.functional.pad(moved, (0, new), value=torch.nan).reshape(-1, moved.shape[-1] + new)


def stream_life(model: nn.Module, tokens: Tensor, batch: int | None = None) -> Arrays:
    """`Life` over `tokens` [samples, T]."""
    life = Life()
    watch(model, tokens, life, batch=batch)
    return life.result()


def charts(runs: Mapping[str, Arrays]) -> list[Chart]:
    """The speed of all runs, and the shares of each."""
    drawn = [_speed(runs), *_shares(runs)]
    if any(chart.panels for chart in drawn):
        return drawn
    absent = [f"{label} carries no streams." for label in runs]
    return [Chart("life", "Life of the streams", "How streams change with depth.", absent=absent)]


def _speed(runs: Mapping[str, Arrays]) -> Chart:
    found = {label: arrays["speed"] for label, arrays in runs.items() if "speed" in arrays}
    log_y = far_apart(np.concatenate([np.empty(0), *map(np.ravel, found.values())]))
    panels, seen = [], []
    for label, values in found.items():
        numbers = np.arange(len(values)) + 1
        # A logarithmic axis has no place for a stream that stays as it is.
        shown = np.where(values > 0, values, np.nan) if log_y else values
        lines = [Line(f"stream {k}", numbers, shown[:, k], k) for k in range(shown.shape[1])]
        panels.append(Panel(label, "sublayer", "|change| / |stream|", lines, log_y))
        seen.append(_speed_seen(label, values))
    return Chart(
        name="life-speed",
        title="How fast the streams change",
        shows="How far each stream moves at each sublayer, as a share of its length (mean over "
        "tokens).",
        panels=tuple(panels),
        seen=" ".join(seen),
        absent=[f"{label} carries no streams." for label in runs if label not in found],
    )


def _speed_seen(label: str, values: Array) -> str:
    there = np.flatnonzero(np.isfinite(values).any(0))
    if not there.size:
        return f"The streams of {label} are not finite."
    mean = np.nanmedian(values[:, there], axis=0)
    if there.size == 1:
        return (
            f"The stream of {label} changes by {mean[0]:.3f} of its length at the median sublayer."
        )
    slow, fast = int(np.argmin(mean)), int(np.argmax(mean))
    return (
        f"The streams of {label} change by {mean[slow]:.3f} (stream {there[slow]}) to "
        f"{mean[fast]:.3f} (stream {there[fast]}) of their length at the median sublayer."
    )


def _shares(runs: Mapping[str, Arrays]) -> list[Chart]:
    """A chart for each run: shares of one and coefficients of another need scales of their own."""
    absent, drawn = [], list[Chart]()
    for label, arrays in runs.items():
        if "shares" not in arrays:
            absent.append(
                f"What the sublayers of {label} write goes into its streams in a way that shares "
                "cannot tell."
                if "speed" in arrays
                else f"{label} carries no streams."
            )
        elif not np.isfinite(arrays["shares"]).all():
            absent.append(f"The streams of {label} are not finite.")
        elif _even(arrays["shares"]):
            value = arrays["shares"][0, 0]
            absent.append(f"{label} counts all writers alike: each coefficient is {value:.4g}.")
    for label, arrays in runs.items():
        known = "shares" in arrays and np.isfinite(arrays["shares"]).all()
        if not known or _even(arrays["shares"]):
            continue
        shares, streams = arrays["shares"], [str(k) for k in range(len(arrays["shares"]))]
        convex = _convex(shares)
        seen = _shares_seen(label, shares, arrays.get("final"))
        if "final" in arrays:
            shares, streams = np.vstack([shares, arrays["final"]]), [*streams, "output"]
        most = float(np.abs(shares).max())
        scale = (-most, most, 0.0) if shares.min() < 0 else (0.0, most, None)
        writers = np.arange(shares.shape[1])
        heat = Heat(shares, writers, streams, "share" if convex else "coefficient", *scale)
        drawn.append(
            Chart(
                name=f"life-shares-{label}",
                title=f"Who wrote the final streams, {label}",
                shows=f"The exact {'share' if convex else 'coefficient'} of the embedding (writer "
                "0) and of every sublayer's output in each final stream (mean over tokens).",
                panels=[Panel(label, "writer, 0 is the embedding", "stream", [heat])],
                seen=seen,
                absent=absent if not drawn else (),
            )
        )
    if drawn or not absent:
        return drawn
    title = "Who wrote the final streams"
    shows = "The exact share of every sublayer's output in each final stream."
    return [Chart("life-shares", title, shows, absent=absent)]


def _even(shares: Array) -> bool:
    """Whether all writers count alike, as for PreNorm: there is nothing to draw."""
    return bool(np.ptp(shares) < 1e-9)


def _convex(shares: Array) -> bool:
    return bool(shares.min() >= 0 and np.abs(shares.sum(1) - 1).max() < 1e-3)


def _shares_seen(label: str, shares: Array, final: Array | None) -> str:
    """Who has most of each stream, and how much of the embedding is left."""
    unit = "share" if _convex(shares) else "coefficient"
    most = np.abs(shares).argmax(1)
    largest = shares[np.arange(len(shares)), most]
    if len(shares) <= NAMED:
        each = [f"stream {k} {_writer(j)} ({largest[k]:.2f})" for k, j in enumerate(most.tolist())]
        text = f"The largest {unit} in the streams of {label}: {', '.join(each)}."
    else:
        low, high = int(np.abs(largest).argmin()), int(np.abs(largest).argmax())
        text = (
            f"The largest {unit} in a stream of {label} is between {largest[low]:.2f} "
            f"({_writer(int(most[low]))} in stream {low}) and {largest[high]:.2f} "
            f"({_writer(int(most[high]))} in stream {high})."
            if low != high
            else f"Each stream of {label} is one writer's alone, to {largest[low]:.2f}."
        )
    left = f"{shares[:, 0].min():.3f} to {shares[:, 0].max():.3f}"
    if len(shares) == 1:
        left = f"{shares[0, 0]:.3f}"
    output = "" if final is None else f" ({final[0]:.3f} in the output)"
    return f"{text} The embedding is left with {left}{output}."


def _writer(j: int) -> str:
    return f"sublayer {j}" if j else "the embedding"
