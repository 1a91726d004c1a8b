# Each target sets itself up in .venv; the second time that takes no time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
DEV := $(VENV)/.dev
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup test demo bench soak lint format clean
setup: $(DEV)

# torch first and pinned: without the pin, pip would fetch several GB of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip setuptools
	$(INSTALL) --constraint constraints.txt torch
	$(INSTALL) --constraint constraints.txt --editable ".[all,gpt2-offline]"
	touch $(STAMP)

# What only tests and linters need.
$(DEV): $(STAMP)
	$(INSTALL) --constraint constraints.txt --editable ".[dev]"
	touch $(DEV)

# One worker a core, each on one thread.
test: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto

demo: $(STAMP)
	$(BIN)/scaleinv compare --methods rope,logn+p-rope,alibi,scale-invariant-p-rope --seeds 1 --steps 400 \
		--batch-tokens 2048 --tokens 131072 --out runs/demo
	$(BIN)/scaleinv generate runs/demo/runs/scale-invariant-p-rope-seed0 --prompt "My fellow citizens" --seed 0

bench: $(STAMP)
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/decoding.py
	$(BIN)/python benchmarks/training.py

# Kills training, comparisons and needle tests 100 times; what they leave must equal undisturbed ones. A few minutes.
soak: $(STAMP)
	$(BIN)/python benchmarks/soak.py --kills 100

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
