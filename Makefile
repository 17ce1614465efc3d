# `make help` lists the targets: each has its sentence behind "##" on the line that names it.
#
# Each interpreter has an environment of its own: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv$(if $(filter-out python3,$(notdir $(PYTHON))),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# uv takes a tenth of pip's time, but does not read pip's files of settings: where it fails, pip installs.
INSTALL = $(PIP) uv && $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt $(1) || \
	    $(PIP) -c constraints.txt $(1)

# Tests and jobs start many processes, and each would compile the packages again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train test test-all mutants docs pictures clean

help: ## List the targets (the default).
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Add PYTHON=python3.12, for example, to use another interpreter; it gets its own environment."

train: $(VENV)/installed-base ## Train the quickstart model on two clusters simulated on this machine.
	$(BIN)/python -m launch train configs/runs/quickstart.yaml

# One process compiles all modules once, beside mypy: four that begin together would do it four times.
test: $(VENV)/installed-dev ## Check style and types, and run the tests: 20 to 40 minutes on two cores.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/mypy >$(VENV)/types.txt 2>&1 & types=$$!; \
	[ $(VENV)/compiled -nt $(VENV)/installed-dev ] || $(BIN)/pytest -q --collect-only $(SELECT) >/dev/null && touch $(VENV)/compiled; \
	$(BIN)/pytest -q -n 4 --dist loadgroup --max-worker-restart 0 $(SELECT); tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.txt; exit $$((tests + types))

test-all: SELECT := -m ''
test-all: $(VENV)/installed-parity $(VENV)/transformers4/installed $(VENV)/skypilot/installed
test-all: test ## The same, with the exhaustive searches, every fault at every moment, and transformers.

mutants: $(VENV)/installed-dev ## Plant known bugs in copies of the checkout, and list those that no test finds.
	$(BIN)/python -m tests.mutations -j 2

docs: $(VENV)/installed-dev ## Write the documents as a site, with search: site/index.html.
	$(BIN)/python -m sphinx -q -W --keep-going -d site/.doctrees docs site

pictures: $(VENV)/installed-base ## Draw the pictures in docs/ again from the code and the results.
	$(BIN)/python -m docs.pictures

clean: ## Remove the environments, .venv and .venv-*.
	rm -rf .venv .venv-*

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-base: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a minute, once)"
	$(call INSTALL,-e '.[tb]')
	@touch $@

$(VENV)/installed-parity: $(VENV)/installed-dev
	@echo "installing PyTorch, transformers and peft into $(VENV) (minutes, once)"
	$(PIP) -c constraints.txt -e '.[dev,parity]'
	@touch $@

# Version 4 needs other versions of packages than version 5: an environment inside the other.
$(VENV)/transformers4/installed: $(VENV)/bin/python
	@echo "installing transformers 4 into $(VENV)/transformers4 (a minute, once)"
	$(BIN)/python -m venv $(VENV)/transformers4
	$(VENV)/transformers4/bin/python -m pip install --quiet --disable-pip-version-check \
	    transformers==4.57.6 jinja2==3.1.6
	@touch $@

# SkyPilot's packages are other versions than ours, too.
$(VENV)/skypilot/installed: $(VENV)/bin/python
	@echo "installing SkyPilot into $(VENV)/skypilot (a minute, once)"
	$(BIN)/python -m venv $(VENV)/skypilot
	$(VENV)/skypilot/bin/python -m pip install --quiet --disable-pip-version-check skypilot==0.14.1
	@touch $@

$(VENV)/installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a minute, once)"
	$(call INSTALL,-e '.[dev]')
	@touch $@ $(VENV)/installed-base
