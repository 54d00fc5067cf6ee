"""A configuration from plain argparse flags, for machines without tyro."""

import argparse
import types
import typing
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def parse_flags(kind: type[T], arguments: Sequence[str] | None = None, **defaults: Any) -> T:
    """Flags --like-this for every field of the dataclass `kind`; lists take several words."""
    parser = argparse.ArgumentParser(description=kind.__doc__)
    hints = typing.get_type_hints(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            default=defaults.get(field.name, field.default),
            help="default: %(default)s",
            **options(hints[field.name]),
        )
    values = vars(parser.parse_args(arguments))
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def options(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of type `hint`."""
    arguments = [a for a in typing.get_args(hint) if a is not type(None)]
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return options(arguments[0])
    if origin is tuple:
        return {"nargs": "+", **options(arguments[0])}
    if origin is typing.Literal:
        return {"type": type(arguments[0]), "choices": arguments}
    if hint is bool:
        return {"type": boolean}
    assert hint in (int, float, str, Path), f"{hint} has no flag"
    return {"type": hint}


def boolean(word: str) -> bool:
    if word not in ("True", "False"):
        raise argparse.ArgumentTypeError(f"use True or False, not {word!r}")
    return word == "True"
