# Two commands: `make demo` and `make test`. Each sets up .venv by itself the first time.
# Needs Python 3.11 or newer and make; on Windows or without make, see "Without make" in README.md.

PYTHON ?= python3
STEPS ?=
PY := .venv/bin/python
READY := .venv/.ready

.PHONY: demo test test-slow lint clean

demo: $(READY)
	$(PY) -m multigate demo $(if $(STEPS),--steps $(STEPS))

test: $(READY) lint
	$(PY) -m pytest -n auto -m "not slow"

test-slow: $(READY)
	$(PY) -m pytest -n auto -m slow

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	PYTHON=$(PYTHON) sh scripts/setup.sh
	touch $(READY)

clean:
	rm -rf .venv
