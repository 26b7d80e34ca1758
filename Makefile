# Everything a person types in this repository. `make help` lists it.
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
WORKERS ?= 2
export PATH := $(PATH):/usr/sbin:/sbin

.PHONY: pictures help demo quick test check fix coverage docs bench wheel image image-check release pins generate clean
# The unit tests that mount nothing and start no processes.
QUICK := tests/unit/test_documentation.py tests/unit/test_words.py tests/unit/kube tests/unit/controllers tests/unit/sidecars \
	tests/unit/insight tests/unit/cli tests/unit/host tests/unit/deploy
.DEFAULT_GOAL := help

help: ## list what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: ## bring the whole stack up on this machine, walk one volume through its life, leave nothing behind
	@scripts/prepare run
	@$(BIN)/moorage demo

quick: ## run the pure unit tests, in less than a minute
	@scripts/prepare dev
	@HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest -q -n $(WORKERS) $(QUICK) $(PYTEST_ARGS)

test: ## run all tests (as root: also those that mount real filesystems)
	@scripts/prepare dev
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

check: ## lint, format, types (strict), the direction of imports and spelling
	@scripts/prepare dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

fix: ## repair what lint and format can repair
	@scripts/prepare dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: ## run the unit tests with branch coverage; each package must reach its floor in pyproject.toml
	@scripts/prepare dev
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --cov --cov-report=json:build/coverage/report.json \
		tests/unit $(PYTEST_ARGS)
	@$(BIN)/python scripts/coverage.py build/coverage/report.json

docs: ## write the generated pages and build the site in build/site; a broken link is an error
	@scripts/prepare dev
	@$(BIN)/python scripts/docs.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

pictures: ## take the screenshots that README and docs show (as root)
	@scripts/prepare dev
	@$(BIN)/python scripts/pictures.py

bench: ## run every benchmark; each prints its figure and its bound
	@scripts/prepare dev
	@$(BIN)/python benchmarks/all.py

wheel: ## build the pure Python wheel in dist/
	@scripts/prepare dev
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

image: ## make the container image as an OCI archive, without pulling a base image
	@deploy/image/build

image-check: ## make the image twice under different circumstances: both must have the same digest
	@scripts/prepare dev
	@deploy/image/check

generate: ## write the protocol stubs again from the .proto files
	@scripts/prepare dev
	$(BIN)/python -m moorage.csi.generate

release: ## run CI and the image check, write the changelog, tag the version
	@scripts/prepare dev
	@scripts/release

pins: ## write requirements*.txt again from pyproject.toml
	@scripts/prepare dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-tools
	@scripts/pins

clean: ## remove what the other targets made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
