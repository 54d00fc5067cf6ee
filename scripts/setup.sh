#!/bin/sh
# Creates .venv and installs multigate with its pinned dependencies: uv when it can be had, pip otherwise.
set -eu

PYTHON="${PYTHON:-python3}"
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "multigate needs Python 3.11 or newer, and '$PYTHON' is not: run make PYTHON=/path/to/python3.11" >&2
    exit 1
fi

[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
PY=.venv/bin/python

if "$PY" -m pip install --quiet --disable-pip-version-check uv==0.13.7; then
    # uv does not read pip's configuration; a folder of wheels named there is handed over.
    LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$("$PY" -m pip config get global.find-links 2>/dev/null || true)}}"
    [ -z "$LINKS" ] || export UV_FIND_LINKS="$LINKS"
    "$PY" -m uv pip install --quiet --python "$PY" -c constraints.txt torch==2.13.0 -e '.[train,dev]'
else
    "$PY" -m pip install --quiet -c constraints.txt torch==2.13.0
    "$PY" -m pip install --quiet -c constraints.txt -e '.[train,dev]'
fi
