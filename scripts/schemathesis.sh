#!/usr/bin/env bash
# Asks `springtide ingest` everything that its OpenAPI document allows, and much that it does not, with Schemathesis: no 5xx, no
# answer that the document does not name, nothing refused that it allows or taken that it forbids. Installs Schemathesis
# into target/ at the version below; needs python3 with venv, and a Postgres and a Kafka of its own, which
# `springtide stack test-env -- scripts/schemathesis.sh …` gives it.
# Usage: scripts/schemathesis.sh SPRINGTIDE [EXAMPLES [SEED]]
set -euo pipefail
cd "$(dirname "$0")/.."
version=4.32.5
springtide=$(realpath "$1") examples=${2:-200} seed=${3:-1}
target=$(realpath "${CARGO_TARGET_DIR:-target}")
venv=$target/schemathesis config=$PWD/scripts/schemathesis.toml

if [ "$("$venv/bin/python" -m pip show schemathesis 2>/dev/null | sed -n 's/^Version: //p')" != "$version" ]; then
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "schemathesis==$version"
fi

: "${SPRINGTIDE_TEST_POSTGRES:?run me by: $springtide stack test-env -- $0 $springtide}" "${SPRINGTIDE_TEST_KAFKA:?}"
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

# Without the stateful phase: it follows things that are made, read and removed, and events are only taken. And without
# positive_data_acceptance: an event keeps rules that JSON Schema cannot say (ids that hold a time, spans that cover the sampled
# tokens), so that what the document allows may be a 400 that names the field.
status=0
"$venv/bin/schemathesis" --config-file "$config" run "$url/openapi.json" --checks all --exclude-checks positive_data_acceptance --mode all --phases examples,coverage,fuzzing \
  --seed "$seed" --max-examples "$examples" --continue-on-failure --request-timeout 30 --report json \
  --report-json-path "$target/schemathesis.json" || status=$?
# Whatever was asked, the process lives and answers.
kill -0 "$ingest" && curl --silent --fail --output /dev/null "$url/health" || { tail -n 50 ingest.log >&2; status=1; }
if grep -q "handler panicked" ingest.log; then
  grep "handler panicked" ingest.log >&2
  status=1
fi
exit "$status"
