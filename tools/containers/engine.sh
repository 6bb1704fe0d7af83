# Sourced. A Docker engine: the one that answers, or, for root with `dockerd` installed, one of its own that ends with the
# caller, in the folder .stack/docker. Compose is built with Go where the engine's client has none.
docker_start() {
  if ! docker info >/dev/null 2>&1; then
    command -v dockerd >/dev/null || { echo "no Docker engine answers, and dockerd (package docker.io) is not installed" >&2; return 1; }
    local dir
    dir=$PWD/.stack/docker
    mkdir -p "$dir"
    cat >"$dir/daemon.json" <<X
{"data-root": "$dir/data", "exec-root": "/run/springtide-docker", "pidfile": "$dir/pid", "hosts": ["unix://$dir/sock"],
 "oom-score-adjust": 0, "bip": "10.201.0.1/24"}
X
    dockerd --config-file "$dir/daemon.json" >"$dir/log" 2>&1 &
    docker_pid=$!
    export DOCKER_HOST=unix://$dir/sock
    for _ in $(seq 150); do docker info >/dev/null 2>&1 && break; sleep 0.2; done
    docker info >/dev/null
  fi
  export DOCKER_BUILDKIT=0 # BuildKit would ask a registry for ARG BASE
  docker compose version >/dev/null 2>&1 || {
    mkdir -p "${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins"
    (cd "$(mktemp -d)" && go mod init compose && go get -tool github.com/docker/compose/v2/cmd@v2.40.3 &&
      CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins/docker-compose" \
        github.com/docker/compose/v2/cmd) >/dev/null 2>&1
  }
}
docker_stop() { [ -z "${docker_pid:-}" ] || { kill "$docker_pid"; wait "$docker_pid" || true; }; }
