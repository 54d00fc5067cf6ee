"""Packages that only some sources and tokenizers need."""

from importlib import import_module
from typing import Any


def optional(package: str, extra: str, what: str) -> Any:
    """The module `package`, or one sentence that says which extra of multigate brings it."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        root = package.split(".")[0]
        if error.name is not None and error.name.split(".")[0] != root:
            raise
        raise ValueError(
            f"{what} needs the package {root}: pip install 'multigate[{extra}]'."
        ) from error
