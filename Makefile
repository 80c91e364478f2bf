# Every target that needs packages sets up .venv by itself, from constraints.txt.

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

# The first interpreter that is new enough; PYTHON=... overrides it.
PYTHON ?= $(shell for python in python3.11 python3 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

# Ranks share the cores: one thread each keeps them out of each other's way.
export OMP_NUM_THREADS = 1

# Two at a time: most tests, those on one rank, keep one core busy. By file: pools of ranks are a process's own.
# In the order of their names, which has the quick ones last: by number of tests, a slow file of few would run alone.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## Train a small Llama on two ranks, with fsdp_opt and with FSDP2, and compare them
	@$(BIN)/python tools/demo.py

test: $(STAMP) ## Run the tests that are not marked slow
	@$(PYTEST) -m "not slow"

test-all: $(STAMP) ## Run every test
	@$(PYTEST)

lint: $(STAMP) ## Run ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean: ## Remove .venv, build outputs and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# torch goes first, alone and by its exact version, so that no other package chooses its build.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with PYTHON=..." >&2; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON): a few minutes, once."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e ".[demo,dev]"
	@touch $@
