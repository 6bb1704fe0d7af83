# Sourced: servers of a benchmark, which end with it. `$work` is a folder for as long.
# Start one with `serve PORT COMMAND…`: returns when it answers GET /health.
work=$(mktemp -d)
servers=()
stop() {
    for server in "${servers[@]}"; do kill -TERM -- "-$server" 2>/dev/null || true; done
    rm -rf "$work"
}
trap stop EXIT
serve() {
    local port=$1
    shift
    setsid "$@" >"$work/$port.log" 2>&1 &
    servers+=($!)
    for _ in $(seq 300); do
        curl --silent --fail --max-time 5 "http://127.0.0.1:$port/health" >/dev/null && return
        kill -0 "${servers[-1]}" 2>/dev/null || break
        sleep 1
    done
    tail -20 "$work/$port.log" >&2
    exit 1
}
