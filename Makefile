# make setup | demo | test | test-slow | check | fix | cards. Everything runs in ./.venv, which `setup` builds once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.spechead-setup
WORKERS ?= 2
CODE := spechead tests $(wildcard recipes scripts)

.PHONY: setup demo test test-slow check fix cards check-speculators

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[demo,serve,dev]"
	touch $(STAMP)

demo: setup
	$(BIN)/spechead demo

test: setup
	$(BIN)/pytest -n $(WORKERS) -m "not slow and not gpu"

test-slow: setup
	$(BIN)/pytest -n $(WORKERS) -m "not gpu"

check: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_house_rules.py

fix: setup
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

cards: setup
	$(BIN)/python scripts/render_readme.py
	$(BIN)/python scripts/render_cli_docs.py
	$(BIN)/python scripts/render_support.py
	$(BIN)/python scripts/render_model_cards.py

# Opt-in: an environment of its own (about 1.5 GB, once) with the real speculators package.
check-speculators: setup
	$(BIN)/python scripts/check_speculators.py
