# Each target sets up what it needs: a virtual environment in .venv, from nothing but a Python of version 3.11 or newer.
# A second call installs nothing again until pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed-dev
PLOTS = $(VENV)/.installed-plots
WORKERS ?= 2
PYTEST_ARGS ?=
# What another Python with newer packages could break: everything that jax, flax, orbax or numpy take part in.
SMOKE_312 = tests/checkpoint tests/convert/test_round_trip.py tests/decoding tests/experiments/test_training.py \
  tests/lab/test_replay.py tests/lab/test_trace.py tests/model tests/offload tests/retention/test_equal_in_jax.py \
  tests/test_dispatch_properties.py tests/test_engine.py tests/test_import.py tests/test_package.py

.PHONY: help install demo demo-eval demo-traces figures test smoke test-py312 tpu-test wheel-test lint format clean

help:
	@echo "make demo        the model that ships answers, with all and with 40 % of its experts; PNG in ./demo"
	@echo "make demo-eval   its held-out tasks with all, 40 % and 10 % of the experts; minutes"
	@echo "make demo-traces its routing at several block lengths and thresholds, in ./traces"
	@echo "make figures     TRACES=FILE... (batch 1): figures and tables as PNG and CSV, in ./figures"
	@echo "make test        all tests, in WORKERS=2 processes; PYTEST_ARGS=... is passed on"
	@echo "make test-py312  the smoke set under Python 3.12, where there is one"
	@echo "make tpu-test    compile for a TPU that is not there, in .venv-tpu (1.7 GB); takes minutes"
	@echo "make wheel-test  build sdist and wheel, use the wheel outside the checkout"
	@echo "make lint        ruff check and ruff format --check; 'make format' repairs"
	@echo "PYTHON=python3.x chooses the Python that .venv is made from"

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 11) else \
	  f"oled-jax needs Python 3.11 or newer, and $(PYTHON) is {v}: name another one, as in make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -e '.[dev]'
	@touch $@

$(PLOTS): $(INSTALLED)
	$(BIN)/python -m pip install -q -e '.[plots]'
	@touch $@

install: $(INSTALLED)

demo: $(PLOTS)
	$(BIN)/python experiments/demo.py

# Held-out tasks with all, 40 % and 10 % of the experts: about five minutes on two cores. EVALUATE=40 gives the model
# card's figures, and takes twice as long.
EVALUATE ?= 16
demo-eval: $(INSTALLED)
	$(BIN)/python experiments/train/evaluate.py --model demo --per-task $(EVALUATE) --compare

# Routing of the demo model at four block lengths, two thresholds and two batch sizes, in ./traces; the repository holds
# experiments/traces (the same with --core).
demo-traces: $(INSTALLED)
	$(BIN)/python experiments/train/traces.py --model demo --out traces

# Policies are compared on the split that nothing was fitted to.
figures: $(PLOTS)
	@test -n "$(TRACES)" || { echo "figures: name trace files, as in make figures TRACES=run.safetensors.gz"; exit 2; }
	for name in fig04_footprint fig07_overlap fig10_stability; do \
	  $(BIN)/python experiments/figures/$$name.py $(TRACES) || exit 1; \
	done
	for name in fig13_bounds table_capw; do \
	  $(BIN)/python experiments/figures/$$name.py $(TRACES) --split evaluation || exit 1; \
	done

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

smoke: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(PYTEST_ARGS)

# A pyenv shim named python3.12 can exist and fail, so a candidate counts when it runs and says that it is 3.12.
test-py312:
	@for python in python3.12 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.12*/bin/python; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; then \
	    exec $(MAKE) --no-print-directory PYTHON="$$python" VENV=.venv312 PYTEST_ARGS="$(SMOKE_312) $(PYTEST_ARGS)" smoke; \
	  fi; \
	done; \
	echo "test-py312: no Python 3.12 on this machine, smoke set skipped"

# An environment of its own: wherever libtpu is installed, every process that does not set JAX_PLATFORMS looks for a TPU.
tpu-test:
	@$(MAKE) --no-print-directory VENV=.venv-tpu install
	.ci/tpu-test .venv-tpu -n $(WORKERS) $(PYTEST_ARGS)

wheel-test: $(INSTALLED)
	.ci/wheel-test $(BIN)/python

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv312 .venv-tpu build dist demo *.egg-info .pytest_cache .ruff_cache .hypothesis
