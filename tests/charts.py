"""A report with every kind of mark, and with everything that makes drawing hard."""

import numpy as np

from multigate.analysis.chart import Bars, Boxes, Chart, Heat, Line, Panel, Report, Section

RUNS = ('prenorm <b>base</b> & "co"', "mgr-competitive $n_8$ %{x}")
BLOCKS = np.arange(1, 13)
SUBLAYERS = np.arange(1, 25)
NAN, INF = np.nan, np.inf


def boxes(count: int, empty: int = 0) -> np.ndarray:
    """Least, quartiles, largest and mean of skewed numbers; the first `empty` rows are NaN."""
    values = np.random.default_rng(count).beta(1, 12, size=(count, 400))
    found = np.quantile(values, [0, 0.25, 0.5, 0.75, 1], axis=1)
    found = np.concatenate([found, values.mean(1)[None]]).T
    found[:empty] = NAN
    return found


def triangle(seed: int, count: int = 12) -> np.ndarray:
    """Something like angular distances: the upper right is empty."""
    random = np.random.default_rng(seed)
    found = np.full((count, count), NAN)
    for n in range(count):
        turned = np.arange(count - n) > random.integers(2, 9)
        found[n, : count - n] = 0.05 * (n + 1) ** 0.7 + 0.15 * turned
    return found


def charts() -> list[Chart]:
    random = np.random.default_rng(0)
    steps, rare = np.arange(400) * 250, np.arange(10) * 10_000
    fall = 3 * np.exp(-steps / 15_000)
    noise = 0.03 * random.normal(size=(2, 400))
    loss = [Line(run, steps, 3.3 + fall + noise[i], i) for i, run in enumerate(RUNS)]
    loss += [
        Line(f"{run}, held out", rare, 3.3 + 3 * np.exp(-rare / 15_000), i, points=True)
        for i, run in enumerate(RUNS)
    ]
    streams = [
        Line(f"stream {k}", SUBLAYERS, np.where(k > SUBLAYERS, NAN, 5 + k + random.random(24)), k)
        for k in range(8)
    ]
    lost = [INF, 900, 40, 12, 8, 5, 4, 3, 2.5, 2, 1.5, -0.2]
    notes = [f"block {block}: costs a lot" for block in BLOCKS]
    kept = [NAN, NAN, NAN, 6, 5, 5, 4, 6, 7, 5, 6, 13.67]
    mix = np.eye(4) * 0.8 + 0.05 * random.normal(size=(4, 4))
    writers = ["embedding", *(str(i) for i in SUBLAYERS)]
    names = [f"stream {k}" for k in range(8)]
    edges = np.arange(50) / 50 + 0.01
    return [
        Chart(
            "loss",
            "Training loss",
            "Cross entropy over steps; marks are held-out text.",
            [Panel("", "step", "loss", loss)],
            seen="The first ends at 3.31, the second at 3.30.",
        ),
        Chart(
            "dynamics",
            "Training dynamics",
            "Root mean square of each block's output, and of its gradient.",
            [
                Panel(
                    "output RMS",
                    "block",
                    "RMS",
                    [
                        Line(RUNS[0], BLOCKS, np.exp(BLOCKS / 3)),
                        Line(RUNS[1], BLOCKS, 1 + 0.2 * random.random(12), 1),
                    ],
                    log_y=True,
                ),
                Panel(
                    "gradient RMS",
                    "block",
                    "gradient RMS",
                    [Line(RUNS[0], BLOCKS, 1e-4 / BLOCKS), Line(RUNS[1], BLOCKS, [2e-5] * 12, 1)],
                ),
            ],
            claim="PreNorm's output grows with depth.",
            seen="It grows 39 times.",
        ),
        Chart(
            "angles",
            "Angular distance",
            "How far the last token's vector turns.",
            [
                Panel(
                    f"stream {k}",
                    "block l",
                    "n blocks later",
                    [Heat(triangle(k), BLOCKS, BLOCKS, "angular distance", 0.0, 0.6)],
                )
                for k in range(9)
            ],
            claim="Every stream turns at depths of its own.",
            seen="They do.",
        ),
        Chart(
            "pruning/<x>",
            "Change of perplexity <without> one block",
            "Perplexity with one block skipped, less that of the whole model.",
            [
                Panel(
                    RUNS[0],
                    "block removed",
                    "change",
                    [Bars("change", BLOCKS, lost, 0, notes)],
                    True,
                ),
                Panel(RUNS[1], "block removed", "change", [Bars("change", BLOCKS, kept, 1)], True),
            ],
            claim="Early blocks of PreNorm cannot go.",
            absent=["Blocks 1 to 3 of <mgr> make its streams."],
        ),
        Chart(
            "gates",
            "Gate values",
            "Distribution of beta over all layers, and by sublayer.",
            [
                Panel(
                    "all sublayers",
                    "beta",
                    "share",
                    [
                        Bars("share", edges, np.exp(-edges * 12), 1),
                        Line("mean", [0.08, 0.08], [1e-4, 1], 1, dashed=True),
                    ],
                    log_y=True,
                ),
                Panel(
                    "by sublayer", "sublayer", "beta", [Boxes(RUNS[1], SUBLAYERS, boxes(24, 2), 1)]
                ),
            ],
            absent=[f"{RUNS[0]} has no gates."],
        ),
        Chart(
            "streams",
            "Largest value of each stream",
            "The largest absolute value after each sublayer.",
            [Panel(run, "sublayer", "largest value", streams) for run in RUNS],
        ),
        Chart(
            "mixing",
            "Mixing maps",
            "The mean mixing matrix, and the shares of every writer.",
            [
                *(
                    Panel(
                        f"sublayer {k}",
                        "from stream",
                        "to stream",
                        [Heat(mix, np.arange(4), np.arange(4), "weight", middle=0.0)],
                    )
                    for k in (1, 12, 24)
                ),
                Panel(
                    "shares", "writer", "", [Heat(random.random((8, 25)), writers, names, "share")]
                ),
            ],
        ),
        Chart(
            "nothing",
            "A figure without data",
            "What cannot be shown.",
            [
                Panel("not a number", "block", "value", [Line("a", [1, 2], [NAN, INF])]),
                Panel("log of zero", "block", "value", [Bars("b", [1, 2], [0, -1])], log_y=True),
                Panel("no box", "block", "value", [Boxes("c", [1], np.full((1, 6), NAN))]),
                Panel(
                    "no cell", "block", "value", [Heat(np.full((2, 2), NAN), [1, 2], [1, 2], "u")]
                ),
                Panel("no marks", "block", "value", []),
            ],
        ),
        Chart(
            "one",
            "One block",
            "A single point of everything.",
            [
                Panel(
                    "line", "block", "value", [Line(RUNS[0], [1], [2.0]), Line("b", [1], [3.0], 1)]
                ),
                Panel(
                    "boxes",
                    "block",
                    "of boxes",
                    [Boxes(RUNS[0], [1], boxes(1)), Boxes("b", [1], boxes(1), 1)],
                    log_y=True,
                ),
                Panel("heat", "block", "stream", [Heat(np.ones((1, 1)), [1], [1], "share")]),
            ],
        ),
        Chart("absent", "Depth attention", "What is read.", absent=["<prenorm> & has none."]),
    ]


def report() -> Report:
    made = charts()
    return Report(
        title="Residuals <compared> & analysed",
        subtitle='On 512 samples of "prose", by multigate analyze runs/a runs/b',
        columns=["run", "residual", "parameters", "loss", "tokens/s", "memory"],
        rows=[
            [RUNS[0], "prenorm", "31.2 M", "3.312", "812 000", "9.1 GiB"],
            [RUNS[1], "mgr-competitive, n = 8", "31.4 M", "3.201", "", "14.8 GiB"],
        ],
        sections=[
            Section("Training", made[:2]),
            Section("Depth", made[2:4]),
            Section("Gates & <streams>", made[4:7]),
            Section("The rest", made[7:]),
        ],
        problems=["runs/<c> has no checkpoint: give the folder of a run that saved one."],
    )
