"""Triton's compiler for a GPU that is not there: its interpreter accepts what it does not."""

import os
import subprocess
import sys


def assert_compiles(script, folder):
    """`script` prints "compiled" at its end; what is compiled is kept in `folder`."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert run.stdout.strip() == "compiled", run.stderr[-3000:]
