PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ADULT ?= $(wildcard ../shared/data/adult.csv)
# Leave one core's worth of threads to each test process.
TEST_FLAGS ?= -n 2

.PHONY: demo test test-slow audit lint type bench clean

$(BIN)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: $(BIN)/.installed
	$(BIN)/python examples/demo.py --adult "$(ADULT)"

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(BIN)/.installed
	$(BIN)/mypy

test: $(BIN)/.installed lint type
	$(BIN)/python -m pytest $(TEST_FLAGS) -m "not slow"

test-slow: $(BIN)/.installed
	$(BIN)/python -m pytest $(TEST_FLAGS) -m slow

audit: $(BIN)/.installed
	$(BIN)/python -m pytest $(TEST_FLAGS) tests/test_audit.py tests/test_mutants.py
	$(BIN)/python tests/audit_table.py

bench: $(BIN)/.installed
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
