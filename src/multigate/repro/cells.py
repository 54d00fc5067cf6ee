"""What is trained: the rows of the paper's Table 1 with its figures, and the related work."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Figures = Mapping[str, tuple[float, float]]
"""By scale: the paper's training and validation loss."""


@dataclass(frozen=True)
class Cell:
    """One thing to train: what of it differs from the recipe of the scale."""

    key: str
    """Its name in files and on the command line."""
    label: str
    """Its name in tables."""
    residual: str
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelChanges`."""
    against: str = "prenorm"
    """The key of the cell that it is compared with, seed by seed."""
    alternatives: tuple[str, ...] = ()
    """Keys of cells that may stand in its row, if they are better on val."""
    paper: Figures = field(default_factory=dict)


def row(
    key: str,
    label: str,
    residual: str,
    streams: int | None = None,
    *paper: tuple[float, float] | None,
    alternatives: tuple[str, ...] = (),
) -> Cell:
    """A row of Table 1 with the paper's figures at the scales S, M and L."""
    figures = {s: pair for s, pair in zip("sml", paper, strict=True) if pair is not None}
    model = {} if streams is None else {"streams": streams}
    return Cell(key, label, residual, model, paper=figures, alternatives=alternatives)


def scaled(of: Cell) -> Cell:
    """Attention Residuals whose logits are divided by sqrt(D), as Multi-Gate Residuals' are."""
    model = {**of.model, "residual_options": {"scaled": True}}
    label = f"{of.label}, 1/sqrt(d)"
    return Cell(f"{of.key}-scaled", label, of.residual, model, paper=of.paper)


# Of the paper's figures two training losses look like misprints, for the gap between train and val
# is nearly the same in all rows of a scale: mHC-lite M 2.7157 (2.7057?) and Block AttnRes n=8 L
# 2.6925 (2.6025?). They are given as printed.
PRENORM = row(
    "prenorm", "PreNorm", "prenorm", None, (2.9280, 2.9440), (2.7286, 2.7314), (2.6306, 2.6213)
)
MHC_LITE = row(
    "mhc-lite-4", "mHC-lite (n=4)", "mhc-lite", 4, (2.8992, 2.9145), (2.7157, 2.7082), None
)
BLOCK_4 = row(
    *("attnres-block-4", "Block AttnRes (n=4)", "attnres-block", 4),
    *((2.8951, 2.9107), (2.6994, 2.7009), (2.6054, 2.5946)),
    alternatives=("attnres-block-4-scaled",),
)
BLOCK_8 = row(
    *("attnres-block-8", "Block AttnRes (n=8)", "attnres-block", 8),
    *((2.8921, 2.9081), (2.6952, 2.6970), (2.6925, 2.5921)),
    alternatives=("attnres-block-8-scaled",),
)
FULL = row(
    *("attnres-full", "Full AttnRes", "attnres-full", None),
    *((2.8911, 2.9066), (2.6930, 2.6947), (2.6036, 2.5920)),
    alternatives=("attnres-full-scaled",),
)
INDEPENDENT_4 = row(
    *("mgr-independent-4", "Independent MGR (n=4)", "mgr-independent", 4),
    *((2.8887, 2.9040), (2.6911, 2.6929), (2.6006, 2.5903)),
)
COMPETITIVE_4 = row(
    *("mgr-competitive-4", "Competitive MGR (n=4)", "mgr-competitive", 4),
    *((2.8889, 2.9045), (2.6889, 2.6911), (2.6001, 2.5898)),
)
INDEPENDENT_8 = row(
    *("mgr-independent-8", "Independent MGR (n=8)", "mgr-independent", 8),
    *((2.8877, 2.9034), (2.6896, 2.6912), (2.5994, 2.5887)),
)
COMPETITIVE_8 = row(
    *("mgr-competitive-8", "Competitive MGR (n=8)", "mgr-competitive", 8),
    *((2.8869, 2.9020), (2.6891, 2.6908), (2.5966, 2.5857)),
)
ROWS = (
    *(PRENORM, MHC_LITE, BLOCK_4, BLOCK_8, FULL),
    *(INDEPENDENT_4, COMPETITIVE_4, INDEPENDENT_8, COMPETITIVE_8),
)
SCALED = tuple(map(scaled, (BLOCK_4, BLOCK_8, FULL)))
RELATED = (
    Cell("highway", "Highway", "highway"),
    Cell("denseformer", "DenseFormer", "denseformer"),
    Cell("hc-4", "Hyper-Connections (n=4)", "hc", {"streams": 4}),
    Cell("mhc-4", "mHC (n=4)", "mhc", {"streams": 4}),
    Cell("moda", "MoDA", "prenorm", {"attention": "moda"}),
    Cell("moda-ffn", "MoDA with keys of the MLPs", "prenorm", {"attention": "moda-ffn"}),
)
"""What the paper cites and does not run. MoDA changes the attention and keeps PreNorm."""
