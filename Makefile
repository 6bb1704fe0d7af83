# Two commands matter: `make up` and `make test`. Both work from a fresh clone on Debian or Ubuntu with a Rust toolchain,
# and again. The others are their parts.

.DEFAULT_GOAL := help
.PHONY: help up test setup libtorch nvrtc stack build torch-free lint ptx test-cuda property-order fuzz-ingest fuzz-policy schemathesis overload full-disks plans chaos-ingest chaos-delta bench-ingest bench-policy bench-delta bench-link bench-sync bench-cuda bench-quant checkpoints parity demo learn base sqlx golden saved

TARGET := $(or $(CARGO_TARGET_DIR),target)
SPRINGTIDE := $(TARGET)/debug/springtide
# Queries were checked against the schema when .sqlx was written; building needs no database.
export SQLX_OFFLINE := true
# Two OpenMP threads beside another busy process are many times slower than one.
export OMP_NUM_THREADS := 1
# Where CUDA's compiler is: fetched, or one that is named.
NVRTC ?= $(abspath .nvrtc)
WITH_NVRTC := LD_LIBRARY_PATH=$(NVRTC)$(if $(LD_LIBRARY_PATH),:$(LD_LIBRARY_PATH))

# One build for all that is tested: another choice of packages would have dependencies with other features, and build them again.
WORKSPACE := --locked --workspace --features policy/cuda

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

up: build ## install what is missing, build, start the stack, run the demo, serve until Ctrl-C
	$(SPRINGTIDE) up --demo

test: libtorch lint torch-free nvrtc ## format, lints, floor plan, kernels for GPUs, all tests, against a real Postgres and Kafka
	cargo build $(WORKSPACE) --bins --tests
	$(SPRINGTIDE) stack fetch
	$(WITH_NVRTC) SPRINGTIDE_PTX=$(abspath $(TARGET))/ptx cargo test $(WORKSPACE)
	$(TARGET)/debug/bench-ingest --springtide $(SPRINGTIDE) --rate 200 --seconds 2 \
		--single-rate 50 --capacity-events 2000 --json $(TARGET)/bench/ingest-small.json

setup: ## install missing distribution packages (uses root or sudo for those alone)
	@scripts/setup.sh

libtorch: setup ## fetch libtorch for the CPU into .libtorch
	@[ -n "$$LIBTORCH" ] || scripts/libtorch.sh .libtorch

nvrtc: setup ## fetch NVRTC, which compiles kernels for NVIDIA's GPUs, into .nvrtc (90 MB); NVRTC=DIR names another
	@[ "$(NVRTC)" != "$(abspath .nvrtc)" ] || scripts/nvrtc.sh .nvrtc

build: libtorch ## build the binary
	cargo build --locked --package springtide

stack: build ## fetch Postgres, Kafka and, if need be, a Java into .stack
	$(SPRINGTIDE) stack fetch

torch-free: setup ## build the binary without libtorch, put aside for the tests
	cargo build --locked --package springtide --no-default-features
	@mkdir -p $(TARGET)/torch-free && cp --remove-destination $(SPRINGTIDE) $(TARGET)/torch-free/springtide
	@rm $(SPRINGTIDE) # the next build brings the whole one back

lint: libtorch ## format check, clippy, floor plan
	cargo fmt --all --check
	cargo clippy $(WORKSPACE) --all-targets -- -D warnings
	cargo clippy --locked --package springtide -- -D warnings # as `make up` builds it
	@scripts/floor-plan.sh

ptx: nvrtc ## the kernels for GPUs: compiled for two kinds without a GPU (PTX in target/ptx), run as C++ on the CPU
	$(WITH_NVRTC) SPRINGTIDE_PTX=$(abspath $(TARGET))/ptx cargo test --locked --package policy --features cuda --lib device::

test-cuda: nvrtc ## the same tests on an NVIDIA GPU, which must be there; GPU=0
	$(WITH_NVRTC) SPRINGTIDE_TEST_DEVICE=$(or $(GPU),0) cargo test --locked --package policy --features cuda --lib device:: -- --test-threads 1

property-order: stack ## any order of the same events gives the same rows, at length; STORIES=100000
	SPRINGTIDE_ORDER_STORIES=$(or $(STORIES),100000) cargo test $(WORKSPACE) --test it any_order -- --nocapture

fuzz-ingest: setup ## every decoder of ingest under libFuzzer, and what came of it; SECONDS=60 each, or RUNS=, TARGETS=
	SECONDS_EACH=$(or $(SECONDS),60) RUNS=$(RUNS) TARGETS="$(TARGETS)" scripts/fuzz.sh ingest

fuzz-policy: setup ## every reader of policy (delta, image, manifest, safetensors) under libFuzzer; SECONDS=60 each, or RUNS=, TARGETS=
	SECONDS_EACH=$(or $(SECONDS),60) RUNS=$(RUNS) TARGETS="$(TARGETS)" scripts/fuzz.sh policy

schemathesis: stack ## the served OpenAPI document against the server, with Schemathesis (needs python3); EXAMPLES=200 SEED=1
	$(SPRINGTIDE) stack test-env -- scripts/schemathesis.sh $(SPRINGTIDE) $(or $(EXAMPLES),200) $(or $(SEED),1)

overload: stack ## ten times what ingest can take, under a memory limit, at length; SECONDS=30 of each of four parts, TIMES=10
	SPRINGTIDE_OVERLOAD_SECONDS=$(or $(SECONDS),30) SPRINGTIDE_OVERLOAD_TIMES=$(or $(TIMES),10) \
	  cargo test $(WORKSPACE) --test it overload:: -- --nocapture

full-disks: stack ## disks that fill under the spool, Postgres and the broker; FILLS=50 (as root, who may mount)
	SPRINGTIDE_DISK_FILLS=$(or $(FILLS),50) cargo test $(WORKSPACE) --test it disk:: -- --nocapture

plans: stack ## the plans of the queries on many rows (10⁷: about an hour and 15 GB of disk); ROWS=1000000
	SPRINGTIDE_PLANS_ROWS=$(or $(ROWS),10000000) cargo test $(WORKSPACE) --test it plans:: -- --nocapture

bench-ingest: setup ## events/s and latency from HTTP to rows, beside a bare producer and sink; ARGS='--rate 5000 --seconds 60'
	cargo build --locked --release --package springtide --no-default-features --package bench
	$(TARGET)/release/bench-ingest --springtide $(TARGET)/release/springtide --json $(TARGET)/bench/ingest.json $(ARGS)

chaos-ingest: stack ## kill ingest, the broker and Postgres at random under load and count what is lost; KILLS=1000 MINUTES=120 RATE= SEED= SWAPS=20
	$(foreach name,KILLS MINUTES RATE SEED SWAPS,$(if $($(name)),SPRINGTIDE_CHAOS_$(name)=$($(name)))) \
		cargo test $(WORKSPACE) --test it chaos -- --nocapture --test-threads 1

demo: build ## replay developers against a running stack; ARGS='--minutes 2'
	$(SPRINGTIDE) demo $(ARGS)

learn: build ## the runs of docs/learning.md: 5 seeds, both kinds of users, 10 minutes each (about 2 hours); USERS= SEEDS= MINUTES= ARGS=
	scripts/learn.sh $(SPRINGTIDE) "$(or $(USERS),house plain)" "$(or $(SEEDS),1 2 3 4 5)" $(or $(MINUTES),10) $(ARGS)

base: build ## train the demo's base model again, into .springtide/base (about 45 minutes of one idle core)
	$(SPRINGTIDE) corpus build --out .springtide/base
	$(SPRINGTIDE) train sft --data .springtide/base --out .springtide/base/model
	$(SPRINGTIDE) corpus evaluate --model .springtide/base/model

sqlx: build ## after a change of a query or a migration: write .sqlx anew, against a Postgres of its own
	$(SPRINGTIDE) stack test-env -- scripts/sqlx.sh $$($(SPRINGTIDE) stack fetch | awk '/^Postgres/ { print $$2 }')/bin/psql

parity: libtorch ## the model against transformers, and every way to compute a token against every other: tables
	cargo test --locked --package policy --features torch --test parity -- --nocapture --test-threads 1

bench-policy: libtorch ## tokens/s of prefill, decode and training step, beside libtorch and (where `make golden` has been) transformers
	OMP_NUM_THREADS=1 cargo bench --locked --profile dev --package policy --features torch --bench policy
	scripts/bench-transformers.sh $(TARGET)/bench/policy.json

bench-delta: ## sizes and speeds of deltas beside other codecs, on made pairs and PAIRS=DIR of model folders; MIB=64
	scripts/setup.sh bsdiff xdelta3
	cargo bench --locked --profile dev --package policy --bench delta -- --programs --mib $(or $(MIB),64) --json $(abspath $(TARGET))/bench/delta.json \
		$(if $(PAIRS),--pairs $(abspath $(PAIRS)))
	python3 scripts/chart_delta.py $(TARGET)/bench/delta.json $(TARGET)/bench/delta.svg

bench-sync: stack ## from a step's bytes to the last follower serving them, and what a streaming caller notices; MIB=1024 FOLLOWERS=2 STEPS=6 THREADS=2
	SPRINGTIDE_SYNC_MIB=$(or $(MIB),1024) SPRINGTIDE_SYNC_FOLLOWERS=$(or $(FOLLOWERS),2) SPRINGTIDE_SYNC_STEPS=$(or $(STEPS),6) \
	  SPRINGTIDE_SYNC_THREADS=$(or $(THREADS),2) SPRINGTIDE_SYNC_JSON=$(abspath $(TARGET))/bench/sync.json \
	  cargo test $(WORKSPACE) --test it sync:: -- --nocapture

chaos-delta: stack ## spoiled stores, wrong bases, broken deltas, replicas killed in the middle, and what came of each; TRIALS=100000 KILLS=1000
	SPRINGTIDE_FAULTS_TRIALS=$(or $(TRIALS),100000) SPRINGTIDE_DELTA_TENSORS=$(or $(TRIALS),100000) \
		cargo test --locked --package policy --lib -- --nocapture store::tests::faults delta::tests
	cargo test --locked --package serving --lib -- trust
	SPRINGTIDE_SYNC_KILLS=$(or $(KILLS),1000) cargo test $(WORKSPACE) --test it sync_kills -- --nocapture

checkpoints: libtorch ## train a random-start model and keep the last versions for bench-delta PAIRS=target/checkpoints; RATES=1e-6,3e-6,1e-5 STEPS=200 KEEP=3
	cargo bench --locked --profile dev --package trainer --features torch --bench checkpoints -- --out $(abspath $(TARGET))/checkpoints \
		--rates $(or $(RATES),1e-6,3e-6,1e-5) --steps $(or $(STEPS),200) --keep $(or $(KEEP),3)

bench-cuda: nvrtc ## deltas in a GPU's memory, which must be there, beside the CPU; MIB=16384
	$(WITH_NVRTC) cargo bench --locked --profile dev --package policy --features cuda --bench cuda -- --mib $(or $(MIB),16384) \
		--json $(abspath $(TARGET))/bench/cuda.json

bench-quant: ## quantised copies: what a step changes of them, and GB/s from nothing and of touched blocks alone; MIB=64 PAIRS=DIR
	cargo bench --locked --profile dev --package policy --bench delta -- --quantised --mib $(or $(MIB),64) \
		--json $(abspath $(TARGET))/bench/quantised.json $(if $(PAIRS),--pairs $(abspath $(PAIRS)))

bench-link: build ## how much of a slow or lossy 1 Gb/s link a download through a relay fills, beside bare TCP (as root, about 25 minutes); ARGS='--times 1'
	cargo build --locked --package bench --bin bench-link
	$(TARGET)/debug/bench-link --springtide $(SPRINGTIDE) --json $(TARGET)/bench/link.json $(ARGS)

golden: ## make policy/tests/golden anew with transformers and torch from PyPI (needs python3 and 5 GB)
	scripts/golden.sh

saved: libtorch ## train a few steps, save, and let transformers and PEFT read what was saved (needs python3 and 5 GB)
	scripts/saved.sh
