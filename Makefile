# make quickstart   one fine-tuning job on this machine, from upload to adapter
# make serve        the server in the foreground, with the sample base model
# make wheel        everything as one file for pip, in dist
# make test         the tests that need no GPU, but for the long ones        make test-all   all that need none
# make check-docs   the tests of the documentation's site, the wheel, the Helm chart and the manifests, which make test leaves out
# make test-failed  those that failed then, once more and one after another
# make bench        every benchmark; results go to benchmarks/results
# make gpu-report   what one GPU shows of the workers: right numbers, speed, memory; without a GPU: that it would run
# make check        format, lint, types, the direction of imports, and links and anchors of the documentation
# make docs         make the pages that are made from the code, and the documentation's site in build/site
#
# Everything is installed into .venv, state is kept in .ft. Variables:
#   PYTHON=python3.12   the interpreter to build .venv with (3.11, 3.12 or 3.13)
#   TORCH_INDEX=URL     package index to take PyTorch from, as the selector on pytorch.org names it (CPU only, another CUDA version)
#   ONLY=a  OUT=DIR     for gpu-report: one of its parts a to e of less than 10 minutes, or sections; where results go
#   FT_HOME=DIR         where state is kept            FT_MODELS=DIR:DIR   folders of base models

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
TORCH_INDEX ?=
export FT_HOME ?= $(CURDIR)/.ft

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOG := $(VENV)/install.log
CLIENTS := $(VENV)/clients/1 $(VENV)/clients/2
COOKBOOK := $(VENV)/clients/cookbook
TRITON := $(VENV)/triton
GPU := $(wildcard /dev/nvidia0)
# Three test processes, since a test often waits for its own; each takes whole modules, in the order of tests/conftest.py.
# No plugins but those named: that of schemathesis alone takes seconds to import, and its test needs none.
# Python writes bytecode, whatever the environment says: the tests start hundreds of processes that import the same modules.
PYTEST := env -u PYTHONDONTWRITEBYTECODE PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m pytest -p pytest_timeout
SIDE_BY_SIDE := --processes 3

.PHONY: help quickstart serve wheel test check-docs test-failed test-all bench gpu-report docs check

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n '1,/^$$/p'

quickstart: $(READY)
	@$(BIN)/ft quickstart --called "make quickstart" || { code=$$?; [ $$code = 130 ] || exit $$code; } # paused: nothing went wrong

serve: $(READY)
	@$(BIN)/ft serve

wheel: $(READY)
	@rm -f dist/ft_service-*.whl
	@$(BIN)/python -m pip wheel --disable-pip-version-check -q --no-deps -w dist .
	@ls dist/ft_service-*.whl

test: $(READY) $(TRITON)
	@$(PYTEST) $(SIDE_BY_SIDE) $(if $(HOLD_BUDGETS),--hold-budgets) -m "not slow and not docs$(if $(GPU),, and not gpu)"

# Of folders that import little: not all that `make test` collects.
check-docs: $(READY)
	@$(PYTEST) -m "docs and not slow" tests/test_*.py tests/deploy tests/ft_service/test_version.py

test-failed: $(READY) $(TRITON)
	@$(PYTEST) --last-failed --last-failed-no-failures none

test-all: $(READY) $(TRITON) $(CLIENTS) $(COOKBOOK)
	@$(PYTEST) $(SIDE_BY_SIDE) $(if $(GPU),,-m "not gpu")

bench: $(READY)
	@$(PIP_INSTALL) -q -c constraints.txt -e '.[bench]'
	@for benchmark in $$(grep -l '^def main' benchmarks/*.py); do echo "$$benchmark"; $(BIN)/python "$$benchmark"; done

# With the interpreter that is there, so that it runs on an image which has PyTorch and no package index (benchmarks/README.md).
gpu-report:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu_report $(if $(OUT),--out "$(OUT)") \
		$(if $(GPU),--device cuda,--device cpu --tiny) $(if $(ONLY),--only "$(ONLY)")

# pyright with Node's usual 4 GiB throws away what it knows, again and again.
check: $(READY)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@NODE_OPTIONS=--max-old-space-size=8192 $(BIN)/pyright
	@$(BIN)/lint-imports
	@$(BIN)/python -m docs.site.build

docs: $(READY)
	@$(BIN)/python -m docs.site.generated
	@$(BIN)/python -m docs.site.build

# Set-up ------------------------------------------------------------------------------------------------------------------
# PyTorch comes first and alone, so that TORCH_INDEX is asked for nothing else. Of what pip says, only large downloads are shown.

PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
SHOW = 2>&1 | tee -a $(LOG) | awk '/Downloading.*\(([0-9][0-9]+\.[0-9] MB|[0-9.]+ GB)\)/ {print "  " $$2, $$3, $$4; fflush()}' \
	|| { tail -n 25 $(LOG) >&2; echo "Set-up failed; all of pip's output is in $(LOG). Run make again to continue." >&2; exit 1; }

$(READY): pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@: > $(LOG)
	@echo "Installing PyTorch into $(VENV) (once; the largest part)"
	@$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) "$$(grep '^torch==' constraints.txt)",-c constraints.txt torch) $(SHOW)
	@echo "Installing everything else"
	@$(PIP_INSTALL) -c constraints.txt -e '.[api,workers,kubernetes,s3,wandb,mlflow,trackio,push,oidc,otel,mcp,openenv,quickstart,docs,dev]' $(SHOW)
	@touch $@
	@echo "Set-up is done."

# Older clients of OpenAI's, which must work too.
$(CLIENTS): $(VENV)/clients/%: $(READY)
	@echo "Installing openai $*.x into $@"
	@rm -rf $@
	@$(PIP_INSTALL) --target $@ "openai>=$*,<$$(($* + 1))" $(SHOW)
	@touch $@

# Recipes of tinker-cookbook, with what they import beyond the packages of .venv; not every index has all that it requires.
$(COOKBOOK): $(READY)
	@echo "Installing tinker-cookbook into $@"
	@rm -rf $@ && mkdir -p $@
	@$(PIP_INSTALL) -q --no-deps --target $@ 'tinker-cookbook>=0.6,<0.7' antlr4-python3-runtime blobfile chz datasets dill \
		latex2sympy2_extended math-verify multiprocess pandas pycryptodomex pylatexenc pyrage termcolor tiktoken \
		|| echo "tinker-cookbook cannot be had: the tests of its recipes are skipped."
	@touch $@

# Compiles kernels for GPUs on a processor, beside a PyTorch that has not brought it; the release that PyTorch 2.11 brings.
$(TRITON): $(READY)
	@mkdir -p $@
	@$(BIN)/python -c 'import triton' 2> /dev/null || { \
		echo "Installing Triton into $@, to compile the kernels in tests"; \
		$(PIP_INSTALL) -q --no-deps --target $@ 'triton==3.6.*' || echo "Triton cannot be had: the tests of kernels are skipped."; }
	@touch $@

define CHECK_PYTHON
command -v $(PYTHON) > /dev/null || { \
	echo "make: $(PYTHON) was not found. Install Python 3.11, 3.12 or 3.13 (Debian, Ubuntu: apt install python3 python3-venv)," \
		"or name one: make PYTHON=/path/to/python" >&2; exit 1; }; \
$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1), and 3.11, 3.12 or 3.13 is needed." >&2; \
	for other in python3.13 python3.12 python3.11; do \
		! command -v $$other > /dev/null || { echo "make: $$other is installed: run make with PYTHON=$$other" >&2; break; }; \
	done; exit 1; }; \
$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null || { \
	echo "make: $(PYTHON) cannot create virtual environments: venv or ensurepip is missing." \
		"On Debian and Ubuntu: apt install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; \
	exit 1; }
endef
