# Everything starts from a checkout with nothing installed: each target makes what it needs, once.
# Variables: PYTHON (base interpreter), VENV, TORCH=auto|reuse|install, TORCH_INDEX (index URL for torch),
# STRICT=1 (no optional step may fail), JOBS (test processes), ARGS (more arguments for pytest or verify).

VENV ?= .venv
TORCH ?= auto
TORCH_INDEX ?=
STRICT ?=
JOBS ?= auto
ARGS ?=
FIND_PYTHON = for p in python3 python python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && command -v "$$p" && break; done
PYTHON ?= $(shell $(FIND_PYTHON))

PY := $(VENV)/bin/python
RUN := $(VENV)/.ready-to-run
DEV := $(VENV)/.ready-to-develop
INPUTS := pyproject.toml ci/bootstrap.py $(wildcard constraints/*.txt)
BOOTSTRAP = $(if $(PYTHON),,$(error no Python 3.11 or newer found: set PYTHON=/path/to/python)) \
	$(PYTHON) ci/bootstrap.py --venv $(VENV) --torch $(TORCH) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) \
	$(if $(STRICT),--strict)

# One thread per process: the test processes share the cores.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-native test-interpret test-slow lint format typecheck check hooks install dev clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUN) ## store and decode real keys and values: four presets, both layouts
	$(PY) -m turboquant_rocm.verify --input examples/kv/smollm2_135m.npz $(ARGS)

test: test-native test-interpret ## all tests that this machine can run, but the slow ones

# Triton decides once per process whether it compiles or interprets, hence two.
test-native: $(DEV) ## of these, all but those in Triton's interpreter
	$(PYTEST) tests $(ARGS)

test-interpret: $(DEV) ## those in Triton's interpreter
	TRITON_INTERPRET=1 $(PYTEST) tests/l1_interpret $(ARGS)

test-slow: ## all tests, with the slow ones
	$(MAKE) test ARGS="--run-slow $(ARGS)"

lint: $(DEV) ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(DEV) ## rewrite the source as `make lint` wants it
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

typecheck: $(DEV) ## mypy --strict
	$(PY) -m mypy -p turboquant_rocm -p ci

check: lint typecheck test ## what CI runs

hooks: $(DEV) ## install the git hooks of .pre-commit-config.yaml
	$(PY) -m pre_commit install

install: $(RUN) ## the environment of `make demo`

dev: $(DEV) ## the environment of `make test`

clean: ## remove the environment and all caches
	@test ! -e $(VENV) || test -e $(VENV)/bootstrap.json || { echo "$(VENV) was not made here"; exit 1; }
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(RUN): $(INPUTS)
	$(BOOTSTRAP)
	@touch $@

$(DEV): $(INPUTS)
	$(BOOTSTRAP) --extras test,dev
	@touch $@ $(RUN)
