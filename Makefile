PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PREFIX ?= 512,1024,2048

.DEFAULT_GOAL := help
.PHONY: help install test lint ablation sweep audit claims figures clean

help: ## Show the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/\1\t\2/' | expand -t 12

install: $(VENV)/installed ## Create the virtual environment with the tested versions

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

test: install ## Run the tests (GPU tests only where there is a GPU)
	$(BIN)/python -m pytest

lint: install ## Check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

ablation: install ## Run the 12-cell ablation on the CPU, with tables and figures
	$(BIN)/python -m experiments.run experiment=ablation

sweep: install ## Sweep prefix lengths: make sweep PREFIX=512,1024,2048
	$(BIN)/python -m experiments.run -m name=sweep figures=true workload.prefix_len=$(PREFIX)

audit: install ## Measure the same two cells under common mistakes, and show what each would have reported
	$(BIN)/python -m experiments.run experiment=audit
	$(BIN)/python -m analysis.audit outputs/audit

claims: install ## Put the paper's claims beside what the published records say
	$(BIN)/python -m analysis.claims results/*/

figures: install ## Rebuild the figures of every published run from its records
	@set -e; for run in results/*/; do case $$run in \
	  *audit*) $(BIN)/python -m analysis.audit $$run ;; \
	  *) $(BIN)/python -m analysis.report $$run ;; \
	esac; done

clean: ## Remove the virtual environment and caches; outputs stay
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
