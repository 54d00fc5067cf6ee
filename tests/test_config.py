"""Configuration: recipes, files, flags, and what is said about a mistake in them."""

import dataclasses
import tomllib
from pathlib import Path

import pytest

import multigate as mg
from multigate.__main__ import parse
from multigate.config import (
    FREE,
    TrainConfig,
    differences,
    from_table,
    recipe_path,
    resolve,
    to_table,
    to_toml,
)
from multigate.gpt import PRESETS


def test_later_wins(tmp_path):
    """The default, the scale's recipe, the files in order, the flags."""
    assert TrainConfig().tokens_per_step != resolve("mini").tokens_per_step == 65536
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text('scale = "mini"\nsteps = 7\nseed = 3\n[optim]\nlr_muon = 0.5\nwarmup = 9\n')
    second.write_text("steps = 8\n[optim]\nwarmup = 10\n[model.residual_options]\nstatic = true\n")
    config = resolve(None, [first, second])
    assert (config.scale, config.steps, config.seed) == ("mini", 8, 3)
    assert (config.optim.lr_muon, config.optim.warmup) == (0.5, 10)
    assert config.model.residual_options == {"static": True}
    assert config.tokens_per_step == 65536
    flags = ["--steps", "9", "--optim.warmup", "11", "--residual", "hc", "--model.streams", "2"]
    flagged = parse(TrainConfig, flags, "train", config)
    assert (flagged.steps, flagged.optim.warmup, flagged.optim.lr_muon) == (9, 11, 0.5)
    assert (flagged.residual, flagged.model.streams) == ("hc", 2)
    assert flagged.model.memory == "store"
    assert parse(TrainConfig, ["--model.memory", "exact"], "train").gpt(256).memory == "exact"
    assert resolve("tiny", [first]).scale == "tiny"


@pytest.mark.parametrize("scale", PRESETS)
def test_every_scale_has_a_recipe(scale):
    recipe = tomllib.loads(recipe_path(scale).read_text())
    config = resolve(scale)
    assert config.scale == recipe["scale"] == scale
    model = config.gpt(50257)
    assert config.tokens_per_step % model.context == 0
    assert model.vocab_size == 50304
    assert config.gpt(256).vocab_size == 256
    assert mg.preset(scale).blocks == model.blocks


def test_the_papers_settings():
    for scale, muon, adamw in [("s", 1e-2, 3e-3), ("m", 6e-3, 2e-3), ("l", 4e-3, 1e-3)]:
        config = resolve(scale)
        assert config.steps * config.tokens_per_step == 20000 * 512 * 1024
        assert (config.optim.lr_muon, config.optim.lr_adamw) == (muon, adamw)
        assert (config.optim.warmup, config.optim.weight_decay, config.optim.clip) == (200, 0.1, 1)
        assert (config.optim.beta1, config.optim.beta2, config.optim.momentum) == (0.9, 0.95, 0.95)
        assert config.data == "fineweb"
        assert config.tokenizer == "gpt2"


def test_what_is_written_is_what_was_resolved(tmp_path):
    config = dataclasses.replace(
        resolve("mini"), name='with "quotes"', log=("tensorboard",), init=Path("runs/x"), keep=3
    )
    config = from_table(config, {"model": {"residual_options": {"bias_init": 0.5}}}, "here")
    file = tmp_path / "config.toml"
    file.write_text(to_toml(to_table(config)))
    assert resolve(None, [file]) == config


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("stesp = 3", "unknown setting 'stesp': did you mean 'steps'?"),
        ("[optim]\nlr_moon = 1.0", "[optim]: unknown setting 'lr_moon': did you mean 'lr_muon'?"),
        ("steps = 1.5", "steps must be of type int, got 1.5."),
        ('steps = "many"', "steps must be of type int, got 'many'."),
        ("steps = true", "steps must be of type int, got True."),
        ('parallel = "ddq"', "parallel must be one of ddp, fsdp, got 'ddq'."),
        ('log = ["tensorbord"]', "log must be one of tensorboard, wandb, got 'tensorbord'."),
        ("steps = 0", "steps must be at least 1, got 0."),
        ('scale = "huge"', "unknown scale 'huge'"),
        ("steps = ", "is not TOML"),
        ('scale = ["tiny"]', "unknown scale ['tiny']"),
        ("[optim]\nmomentum = 1.0", "momentum must be at least 0 and below 1"),
        ("model = 3", "model must be of type ModelChanges, got 3."),
        ('[model]\nmemory = "keep"', "memory must be one of store, recompute, invert, exact, got"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence(tmp_path, text, sentence):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the sentence is compared below
        resolve(None, [file])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value).strip()


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no configuration file .*nowhere\.toml"):
        resolve(None, [tmp_path / "nowhere.toml"])


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [("--stepz", "--steps"), ("--optim.lr-moon", "--optim.lr-muon"), ("--modl.width", "--model.")],
)
def test_an_unknown_flag_names_the_nearest_one(flag, nearest, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(TrainConfig, [flag, "3"], "train", TrainConfig())
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert "Perhaps you meant" in shown
    assert nearest in shown


def test_the_help_is_generated(capsys):
    with pytest.raises(SystemExit):
        parse(TrainConfig, ["--help"], "train", resolve("mini"))
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for setting in ("--residual STR", "--tokens-per-step INT", "--optim.lr-muon FLOAT"):
        assert setting in shown
    assert "Over all devices and micro-batches. (default: 65536)" in shown


def test_what_may_change_between_a_run_and_its_continuation():
    config = resolve("tiny")
    stored = to_table(config)
    assert differences(stored, dataclasses.replace(config, eval_every=3, keep=9)) == []
    changed = dataclasses.replace(
        config, residual="hc", optim=dataclasses.replace(config.optim, lr_muon=0.5)
    )
    assert differences(stored, changed) == [
        "residual mgr-competitive -> hc",
        "optim.lr_muon 0.02 -> 0.5",
    ]
    assert {f.name for f in dataclasses.fields(TrainConfig)} > FREE


def test_the_memory_mode_may_change_between_a_run_and_its_continuation():
    """With its own options, and from a run that is older than the modes; nothing else may."""
    config = resolve("tiny")

    def changed(**model):
        return dataclasses.replace(config, model=dataclasses.replace(config.model, **model))

    stored = to_table(config)
    assert differences(stored, changed(memory="exact")) == []
    options = {"keep": 0.1, "every": 3}
    assert differences(stored, changed(memory="invert", residual_options=options)) == []
    assert differences(to_table(changed(residual_options=options)), config) == []
    other = changed(residual_options={"bias_init": -3.0, "every": 3})
    assert differences(stored, other) == ["model.residual_options {} -> {'bias_init': -3.0}"]
    del stored["model"]["memory"]
    assert differences(stored, config) == differences(stored, changed(memory="invert")) == []
    assert differences(stored, changed(streams=2, memory="invert")) == ["model.streams None -> 2"]
