"""The command line: `multigate COMMAND` or `python -m multigate COMMAND`."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="multigate", description="Multi-Gate Residuals.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo", help="train two tiny GPTs on this Python's own source and compare them"
    )
    demo.add_argument("--steps", type=_positive, default=1000, help="training steps of each model")
    demo.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("rich") is None:
        print("multigate demo needs rich: pip install 'multigate[train]'", file=sys.stderr)
        return 1
    from .demo import demo as run_demo

    try:
        run_demo(options.steps, options.seed)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"multigate: {error}", file=sys.stderr)
        return 1
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
