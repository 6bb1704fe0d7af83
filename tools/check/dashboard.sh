# The dashboard: the roles under load, a real Prometheus, every panel's query; then an alert that fires. Downloads Debian's Prometheus, 25 MB.
python3 tools/dashboard.py --check
need build
packages curl
prometheus=.stack/prometheus/usr/bin/prometheus
[ -x "$prometheus" ] || (mkdir -p .stack && cd .stack && apt-get download prometheus && dpkg -x prometheus_*.deb prometheus && rm prometheus_*.deb)
dir=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$dir"' EXIT
cat >"$dir/prometheus.yml" <<X
global: { scrape_interval: 2s }
rule_files: [$PWD/deploy/alerts.yml]
scrape_configs:
  - job_name: springtide
    static_configs: [{ targets: ["127.0.0.1:8000", "127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003"] }]
X
"$prometheus" --config.file="$dir/prometheus.yml" --storage.tsdb.path="$dir/data" --web.listen-address=127.0.0.1:19090 >"$dir/log" 2>&1 &
SPRINGTIDE__STATE_DIR=$dir/state "$springtide" --config demo/completion.toml up --demo -- --minutes 5 >"$dir/up" 2>&1 &
up=$!
for _ in $(seq 60); do curl -sf http://127.0.0.1:8000/health >/dev/null && break; kill -0 "$up" || { tail "$dir/up"; exit 1; }; sleep 1; done
sleep 120
python3 tools/dashboard.py --ask http://127.0.0.1:19090
# An alert, seen firing: the roles are gone.
kill "$up"
wait "$up" || true
for _ in $(seq 180); do
  curl -s http://127.0.0.1:19090/api/v1/alerts | grep -q '"alertname":"SpringtideRoleDown".*"state":"firing"' && { echo "SpringtideRoleDown fires"; exit 0; }
  sleep 1
done
echo "SpringtideRoleDown does not fire" >&2
exit 1
