# Two commands matter: `make up` and `make test`. Both work from a fresh clone on Debian or Ubuntu with a Rust toolchain, and
# work again when run twice. The other targets are parts of them, benchmarks and long runs.

.DEFAULT_GOAL := help
.PHONY: help up vllm sglang test test-engines test-clients python-test test-build check-tree deny advisories setup libtorch nvrtc stack build release torch-free lint docs diagrams ptx test-cuda \
	property-order fuzz-ingest fuzz-policy fuzz-tenants schemathesis browser-test bench-page overload full-disks plans chaos-ingest chaos-delta chaos-rollouts chaos-trainer chaos-release chaos-engines bench-ingest \
	bench-policy bench-delta bench-link bench-sync bench-revoke bench-poison bench-attacks bench-expiry bench-arms bench-session bench-serving bench-tide bench-beside-trainer bench-clusters bench-tables bench-engines bench-gateway bench-mismatch bench-cuda bench-quant bench-sandbox bench-evidence bench-monitors bench-reverse losses checkpoints parity chat-matrix demo learn learn-hours typed base agent-base environments bench-environments bench-overlap bench-staleness bench-release bench-rollback bench-dead-engine bench-offpolicy sqlx golden saved

TARGET := $(or $(CARGO_TARGET_DIR),target)
SPRINGTIDE := $(TARGET)/debug/springtide
# .sqlx holds what the queries' checks need; building needs no database.
export SQLX_OFFLINE := true
# A second OpenMP thread beside another busy process makes libtorch many times slower.
export OMP_NUM_THREADS := 1
# The folder of CUDA's run-time compiler: fetched, or one that is named.
NVRTC ?= $(abspath .nvrtc)
WITH_NVRTC := LD_LIBRARY_PATH=$(NVRTC)$(if $(LD_LIBRARY_PATH),:$(LD_LIBRARY_PATH))

# All tests share one choice of packages and features: another choice would build dependencies again.
WORKSPACE := --locked --workspace
# The tests' build is also the lints' run: clippy's driver is the compiler of our own crates, as in `cargo clippy`.
LINTED := RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-Dwarnings__CLIPPY_HACKERY__
TIMES := $(TARGET)/test-times.tsv
TIMED := scripts/timed.sh $(TIMES)

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

# --- the two commands ---

up: check-path build $(if $(filter vllm,$(ENGINE)),vllm) ## install what is missing, build, start the stack, run the demo, serve until Ctrl-C; ENGINE=vllm answers with vLLM (downloads 3 GB); CANARY=1 moves champion by canaries alone (demo/canary.toml)
	$(if $(filter vllm,$(ENGINE)),SPRINGTIDE__STACK__VLLM__PROGRAM=$(VLLM)) $(SPRINGTIDE) --config demo/$(if $(CANARY),canary,completion).toml up --demo $(if $(ARGS),-- $(ARGS))

test: ## what CI runs: format, lints, floor plan, licenses of crates, all tests, with a real Postgres and Kafka; then where the time went
	@rm -f $(TIMES)
	@$(TIMED) "distribution packages, libtorch" $(MAKE) --no-print-directory libtorch
	@scripts/sandboxes.sh
	@$(TIMED) "download crates" cargo fetch --locked
	@$(TIMED) "format, floor plan, links in the docs" $(MAKE) --no-print-directory check-tree
	@$(TIMED) "licenses and sources of crates" $(MAKE) --no-print-directory deny
	@$(TIMED) "build the binary without libtorch" $(MAKE) --no-print-directory torch-free
	@$(TIMED) "build everything, with lints" env $(LINTED) $(MAKE) --no-print-directory test-build
	@$(TIMED) "download Postgres and Kafka" $(SPRINGTIDE) stack fetch
	@$(TIMED) "wheel of python/, its types and tests" env $(LINTED) $(MAKE) --no-print-directory python-test
	@$(TIMED) "tests" env $(LINTED) SPRINGTIDE_PYTHON=$(abspath $(TARGET))/python/bin/python \
		cargo test $(WORKSPACE) $$(scripts/sandboxes.sh skip)
	@$(TIMED) "bench-ingest, small" $(TARGET)/debug/bench-ingest --springtide $(SPRINGTIDE) --rate 200 --seconds 2 \
		--single-rate 50 --capacity-events 2000 --json $(TARGET)/bench/ingest-small.json
	@scripts/timed.sh $(TIMES) --report

# --- their parts ---

VLLM := $(abspath .springtide/vllm-venv)/bin/vllm

vllm: setup ## install vLLM for the CPU and the wheel of python/ into .springtide/vllm-venv (3 GB to download, 6 GB on disk); VLLM=PROGRAM names another
	@[ "$(VLLM)" != "$(abspath .springtide/vllm-venv)/bin/vllm" ] || scripts/vllm-venv.sh .springtide/vllm-venv

# Before the build: Linux limits the path of a socket, here .springtide/postgres/.s.PGSQL.15432.
check-path:
	@[ "$$(printf %s "$(CURDIR)" | wc -c)" -le 70 ] || { echo "The path $(CURDIR) is too long for the socket of the \
	private Postgres: move this folder to a path of at most 70 bytes." >&2; exit 1; }

setup: ## install missing distribution packages (needs root or sudo for that alone)
	@scripts/setup.sh

libtorch: setup ## download libtorch for the CPU into .libtorch
	@[ -n "$$LIBTORCH" ] || scripts/libtorch.sh .libtorch

nvrtc: setup ## download NVRTC, the compiler of GPU kernels, into .nvrtc (90 MB); NVRTC=DIR names another
	@[ "$(NVRTC)" != "$(abspath .nvrtc)" ] || scripts/nvrtc.sh .nvrtc

build: libtorch ## build the binary for development
	cargo build --locked --package springtide

release: libtorch ## build the binary for shipping, into target/release
	cargo build --locked --release --package springtide

stack: build ## download Postgres, Kafka and, if need be, a Java into .stack
	$(SPRINGTIDE) stack fetch

python-test: setup ## build the wheel of python/, check its types, test it; installs maturin, mypy, pytest, NumPy, httpx into target/python (60 MB)
	@scripts/python-test.sh $(TARGET)/python

test-build:
	cargo build $(WORKSPACE) --bins --tests --benches

torch-free: setup ## build the binary without libtorch, put aside for the tests
	$(LINTED) cargo build --locked --package springtide --no-default-features
	@mkdir -p $(TARGET)/torch-free && cp --remove-destination $(SPRINGTIDE) $(TARGET)/torch-free/springtide
	@rm $(SPRINGTIDE) # the next build makes the whole one again

check-tree:
	cargo fmt --all --check
	@scripts/floor-plan.sh
	@python3 scripts/check_docs.py

deny: setup ## check every crate against deny.toml: bans, licenses, sources (after the first run no network is needed)
	@cargo fetch --locked --quiet
	@scripts/deny.sh bans licenses sources

advisories: setup ## check every crate for known vulnerabilities and yanked versions (needs the network: RustSec's database on GitHub)
	@cargo fetch --locked --quiet
	@scripts/deny.sh advisories

lint: libtorch ## format, floor plan, links in the docs, clippy
	@cargo fetch --locked --quiet # the floor plan asks cargo without the network
	@$(MAKE) --no-print-directory check-tree
	cargo clippy $(WORKSPACE) --all-targets -- -D warnings

docs: ## build the documentation as a site in target/docs and check its links (needs mdBook: cargo install mdbook --version 0.5.4 --locked)
	scripts/docs.sh $(TARGET)/docs

diagrams: ## render the pictures of docs/images from their sources (needs graphviz: apt-get install graphviz)
	scripts/diagrams.sh

demo: build ## replay developers against a running stack; ARGS='--minutes 2'
	$(SPRINGTIDE) demo $(ARGS)

sqlx: build ## after a change of a query or a migration: write .sqlx again, against a Postgres of its own
	$(SPRINGTIDE) stack test-env -- scripts/sqlx.sh $$($(SPRINGTIDE) stack fetch | awk '/^Postgres/ { print $$2 }')/bin/psql

# --- long runs ---

property-order: stack ## any order of the same events gives the same rows; STORIES=100000
	SPRINGTIDE_ORDER_STORIES=$(or $(STORIES),100000) cargo test $(WORKSPACE) --test it any_order -- --nocapture

fuzz-ingest: setup ## libFuzzer on every decoder of ingest; SECONDS=60 each, or RUNS=, TARGETS=
	SECONDS_EACH=$(or $(SECONDS),60) RUNS=$(RUNS) TARGETS="$(TARGETS)" scripts/fuzz.sh ingest

fuzz-policy: setup ## libFuzzer on every reader of artifact (delta, checkpoint, manifest, safetensors); SECONDS=60 each, or RUNS=, TARGETS=
	SECONDS_EACH=$(or $(SECONDS),60) RUNS=$(RUNS) TARGETS="$(TARGETS)" scripts/fuzz.sh policy

fuzz-tenants: stack ## random requests of two tenants to every route of every role, with ids of each other's objects; N=100000 SEED=1
	SPRINGTIDE_FUZZ_REQUESTS=$(or $(N),100000) SPRINGTIDE_FUZZ_SEED=$(or $(SEED),1) \
	  cargo test $(WORKSPACE) --test it tenants::fuzz -- --nocapture

schemathesis: stack ## Schemathesis: the OpenAPI document of each role against the role (needs python3); EXAMPLES=200 SEED=1 ROLES='ingest serve'
	$(SPRINGTIDE) stack test-env -- scripts/schemathesis.sh $(SPRINGTIDE) $(or $(EXAMPLES),200) $(or $(SEED),1) $(ROLES)

browser-test: stack ## every page of control in headless Chromium: by keyboard, phone size, dark, axe (npm, 20 MB; needs Node.js 20); SHOTS=docs/images takes screenshots
	scripts/setup.sh chromium node npm
	$(SPRINGTIDE) stack test-env -- scripts/browser-test.sh $(SPRINGTIDE) $$($(SPRINGTIDE) stack fetch | awk '/^Postgres/ { print $$2 }')/bin/psql $(SHOTS)

bench-page: stack ## when each page of control is first painted with many answers in the tables, in headless Chromium (10⁷: 20 minutes beside other work, more than 9 GB of disk); ROWS=10000000
	scripts/setup.sh chromium node npm
	@mkdir -p $(TARGET)/bench
	ROWS=$(or $(ROWS),10000000) PAINT_JSON=$(abspath $(TARGET))/bench/page.json $(SPRINGTIDE) stack test-env -- scripts/browser-test.sh $(SPRINGTIDE) \
	  $$($(SPRINGTIDE) stack fetch | awk '/^Postgres/ { print $$2 }')/bin/psql

overload: stack ## ten times what ingest can take, under a memory limit; SECONDS=30 for each of four parts, TIMES=10
	SPRINGTIDE_OVERLOAD_SECONDS=$(or $(SECONDS),30) SPRINGTIDE_OVERLOAD_TIMES=$(or $(TIMES),10) \
	  cargo test $(WORKSPACE) --test it overload:: -- --nocapture

full-disks: stack ## disks that fill under the spool, Postgres and the broker; FILLS=50 (as root, to mount them)
	SPRINGTIDE_DISK_FILLS=$(or $(FILLS),50) cargo test $(WORKSPACE) --test it disk:: -- --nocapture

plans: stack ## the query plans on many rows (10⁷: about an hour and 15 GB of disk); ROWS=1000000
	SPRINGTIDE_PLANS_ROWS=$(or $(ROWS),10000000) cargo test $(WORKSPACE) --test it plans:: -- --nocapture

chaos-ingest: stack ## kill ingest, broker and Postgres under load, count what is lost; KILLS=1000 MINUTES=120 RATE= SEED= SWAPS=20
	$(foreach name,KILLS MINUTES RATE SEED SWAPS,$(if $($(name)),SPRINGTIDE_CHAOS_$(name)=$($(name)))) \
		cargo test $(WORKSPACE) --test it chaos -- --nocapture --test-threads 1

chaos-rollouts: stack python-test ## kill harnesses, their worlds, the gateway, the trainer, control and ingest while offline runs learn; KILLS=120 (13 minutes on a busy machine) SEED=
	SPRINGTIDE_ROLLOUT_KILLS=$(or $(KILLS),120) $(if $(SEED),SPRINGTIDE_ROLLOUT_SEED=$(SEED)) \
		SPRINGTIDE_PYTHON=$(abspath $(TARGET))/python/bin/python cargo test $(WORKSPACE) --test it rollout_kills -- --nocapture

chaos-trainer: stack ## kill the trainer anywhere while it learns from a frozen log: the versions must be those of one that was not; KILLS=100 SEED=
	SPRINGTIDE_TRAINER_KILLS=$(or $(KILLS),100) $(if $(SEED),SPRINGTIDE_TRAINER_SEED=$(SEED)) \
		cargo test $(WORKSPACE) --test it frozen_log -- --nocapture

chaos-release: stack ## kill both release loops while canaries are proposed, promoted and taken back; KILLS=200 SEED=
	SPRINGTIDE_RELEASE_KILLS=$(or $(KILLS),200) $(if $(SEED),SPRINGTIDE_RELEASE_SEED=$(SEED)) \
		cargo test $(WORKSPACE) --test it release_kills -- --nocapture

bench-clusters: stack python-test ## a run in four clusters over links with delay and loss: harnesses there against harnesses here (root; 2 minutes for 6 steps); STEPS=10
	SPRINGTIDE_CLUSTERS_STEPS=$(or $(STEPS),10) SPRINGTIDE_PYTHON=$(abspath $(TARGET))/python/bin/python \
		cargo test $(WORKSPACE) --test it clusters -- --nocapture

chaos-engines: stack vllm ## kill the gateway, a vLLM server, the updater and springtide follow under load, compare callers, log and exact model (about 45 minutes; downloads vLLM, 3 GB); KILLS=50 of each, ARGS='--engines 3'
	cargo build --locked --package bench --bin chaos-engines
	$(TARGET)/debug/chaos-engines --springtide $(SPRINGTIDE) --vllm $(VLLM) --model models/demo-base --kills $(or $(KILLS),50) \
	  --json $(TARGET)/bench/chaos-engines.json $(ARGS)

chaos-delta: stack ## damaged stores, wrong bases, broken deltas, replicas killed during a sync; TRIALS=100000 KILLS=1000
	SPRINGTIDE_FAULTS_TRIALS=$(or $(TRIALS),100000) SPRINGTIDE_DELTA_TENSORS=$(or $(TRIALS),100000) \
		cargo test --locked --package store --package artifact --lib -- --nocapture tests::faults delta::tests
	cargo test --locked --package serving --lib -- trust
	SPRINGTIDE_SYNC_KILLS=$(or $(KILLS),1000) cargo test $(WORKSPACE) --test it sync_kills -- --nocapture

learn: build ## whether it learns, with the settings of make up: 5 seeds, both kinds of users, 10 minutes each (2 hours); USERS= SEEDS= MINUTES= ARGS=
	scripts/learn.sh $(SPRINGTIDE) "$(or $(USERS),house plain)" "$(or $(SEEDS),11 12 13 14 15)" $(or $(MINUTES),10) $(ARGS)
	scripts/learning_table.py .springtide/learn .springtide/learn.json "$(or $(USERS),house plain)" $(or $(SEEDS),11 12 13 14 15)

learn-hours: build ## two hours of learning, by period and along the run (2 hours); USERS= SEED= ARGS='--corpus DIR'
	scripts/learn.sh $(SPRINGTIDE) $(or $(USERS),house) $(or $(SEED),41) 120 --capability-points 12 $(ARGS)
	scripts/learning_hours.py .springtide/learn-hours.json .springtide/learn/$(or $(USERS),house)-$(or $(SEED),41).json

typed: build ## what users type as a second teacher, apart from accepts and rejects: a live demo, a supervised run, three evaluations (10 minutes); USERS= SEED= MINUTES=
	scripts/typed.sh $(SPRINGTIDE) "$(or $(USERS),house)" "$(or $(SEED),31)" $(or $(MINUTES),5) .springtide/typed

base: build ## train the demo's base model again, into .springtide/base (about an hour on one idle core)
	$(SPRINGTIDE) corpus build --out .springtide/base/plain
	$(SPRINGTIDE) train sft --data .springtide/base/plain --out .springtide/base/plain/model
	$(SPRINGTIDE) corpus build --out .springtide/base --house 0.03 --tokenizer .springtide/base/plain
	$(SPRINGTIDE) train sft --from .springtide/base/plain/model --data .springtide/base --out .springtide/base/model \
	  --steps 400 --matrix-rate 0.006 --vector-rate 0.001
	$(SPRINGTIDE) corpus evaluate --model .springtide/base/model
	$(SPRINGTIDE) corpus evaluate --model .springtide/base/model --users house

ENVIRONMENTS := .springtide/environments-venv/bin/python

environments: setup ## install verifiers, reasoning-gym and the wheel of python/ into .springtide/environments-venv (200 MB to download), and test what needs them and the tasks
	@scripts/environments-venv.sh .springtide/environments-venv
	cd python/tests && $(abspath $(ENVIRONMENTS)) -m pytest -p no:cacheprovider --quiet against_verifiers.py against_openai.py
	cd examples/environments && $(abspath $(ENVIRONMENTS)) -m unittest tables.test_tasks

agent-base: build ## train the model of the example environments into .springtide/agent (more than half an hour on one core); STEPS=875
	@scripts/environments-venv.sh .springtide/environments-venv
	$(ENVIRONMENTS) examples/environments/base/build.py base .springtide/agent
	$(SPRINGTIDE) train sft --data .springtide/agent --out .springtide/agent/model --shape examples/environments/base/config.json \
	  --batch 16 --steps $(or $(STEPS),875)

bench-environments: stack vllm ## after agent-base: GRPO in the example environments beside TRL's, with base and supervised bound (hours; downloads vLLM, 3 GB); ARGS='shop --seeds 1 --steps 4 --every 2'
	@scripts/environments-venv.sh .springtide/environments-venv $(VLLM)
	@[ -f .springtide/agent/model/model.safetensors ] || $(MAKE) --no-print-directory agent-base
	scripts/bench-environments.sh $(SPRINGTIDE) $(ENVIRONMENTS) .springtide/agent bench environments $(ARGS)

# Not to be changed after a reported run has been seen.
REVERSE_STEPS := 104
bench-reverse: stack ## GRPO on reversed words beside TRL's GRPOTrainer: the same weights, prompts and settings, 5 seeds (needs 5 GB, as `make golden`); ARGS='--seeds 1 --steps 10'
	@[ -f .springtide/reverse/model/model.safetensors ] || { \
	  python=$$(scripts/golden-venv.sh) && $$python examples/environments/reverse/words.py .springtide/reverse && \
	  $(SPRINGTIDE) train sft --data .springtide/reverse --out .springtide/reverse/model --steps $(REVERSE_STEPS) --batch 64 \
	    --precision f32 --shape examples/environments/reverse/config.json; }
	HF_HUB_OFFLINE=1 scripts/bench-environments.sh $(SPRINGTIDE) $$(scripts/golden-venv.sh) .springtide/reverse reverse/bench reverse $(ARGS)

bench-overlap: stack ## after agent-base: rollouts and steps at the same time against one after the other, in an example environment (14 minutes with '--seeds 3 --steps 20 --tasks-per-step 4'); ARGS='shop --seeds 1 --steps 10'
	@scripts/environments-venv.sh .springtide/environments-venv
	@[ -f .springtide/agent/model/model.safetensors ] || $(MAKE) --no-print-directory agent-base
	scripts/bench-environments.sh $(SPRINGTIDE) $(ENVIRONMENTS) .springtide/agent overlap overlap $(ARGS)

bench-staleness: stack ## after agent-base: how old the versions were that sampled what a run trained on, over a million tokens of a random model (14 minutes beside other work); ARGS='--steps 20'
	@scripts/environments-venv.sh .springtide/environments-venv
	@[ -f .springtide/agent/model/model.safetensors ] || $(MAKE) --no-print-directory agent-base
	$(ENVIRONMENTS) examples/environments/base/tiny.py .springtide/agent/model .springtide/agent-tiny/model
	scripts/bench-environments.sh $(SPRINGTIDE) $(ENVIRONMENTS) .springtide/agent-tiny staleness staleness $(ARGS)

bench-release: stack vllm ## planted versions as canaries on the demo's live traffic: decisions, seconds, users who got a bad one (5 of each of 9 kinds; 35 canaries took 36 minutes beside other work, and each of shorter takes 8 more; --shadow answers unseen first; downloads vLLM, 3 GB); ARGS='--each 1 --kinds silent'
	scripts/bench-stack.sh release $(SPRINGTIDE) $(dir $(VLLM))python $(ARGS)

bench-rollback: stack vllm ## rollbacks under load, three replicas, also while one is stopped: seconds until no user gets the bad version, requests that failed (10 minutes; downloads vLLM, 3 GB)
	scripts/bench-stack.sh rollback $(SPRINGTIDE) $(dir $(VLLM))python $(ARGS)

bench-dead-engine: stack vllm ## one of three vLLM servers killed, then a release and a rollback under load: requests that failed, seconds (5 minutes; downloads vLLM, 3 GB)
	python3 scripts/dead_engine.py --springtide $(SPRINGTIDE) --vllm $(VLLM) --base models/demo-base --cache .stack --json $(TARGET)/bench/dead-engine.json

bench-offpolicy: stack vllm ## what logged answers say about versions, beside what users gave them later: demos of SEEDS, one after another (8 minutes each; downloads vLLM, 3 GB); ARGS='--minutes 6'
	rm -f $(TARGET)/bench/offpolicy.json
	for seed in $(or $(SEEDS),1 2 3 4 5); do scripts/bench-stack.sh offpolicy $(SPRINGTIDE) $(dir $(VLLM))python --seed $$seed $(ARGS) || exit 1; done

parity: libtorch ## compare the model with transformers, and every way to compute a token with every other: tables
	cargo test --locked --package model --features torch --test parity -- --nocapture --test-threads 1

chat-matrix: ## compare prompts with transformers: the chat templates of 72 files of TRL and 36 conversations each (fetches 300 MB); ARGS='--show 20'
	cargo build --locked --package text --example render_chats
	scripts/chat-matrix.sh $(TARGET)/debug/examples/render_chats $(ARGS)

losses: libtorch ## compare losses, gradients and advantages with those of TRL and verl (made by `make golden`): a table
	cargo test --locked --package trainer --features torch --lib golden:: -- --nocapture

saved: libtorch ## train a few steps, save, and let transformers and PEFT read the result (needs python3 and 5 GB)
	scripts/saved.sh

golden: ## make the golden fixtures in policy/*/tests/golden and trainer/tests/golden again with transformers, TRL and verl (needs python3 and 5 GB)
	scripts/golden.sh

checkpoints: libtorch ## train a small model and keep its last versions for bench-delta PAIRS=target/checkpoints; RATES=1e-6,3e-6,1e-5 STEPS=200 KEEP=3
	cargo bench --locked --profile dev --package trainer --features torch --bench checkpoints -- --out $(abspath $(TARGET))/checkpoints \
		--rates $(or $(RATES),1e-6,3e-6,1e-5) --steps $(or $(STEPS),200) --keep $(or $(KEEP),3)

# --- GPU kernels (nothing else uses the feature `cuda`; `make test` runs their tests on the CPU) ---

ptx: nvrtc ## compile the GPU kernels for two kinds of GPU without one (PTX in target/ptx) and run them as C++ on the CPU
	$(WITH_NVRTC) SPRINGTIDE_PTX=$(abspath $(TARGET))/ptx cargo test --locked --package artifact --features cuda --lib device::

test-cuda: nvrtc ## the same tests on an NVIDIA GPU; GPU=0
	$(WITH_NVRTC) SPRINGTIDE_TEST_DEVICE=$(or $(GPU),0) cargo test --locked --package artifact --features cuda --lib device:: -- --test-threads 1

bench-cuda: nvrtc ## deltas in an NVIDIA GPU's memory, beside the CPU; MIB=16384
	$(WITH_NVRTC) cargo bench --locked --package artifact --features cuda --bench cuda -- --mib $(or $(MIB),16384) \
		--json $(abspath $(TARGET))/bench/cuda.json

# --- benchmarks: a table, and target/bench/NAME.json ---

bench-ingest: setup ## events/s and latency from HTTP to rows, beside a bare producer and sink; ARGS='--rate 5000 --seconds 60'
	cargo build --locked --release --package springtide --no-default-features --package bench
	$(TARGET)/release/bench-ingest --springtide $(TARGET)/release/springtide --json $(TARGET)/bench/ingest.json $(ARGS)

bench-policy: libtorch ## tokens/s of prefill, decode and training step, beside libtorch and (after `make golden`) transformers
	cargo bench --locked --profile dev --package model --features torch --bench model
	scripts/bench-transformers.sh $(TARGET)/bench/policy.json

bench-delta: ## sizes and speeds of deltas beside other codecs, on made pairs and PAIRS=DIR of model folders; MIB=64
	scripts/setup.sh bsdiff xdelta3
	cargo bench --locked --package artifact --bench delta -- --programs --mib $(or $(MIB),64) --json $(abspath $(TARGET))/bench/delta.json \
		$(if $(PAIRS),--pairs $(abspath $(PAIRS)))
	python3 scripts/chart_delta.py $(TARGET)/bench/delta.json $(TARGET)/bench/delta.svg

bench-sandbox: setup ## sandboxes that start and end per second
	cargo run --locked --package world --example bench_sandbox -- $(TARGET)/bench/sandbox.json

bench-quant: ## quantized copies: how much of them a step changes, and GB/s to make them; MIB=64 PAIRS=DIR
	cargo bench --locked --package artifact --bench delta -- --quantised --mib $(or $(MIB),64) \
		--json $(abspath $(TARGET))/bench/quantised.json $(if $(PAIRS),--pairs $(abspath $(PAIRS)))

bench-evidence: ## simulated releases at continuous looks: false alarms, power, hours until a verdict by traffic (6 minutes beside other work); ARGS='--releases 100 --releases-per-effect 20'; ANSWERS=target/bench/release-answers.csv replays logged answers with effects instead
	cargo bench --locked --profile dev --package evidence --bench simulate -- --json $(abspath $(TARGET))/bench/$(if $(ANSWERS),replay,evidence).json \
		$(if $(ANSWERS),--answers $(abspath $(ANSWERS))) $(ARGS)

bench-monitors: ## simulated monitors of a learning arm's answers: false alarms, delay by effect, two policies that avoid being scored (3 minutes beside other work); ARGS='--streams 40 --streams-per-effect 40 --policies 20'
	cargo bench --locked --profile dev --package evidence --bench monitors -- --json $(abspath $(TARGET))/bench/monitors.json $(ARGS)

bench-sync: stack ## from a step's bytes to the last follower serving them, and what a streaming client notices; MIB=1024 FOLLOWERS=2 STEPS=6 THREADS=2
	SPRINGTIDE_SYNC_MIB=$(or $(MIB),1024) SPRINGTIDE_SYNC_FOLLOWERS=$(or $(FOLLOWERS),2) SPRINGTIDE_SYNC_STEPS=$(or $(STEPS),6) \
	  SPRINGTIDE_SYNC_THREADS=$(or $(THREADS),2) SPRINGTIDE_SYNC_JSON=$(abspath $(TARGET))/bench/sync.json \
	  cargo test $(WORKSPACE) --test it sync:: -- --nocapture

bench-revoke: stack ## each kind of key is stolen and revoked: seconds until the thief is out, and whether releases go on
	SPRINGTIDE_REVOKE_JSON=$(abspath $(TARGET))/bench/revoke.json cargo test $(WORKSPACE) --test it revocation:: -- --nocapture

bench-poison: stack ## what attackers make a small policy learn, with caps and without (15 minutes); SEEDS=5 STEPS=48 WARM_UP=12 USERS=200 CASES='nobody; 5% × 20' PARALLEL=2
	SPRINGTIDE_POISON_CASES="$(or $(CASES),all)" SPRINGTIDE_POISON_SEEDS=$(or $(SEEDS),5) SPRINGTIDE_POISON_STEPS=$(or $(STEPS),48) \
	  SPRINGTIDE_POISON_WARM_UP=$(or $(WARM_UP),12) SPRINGTIDE_POISON_USERS=$(or $(USERS),200) SPRINGTIDE_POISON_PARALLEL=$(or $(PARALLEL),2) \
	  SPRINGTIDE_POISON_JSON=$(abspath $(TARGET))/bench/poison.json cargo test $(WORKSPACE) --test it trainer::poison -- --nocapture

bench-expiry: stack ## old weeks are dropped beside a long reader and honest traffic (10⁷: 20 minutes and 15 GB of disk); ROWS=10000000
	SPRINGTIDE_EXPIRY_ROWS=$(or $(ROWS),10000000) SPRINGTIDE_EXPIRY_JSON=$(abspath $(TARGET))/bench/expiry.json \
	  cargo test $(WORKSPACE) --test it expiry:: -- --nocapture

bench-arms: stack ## arms change under load: seconds until they are in force, failed requests, chi-squares; USERS=3000
	SPRINGTIDE_ARMS_USERS=$(or $(USERS),3000) cargo test $(WORKSPACE) --test it arms:: -- --nocapture

# Not to be changed after a reported run has been seen.
SESSION_RUN := $(if $(SMALL),0.5 --rate 4 --start-sessions 60,10)
bench-session: stack ## what the policy learns from sessions: by a verdict at the end, by judged turns, and a control (about 105 minutes); SEEDS=3 VARIANTS='end turns random' SMALL=1 (one seed, half a minute each)
	scripts/session.sh $(SPRINGTIDE) "$(or $(VARIANTS),end turns random)" "$$(seq -s' ' $(or $(SEEDS),$(if $(SMALL),1,3)))" $(SESSION_RUN) $(ARGS)

bench-serving: stack vllm ## tokens per second and latency at 1 to 64 streams, ours beside vLLM on the CPU, llama.cpp's server, transformers serve and our kernels alone; the demo's model and a Llama of 88M (15 minutes, and 10 once to build llama.cpp; downloads vLLM, 3 GB); SERVERS='ours vllm llama transformers' ARGS='--streams 16'
	cargo build --locked --release --package springtide --package bench --bin springtide --bin bench-serving
	scripts/serving-others.sh .springtide/serving-others $(VLLM)
	$(dir $(VLLM))python scripts/random_llama.py models/demo-base .springtide/llama-88m
	SERVERS="$(SERVERS)" scripts/bench-serving.sh $(TARGET)/release/springtide $(TARGET)/release/bench-serving $(VLLM) .springtide/serving-others \
	  models/demo-base 2048 0,2,3 $$(nproc) $(ARGS)
	SERVERS="$(SERVERS)" scripts/bench-serving.sh $(TARGET)/release/springtide $(TARGET)/release/bench-serving $(VLLM) .springtide/serving-others \
	  .springtide/llama-88m 2048 0,2,3 $$(nproc) --requests 16 $(ARGS)

bench-tide: stack ## share of idle slots that rollouts use and what production notices, two replicas under TRACE, alone and beside rollouts (5 pairs of 2 × 120 s); TRACE=FILE.csv (AzureLLMInferenceTrace_conv of github.com/Azure/AzurePublicDataset) ARGS='--pairs 1 --seconds 30'; after make vllm, ARGS='--vllm .springtide/vllm-venv/bin/vllm --replicas 1'
	@[ -f "$(TRACE)" ] || { echo "Name the trace: make bench-tide TRACE=FILE.csv (see make help)" >&2; exit 1; }
	cargo build --locked --release --package springtide --package bench --bin springtide --bin bench-tide
	$(TARGET)/release/bench-tide --springtide $(TARGET)/release/springtide --trace "$(TRACE)" \
	  --json $(TARGET)/bench/tide.json $(ARGS)

bench-beside-trainer: stack ## share of the trainer's idle time that rollouts use on its machine, and what a step takes without them, beside them, and with serve.tide.beside_trainer (a development build, 5 minutes); STEPS=6
	SPRINGTIDE_BESIDE_STEPS=$(or $(STEPS),6) cargo test $(WORKSPACE) --test it beside_trainer -- --nocapture

bench-engines: libtorch vllm ## updates of a running vLLM under load: tokens of a wrong version, failed requests, gaps; then against a fresh server (15 minutes; downloads vLLM, 3 GB); TENSOR_PARALLEL=2 ARGS='--updates 10'
	cargo build --locked --release --package bench --bin bench-engines
	TENSOR_PARALLEL=$(TENSOR_PARALLEL) scripts/bench-engines.sh $(TARGET)/release/bench-engines $(VLLM) models/demo-base $(ARGS)

# Not to be changed after a reported run has been seen.
bench-mismatch: libtorch vllm ## what is learned from tokens that vLLM sampled, in f32, bf16 and with a KV cache in fp8, with and without corrections (15 minutes; downloads vLLM, 3 GB); ARGS='--seeds 1 --steps 4'
	cargo build $(WORKSPACE) --bin bench-mismatch
	scripts/bench-mismatch.sh $(TARGET)/debug/bench-mismatch $(VLLM) models/demo-base $(ARGS)

bench-gateway: stack vllm ## what the gateway adds to a real vLLM at 1 to 32 streams, and to recorded tokens at 50 and 200 (10 minutes; downloads vLLM, 3 GB); ARGS='--streams 4 --rounds 2'
	cargo build --locked --release --package springtide --package bench --bin springtide --bin bench-gateway
	$(TARGET)/release/bench-gateway --springtide $(TARGET)/release/springtide --vllm $(VLLM) --model models/demo-base \
	  --json $(TARGET)/bench/gateway.json $(ARGS)

SGLANG := $(abspath .springtide/sglang-venv)/bin/python

sglang: vllm ## install SGLang with stubbed kernels, for tests of its API, into .springtide/sglang-venv (40 MB to download, 200 MB on disk); SGLANG=PYTHON names another
	@[ "$(SGLANG)" != "$(abspath .springtide/sglang-venv)/bin/python" ] || scripts/sglang-venv.sh .springtide/sglang-venv $(VLLM)

test-engines: sglang ## the tests of python/ with torch, and the contract tests against a real vLLM and a real SGLang (API only, stubbed kernels): do they still answer as recorded (3 minutes); RECORD=1 records them anew
	scripts/test-engines.sh $(VLLM) $(SGLANG) models/demo-base $(if $(RECORD),record)

test-clients: stack vllm ## SDKs, evaluators and coding agents against a running Springtide (PyPI and npm, 600 MB; evaluators share vLLM's torch, 3 GB); KINDS='sdk evaluators agents'
	scripts/test-clients.sh $(SPRINGTIDE) models/demo-base .springtide/clients $(VLLM) $(KINDS)

# --- worlds: virtual machines for rollouts ---

WORLD_IMAGE := .springtide/world-image
# What runs their processors: kvm where the processor virtualizes, else tcg (emulation, slower).
ACCELERATOR := $(if $(shell grep -m1 -owE 'vmx|svm' /proc/cpuinfo),kvm,tcg)

world-image: stack ## build the image of microVM worlds (kernel, Postgres, Python, agent) into .springtide/world-image, without root (70 MB to download, 180 MB on disk); PACKAGES='more Debian packages'
	scripts/setup.sh mke2fs
	scripts/world-image.sh $(WORLD_IMAGE) $(wildcard .stack/postgres-*) $(PACKAGES)

test-world: world-image ## microVM worlds: forks diverge, limits hold, escapes fail, nothing outlives its owner; ACCELERATOR=tcg
	scripts/setup.sh qemu-system-x86_64 bwrap
	SPRINGTIDE_WORLD_IMAGE=$(abspath $(WORLD_IMAGE)) SPRINGTIDE_WORLD_ACCELERATOR=$(ACCELERATOR) \
	  cargo test --locked --package world --test worlds -- --ignored --nocapture

bench-world: world-image ## cold and warm starts per second of microVM worlds, memory per fork; ACCELERATOR=tcg ARGS='--cold 3 --warm 30 --alive 8'
	scripts/setup.sh qemu-system-x86_64 bwrap
	cargo bench --locked --profile dev --package world --bench world -- --image $(abspath $(WORLD_IMAGE)) --accelerator $(ACCELERATOR) \
	  --json $(abspath $(TARGET))/bench/world.json $(ARGS)

bench-tables: world-image ## a world with a Postgres for each attempt, answers from a script: attempts per minute, what forks share, what dies with a machine; ACCELERATOR=tcg ARGS='--tasks 10'
	scripts/setup.sh qemu-system-x86_64 bwrap
	@scripts/environments-venv.sh .springtide/environments-venv
	$(ENVIRONMENTS) examples/environments/tables/scripted.py --springtide $(SPRINGTIDE) --accelerator $(ACCELERATOR) \
	  --json $(TARGET)/bench/tables.json $(ARGS)

bench-attacks: stack ## what honest traffic notices of slow connections, floods, poison, wrong clocks, transactions (8 minutes); SECONDS=20 RATE=100 CONNECTIONS=2000 CONNECTIONS_MAX=1000 CASES='slow bodies; random keys'
	cargo build --locked --release --package springtide --no-default-features
	SPRINGTIDE_ATTACKS_PROGRAM=$(abspath $(TARGET))/release/springtide SPRINGTIDE_ATTACKS_CASES="$(or $(CASES),all)" \
	  SPRINGTIDE_ATTACKS_SECONDS=$(or $(SECONDS),20) SPRINGTIDE_ATTACKS_RATE=$(or $(RATE),100) SPRINGTIDE_ATTACKS_COMPLETIONS=5 \
	  SPRINGTIDE_ATTACKS_CONNECTIONS=$(or $(CONNECTIONS),2000) SPRINGTIDE_ATTACKS_CONNECTIONS_MAX=$(or $(CONNECTIONS_MAX),1000) \
	  SPRINGTIDE_ATTACKS_JSON=$(abspath $(TARGET))/bench/attacks.json cargo test $(WORKSPACE) --test it attacks:: -- --nocapture

bench-link: build ## share of a slow or lossy 1 Gb/s link that a download through a relay fills, beside bare TCP (as root, 25 minutes); ARGS='--times 1'
	cargo build --locked --package bench --bin bench-link
	$(TARGET)/debug/bench-link --springtide $(SPRINGTIDE) --json $(TARGET)/bench/link.json $(ARGS)
