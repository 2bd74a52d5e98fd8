# Each target sets up .venv by itself on a machine with python3 (3.10+, with venv) and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
STAMP := $(VENV)/.installed
LAB_STAMP := $(VENV)/.installed_notebook
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
export OMP_NUM_THREADS ?= 1

.PHONY: demo notebooks notebook-outputs docs test versions lint types check setup clean

demo: $(STAMP)  ## train a DLRM with stock TorchRec and with hot/cold tables, and compare
	$(BIN)/torchrec-picasso demo $(ARGS)

notebooks: $(LAB_STAMP)  ## open the notebooks in JupyterLab
	$(BIN)/jupyter-lab $(ARGS) notebooks

docs: $(DOCS_STAMP)  ## build the documents as a site into site/, without a network
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet $(ARGS)

notebook-outputs: $(STAMP)  ## run the notebooks and store their outputs in them
	$(BIN)/python -m tests.notebooks.outputs $(ARGS)

test: $(STAMP)  ## the whole test-suite; tests of one file run one after another
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile $(ARGS)

versions: $(STAMP)  ## the suite with each TorchRec release, in .venv-<release>; an hour, and GB where torch has CUDA
	$(BIN)/python -m tests.versions -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

check: lint types test  ## what .ci/run runs

setup: $(STAMP)

$(STAMP): requirements.txt requirements-nodeps.txt setup.py pyproject.toml
	@echo "setting up $(VENV) (a minute or two, once)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements.txt
	$(PIP) install --no-deps -r requirements-nodeps.txt
	$(PIP) install --no-deps -e .
	@touch $@

$(LAB_STAMP): $(STAMP) requirements-notebook.txt
	@echo "adding JupyterLab to $(VENV) (once)"
	$(PIP) install -r requirements-notebook.txt
	@touch $@

$(DOCS_STAMP): requirements-docs.txt
	@echo "setting up $(DOCS_VENV) (once)"
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check --quiet install -r requirements-docs.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-* site build *.egg-info
