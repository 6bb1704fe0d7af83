#!/usr/bin/env bash
# The images and deploy/compose.yaml on a real Docker engine: build, start, first feedback, a restart of every container
# under load, SIGTERM, the demo. Needs `make dist`; figures go to target/bench/deploy.txt. MINUTES=2 of the demo.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/containers/engine.sh
dist=${DIST:-target/dist} out=target/bench/deploy.txt
mkdir -p target/bench
: >"$out"
say() { echo "$*" | tee -a "$out"; }
fail() { say "failed: $*"; exit 1; }
seconds() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(seconds)" 'BEGIN { printf "%.1f s", b - a }'; }
docker_start
export KAFKA_IMAGE=springtide-test-kafka:1 POSTGRES_IMAGE=springtide-test-postgres:1 S3_IMAGE=springtide-test-s3:1
tools/containers/images.sh "$dist"
compose() { docker compose -f deploy/compose.yaml --profile cli --profile demo "$@"; }
temporary=$(mktemp -d)
finish() {
  [ -z "${load:-}" ] || kill "$load" 2>/dev/null || true
  [ "${1:-0}" = 0 ] || compose logs --tail 60
  compose down -v --timeout 5 >/dev/null 2>&1 || true
  docker_stop
  rm -rf "$temporary"
}
trap 'finish $?' EXIT

for image in springtide springtide-trainer; do
  bytes=$(docker save "$image:0.1.0" | gzip -6 | wc -c)
  say "$image: $(docker image inspect -f '{{.Size}}' "$image:0.1.0" | numfmt --to=si)B, compressed $(numfmt --to=si "$bytes")B," \
    "user $(docker image inspect -f '{{.Config.User}}' "$image:0.1.0")"
done
compose config -q
compose down -v --timeout 5 >/dev/null 2>&1
start=$(seconds)
docker compose -f deploy/compose.yaml up --wait --pull never --quiet-pull 2>&1 | tail -3
say "up --wait: $(since "$start")"
for role in control ingest serve train; do
  id=$(compose ps -q "$role") status=/proc/$(docker inspect -f '{{.State.Pid}}' "$(compose ps -q "$role")")/status
  [ "$(docker inspect -f '{{.HostConfig.ReadonlyRootfs}}' "$id")" = true ] || fail "$role can write to its root"
  grep -q '^CapEff:.0*$' "$status" || fail "$role has capabilities"
  say "$role: read-only root $(docker inspect -f '{{.HostConfig.ReadonlyRootfs}}' "$id"), $(
    docker exec "$id" /opt/springtide/bin/springtide --version)," \
    "$(grep -E 'CapEff|NoNewPrivs' "$status" | tr -s '\t\n' '  ')"
done
compose cp secrets:/var/lib/springtide/app/api-key "$temporary/key" >/dev/null 2>&1
compose run --rm --no-deps cli release list | tee -a "$out"

python3 tools/containers/load.py http://127.0.0.1:8000 http://127.0.0.1:8001 "$temporary/key" "$temporary/load.json" >"$temporary/load.log" 2>&1 &
load=$!
sleep 5
for service in serve ingest control train kafka postgres s3; do
  start=$(seconds)
  compose restart "$service" >/dev/null 2>&1
  healthy() { [ "$(docker inspect -f '{{.State.Health.Status}}' "$(compose ps -q "$service")")" = healthy ]; }
  for _ in $(seq 120); do healthy && break; sleep 1; done
  healthy || fail "$service is not healthy after its restart"
  say "restart of $service under load: healthy after $(since "$start")"
  sleep 3
done
kill "$load" && wait "$load" || { cat "$temporary/load.log"; exit 1; }
unset load
say "load: $(tail -1 "$temporary/load.log")"
sleep 10
ids=$(python3 -c "import json; print(','.join(json.load(open('$temporary/load.json'))['acknowledged']))")
rows=$(compose exec -T postgres psql -h /tmp -U springtide -At -c "select
  (select count(*) from generation where id = any('{$ids}')), (select count(*) from feedback where generation_id = any('{$ids}'))")
acknowledged=$(tr ',' '\n' <<<"$ids" | wc -l)
say "acknowledged answers: $acknowledged; rows of generation|feedback in Postgres: $rows"
[ "$rows" = "$acknowledged|$acknowledged" ] || fail "acknowledged events are missing or doubled"

start=$(seconds)
compose stop serve ingest control train >/dev/null 2>&1
codes=$(for role in control ingest serve train; do docker inspect -f '{{.State.ExitCode}}' "$(compose ps -aq "$role")"; done | tr '\n' ' ')
say "SIGTERM to four roles: ended after $(since "$start"), exit codes $codes"
[ "$codes" = "0 0 0 0 " ] || fail "a role did not end by itself"
docker compose -f deploy/compose.yaml up --wait --pull never >/dev/null 2>&1
compose run --rm demo demo --corpus /opt/springtide/share/demo/corpus --minutes "${MINUTES:-2}" 2>&1 | tail -25 | tee -a "$out"
compose run --rm --no-deps cli release list | tee -a "$out"
say "passed"
