#!/usr/bin/env bash
# Writes the types of all `query!` statements to .sqlx, so that a build needs no database.
# `make sqlx` starts an empty Postgres for it. psql applies the migrations, because the binary that
# contains new ones cannot be built before this has run.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${SPRINGTIDE_TEST_POSTGRES:?run this as \`make sqlx\`}"
psql=$1
for migration in migrations/*.sql; do
  "$psql" "$SPRINGTIDE_TEST_POSTGRES" --quiet --set ON_ERROR_STOP=1 --file "$migration"
done
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
# Makes cargo expand all macros again.
touch edge/src/lib.rs ingest/src/lib.rs trainer/runs/src/lib.rs trainer/src/lib.rs serving/src/lib.rs serving/release/src/lib.rs control/src/lib.rs demo/src/lib.rs src/main.rs tests/fixture/src/lib.rs tests/{log,learning,serving,operations}/main.rs
SQLX_OFFLINE=false SQLX_OFFLINE_DIR=$fresh DATABASE_URL=$SPRINGTIDE_TEST_POSTGRES cargo check --locked --workspace --all-targets
mkdir -p .sqlx
find .sqlx -name 'query-*.json' -delete
cp "$fresh"/query-*.json .sqlx/
echo "$(ls .sqlx | wc -l) queries in .sqlx"
