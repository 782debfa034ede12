# make run           a federated sparse GP on real data, makers of cars as sites, simulated with Ray
# make test          lint, types and every test: the gate
# make test-long     what takes minutes: kills at every message, full disks, SuperNodes that are killed
# make quick         the tests without those that start a SuperLink
# make deploy-demo   a SuperLink with TLS and three SuperNodes with a CSV file each, on this machine
# make docs          the documentation site, into docs/_build
# make clean         removes caches, logs, keys and Flower's own files; results and the environment stay
#
# CONFIG=simulations/fgpr.toml SITES=10 and ARGS="seed=1 method=…" change what is run; SITES=0 takes natural groups.
#
# On Linux, pip's usual build of PyTorch brings several gigabytes of CUDA. Whoever wants the CPU build installs it first,
# into .venv (python3 -m venv .venv), by PyTorch's own instructions and in the version constraints.txt names; `make` then
# leaves it alone.

PYTHON ?= python3
SITES ?= 0
CONFIG ?= simulations/sgpr-makers.toml
# Runs on Ray and on SuperNodes wait as much as they compute.
WORKERS ?= 3
ARGS ?=

bin := .venv/bin
installed := .venv/.installed

# Real data sets beside the checkout, where there are any.
data := $(realpath ../shared/data)
ifneq ($(data),)
export FEDGP_DATA ?= $(data)
endif

.PHONY: setup run test tests test-long quick lint format docs deploy-demo clean
.DELETE_ON_ERROR:

setup: $(installed)

$(installed): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; make PYTHON=python3.12")'
	test -x $(bin)/python || $(PYTHON) -m venv .venv
	$(bin)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# `exec`, so that a signal reaches the launcher itself, which ends what it started before it leaves.
run: setup
	@exec $(bin)/fedgp simulate --sites $(SITES) --config $(CONFIG) $(ARGS)

deploy-demo: setup
	@exec $(bin)/fedgp deploy demo $(ARGS)

lint: setup
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

format: setup
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

test:
	@$(MAKE) --no-print-directory --jobs 2 lint tests

tests: setup
	OMP_NUM_THREADS=1 $(bin)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Real machines by themselves: sites refuse an app in whose folder other tests build something.
test-long: setup
	OMP_NUM_THREADS=1 $(bin)/pytest -m long -n 2 --dist worksteal --ignore tests/test_real_machines.py
	OMP_NUM_THREADS=1 $(bin)/pytest -m long tests/test_real_machines.py

quick: setup
	OMP_NUM_THREADS=1 $(bin)/pytest -m "not simulation and not deployment and not long"

docs: setup
	OMP_NUM_THREADS=1 $(bin)/sphinx-build -W --keep-going -q docs docs/_build

clean:
	rm -rf docs/_build docs/gallery docs/jupyter_execute .flwr .deploy .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info *.fab
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
