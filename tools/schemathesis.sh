#!/usr/bin/env bash
# Tests every role that has an API with Schemathesis: with requests that its OpenAPI document allows
# and requests that it forbids. Fails on a 5xx, on an answer that the document does not declare, if a
# role ends or a handler panics, and, for ingest and the collector, whose documents describe bodies,
# if a forbidden request is accepted. Installs Schemathesis into target/, pinned by hash. Needs Python
# 3.11 or newer with venv, and an empty Postgres and Kafka. This starts them:
# springtide stack test-env -- tools/schemathesis.sh …
# Usage: tools/schemathesis.sh SPRINGTIDE [EXAMPLES [SEED [ROLE…]]]
set -euo pipefail
cd "$(dirname "$0")/.."
requirements=tools/pins/schemathesis/requirements.txt # pins everything by hash
springtide=$(realpath "$1") examples=${2:-200} seed=${3:-1}
roles=("${@:4}")
[ "${#roles[@]}" -gt 0 ] || roles=(ingest collector control serve relay)
target=$(realpath "${CARGO_TARGET_DIR:-target}")
venv=$target/schemathesis config=$PWD/tools/schemathesis.toml root=$PWD

if ! cmp --silent "$requirements" "$venv/requirements.txt"; then
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary=:all: --require-hashes \
    --requirement "$requirements"
  cp "$requirements" "$venv/requirements.txt"
fi

: "${SPRINGTIDE_TEST_POSTGRES:?run this as: $springtide stack test-env -- $0 $springtide}" "${SPRINGTIDE_TEST_KAFKA:?}"
work=$(mktemp -d)
declare -A pids
stop() {
  for pid in "${pids[@]}"; do
    kill "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
  rm -rf "$work"
}
trap stop EXIT
free_ports() {
  python3 -c 'import socket; s = [socket.socket() for _ in range(6)]; [x.bind(("127.0.0.1", 0)) for x in s]
print(*(x.getsockname()[1] for x in s))'
}
read -r at_ingest at_collector at_control at_serve at_relay at_train <<<"$(free_ports)"
export SPRINGTIDE__POSTGRES__URL=$SPRINGTIDE_TEST_POSTGRES
export SPRINGTIDE__KAFKA__LIBRDKAFKA_FILE=$SPRINGTIDE_TEST_KAFKA_FILE
export SPRINGTIDE__KAFKA__BROKERS=$SPRINGTIDE_TEST_KAFKA SPRINGTIDE__KAFKA__TOPIC_PREFIX=schemathesis-$$
export SPRINGTIDE__STATE_DIR=$work/state SPRINGTIDE__POLICY__BASE=$root/demo/models/base
export SPRINGTIDE__LISTEN__INGEST=127.0.0.1:$at_ingest SPRINGTIDE__LISTEN__CONTROL=127.0.0.1:$at_control
export SPRINGTIDE__LISTEN__SERVE=127.0.0.1:$at_serve SPRINGTIDE__LISTEN__TRAIN=127.0.0.1:$at_train
export SPRINGTIDE__RELAY__LISTEN=127.0.0.1:$at_relay
declare -A url=([ingest]=http://127.0.0.1:$at_ingest [collector]=http://127.0.0.1:$at_collector
  [control]=http://127.0.0.1:$at_control [serve]=http://127.0.0.1:$at_serve [relay]=http://127.0.0.1:$at_relay
  [train]=http://127.0.0.1:$at_train)
cd "$work" # no springtide.toml there
"$springtide" migrate >migrate.log 2>&1 || { cat migrate.log >&2; exit 1; }

start() { # role: waits until it answers /health
  local role=$1
  case $role in
    collector) SPRINGTIDE__LISTEN__INGEST=127.0.0.1:$at_collector "$springtide" ingest --spool "$work/spool" \
      --upstream "${url[ingest]}" >collector.log 2>&1 & ;;
    relay) "$springtide" relay --upstream "file://$work/state/store" >relay.log 2>&1 & ;;
    *) "$springtide" "$role" >"$role.log" 2>&1 & ;;
  esac
  pids[$role]=$!
  for _ in $(seq 900); do
    curl --silent --fail --output /dev/null "${url[$role]}/health" && return
    kill -0 "${pids[$role]}" 2>/dev/null || break
    sleep 0.1
  done
  tail -n 50 "$role.log" >&2
  exit 1
}
start ingest
start collector
start control
# The trainer imports the base, so that there is a version to serve, list and download. It stops before
# it would execute the runs that are created here.
start train
for _ in $(seq 900); do
  curl --silent "${url[control]}/v1/aliases" | grep -q champion && break
  sleep 0.1
done
kill "${pids[train]}" && wait "${pids[train]}" || true
unset 'pids[train]'
start serve
start relay

status=0
for role in "${roles[@]}"; do
  echo "--- $role"
  # Without the stateful phase, which creates, reads and deletes resources: events can only be sent.
  # Without positive_data_acceptance: events must satisfy rules that JSON Schema cannot express (ids
  # that contain a time, spans that cover the sampled tokens). So a request that the document allows
  # may get a 400 that names the field. The documents of other roles do not describe bodies, and
  # tools/schemathesis_hooks.py does, more narrowly than the roles.
  without=positive_data_acceptance
  case $role in ingest | collector) ;; *) without+=,negative_data_rejection ;; esac
  SCHEMATHESIS_HOOKS=schemathesis_hooks PYTHONPATH=$root/tools "$venv/bin/schemathesis" --config-file "$config" \
    run "${url[$role]}/openapi.json" --checks all --exclude-checks "$without" --mode all \
    --phases examples,coverage,fuzzing --seed "$seed" --max-examples "$examples" --continue-on-failure \
    --request-timeout 30 --report json --report-json-path "$target/schemathesis-$role.json" || status=$?
  # The process must still run and respond.
  kill -0 "${pids[$role]}" && curl --silent --fail --output /dev/null "${url[$role]}/health" ||
    { tail -n 50 "$role.log" >&2; status=1; }
  if grep "handler panicked" "$role.log" >&2; then status=1; fi
done
exit "$status"
