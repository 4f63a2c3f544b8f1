# Two commands: `make compare` runs the main job, `make test` passes the tests. Each does all its own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.laconic-installed
FRAMEWORKS := .venv-frameworks
DOCS   := .venv-docs
BENCH  := .venv-bench
SITE   := build/site
QUICK  := not slow and not root and not nightly and not frameworks
OLDEST := 2.11.0
NEWEST := 2.15.0

.PHONY: compare test test-all frameworks nightly bench docs peers lint types clean versions
.DELETE_ON_ERROR:

compare: $(STAMP)
	$(BIN)/laconic compare

# What a contributor needs at every change.
test: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 8 -m "$(QUICK)"

# The slow tests, and those that need root for network namespaces, too.
test-all: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 8 -m "not nightly and not frameworks"

nightly: $(STAMP)
	$(BIN)/python -m pytest -m nightly

# The quick tests on the oldest and the newest torch of docs/versions.md, each in an environment of its own: 5 GB each, as
# torch's wheels on PyPI bring CUDA's libraries. `make versions-2.15.0` runs one of them.
versions: versions-$(OLDEST) versions-$(NEWEST)

versions-%: .venv-torch-%/.laconic-installed
	.venv-torch-$*/bin/python -m pytest -n auto --maxprocesses 8 -m "$(QUICK)"

# The quick part of every benchmark, in under 10 minutes: says what got slower than benchmarks/recorded.json.
bench: $(STAMP)
	$(BIN)/python benchmarks/bench.py

# With the real Lightning, Accelerate, transformers, Ray and the tools of docs/metrics.md, in an environment of their own.
frameworks: $(FRAMEWORKS)/.laconic-installed
	$(FRAMEWORKS)/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile -m frameworks -o filterwarnings=default tests/integrations

# The site, in an environment of its own: build/site/index.html. A warning is an error, and every link is followed.
docs: $(DOCS)/.laconic-installed
	$(DOCS)/bin/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -d build/doctrees docs $(SITE)
	LACONIC_SITE=$(SITE) $(DOCS)/bin/python -m pytest tests/docs/test_site.py tests/docs/test_publishing.py

# Every peer beside laconic over real links, in an environment of their own: under 40 minutes on 2 cores.
peers: $(BENCH)/.laconic-installed
	@mkdir -p build
	$(BENCH)/bin/python benchmarks/peers.py --json build/peers.json --png build/peers.png

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Made again when the dependencies change.
$(STAMP): EXTRA := dev
$(FRAMEWORKS)/.laconic-installed: EXTRA := frameworks
$(DOCS)/.laconic-installed: EXTRA := docs
$(BENCH)/.laconic-installed: EXTRA := bench
%/.laconic-installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "laconic needs Python 3.11 or newer, and $(PYTHON) is older. Try: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }
	@test -x $*/bin/python || $(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRA)]"
	@touch $@

# As above, with this torch, and the Triton that it asks for, instead of those in constraints.txt.
.venv-torch-%/.laconic-installed: pyproject.toml constraints.txt
	@test -x .venv-torch-$*/bin/python || $(PYTHON) -m venv .venv-torch-$*
	@{ grep -v -e '^torch==' -e '^triton==' constraints.txt; echo 'torch==$*'; } > .venv-torch-$*/constraints.txt
	.venv-torch-$*/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-torch-$*/constraints.txt -e ".[dev]"
	@touch $@

.PRECIOUS: .venv-torch-%/.laconic-installed

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(DOCS) $(BENCH) .venv-torch-* build .pytest_cache .mypy_cache .ruff_cache
