"""What do the memory modes cost in accuracy? Looks at trained runs of Multi-Gate Residuals.

    python benchmarks/memory_modes.py RUN [RUN ...] --out benchmarks/results

RUN is the folder of a trained run. For each: the gradients of every parameter in each mode against
`store`, on held-out text; how far the inverted streams drift from the true ones, step by step from
the last to the first; and how the gate values are distributed, on which inversion rests. Prints a
table, writes memory_modes.json and memory_modes.png.
"""

import argparse
import json
import os
import textwrap
from pathlib import Path

import numpy as np
import torch

from multigate.checkpoint import open_run
from multigate.data import open_data
from multigate.device import choose
from multigate.evaluate import load_model
from multigate.ops.gate_pool import passes, reference
from multigate.residuals.memory import Memory
from multigate.residuals.mgr import MultiGateResidual

MODES = {
    "store, once more": Memory("store"),
    "recompute": Memory("recompute"),
    "exact": Memory("exact"),
    "invert, keep 1%": Memory("invert"),
    "invert, keep 0": Memory("invert", keep=0.0),
    "invert, keep 1%, every 8": Memory("invert", every=8),
}
SCHEMES = {
    "keep 0": Memory("invert", keep=0.0),
    "keep 1%": Memory("invert"),
    "keep 5%": Memory("invert", keep=0.05),
    "keep 1%, all at every 8th step": Memory("invert", every=8),
}
SMALL = 0.1


def gradients(model, tokens, memory, autocast):
    model.stack.residual.memory = memory
    model.zero_grad(set_to_none=True)
    with autocast():
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(found, expected):
    """Least and mean cosine of a group's gradients, and whether every bit of them is the same."""
    groups = {"sublayers": [], "gates": []}
    same = True
    for name, gradient in expected.items():
        same &= torch.equal(found[name], gradient)
        if gradient.norm() > 0:
            a, b = (g.double().flatten() for g in (found[name], gradient))
            group = "gates" if ".residual." in name else "sublayers"
            groups[group].append(float(torch.nn.functional.cosine_similarity(a, b, dim=0)))
    least = {f"{name} least": min(cosines) for name, cosines in groups.items()}
    mean = {f"{name} mean": sum(cosines) / len(cosines) for name, cosines in groups.items()}
    return {"same bits": same, **least, **mean}


def gradient_study(model, tokens, autocast):
    before = model.stack.residual.memory
    expected = gradients(model, tokens, Memory("store"), autocast)
    found = {
        name: compare(gradients(model, tokens, memory, autocast), expected)
        for name, memory in MODES.items()
    }
    model.stack.residual.memory = before
    return found


@torch.no_grad()
def gated_steps(model, tokens, autocast):
    """y, beta and the streams before each gated step."""
    residual, steps = model.stack.residual, []
    step = residual.step

    def watched(i, y, state, norm=None):
        gate = residual.steps[i]
        if isinstance(gate, MultiGateResidual):
            whole = state[0] if len(state) == 1 else torch.stack(state, -2)
            beta = reference.gate(whole, gate.w1, gate.b1, gate.gate_variant, gate.eps)
            steps.append((y, beta, whole))
        return step(i, y, state, norm)

    residual.step = watched
    try:
        with autocast():
            model(tokens[:, :-1])
    finally:
        del residual.step
    return steps


@torch.no_grad()
def drift(steps, memory):
    """||s~ - s|| / ||s|| of the inverted streams before each step, from the last to the first; 0
    where they are kept."""
    errors, streams = [], None
    for j, (y, beta, true) in reversed(list(enumerate(steps))):
        if j == 0 or memory.ends(j, len(steps)):
            streams = true
        else:
            streams = reference.unlerp(streams, y, beta)
            rows, index = passes.largest(true, beta, memory.millionths)
            streams = streams.flatten(0, -2).index_copy(0, index, rows).view(true.shape)
        errors.append(float((streams.float() - true.float()).norm() / true.float().norm()))
    return errors


def inversion_study(model, tokens, autocast):
    steps = gated_steps(model, tokens, autocast)
    beta = torch.stack([beta.flatten() for _, beta, _ in steps]).float().cpu()
    counts, edges = np.histogram(beta.numpy(), bins=50, range=(0, 1))
    return {
        "drift": {name: drift(steps, memory) for name, memory in SCHEMES.items()},
        "gate": {
            "mean": float(beta.mean()),
            "max": float(beta.max()),
            "share below 0.1": float((beta < SMALL).float().mean()),
            "histogram": (counts / counts.sum()).tolist(),
            "edges": edges.tolist(),
        },
    }


def draw(studies, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5, 2.4 * len(studies)), 5.5), layout="constrained")
    axes = figure.subplots(2, len(studies), squeeze=False, sharey="row")
    for (above, below), (name, study) in zip(axes.T, studies.items(), strict=True):
        for scheme, errors in study["drift"].items():
            shown = [error or np.nan for error in errors]
            above.semilogy(range(len(errors)), shown, label=scheme)
        above.set(xlabel="steps back from the last")
        above.set_title(textwrap.fill(name, 24), fontsize="medium")
        gate = study["gate"]
        below.stairs(gate["histogram"], gate["edges"], fill=True)
        below.set_yscale("log")
        below.set(xlabel=f"gate value; {gate['share below 0.1']:.1%} below 0.1", xlim=(0, 1))
    axes[0, 0].set_ylabel("error of the inverted streams")
    axes[1, 0].set_ylabel("share of the gates")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, help="prepared text; that of the run if left out")
    parser.add_argument("--windows", type=int, default=8, help="sequences of the model's length")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    # Otherwise attention's own backward pass, which adds in any order, would hide what is asked.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    compute, studies = choose(args.device), {}
    for run in args.runs:
        path, state = open_run(run, "last")
        model = load_model(path, state).to(compute.device)
        split = open_data(args.data or Path(state["data"]), verify=False).split("val")
        count = min(args.windows, split.windows(model.config.context))
        rows = split.rows(range(count), model.config.context)
        tokens = torch.from_numpy(rows.astype(np.int64)).to(compute.device)
        residual = model.stack.residual
        name = f"{residual.depth} sublayers, {residual.streams} streams"
        if name in studies:
            name += f", {run.name}"
        studies[name] = inversion_study(model, tokens, compute.autocast)
        studies[name]["gradients"] = gradient_study(model, tokens, compute.autocast)
        for mode, found in studies[name]["gradients"].items():
            figures = ", ".join(
                f"{k} {v}" if isinstance(v, bool) else f"{k} {v:.6f}" for k, v in found.items()
            )
            print(f"{name}, {mode}: {figures}", flush=True)
        gate = studies[name]["gate"]
        print(
            f"{name}: {gate['share below 0.1']:.1%} of the gates below 0.1, mean {gate['mean']:.3f}"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "memory_modes.json").write_text(json.dumps(studies, indent=1) + "\n")
    draw(studies, args.out / "memory_modes.png")


if __name__ == "__main__":
    main()
