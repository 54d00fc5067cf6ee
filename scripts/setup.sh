#!/bin/sh
# Creates .venv and installs multigate with pinned dependencies: by uv if it can be had, else by pip.
# The extras to install are the argument, e.g. train or train,dev.
set -eu

EXTRAS="${1:-train}"

PYTHON="${PYTHON:-python3}"
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "multigate needs Python 3.11 or newer, and '$PYTHON' is not: run make PYTHON=/path/to/python3.11" >&2
    exit 1
fi

PY=.venv/bin/python
if ! "$PY" -m pip --version >/dev/null 2>&1; then
    rm -rf .venv
    "$PYTHON" -m venv .venv
fi

by_uv() {
    "$PY" -m pip install --quiet --disable-pip-version-check uv==0.13.7 || return 1
    # uv does not read pip's configuration; a folder of wheels named there is handed over.
    LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$("$PY" -m pip config get global.find-links 2>/dev/null || true)}}"
    [ -z "$LINKS" ] || export UV_FIND_LINKS="$LINKS"
    "$PY" -m uv pip install --quiet --python "$PY" -c constraints.txt -e ".[$EXTRAS]"
}

by_uv || "$PY" -m pip install --quiet -c constraints.txt -e ".[$EXTRAS]"
