#!/usr/bin/env bash
# The entry point of the Postgres image for tests: like that of postgres:18, it makes the cluster once with POSTGRES_USER,
# POSTGRES_PASSWORD and POSTGRES_DB, runs /docker-entrypoint-initdb.d/*.sql, and starts the server.
set -euo pipefail
data=${PGDATA:-/var/lib/postgresql/18/docker}
if [ ! -s "$data/PG_VERSION" ]; then
  printf '%s' "$POSTGRES_PASSWORD" >/tmp/password
  initdb -D "$data" -U "$POSTGRES_USER" --pwfile=/tmp/password --auth-local=trust --auth-host=scram-sha-256 >/dev/null
  rm /tmp/password
  echo "host all all all scram-sha-256" >>"$data/pg_hba.conf"
  pg_ctl -D "$data" -w -o "-c listen_addresses='' -k /tmp" start >/dev/null
  createdb -h /tmp -U "$POSTGRES_USER" "$POSTGRES_DB"
  for file in /docker-entrypoint-initdb.d/*.sql; do
    [ ! -e "$file" ] || psql -q -v ON_ERROR_STOP=1 -h /tmp -U "$POSTGRES_USER" -d "$POSTGRES_DB" -f "$file"
  done
  pg_ctl -D "$data" -w stop >/dev/null
fi
exec postgres -D "$data" -c listen_addresses='*' -c unix_socket_directories=/tmp -c max_connections=200
