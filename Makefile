# Two commands: `make compare` runs the main job, `make test` passes the tests. Each does all its own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.laconic-installed

.PHONY: compare test test-all nightly lint types clean
.DELETE_ON_ERROR:

compare: $(STAMP)
	$(BIN)/laconic compare

# What a contributor needs at every change.
test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not root and not nightly"

# The slow tests, and those that need root for network namespaces, too.
test-all: $(STAMP)
	$(BIN)/python -m pytest -m "not nightly"

nightly: $(STAMP)
	$(BIN)/python -m pytest -m nightly

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Made again when the dependencies change.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "laconic needs Python 3.11 or newer, and $(PYTHON) is older. Try: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
