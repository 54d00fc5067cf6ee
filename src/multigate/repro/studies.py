"""The studies: which cells they have, and how a table groups them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from multigate.names import unknown

from .cells import (
    BLOCK_4,
    BLOCK_8,
    COMPETITIVE_4,
    COMPETITIVE_8,
    FULL,
    INDEPENDENT_4,
    INDEPENDENT_8,
    MHC_LITE,
    PRENORM,
    RELATED,
    ROWS,
    SCALED,
    Cell,
)

LEARNING_RATES = (0.5, 1.0, 2.0)
"""Times the learning rates of the recipe; PreNorm chooses among them on val."""
DEPTHS = {
    "tiny": ((3, 192, 1), (12, 96, 1)),
    "mini": ((6, 512, 4), (24, 256, 2)),
    "s": ((6, 1024, 8), (24, 512, 4)),
}
"""Blocks, width and heads at nearly the parameters of the scale itself."""
DEEP = {"tiny": (12, 64, 1), "mini": (36, 256, 2), "s": (36, 512, 4)}


@dataclass(frozen=True)
class Group:
    """The cells of one table, in order; a cell may be in several."""

    title: str
    cells: Sequence[Cell]
    about: str = ""
    extra: bool = False
    """Whether fewer seeds will do: see `extra_seeds` of the command."""


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    page: str
    """The file of its tables; its numbers are in a .json of its own."""
    numbers: str
    groups: Sequence[Group]
    baseline: Cell = PRENORM
    """What the learning rates are checked on."""
    learning_rates: Sequence[float] = (1.0,)
    pairs: Sequence[tuple[Cell, Cell]] = ()
    """Cells that are also compared with each other."""
    curves: bool = True
    """Whether its figure has the curves of its first table; else the differences of all tables."""
    analyze: bool = False
    """Whether `multigate analyze` looks into each of its runs."""

    def cells(self) -> dict[str, Cell]:
        """Every cell once, by key, in the order in which they are most useful."""
        return {cell.key: cell for group in self.groups for cell in group.cells}

    def chosen(self, rows: Sequence[str]) -> list[str]:
        """The keys that `rows` name, each with its alternatives; all of them for none."""
        cells = self.cells()
        for name in rows:
            if name not in cells:
                raise ValueError(unknown(f"row of {self.name}", name, cells))
        wanted = {key for name in rows for key in (name, *cells[name].alternatives)}
        return [key for key in cells if not rows or key in wanted]


def table1(scale: str) -> Study:
    """The nine rows of the paper, and the work it only cites."""
    variants = [
        cell for pair in zip((BLOCK_4, BLOCK_8, FULL), SCALED, strict=True) for cell in pair
    ]
    return Study(
        "table1",
        "Table 1",
        "TABLE.md",
        "results.json",
        [
            Group("The rows of the paper's table", ROWS),
            Group(
                "AttnRes with and without 1/sqrt(d)",
                variants,
                "The paper does not say whether the logits of its AttnRes are divided by sqrt(d): "
                "both were run, and the one with the lower mean val loss, over the seeds that both "
                "have, stands above.",
            ),
            Group("Related work that the paper cites", RELATED, extra=True),
        ],
        pairs=[
            *((mgr, FULL) for mgr in (INDEPENDENT_4, COMPETITIVE_4, INDEPENDENT_8, COMPETITIVE_8)),
            (COMPETITIVE_4, MHC_LITE),
            (COMPETITIVE_8, MHC_LITE),
            (MHC_LITE, FULL),
            *((of, BLOCK_4) for of in (INDEPENDENT_4, COMPETITIVE_4)),
            *((of, BLOCK_8) for of in (INDEPENDENT_8, COMPETITIVE_8, FULL)),
            (INDEPENDENT_8, INDEPENDENT_4),
            (COMPETITIVE_8, COMPETITIVE_4),
            (COMPETITIVE_4, INDEPENDENT_4),
            (COMPETITIVE_8, INDEPENDENT_8),
        ],
        # The paper has chosen the learning rates of its own scales.
        learning_rates=LEARNING_RATES if scale in ("tiny", "mini") else (1.0,),
    )


def ablations(scale: str) -> Study:
    """What the paper leaves open, one question a table."""
    competitive, eight = COMPETITIVE_4, COMPETITIVE_8
    independent, independent_8 = INDEPENDENT_4, INDEPENDENT_8
    # Calibrated, four streams over 24 sublayers begin with -3.
    own = [biased(independent, b) for b in (-1.0, "calibrated", -5.0)]
    biases = [competitive, *(biased(competitive, b) for b in (-1.0, -3.0, -5.0)), independent, *own]
    calibrated_8 = biased(independent_8, "calibrated")
    one, two, twelve = (with_streams(competitive, n) for n in (1, 2, 12))
    shapes = depths(scale)
    floats = [
        variant(of, "float32", "streams in float32", stream_dtype="float32")
        for of in (PRENORM, FULL, competitive)
    ]
    modes = [
        variant(competitive, mode, f"memory {mode}", memory=mode)
        for mode in ("recompute", "invert", "exact")
    ]
    return Study(
        "ablations",
        "Ablations",
        "ABLATIONS.md",
        "ablations.json",
        [
            Group(
                "Initial gate bias",
                [*biases, independent_8, calibrated_8],
                "Without a remark: the paper's formula, with n the number of streams for both "
                "gates; calibrated: n = 1 in it for the independent gate, which then begins with "
                "the same gates as the competitive one.",
            ),
            Group("Number of streams", [PRENORM, one, two, competitive, eight, twelve]),
            Group(
                "AttnRes with and without 1/sqrt(d)",
                [
                    cell
                    for of, to in zip((BLOCK_4, BLOCK_8, FULL), SCALED, strict=True)
                    for cell in (of, replace(to, against=of.key))
                ],
            ),
            Group(
                "Depth at nearly equal parameters",
                [cell for cells in shapes for cell in cells],
                "Each against PreNorm of its own shape.",
            ),
            Group("Streams in float32", [PRENORM, FULL, competitive, *floats]),
            Group("Memory mode", [competitive, *modes]),
        ],
        pairs=[
            (calibrated_8, biased(independent, "calibrated")),
            (two, competitive),
            (twelve, eight),
            *((mgr, full) for _, *both, mgr in shapes for full in both),
        ],
        curves=False,
        learning_rates=LEARNING_RATES if scale in ("tiny", "mini") else (1.0,),
    )


def deep(scale: str) -> Study:
    """Many narrow blocks, looked into by `multigate analyze`."""
    if scale not in DEEP:
        raise ValueError(f"the study deep has a shape at the scales {', '.join(DEEP)} only.")
    blocks, width, heads = DEEP[scale]
    size = {"blocks": blocks, "width": width, "heads": heads}
    cells = [
        replace(cell, model={**cell.model, **size}, alternatives=(), paper={})
        for cell in (PRENORM, *SCALED[1:], INDEPENDENT_8, COMPETITIVE_8)
    ]
    invert = variant(
        cells[-1],
        "invert",
        "memory invert, p=0.01",
        memory="invert",
        residual_options={"keep": 0.01},
    )
    cells = [replace(cell, key=f"deep-{cell.key}", against="deep-prenorm") for cell in cells]
    inverted = replace(invert, key=f"deep-{invert.key}", against=cells[-1].key)
    prenorm, block, full, *both = cells
    return Study(
        "deep",
        f"Deep models: {blocks} blocks of width {width}",
        "DEEP.md",
        "deep.json",
        [
            Group(
                "Loss",
                [*cells, inverted],
                "Attention Residuals have 1/sqrt(d), with which their loss was lower at mini.",
            )
        ],
        prenorm,
        pairs=[(mgr, of) for mgr in both for of in (block, full)],
        analyze=True,
    )


STUDIES = {"table1": table1, "ablations": ablations, "deep": deep}


def variant(of: Cell, suffix: str, label: str, **model: Any) -> Cell:
    """`of` with something changed, compared with `of`."""
    changed: Mapping[str, Any] = {**of.model, **model}
    return Cell(f"{of.key}-{suffix}", f"{of.label}, {label}", of.residual, changed, of.key)


def biased(of: Cell, bias: str | float) -> Cell:
    word = bias if isinstance(bias, str) else f"bias-minus{-bias:g}"
    label = bias if isinstance(bias, str) else f"bias {bias:g}"
    return variant(of, word, label, residual_options={"bias_init": bias})


def with_streams(of: Cell, n: int) -> Cell:
    """The same method with n streams, compared with PreNorm as the others are."""
    key, label = of.key.rpartition("-")[0], of.label.partition(" (")[0]
    return Cell(f"{key}-{n}", f"{label} (n={n})", of.residual, {**of.model, "streams": n})


def depths(scale: str) -> Sequence[Sequence[Cell]]:
    """PreNorm, both Full AttnRes and competitive MGR: with fewer and wider blocks, in the shape of
    the scale, and with more and narrower ones."""
    # Both are shown, so neither may stand for the other.
    own = (PRENORM, replace(FULL, alternatives=()), SCALED[-1], COMPETITIVE_4)
    others = [[reshaped(of, *shape) for of in own] for shape in DEPTHS.get(scale, ())]
    return [*others[:1], own, *others[1:]]


def reshaped(of: Cell, blocks: int, width: int, heads: int) -> Cell:
    """`of` in another shape, compared with PreNorm in that shape."""
    shape = f"{blocks}x{width}"
    changed = variant(of, shape, shape, blocks=blocks, width=width, heads=heads)
    return replace(changed, against=f"{PRENORM.key}-{shape}")
