# Everything a person or CI runs. Each target installs what it needs into .envs/ and is quick when all is there.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

ENVS  := .envs
BASE  := $(ENVS)/base/bin
STAMP := .installed

.PHONY: help install lint test test-harnesses demo bench clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

install: $(ENVS)/base/$(STAMP) $(ENVS)/trainer/$(STAMP) $(ENVS)/inference/$(STAMP) ## Install the three environments

$(ENVS)/%/$(STAMP): infra/environments/%.txt infra/environments/install.sh pyproject.toml
	@bash infra/environments/install.sh $*
	@touch $@

lint: $(ENVS)/base/$(STAMP) ## ruff, mypy (strict) and the layering contracts
	$(BASE)/ruff check .
	$(BASE)/ruff format --check .
	$(BASE)/mypy
	$(BASE)/lint-imports

test: install ## Every test, against the real parts
	$(BASE)/python -m pytest

test-harnesses: install ## The real harnesses alone: Codex, OpenClaw, pi, mini-swe-agent, against the proxy
	$(BASE)/python -m pytest tests/proxy/test_codex.py tests/proxy/test_replay_codex.py tests/proxy/test_programs.py

SEED ?= 0
demo: install ## Train a small policy inside the real Codex harness, end to end (SEED=1: another one)
	$(BASE)/openforge train recipes/quickstart --seed $(SEED) --name quickstart-seed-$(SEED)

bench: install ## Seconds by phase, proxy latency and trainer time, each as a ratio in one run
	$(BASE)/python -m benchmarks

clean: ## Remove the environments and the local stack's state
	@if [ -x $(BASE)/openforge ]; then $(BASE)/openforge down || true; fi
	rm -rf $(ENVS) .tools .openforge

.PHONY: lock
UV   ?= $(or $(shell command -v uv),.tools/bin/uv)
LOCK := $(UV) pip compile pyproject.toml --quiet --python-version 3.11 --no-annotate --no-header --no-emit-index-url --no-emit-find-links
lock: ## Compile the pinned requirements anew from pyproject.toml
	$(LOCK) --extra base --extra dev -o infra/environments/base.txt
	$(LOCK) --extra trainer --override infra/environments/overrides.txt --find-links "$${PIP_FIND_LINKS:-}" -o infra/environments/trainer.txt
	$(LOCK) --extra inference --override infra/environments/overrides.txt --find-links "$${PIP_FIND_LINKS:-}" -o infra/environments/inference.txt
