"""The command line: `multigate COMMAND` or `python -m multigate COMMAND`."""

import argparse
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .config import TrainConfig

T = TypeVar("T")


def demo(arguments: Sequence[str]) -> int:
    """train two tiny GPTs on this Python's own source and compare them"""
    from .demo import DemoConfig, demo

    demo(parse(DemoConfig, arguments, "demo"))
    return 0


def prepare(arguments: Sequence[str]) -> int:
    """turn text into token shards to train on"""
    from .data import PrepareConfig, prepare

    prepare(parse(PrepareConfig, arguments, "prepare"))
    return 0


def train(arguments: Sequence[str]) -> int:
    """train a GPT with any residual, at any scale, on any prepared text"""
    config, dry = train_flags(arguments)
    if dry:
        from .fit import dry_run

        dry_run(config)
        return 0
    from .train import train

    result = train(config)
    return 0 if result.signal is None else 128 + result.signal


def train_flags(arguments: Sequence[str]) -> "tuple[TrainConfig, bool]":
    """The configuration of a run, and whether it is a dry one."""
    from .config import resolve

    files = argparse.ArgumentParser("multigate train", add_help=False, allow_abbrev=False)
    files.add_argument("--config", type=Path, action="append", default=[])
    files.add_argument("--dry-run", action="store_true")
    chosen, flags = files.parse_known_args(arguments)
    files.add_argument("--scale")
    scale = files.parse_known_args(arguments)[0].scale
    default = resolve(scale, chosen.config)
    note = (
        "With --config FILE.toml (more than once if need be) settings are read from files. "
        "--dry-run trains nothing and shows how much memory it would take, in each memory mode."
    )
    return parse(type(default), flags, "train", default, note), chosen.dry_run


def evaluate(arguments: Sequence[str]) -> int:
    """measure a trained run on held-out text, or score it on tasks of EleutherAI's harness"""
    from .evaluate import EvalConfig, evaluate

    config = parse(EvalConfig, arguments, "eval")
    if config.tasks:
        from .harness import score_tasks

        score_tasks(config)
        return 0
    evaluate(config)
    return 0


def sample(arguments: Sequence[str]) -> int:
    """let a trained run continue text"""
    from .sample import SampleConfig, sample

    sample(parse(SampleConfig, arguments, "sample"))
    return 0


def export(arguments: Sequence[str]) -> int:
    """write a trained run as a folder that Transformers loads"""
    from .hf.export import ExportConfig, export

    export(parse(ExportConfig, arguments, "export"))
    return 0


def analyze(arguments: Sequence[str]) -> int:
    """look into trained runs: every figure of the paper, as a page and as files"""
    from .analysis.command import AnalyzeConfig, analyze

    return 0 if analyze(parse(AnalyzeConfig, arguments, "analyze")).measured else 1


def report(arguments: Sequence[str]) -> int:
    """compare training runs by their logs, also while they are running"""
    from .analysis.command import ReportConfig, report

    report(parse(ReportConfig, arguments, "report"))
    return 0


def bench(arguments: Sequence[str]) -> int:
    """measure the operations and whole training steps on this machine"""
    from .bench import BenchConfig, bench

    bench(parse(BenchConfig, arguments, "bench"))
    return 0


def repro(arguments: Sequence[str]) -> int:
    """run the paper's table again, with seeds and intervals"""
    from .repro.command import repro, speed, summary
    from .repro.config import ReproConfig, SpeedConfig, SummaryConfig
    from .repro.dry import dry_run

    if arguments[:1] == ["summary"]:
        summary(parse(SummaryConfig, arguments[1:], "repro summary"))
        return 0
    if arguments[:1] == ["speed"]:
        speed(parse(SpeedConfig, arguments[1:], "repro speed"))
        return 0
    flags = [word for word in arguments if word != "--dry-run"]
    note = (
        "--dry-run trains nothing and shows the runs, their models and the memory they take. "
        "`multigate repro summary OUT` makes the tables anew from what is kept, "
        "`multigate repro speed OUT` times the models alone."
    )
    config = parse(ReproConfig, flags, "repro", description=note)
    if len(flags) < len(arguments):
        dry_run(config)
        return 0
    done = repro(config)
    if done.signal is not None:
        return 128 + done.signal
    return 1 if done.failed else 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "demo": demo,
    "prepare": prepare,
    "train": train,
    "eval": evaluate,
    "sample": sample,
    "export": export,
    "analyze": analyze,
    "report": report,
    "bench": bench,
    "repro": repro,
}
NEEDED = ("rich", "safetensors", "tokenizers", "tyro")


def parse(
    kind: type[T],
    arguments: Sequence[str],
    command: str,
    default: T | None = None,
    description: str = "",
) -> T:
    """A configuration of type `kind` from flags; help comes from its docstrings."""
    import tyro

    about = " ".join(((kind.__doc__ or "") + " " + description).split())
    options: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(
        kind,
        prog=f"multigate {command}",
        description=about,
        args=list(arguments),
        config=(tyro.conf.FlagConversionOff, tyro.conf.PositionalRequiredArgs),
        **options,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="multigate",
        description="Multi-Gate Residuals, and what they are compared with.",
        epilog="multigate COMMAND --help explains a command.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        commands.add_parser(name, help=function.__doc__, add_help=False)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given[:1])
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"multigate {options.command} needs {', '.join(missing)}: "
            "pip install 'multigate[train]'",
            file=sys.stderr,
        )
        return 1
    # What the library notes, such as the choice of a kernel, is worth a line to a person.
    if rank() == "":
        logging.basicConfig(format="%(message)s")
        logging.getLogger("multigate").setLevel(logging.INFO)
    try:
        return COMMANDS[options.command](given[1:])
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError, ArithmeticError) as error:
        print(f"multigate: {rank()}{error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if "out of memory" in str(error):
            print(
                f"multigate: {rank()}the GPU's memory is full: use a smaller --micro-batch or "
                "--checkpoint-activations True; --dry-run shows what takes it.",
                file=sys.stderr,
            )
            return 1
        if rank() and "onnection" in str(error):
            # The first process has gone, and has said why.
            return 1
        raise


def rank() -> str:
    """Which process of torchrun's speaks, if it is not the first."""
    number = os.environ.get("RANK", "0")
    return "" if number == "0" else f"process {number}: "


if __name__ == "__main__":
    sys.exit(main())
