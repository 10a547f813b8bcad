# Everything needs only make, git and some Python from 3.12 on; the environment lies in .venv and nothing is installed elsewhere.
#
#   make setup          the environment (the other targets do it too)
#   make serve          the server with the tiny model, decode context parallel size 4, 3 drafts a step; ARGS='--port 8001 …'
#                       adds flags
#   make test           lint and the tests; PYTEST_ARGS='-k word' adds arguments
#   make test-matrix    full products of settings (long)
#   make test-gpu       kernels, engines and attention on this machine's GPUs; needs PYTHON=… with a JAX that sees them
#   make soak           five minutes of clients that misbehave
#   make pictures       draws the pictures of docs/ again
#   make docs           the API reference, from docstrings, into build/docs
#   make lint           formatting and lint alone
#   make clean          removes .venv and caches
#
# PYTHON=… names the Python to use; EXTRAS=test,cuda13 installs for NVIDIA GPUs.

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-matrix soak test-gpu pictures docs lint clean

EXTRAS ?= test
ARGS ?=
PYTEST_ARGS ?=

python := .venv/bin/python
settings = PYTHON='$(PYTHON)' EXTRAS='$(EXTRAS)'
pytest = $(python) -m pytest -n 2 --dist loadfile
no_python = dcpjax needs CPython 3.12 to 3.14 that can make environments: on Debian 13 `apt install python3 python3-venv`, \
else install uv or pyenv, or name one with `make PYTHON=/path/to/python3.12`

help:
	@sed -n 's/^#   //p' Makefile

setup:
	@$(settings) sh scripts/setup.sh make '$(or $(shell $(settings) sh scripts/setup.sh find),$(error $(no_python)))'

serve: setup
	$(python) -m dcpjax.serve --decode-context-parallel-size 4 \
	  --speculative-config '{"method":"mtp","num_speculative_tokens":3}' $(ARGS)

lint: setup
	$(python) -m ruff check .
	$(python) -m ruff format --check .

test: lint
	$(pytest) $(PYTEST_ARGS)

soak: setup
	$(python) -m pytest -m soak $(PYTEST_ARGS)

test-matrix: setup
	$(pytest) -m matrix $(PYTEST_ARGS)

test-gpu:
	$(PYTHON) -m pytest -m gpu $(PYTEST_ARGS)
	$(PYTHON) -m pytest --on-gpu $(PYTEST_ARGS) $(patsubst %,tests/attention/test_%.py,attend select select_kernels merge decision_4)

docs:
	@$(MAKE) --no-print-directory setup EXTRAS='$(EXTRAS),docs'
	PYTHONPATH=. $(python) -m doctest scripts/reference.py
	PYTHONPATH=. $(python) -W error scripts/reference.py build/docs

pictures: setup
	PYTHONPATH=. $(python) scripts/pictures.py

clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
