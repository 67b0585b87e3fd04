# Two commands set everything up by themselves: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
HOSTS ?= 4
RATE ?= 25mbit
ITERATIONS ?= 24

.PHONY: demo test test-fast check docs pages tables constraints clean

demo: $(VENV)/installed
	$(BIN)/offbeat demo --hosts $(HOSTS) --rate $(RATE) --iterations $(ITERATIONS)

# Everything that a change of the package can break.
test: $(VENV)/installed-test
	$(BIN)/python -m pytest -q -n 3 --dist loadgroup --ignore tests/release

# Tests without processes, except those that are marked as long.
test-fast: $(VENV)/installed-test
	$(BIN)/python -m pytest -q -n 2 -m "not long" tests/fast

# Style, types, pages, distributions, pins and borders.
check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup tests/release

# Into site/; site/index.html opens without a server, the search needs one.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The generated parts of all pages: plans, pictures, settings, public names.
pages: $(VENV)/installed
	$(BIN)/python docs/fill.py

# All tables of benchmarks/results, in benchmarks/tables.md, docs/benchmarks.md and docs/claims.md.
tables:
	$(PYTHON) benchmarks/papers/claims.py
	$(PYTHON) benchmarks/tables.py

# Pins for every Python and platform, with markers. The file also lists what CUDA builds of torch
# need, so it serves as constraints (-c), never as requirements (-r). Pins that pyproject.toml still
# allows stay; `make constraints UPGRADE=--upgrade` or UPGRADE="-P torch" renews all or one.
constraints: $(VENV)/installed-dev
	$(BIN)/uv pip compile -q --no-config --universal --python-version 3.11 --all-extras \
	  --no-annotate --no-header $(UPGRADE) -o constraints.txt pyproject.toml

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "offbeat needs Python 3.11 or newer; choose one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/installed-test $(VENV)/installed-docs  # dev contains both

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) runs site
