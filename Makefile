# Two commands: `make demo` and `make test`. Each sets up .venv by itself the first time.
# Needs Python 3.11 or newer and make; on Windows or without make, see "Without make" in README.md.

PYTHON ?= python3
STEPS ?=
PY := .venv/bin/python
READY := .venv/.ready
READY_DEV := .venv/.ready-dev

.PHONY: demo test test-slow lint docs tables clean

demo: $(READY)
	$(PY) -m multigate demo $(if $(STEPS),--steps $(STEPS))

test: $(READY_DEV) lint
	$(PY) -m pytest -n auto -m "not slow"

test-slow: $(READY_DEV)
	$(PY) -m pytest -n auto -m slow

lint: $(READY_DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(READY_DEV)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "Open site/index.html"

# Everything that is made from the kept logs, and the tables of the pages.
tables: $(READY)
	for folder in repro/*/; do $(PY) -m multigate repro summary $$folder || exit 1; done
	$(PY) scripts/tables.py

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	PYTHON=$(PYTHON) sh scripts/setup.sh train,plot
	touch $(READY)

$(READY_DEV): pyproject.toml constraints.txt scripts/setup.sh
	PYTHON=$(PYTHON) sh scripts/setup.sh train,data,track,kernels,plot,hf,eval,docs,dev
	touch $(READY) $(READY_DEV)

clean:
	rm -rf .venv demo-report site
