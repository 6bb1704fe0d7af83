# What the scripts of tools/{bench,chaos,check,fuzz,model} share. tools/run.sh sources it from the root of the tree.
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
springtide=$target/debug/springtide
vllm=${VLLM:-$PWD/.springtide/vllm-venv/bin/vllm}
sglang=${SGLANG:-$PWD/.springtide/sglang-venv/bin/python}
environments=$PWD/.springtide/environments-venv/bin/python
model=demo/models/base
export OMP_NUM_THREADS=1 SQLX_OFFLINE=true
mkdir -p "$target/bench" .springtide
# As make would paste them into a shell, quotes included.
eval "args=(${ARGS:-})"

need() { make --no-print-directory NAME= "$@"; }              # targets of the Makefile
packages() { tools/setup.sh "$@"; }                           # programs that may have to be installed
build() { cargo build --locked --package "$@"; }
it() { cargo test --locked --workspace --test "$1" "$2" -- --nocapture; } # it log disk:: runs these tests of tests/log
on_stack() { "$springtide" stack test-env -- "$@"; }          # with an empty Postgres and Kafka
psql() { echo "$("$springtide" stack fetch | awk '/^Postgres/ { print $2 }')/bin/psql"; }
with_nvrtc() { LD_LIBRARY_PATH=${NVRTC:-$PWD/.nvrtc}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$@"; }
accelerator() { # of virtual machines: kvm where the processor virtualizes, else emulation, which is slower
  echo "${ACCELERATOR:-$(grep -qwE 'vmx|svm' /proc/cpuinfo && echo kvm || echo tcg)}"
}
