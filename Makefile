# Two commands matter: `make up` and `make test`. Both work from a fresh clone on Debian or Ubuntu with a Rust toolchain,
# and again. The others are their parts.

.DEFAULT_GOAL := help
.PHONY: help up test setup libtorch stack build torch-free lint property-order fuzz-ingest schemathesis overload full-disks plans chaos-ingest bench-ingest bench-policy parity demo learn base sqlx golden saved

TARGET := $(or $(CARGO_TARGET_DIR),target)
SPRINGTIDE := $(TARGET)/debug/springtide
# Queries were checked against the schema when .sqlx was written; building needs no database.
export SQLX_OFFLINE := true
# Two OpenMP threads beside another busy process are many times slower than one.
export OMP_NUM_THREADS := 1

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

up: build ## install what is missing, build, start the stack, run the demo, serve until Ctrl-C
	$(SPRINGTIDE) up --demo

test: build lint torch-free ## format, lints, floor plan, all tests, against a real Postgres and Kafka
	$(SPRINGTIDE) stack fetch
	cargo test --locked --workspace
	cargo run --locked --quiet --package bench --bin bench-ingest -- --springtide $(SPRINGTIDE) --rate 200 --seconds 2 \
		--single-rate 50 --capacity-events 2000 --json $(TARGET)/bench/ingest-small.json

setup: ## install missing distribution packages (uses root or sudo for those alone)
	@scripts/setup.sh

libtorch: setup ## fetch libtorch for the CPU into .libtorch
	@[ -n "$$LIBTORCH" ] || scripts/libtorch.sh .libtorch

build: libtorch ## build the binary
	cargo build --locked --package springtide

stack: build ## fetch Postgres, Kafka and, if need be, a Java into .stack
	$(SPRINGTIDE) stack fetch

torch-free: libtorch ## build the binary without libtorch, put aside for the tests
	cargo build --locked --package springtide --no-default-features
	@mkdir -p $(TARGET)/torch-free && cp $(SPRINGTIDE) $(TARGET)/torch-free/springtide
	@cargo build --locked --quiet --package springtide # the whole one takes its place again

lint: libtorch ## format check, clippy, floor plan
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	@scripts/floor-plan.sh

property-order: stack ## any order of the same events gives the same rows, at length; STORIES=100000
	SPRINGTIDE_ORDER_STORIES=$(or $(STORIES),100000) cargo test --locked --test it any_order -- --nocapture

fuzz-ingest: setup ## every decoder of ingest under libFuzzer, and what came of it; SECONDS=60 each, or RUNS=, TARGETS=
	SECONDS_EACH=$(or $(SECONDS),60) RUNS=$(RUNS) TARGETS="$(TARGETS)" scripts/fuzz-ingest.sh

schemathesis: stack ## the served OpenAPI document against the server, with Schemathesis (needs python3); EXAMPLES=200 SEED=1
	$(SPRINGTIDE) stack test-env -- scripts/schemathesis.sh $(SPRINGTIDE) $(or $(EXAMPLES),200) $(or $(SEED),1)

overload: stack ## ten times what ingest can take, under a memory limit, at length; SECONDS=30 of each of four parts, TIMES=10
	SPRINGTIDE_OVERLOAD_SECONDS=$(or $(SECONDS),30) SPRINGTIDE_OVERLOAD_TIMES=$(or $(TIMES),10) \
	  cargo test --locked --test it overload:: -- --nocapture

full-disks: stack ## disks that fill under the spool, Postgres and the broker; FILLS=50 (as root, who may mount)
	SPRINGTIDE_DISK_FILLS=$(or $(FILLS),50) cargo test --locked --test it disk:: -- --nocapture

plans: stack ## the plans of the queries on many rows (10⁷: about an hour and 15 GB of disk); ROWS=1000000
	SPRINGTIDE_PLANS_ROWS=$(or $(ROWS),10000000) cargo test --locked --test it plans:: -- --nocapture

bench-ingest: setup ## events/s and latency from HTTP to rows, beside a bare producer and sink; ARGS='--rate 5000 --seconds 60'
	cargo build --locked --release --package springtide --no-default-features --package bench
	$(TARGET)/release/bench-ingest --springtide $(TARGET)/release/springtide --json $(TARGET)/bench/ingest.json $(ARGS)

chaos-ingest: stack ## kill ingest, the broker and Postgres at random under load and count what is lost; KILLS=1000 MINUTES=120 RATE= SEED= SWAPS=20
	$(foreach name,KILLS MINUTES RATE SEED SWAPS,$(if $($(name)),SPRINGTIDE_CHAOS_$(name)=$($(name)))) \
		cargo test --locked --test it chaos -- --nocapture --test-threads 1

demo: build ## replay developers against a running stack; ARGS='--minutes 2'
	$(SPRINGTIDE) demo $(ARGS)

learn: build ## the runs of docs/learning.md: 5 seeds, both kinds of users, 10 minutes each (about 2 hours); USERS= SEEDS= MINUTES= ARGS=
	scripts/learn.sh $(SPRINGTIDE) "$(or $(USERS),house plain)" "$(or $(SEEDS),1 2 3 4 5)" $(or $(MINUTES),10) $(ARGS)

base: build ## train the demo's base model again, into .springtide/base (about 45 minutes of one idle core)
	$(SPRINGTIDE) corpus build --out .springtide/base
	$(SPRINGTIDE) train sft --data .springtide/base --out .springtide/base/model
	$(SPRINGTIDE) corpus evaluate --model .springtide/base/model

sqlx: ## after a change of a query or a migration: write .sqlx anew, against a Postgres of its own
	$(SPRINGTIDE) stack test-env -- scripts/sqlx.sh $$($(SPRINGTIDE) stack fetch | awk '/^Postgres/ { print $$2 }')/bin/psql

parity: libtorch ## the model against transformers, and every way to compute a token against every other: tables
	cargo test --locked --package policy --features torch --test parity -- --nocapture --test-threads 1

bench-policy: libtorch ## tokens/s of prefill, decode and training step, beside libtorch and (where `make golden` has been) transformers
	OMP_NUM_THREADS=1 cargo bench --locked --profile dev --package policy --features torch --bench policy
	scripts/bench-transformers.sh $(TARGET)/bench/policy.json

golden: ## make policy/tests/golden anew with transformers and torch from PyPI (needs python3 and 5 GB)
	scripts/golden.sh

saved: libtorch ## train a few steps, save, and let transformers and PEFT read what was saved (needs python3 and 5 GB)
	scripts/saved.sh
