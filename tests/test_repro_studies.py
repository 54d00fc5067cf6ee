"""What the studies declare: cells, the paper's figures, the order of runs."""

from dataclasses import replace
from pathlib import Path

import pytest

import multigate as mg
from multigate.config import resolve, to_table
from multigate.repro.cells import RELATED, ROWS, SCALED
from multigate.repro.config import ReproConfig
from multigate.repro.kept import changes, publishable
from multigate.repro.plan import checks, ordered, planned, recipe, run_name, split_name
from multigate.repro.studies import DEPTHS, STUDIES
from multigate.repro.worker import Job

SCALES = ("tiny", "mini", "s", "m", "l")


def test_the_nine_rows_and_the_papers_figures():
    assert [cell.label for cell in ROWS] == [
        *("PreNorm", "mHC-lite (n=4)", "Block AttnRes (n=4)", "Block AttnRes (n=8)"),
        *("Full AttnRes", "Independent MGR (n=4)", "Competitive MGR (n=4)"),
        *("Independent MGR (n=8)", "Competitive MGR (n=8)"),
    ]
    val = {s: [c.paper[s][1] if s in c.paper else None for c in ROWS] for s in "sml"}
    assert val == {
        "s": [2.9440, 2.9145, 2.9107, 2.9081, 2.9066, 2.9040, 2.9045, 2.9034, 2.9020],
        "m": [2.7314, 2.7082, 2.7009, 2.6970, 2.6947, 2.6929, 2.6911, 2.6912, 2.6908],
        "l": [2.6213, None, 2.5946, 2.5921, 2.5920, 2.5903, 2.5898, 2.5887, 2.5857],
    }
    train = {s: [c.paper[s][0] if s in c.paper else None for c in ROWS] for s in "sml"}
    assert train == {
        "s": [2.9280, 2.8992, 2.8951, 2.8921, 2.8911, 2.8887, 2.8889, 2.8877, 2.8869],
        "m": [2.7286, 2.7157, 2.6994, 2.6952, 2.6930, 2.6911, 2.6889, 2.6896, 2.6891],
        "l": [2.6306, None, 2.6054, 2.6925, 2.6036, 2.6006, 2.6001, 2.5994, 2.5966],
    }


def test_every_residual_is_in_the_table():
    """The ten of the library, and mixture-of-depths attention."""
    cells = [*ROWS, *SCALED, *RELATED]
    assert {cell.residual for cell in cells} == set(mg.residual_names()[:10])
    assert {cell.model.get("attention", "plain") for cell in cells} == {"plain", "moda", "moda-ffn"}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", STUDIES)
def test_every_cell_can_be_built_or_says_why_not(name, scale):
    if name == "deep" and scale in "ml":
        with pytest.raises(ValueError, match="at the scales tiny, mini, s only"):
            STUDIES[name](scale)
        return
    cells = STUDIES[name](scale).cells()
    found = {
        key: planned(resolve(scale), Path("runs"), cell, 0, 1.0).impossible
        for key, cell in cells.items()
    }
    impossible = [key for key, why in found.items() if why]
    # The formula of the bias has no value for 12 streams over 12 sublayers.
    assert impossible == (["mgr-competitive-12"] if (name, scale) == ("ablations", "tiny") else [])
    for cell in cells.values():
        assert cell.against in cells
        assert set(cell.alternatives) <= set(cells)


def test_what_the_ablations_ask():
    cells = STUDIES["ablations"]("mini").cells()
    biases = {
        key: cell.model["residual_options"]["bias_init"]
        for key, cell in cells.items()
        if "bias_init" in cell.model.get("residual_options", {})
    }
    assert biases == {
        "mgr-competitive-4-bias-minus1": -1.0,
        "mgr-competitive-4-bias-minus3": -3.0,
        "mgr-competitive-4-bias-minus5": -5.0,
        "mgr-independent-4-bias-minus1": -1.0,
        "mgr-independent-4-calibrated": "calibrated",
        "mgr-independent-4-bias-minus5": -5.0,
        "mgr-independent-8-calibrated": "calibrated",
    }
    streams = {f"mgr-competitive-{n}": n for n in (1, 2, 4, 8, 12)}
    assert {key: cells[key].model["streams"] for key in streams} == streams
    groups = {group.title: group.cells for group in STUDIES["ablations"]("mini").groups}
    attnres = groups["AttnRes with and without 1/sqrt(d)"]
    scaled = [cell for cell in attnres if cell.model.get("residual_options") == SCALE]
    assert [cell.against for cell in scaled] == [
        *("attnres-block-4", "attnres-block-8", "attnres-full"),
    ]
    assert {cells[key].model.get("memory") for key in cells} >= {"recompute", "invert", "exact"}
    assert sum(cell.model.get("stream_dtype") == "float32" for cell in cells.values()) == 3


SCALE = {"scaled": True}


def test_shapes_of_other_depths_have_nearly_the_same_parameters():
    for scale, shapes in DEPTHS.items():
        own = mg.preset(scale)
        size = own.blocks * own.width**2
        for blocks, width, heads in shapes:
            assert blocks * width**2 == pytest.approx(size, rel=0.15)
            assert width % (2 * heads) == 0
    cells = STUDIES["ablations"]("mini").cells()
    assert {c.against for k, c in cells.items() if "24x256" in k} == {"prenorm-24x256"}
    (group,) = (g for g in STUDIES["ablations"]("mini").groups if g.title.startswith("Depth"))
    for k, name in enumerate(
        ("prenorm", "attnres-full", "attnres-full-scaled", "mgr-competitive-4")
    ):
        shapes = [cell.key for cell in group.cells[k::4]]
        assert shapes == [f"{name}-6x512", name, f"{name}-24x256"]
    assert "attnres-full-scaled" in STUDIES["ablations"]("l").cells()


def test_the_deep_study():
    cells = STUDIES["deep"]("mini").cells()
    assert len(cells) == 6
    for cell in cells.values():
        assert [cell.model[name] for name in ("blocks", "width", "heads")] == [36, 256, 2]
    for name in ("block-8", "full"):
        assert cells[f"deep-attnres-{name}-scaled"].model["residual_options"] == SCALE
    inverted = cells["deep-mgr-competitive-8-invert"]
    assert (inverted.model["memory"], inverted.model["residual_options"]) == (
        "invert",
        {"keep": 0.01},
    )
    assert inverted.against == "deep-mgr-competitive-8"


def test_the_paper_scales_have_the_papers_hyper_parameters():
    """Its tables 3 and 4; the learning rates are the paper's, so there is no check."""
    rates = {"s": (1e-2, 3e-3), "m": (6e-3, 2e-3), "l": (4e-3, 1e-3)}
    shapes = {"s": (12, 768, 6), "m": (24, 1024, 8), "l": (36, 1280, 10)}
    for scale, (muon, adamw) in rates.items():
        config = ReproConfig("table1", scale).recipe()
        assert (config.optim.lr_muon, config.optim.lr_adamw) == (muon, adamw)
        assert (config.steps, config.tokens_per_step, config.optim.warmup) == (20000, 524288, 200)
        assert (config.optim.weight_decay, config.optim.clip, config.optim.momentum) == (
            0.1,
            1,
            0.95,
        )
        assert (config.optim.beta1, config.optim.beta2) == (0.9, 0.95)
        assert (config.data, config.tokenizer) == ("fineweb", "gpt2")
        model = config.gpt(50257)
        assert (model.blocks, model.width, model.heads) == shapes[scale]
        assert (model.context, model.vocab_size, model.rope_base) == (1024, 50304, 10000.0)
        assert ReproConfig("table1", scale).factors == (1.0,)
    assert ReproConfig("table1", "mini").factors == (0.5, 1.0, 2.0)


def test_runs_come_seed_by_seed_and_the_nine_rows_first():
    study = STUDIES["table1"]("mini")
    order = [(cell.key, seed) for cell, seed in ordered(study, study.chosen(()), (3, 5), 1)]
    assert [seed for _, seed in order] == [3] * 18 + [5] * 12
    nine = [cell.key for cell in ROWS]
    assert [key for key, _ in order[:9]] == [key for key, _ in order[18:27]] == nine
    assert [key for key, _ in order[9:12]] == [cell.key for cell in SCALED]
    assert [key for key, _ in order[12:18]] == [cell.key for cell in RELATED]
    assert len(set(order)) == len(order)


def test_a_row_brings_its_alternatives_along():
    study = STUDIES["table1"]("mini")
    assert study.chosen(("attnres-full", "prenorm")) == [
        *("prenorm", "attnres-full", "attnres-full-scaled"),
    ]
    with pytest.raises(ValueError, match="did you mean 'mgr-competitive-8'"):
        study.chosen(("mgr-competitve-8",))


def test_runs_of_a_seed_differ_in_their_model_alone():
    base = recipe(resolve("mini"), None)
    study = STUDIES["table1"]("mini")
    first = None
    for cell in study.cells().values():
        config = planned(base, Path("runs"), cell, 1, 2.0).config
        common = replace(config, residual="", model=base.model, name=None)
        first = first or common
        assert common == first
        assert config.optim.lr_muon == 2 * base.optim.lr_muon
        assert config.optim.lr_adamw == 2 * base.optim.lr_adamw


def test_the_check_shares_its_run_with_the_table():
    study, base = STUDIES["table1"]("mini"), resolve("mini")
    rates = checks(study, base, Path("runs"), (4, 5), (0.5, 1.0, 2.0))
    assert [run.name for run in rates] == [
        *("prenorm-lr0.5-seed4", "prenorm-seed4", "prenorm-lr2-seed4"),
    ]
    assert checks(study, base, Path("runs"), (4, 5), (1.0,)) == []
    deep = STUDIES["deep"]("mini")
    (run, _) = checks(deep, base, Path("runs"), (0,), (1.0, 2.0))
    assert run.name == "deep-prenorm-seed0"
    assert run.config.model.blocks == 36


def test_names_say_cell_and_seed():
    for study in STUDIES.values():
        for key in study("mini").cells():
            for factor in (0.5, 1, 1e-05):
                assert split_name(run_name(key, 12, factor)) == (key, 12)


def test_few_steps_have_a_short_warm_up():
    base = resolve("mini")
    assert recipe(base, None) == base
    assert (recipe(base, 40).steps, recipe(base, 40).optim.warmup) == (40, 10)
    assert recipe(base, 4000).optim.warmup == base.optim.warmup


@pytest.mark.parametrize("name", STUDIES)
def test_a_worker_reads_what_it_was_told(name, tmp_path):
    for cell in STUDIES[name]("mini").cells().values():
        run = planned(resolve("mini"), tmp_path, cell, 3, 0.5)
        job = Job(run.config, tmp_path / "kept", 2)
        assert Job.read(job.write()) == job


def test_a_changed_memory_mode_is_a_change():
    cells = STUDIES["deep"]("mini").cells()
    keys = ("deep-mgr-competitive-8", "deep-mgr-competitive-8-invert")
    one, two = (planned(resolve("mini"), Path("runs"), cells[k], 0, 1).config for k in keys)
    assert changes(publishable(one), publishable(two)) == [
        "model.memory store -> invert",
        "model.residual_options.keep None -> 0.01",
    ]
    assert changes(publishable(one), to_table(replace(one, device="cuda", micro_batch=3))) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seeds": ()}, "seeds must be different numbers"),
        ({"seeds": (1, 1)}, "seeds must be different numbers"),
        ({"lr_factors": (1.0, 0.0)}, "lr_factors must be different numbers above 0"),
        ({"jobs": 0}, "jobs must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"extra_seeds": -1}, "extra_seeds must be at least 0, got -1"),
        ({"budget_minutes": 0.0}, "budget_minutes must be more than 0"),
    ],
)
def test_settings_that_make_no_sense(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        ReproConfig("table1", **changes)
