#!/usr/bin/env bash
# Writes what `query!` learns from a database into .sqlx, so that building needs none. `make sqlx` starts an empty Postgres
# for it; the migrations are applied by psql, because a binary that knows the new ones cannot be built before this is done.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${SPRINGTIDE_TEST_POSTGRES:?run this as \`make sqlx\`}"
psql=$1
for migration in migrations/*.sql; do
  "$psql" "$SPRINGTIDE_TEST_POSTGRES" --quiet --set ON_ERROR_STOP=1 --file "$migration"
done
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
touch edge/src/lib.rs ingest/src/lib.rs trainer/src/lib.rs serving/src/lib.rs demo/src/lib.rs src/main.rs tests/main.rs # expand all macros again
SQLX_OFFLINE=false SQLX_OFFLINE_DIR=$fresh DATABASE_URL=$SPRINGTIDE_TEST_POSTGRES cargo check --locked --workspace --all-targets
mkdir -p .sqlx
find .sqlx -name 'query-*.json' -delete
cp "$fresh"/query-*.json .sqlx/
echo "$(ls .sqlx | wc -l) queries in .sqlx"
