# `make help` lists the targets. Everything is installed into this folder: uv into .tools when it is missing, packages into .venv.
SHELL := bash
.DEFAULT_GOAL := help
UV := $(shell command -v uv 2>/dev/null || echo .tools/bin/uv)
BIN := .venv/bin

.PHONY: help setup demo test test-slow lint format types bench bench-report clean install-packages install haproxy

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

# What the images' RUN steps call (docker/). Packages come first and the project after them, so that a layer holds the packages.
EXTRAS ?= learn cluster
INSTALL = $(UV) sync --locked --no-dev --no-editable $(addprefix --extra ,$(EXTRAS))

install-packages: pyproject.toml uv.lock $(filter .tools/bin/uv,$(UV)) ## Install the packages of EXTRAS into .venv, without those of development.
	$(INSTALL) --no-install-project

install: install-packages ## Install the project with EXTRAS into .venv, to be run and not to be changed.
	$(INSTALL)

haproxy: ## Write .venv/bin/rlsvc-haproxy, which keeps HAProxy's own ports on loopback.
	$(BIN)/python -m rlsvc.serve.haproxy $(BIN)/rlsvc-haproxy

demo: setup ## Train, evaluate, serve and query a small policy on this machine.
	$(BIN)/rlsvc demo

# These tests compile many small programs and run each a few times, so most of XLA's optimizations would cost more than they save.
# Two processes: the tests of Ray in one, files of the others in both.
test: setup ## Run the tests that take minutes.
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(BIN)/pytest -m "not slow and not gpu" -n 2 --dist loadgroup --no-loadscope-reorder

# Those of Ray start clusters and processes of their own, and come one after the other.
test-slow: setup ## Run the slow tests: learning, sweeps, jobs.
	$(BIN)/pytest -m "slow and not gpu and not ray" -n 2 --dist loadfile
	$(BIN)/pytest -m "slow and not gpu and ray"

lint: setup ## Check format, lint, import layers and images.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/hadolint --failure-threshold style docker/*.Dockerfile

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
