"""What a run was made with: versions, commit and code, device."""

import hashlib
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from multigate import __version__
from multigate.device import Compute
from multigate.fit import kernel

ROOT = Path(__file__).parents[1]
BESIDE = {"analysis", "bench", "harness", "hf", "repro"}
"""Rooms that training does not enter."""


def environment(compute: Compute) -> dict[str, Any]:
    """As plain values, and without the name of the machine."""
    on_gpu = compute.device.type == "cuda"
    return {
        "multigate": __version__,
        "commit": commit(),
        "source": source(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if on_gpu else None,
        "device": torch.cuda.get_device_name(compute.device) if on_gpu else compute.device.type,
        "precision": compute.precision,
        "compile": compute.compile,
        "kernel": kernel(compute),
    }


@cache
def commit() -> str | None:
    """Of the checkout that the package lies in, with a + if something was changed since."""
    try:
        # A package installed into somebody else's checkout is not tracked there.
        git("ls-files", "--error-unmatch", str(ROOT / "__init__.py"))
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(ROOT))
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()


@cache
def source() -> str:
    """A digest of the code that trains, also where there is no checkout."""
    total = hashlib.sha256()
    for file in sorted(ROOT.rglob("*")):
        name = file.relative_to(ROOT)
        if file.suffix in (".py", ".cu") and name.parts[0] not in BESIDE:
            total.update(name.as_posix().encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:16]
