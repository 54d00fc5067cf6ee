"""What is said about weights that cannot be loaded; pickles are never opened."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from multigate.residuals import Residual, build_residual

PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def check_weights(folder: Any, options: dict[str, Any]) -> None:
    """Have Transformers read safetensors and nothing else."""
    if options.get("use_safetensors") is False:
        raise ValueError(
            "multigate reads weights from safetensors only, because loading a pickle can run code: "
            "leave use_safetensors=False out."
        )
    options["use_safetensors"] = True
    if folder is None or not Path(folder).is_dir() or options.get("state_dict") is not None:
        return
    inside = Path(folder) / options.get("subfolder", "")
    if not any(inside.glob("model*.safetensors")):
        pickles = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth") for p in inside.glob(kind))
        held = f" but {pickles[0]}, a pickle, and loading one can run code" if pickles else ""
        raise ValueError(
            f"{folder} holds no weights{held}: save the model with save_pretrained, which writes "
            "model.safetensors."
        )
    index = inside / "model.safetensors.index.json"
    if index.exists() and not (inside / "model.safetensors").exists():
        check_index(index)


def check_index(index: Path) -> None:
    """Which file holds a weight is what a stranger says: only one beside it, of safetensors."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = sorted(set(map(os.fspath, found)))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{index} is damaged: copy or export the model once more.") from error
    only_safetensors(files)
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"{index} names {name!r}, a file outside of its folder: remove it.")


def only_safetensors(files: Sequence[str]) -> None:
    """Transformers would open the pickles that an index names."""
    for file in files:
        if not file.endswith(".safetensors"):
            raise ValueError(
                f"the weights are to be read from {file}, which may be a pickle, and loading one "
                "can run code: save the model with save_pretrained."
            )


def check_files(name: str, expected: Mapping[str, Tensor], files: Sequence[str]) -> None:
    """That the files hold these weights in these shapes; before memory is taken for them."""
    only_safetensors(files)
    found = dict[str, tuple[int, ...]]()
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for key in stored.keys():  # noqa: SIM118 - not a mapping
                found[key] = tuple(stored.get_slice(key).get_shape())
    both = found.keys() & expected.keys()
    problems = (
        expected.keys() - both,
        found.keys() - both,
        {key for key in both if found[key] != tuple(expected[key].shape)},
    )
    check_keys(name, dict(zip(PROBLEMS, problems, strict=True)))


@contextmanager
def readable(folder: Any) -> Iterator[None]:
    """A damaged file is one sentence."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {folder} are damaged ({str(error).strip()}): copy or export them once "
            "more."
        ) from error


def check_keys(name: str, info: Mapping[str, Any], advice: str = "") -> None:
    """The weights must be all that the model has, and nothing more: Transformers does not know how
    a residual starts."""
    for problem in PROBLEMS:
        if info.get(problem):
            keys, what = sorted(map(str, info[problem])), problem.replace("_", " ")
            raise ValueError(
                f"these are not the weights of a {name} with this configuration ({len(keys)} "
                f"{what}, the first is {keys[0]}){advice}."
            )


def renew_buffers(residual: Residual, streams: int | None, options: Mapping[str, Any]) -> None:
    """Transformers leaves buffers that are not saved empty: take them from a new residual."""
    fresh = build_residual(residual.name, residual.dim, residual.depth, streams, **options)
    saved = residual.state_dict()
    for name, buffer in fresh.named_buffers():
        if name not in saved:
            residual.get_buffer(name).copy_(buffer)
