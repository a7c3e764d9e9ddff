# The newest Python that is here and supported; `make PYTHON=python3.12 test` for another.
PYTHON ?= $(shell sh .ci/pythons | head -n 1)
VENV ?= .venv
BIN := $(VENV)/bin
ADULT ?= $(wildcard ../shared/data/adult.csv)
# Leave one core's worth of threads to each test process.
TEST_FLAGS ?= -n 2 --dist worksteal
# What differs between releases of Python and JAX: programs, keys, noise, what is shown.
SHORT := contract privacy/test_grid.py privacy/test_noise.py \
  privacy/test_mechanisms.py attacks/test_keys.py attacks/test_rows.py
# For example `-D nb_execution_mode=off`, for pages without the results of notebooks.
DOCS_FLAGS ?=
# For example jax==0.10.2: the newest that pip finds when empty.
PINNED ?=

.PHONY: install format check demo test test-short test-slow audit lint type bench docs \
  dist try-wheel clean

$(BIN)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: needs Python 3.11 to 3.14 on the PATH" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]" $(PINNED)
	touch $@

install: $(BIN)/.installed

format: $(BIN)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: test

demo: $(BIN)/.installed
	$(BIN)/python examples/demo.py --adult "$(ADULT)"

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(BIN)/.installed
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# Compiled in less time, but for the folders that tests/conftest.py names. Types are
# checked meanwhile; what is wrong with them comes last.
test: $(BIN)/.installed lint
	@mkdir -p build; \
	$(BIN)/basedpyright --pythonpath $(BIN)/python > build/types.txt & types=$$!; \
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 \
	  $(BIN)/python -m pytest $(TEST_FLAGS) -m "not slow"; failed=$$?; \
	wait $$types || failed=1; echo "types: $$(cat build/types.txt)"; exit $$failed

test-short: $(BIN)/.installed
	$(BIN)/python -m pytest $(TEST_FLAGS) -m "not slow" $(SHORT:%=tests/%)

# Sphinx too: without it the tests of the site are skipped.
test-slow: $(BIN)/.documented
	JAX_DEBUG_KEY_REUSE=1 $(BIN)/python -m pytest $(TEST_FLAGS) -m slow

audit: $(BIN)/.installed
	$(BIN)/python -m pytest $(TEST_FLAGS) tests/audit
	$(BIN)/python -m tests.audit.table

# The site: warnings are errors, notebooks run unless their results are in build/ already.
$(BIN)/.documented: $(BIN)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

docs: $(BIN)/.documented
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet $(DOCS_FLAGS) \
	  docs build/docs/html
	@echo "docs: open build/docs/html/index.html"

bench: $(BIN)/.installed
	$(BIN)/python -m benchmarks

# What would be uploaded, checked as an index checks it.
dist: $(BIN)/.installed
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

# The wheel of `make dist` alone, without extras, far from the sources.
try-wheel:
	rm -rf $(VENV)-wheel && $(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install --quiet dist/*.whl $(PINNED)
	cp tests/installed.py $(VENV)-wheel/
	cd $(VENV)-wheel && bin/python -I installed.py

clean:
	rm -rf .venv .venv-* build dist runs docs/api .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
