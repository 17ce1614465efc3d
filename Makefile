# make train   train the quickstart model on two rehearsed clusters
# make test    style, types and the whole test suite
# make clean   remove the environments
#
# Each interpreter has an environment of its own: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv$(if $(filter-out python3,$(notdir $(PYTHON))),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: train test clean

train: $(VENV)/installed-base
	$(BIN)/python -m launch train configs/runs/quickstart.yaml

test: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q -n 3

clean:
	rm -rf .venv .venv-*

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-base: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a minute, once)"
	$(PIP_INSTALL) -e '.[tb]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a minute, once)"
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/installed-base
