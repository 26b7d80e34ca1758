# Everything a person types in this repository. `make help` lists it.
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
WORKERS ?= 2
export PATH := $(PATH):/usr/sbin:/sbin

.PHONY: help demo test check docs bench image image-check pins generate clean
.DEFAULT_GOAL := help

help: ## list what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: ## bring the whole stack up on this machine, walk one volume through its life, leave nothing behind
	@scripts/prepare run
	@$(BIN)/moorage demo

test: ## run all tests (as root: also those that mount real filesystems)
	@scripts/prepare dev
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

check: ## lint, format, types (strict) and the direction of imports
	@scripts/prepare dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: ## write the generated pages and build the site in build/site; a broken link is an error
	@scripts/prepare dev
	@$(BIN)/python scripts/docs.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

bench: ## run every benchmark; each prints its figure and its bound
	@scripts/prepare dev
	@$(BIN)/python benchmarks/all.py

image: ## make the container image as an OCI archive, without pulling a base image
	@deploy/image/build

image-check: ## make the image twice under different circumstances: both must have the same digest
	@scripts/prepare dev
	@deploy/image/check

generate: ## write the protocol stubs anew from the .proto files
	@scripts/prepare dev
	$(BIN)/python -m moorage.csi.generate

pins: ## write requirements*.txt anew from pyproject.toml
	@scripts/prepare dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-tools
	@scripts/pins

clean: ## remove what the other targets made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
