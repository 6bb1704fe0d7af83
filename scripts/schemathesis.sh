#!/usr/bin/env bash
# Tests `springtide ingest` with Schemathesis, with requests that its OpenAPI document allows and
# requests that it forbids. Fails on a 5xx, on an answer that the document does not declare, and if
# a forbidden request is accepted. Installs Schemathesis into target/, pinned by hash. Needs Python
# 3.11 or newer with venv, and an empty Postgres and Kafka. This starts them:
# springtide stack test-env -- scripts/schemathesis.sh …
# Usage: scripts/schemathesis.sh SPRINGTIDE [EXAMPLES [SEED]]
set -euo pipefail
cd "$(dirname "$0")/.."
requirements=stack/schemathesis/requirements.txt # pins everything by hash
springtide=$(realpath "$1") examples=${2:-200} seed=${3:-1}
target=$(realpath "${CARGO_TARGET_DIR:-target}")
venv=$target/schemathesis config=$PWD/scripts/schemathesis.toml

if ! cmp --silent "$requirements" "$venv/requirements.txt"; then
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary=:all: --require-hashes \
    --requirement "$requirements"
  cp "$requirements" "$venv/requirements.txt"
fi

: "${SPRINGTIDE_TEST_POSTGRES:?run this as: $springtide stack test-env -- $0 $springtide}" "${SPRINGTIDE_TEST_KAFKA:?}"
work=$(mktemp -d)
ingest=
stop() {
  if [ -n "$ingest" ]; then
    kill "$ingest" 2>/dev/null || true
    wait "$ingest" 2>/dev/null || true
  fi
  rm -rf "$work"
}
trap stop EXIT
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
url=http://127.0.0.1:$port
export SPRINGTIDE__LISTEN__INGEST=127.0.0.1:$port SPRINGTIDE__POSTGRES__URL=$SPRINGTIDE_TEST_POSTGRES
export SPRINGTIDE__KAFKA__LIBRDKAFKA_FILE=$SPRINGTIDE_TEST_KAFKA_FILE
export SPRINGTIDE__KAFKA__BROKERS=$SPRINGTIDE_TEST_KAFKA SPRINGTIDE__KAFKA__TOPIC_PREFIX=schemathesis-$$
export SPRINGTIDE__STATE_DIR=$work/state
cd "$work" # no springtide.toml there
"$springtide" migrate >migrate.log 2>&1 || { cat migrate.log >&2; exit 1; }
"$springtide" ingest >ingest.log 2>&1 &
ingest=$!
for _ in $(seq 300); do
  curl --silent --fail --output /dev/null "$url/health" && break
  kill -0 "$ingest" 2>/dev/null || { cat ingest.log >&2; exit 1; }
  sleep 0.1
done

# Without the stateful phase, which creates, reads and deletes resources: events can only be sent.
# Without positive_data_acceptance: events must satisfy rules that JSON Schema cannot express (ids
# that contain a time, spans that cover the sampled tokens). So a request that the document allows
# may get a 400 that names the field.
status=0
"$venv/bin/schemathesis" --config-file "$config" run "$url/openapi.json" --checks all --exclude-checks positive_data_acceptance --mode all --phases examples,coverage,fuzzing \
  --seed "$seed" --max-examples "$examples" --continue-on-failure --request-timeout 30 --report json \
  --report-json-path "$target/schemathesis.json" || status=$?
# The process must still run and respond.
kill -0 "$ingest" && curl --silent --fail --output /dev/null "$url/health" || { tail -n 50 ingest.log >&2; status=1; }
if grep -q "handler panicked" ingest.log; then
  grep "handler panicked" ingest.log >&2
  status=1
fi
exit "$status"
