#!/usr/bin/env bash
# Opens every page of `control` in headless Chromium (tests/browser/pages.mjs), then logs in through a real OpenID Connect
# provider and tries wrong tokens of it (tests/browser/oidc.mjs). Needs Node.js, npm and Chromium, and an empty
# Postgres and Kafka. This starts them: springtide stack test-env -- tools/browser-test.sh …
# Usage: tools/browser-test.sh SPRINGTIDE PSQL [FOLDER]   (FOLDER: where screenshots go)
# With ROWS it adds so many answers (tests/browser/many.sql), measures when each page is first painted (tests/browser/paint.mjs)
# and writes the figures to PAINT_JSON.
set -euo pipefail
cd "$(dirname "$0")/.."
springtide=$(realpath "$1") psql=$(realpath "$2") folder=-
[ $# -lt 3 ] || folder=$(realpath "$3")
root=$PWD
: "${SPRINGTIDE_TEST_POSTGRES:?run this as: $springtide stack test-env -- $0 $springtide $psql}" "${SPRINGTIDE_TEST_KAFKA:?}"
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)

# Everything is pinned by the lock file, with hashes.
work=$(mktemp -d)
pid=
stop() {
  [ -z "$pid" ] || { kill "$pid" 2>/dev/null || true; wait "$pid" 2>/dev/null || true; }
  rm -rf "$work"
}
trap stop EXIT
cp tests/browser/package.json tests/browser/package-lock.json tests/browser/*.mjs "$work"
(cd "$work" && npm ci --silent --no-audit --no-fund --ignore-scripts)

free_ports() {
  python3 -c 'import socket; s = [socket.socket() for _ in range(3)]; [x.bind(("127.0.0.1", 0)) for x in s]
print(*(x.getsockname()[1] for x in s))'
}
read -r port train_port oidc_port <<<"$(free_ports)"
export SPRINGTIDE__POSTGRES__URL=$SPRINGTIDE_TEST_POSTGRES
export SPRINGTIDE__KAFKA__LIBRDKAFKA_FILE=$SPRINGTIDE_TEST_KAFKA_FILE
export SPRINGTIDE__KAFKA__BROKERS=$SPRINGTIDE_TEST_KAFKA SPRINGTIDE__KAFKA__TOPIC_PREFIX=browser-$$
export SPRINGTIDE__STATE_DIR=$work/state SPRINGTIDE__POLICY__BASE=$root/demo/models/base
export SPRINGTIDE__LISTEN__CONTROL=127.0.0.1:$port SPRINGTIDE__LISTEN__TRAIN=127.0.0.1:$train_port
export SPRINGTIDE__AUTH__REQUIRED=true SPRINGTIDE__SERVE__API_KEY=unused SPRINGTIDE__TRAINER__API_KEY=unused
cd "$work" # no springtide.toml there
"$springtide" migrate >migrate.log 2>&1 || { cat migrate.log >&2; exit 1; }
if [ -z "${ROWS:-}" ]; then
  # The trainer imports the base: a version in the store, with the tokenizer that texts are read with.
  SPRINGTIDE__TRAINER__REALTIME__ENABLED=false SPRINGTIDE__TRAINER__OFFLINE__ENABLED=false "$springtide" train >train.log 2>&1 &
  pid=$!
  for _ in $(seq 900); do
    lines=$("$psql" "$SPRINGTIDE_TEST_POSTGRES" --quiet --tuples-only --no-align --command 'select count(*) from line')
    [ "$lines" = 0 ] || break
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  [ "$lines" = 1 ] || { tail -n 50 train.log >&2; exit 1; }
  kill "$pid" 2>/dev/null || true
  wait "$pid" || true
  pid=
fi
"$psql" "$SPRINGTIDE_TEST_POSTGRES" --quiet --set ON_ERROR_STOP=1 --file "$root/tests/browser/data.sql" >/dev/null
if [ -n "${ROWS:-}" ]; then
  "$psql" "$SPRINGTIDE_TEST_POSTGRES" --quiet --set ON_ERROR_STOP=1 --set rows="$ROWS" --file "$root/tests/browser/many.sql" >/dev/null
fi
key=$("$springtide" key create --role admin --label "Ada, release" | tail -n 1)
texts_key=$("$springtide" key create --scope read,texts --label "Ada, to look at answers" | tail -n 1)
start_control() {
  "$springtide" control >>control.log 2>&1 &
  pid=$!
  for _ in $(seq 300); do
    curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health" && break
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
}
start_control
if [ -n "${ROWS:-}" ]; then
  node paint.mjs "http://127.0.0.1:$port" "$key" "$chromium" "$ROWS" "${PAINT_JSON:?}"
  exit
fi
node pages.mjs "http://127.0.0.1:$port" "$key" "$texts_key" "$chromium" "$folder" || { tail -n 20 control.log >&2; exit 1; }
kill "$pid"
wait "$pid" || true
export SPRINGTIDE__AUTH__OIDC__ISSUER=http://127.0.0.1:$oidc_port
export SPRINGTIDE__AUTH__OIDC__REDIRECT_URL=http://127.0.0.1:$port/login/callback
export SPRINGTIDE__AUTH__OIDC__GROUPS='[{name="springtide-release",role="release"},{name="springtide-ci",scopes=["read"]}]'
start_control
node oidc.mjs "http://127.0.0.1:$port" "$oidc_port" "$chromium" || { tail -n 20 control.log >&2; exit 1; }
if grep -q -e "$key" -e "$texts_key" control.log; then
  echo "a key is in the log" >&2
  exit 1
fi
