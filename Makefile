# `make help` lists the targets. Everything is installed into this folder: uv into .tools when it is missing, packages into .venv.
SHELL := bash
.DEFAULT_GOAL := help
UV := $(shell command -v uv 2>/dev/null || echo .tools/bin/uv)
BIN := .venv/bin

.PHONY: help setup demo test test-slow lint format types bench bench-report clean

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.tools/bin/uv:
	@python=$$(command -v python3.12 >/dev/null && python3.12 -c "" 2>/dev/null && echo python3.12 || command -v python3 || true); \
	if [ -z "$$python" ]; then echo "setup: needs uv, or Python 3 to install uv with" >&2; exit 2; fi; \
	if ! { "$$python" -m venv .tools && .tools/bin/python -m pip install --quiet uv; }; then \
	  rm -rf .tools; "$$python" -m pip install --quiet --target .tools/lib uv && mkdir -p .tools/bin && ln -sf ../lib/bin/uv .tools/bin/uv; \
	fi

.venv/.synced: pyproject.toml uv.lock $(filter .tools/bin/uv,$(UV))
	$(UV) sync --locked --extra all
	@touch $@

setup: .venv/.synced ## Install everything this project needs into .venv (about 7 GB).

demo: setup ## Train, evaluate, serve and query a small policy on this machine.
	$(BIN)/rlsvc demo

# These tests compile many small programs and run each a few times, so most of XLA's optimizations would cost more than they save.
# Two processes: the tests of Ray in one, files of the others in both.
test: setup ## Run the tests that take minutes.
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(BIN)/pytest -m "not slow and not gpu" -n 2 --dist loadgroup --no-loadscope-reorder

test-slow: setup ## Run the slow tests: learning, sweeps, jobs.
	$(BIN)/pytest -m "slow and not gpu"

lint: setup ## Check format, lint and import layers.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

format: setup ## Format and mend what can be mended.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: setup ## Check types.
	$(BIN)/pyright

bench: setup ## Measure the served path on this machine (GPU benchmarks: see docs/benchmarks.md).
	$(BIN)/python benchmarks/serving_overhead.py

bench-report: setup ## Write docs/benchmarks.md from benchmarks/results.
	$(BIN)/python benchmarks/report.py

clean: ## Delete the environment and caches, not runs.
	rm -rf .venv .tools .pytest_cache .ruff_cache
