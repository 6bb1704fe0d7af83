#!/usr/bin/env bash
# The chart on a real Kubernetes of one node, under Pod Security `restricted`: install, first answer and feedback through a
# Service, an upgrade, a broken upgrade and the way back, deleted pods, all under load, then removal. Needs root and the
# images of `make test-deploy`. Network policies, ingress, autoscaling and engines are checked as objects alone.
# Figures go to target/bench/chart.txt. KUBE_BIN=DIR has the programs of tools/kube/tools.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/containers/engine.sh
bin=$(realpath -m "${KUBE_BIN:-.stack/kube-bin}") dir=$PWD/.stack/kube out=$PWD/target/bench/chart.txt
mkdir -p target/bench
: >"$out"
say() { echo "$*" | tee -a "$out"; }
fail() { say "failed: $*"; exit 1; }
seconds() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(seconds)" 'BEGIN { printf "%.1f s", b - a }'; }
tools/setup.sh containerd runc
tools/kube/tools.sh "$bin"
export PATH=$bin:$PATH
temporary=$(mktemp -d)
finish() {
  if [ "${1:-0}" != 0 ]; then
    kubectl get pods -A -o wide || true
    for pod in $(kubectl -n loop get pods -o name); do echo "== $pod"; kubectl -n loop logs "$pod" --tail 15 --all-containers || true; done
    kubectl -n loop get events | tail -20 || true
  fi
  [ -z "${load:-}" ] || kill "$load" 2>/dev/null || true
  tools/kube/down.sh "$dir"
  docker_stop
  rm -rf "$temporary"
}
trap 'finish $?' EXIT

# As objects: the schema of Kubernetes, also for what a cluster of one node cannot prove.
helm lint deploy/chart --quiet
validate=target/python/bin/kubernetes-validate
[ -x "$validate" ] || target/python/bin/python -m pip --quiet install kubernetes-validate==1.37.0
cat >"$temporary/all.yaml" <<'X'
relaySpec: { enabled: true }
ingress: { enabled: true, className: nginx, tlsSecretName: cert }
ingestSpec: { autoscaling: { enabled: true } }
tls: { secretName: springtide-tls }
volumes: [{ name: ca, configMap: { name: ca } }]
volumeMounts: [{ name: ca, mountPath: /ca }]
policy: { base: /ca/model }
servingEngineSpec:
  modelSpec:
    - { name: llama, repository: acme/vllm-springtide, tag: v0.32.0, modelURL: meta-llama/Llama-3.1-8B, replicaCount: 2, requestCPU: 8,
        requestMemory: 64Gi, requestGPU: 1, vllmConfig: { dtype: bfloat16, maxModelLen: 8192, extraArgs: ["--seed=1"] } }
X
for values in deploy/chart/values.yaml "$temporary/all.yaml"; do
  helm template loop deploy/chart -f "$values" >"$temporary/objects.yaml"
  "$validate" --strict "$temporary/objects.yaml" >/dev/null
done
say "objects that fit the schema: $(grep -c '^kind:' "$temporary/objects.yaml")"
if helm template loop deploy/chart --set routerSpec.replicaCuont=3 >/dev/null 2>&1; then fail "a misspelt value was accepted"; fi

docker_start
mkdir -p "$dir-images"
for image in springtide:0.1.0 springtide-trainer:0.1.0 springtide-test-kafka:1 springtide-test-postgres:1 springtide-test-s3:1; do
  docker save "$image" -o "$dir-images/${image%%:*}.tar"
done
printf 'FROM springtide-test-tools:1\nENTRYPOINT ["/usr/bin/busybox", "sleep", "infinity"]\n' | docker build -q -t localhost/pause:1 - >/dev/null
docker save localhost/pause:1 -o "$dir-images/pause.tar"
docker_stop
unset docker_pid
start=$(seconds)
tools/kube/up.sh "$dir" "$bin"
say "a node of Kubernetes is ready after $(since "$start")"
export KUBECONFIG=$dir/admin.kc
real=$(realpath "$bin")
kubectl() { nsenter --net=/run/netns/springtide "$real/kubectl" "$@"; }
helm() { nsenter --net=/run/netns/springtide "$real/helm" "$@"; }
export -f kubectl
export real
for image in "$dir-images"/*.tar; do ctr -a /run/springtide-kube/sock -n k8s.io images import "$image" >/dev/null; done
for name in springtide:0.1.0 springtide-trainer:0.1.0; do # for the upgrade
  ctr -a /run/springtide-kube/sock -n k8s.io images tag "docker.io/library/$name" "docker.io/library/${name%0.1.0}0.1.1" >/dev/null
done
kubectl create namespace loop >/dev/null
kubectl label namespace loop pod-security.kubernetes.io/enforce=restricted >/dev/null
kubectl -n loop apply -f tools/kube/servers.yaml >/dev/null
kubectl -n loop wait --for=condition=Ready pod/kafka pod/postgres pod/s3 --timeout=120s >/dev/null
tools/kube/secrets.sh "${SPRINGTIDE:-target/debug/springtide}" loop loop >/dev/null

start=$(seconds)
helm install loop deploy/chart -n loop -f tools/kube/values.yaml --wait --timeout 5m >/dev/null
say "helm install --wait: $(since "$start")"
kubectl -n loop get pods -o custom-columns=NAME:.metadata.name,READY:.status.containerStatuses[0].ready | tee -a "$out"
address() { kubectl -n loop get service "loop-$1" -o jsonpath='{.spec.clusterIP}'; }
kubectl -n loop get secret springtide-app -o jsonpath='{.data.api-key}' | base64 -d >"$temporary/key"
begin() {
  nsenter --net=/run/netns/springtide python3 tools/containers/load.py "http://$(address serve):8000" "http://$(address ingest):8001" \
    "$temporary/key" "$temporary/load.json" >"$temporary/load.log" 2>&1 &
  load=$!
  sleep 5
}
end() { # end WHAT
  kill "$load"
  wait "$load" || fail "$1: $(tail -3 "$temporary/load.log")"
  unset load
  say "$1: $(tail -1 "$temporary/load.log")"
}
begin
end "first answers and feedback through Services"

begin
start=$(seconds)
helm upgrade loop deploy/chart -n loop -f tools/kube/values.yaml --set image.tag=0.1.1 --wait --timeout 5m >/dev/null
took=$(since "$start")
end "upgrade ($took) under load"

begin
start=$(seconds)
if helm upgrade loop deploy/chart -n loop -f tools/kube/values.yaml --set image.tag=9.9.9 --wait --timeout 60s --rollback-on-failure >"$temporary/broken" 2>&1; then
  fail "the broken upgrade was not noticed"
fi
took=$(since "$start")
say "broken upgrade: $(tail -1 "$temporary/broken" | cut -c1-200)"
kubectl -n loop wait --for=condition=Ready pod -l app.kubernetes.io/instance=loop --timeout=180s >/dev/null
end "broken upgrade and the way back ($took) under load"

begin
for pod in loop-serve-1 $(kubectl -n loop get pods -o name -l app.kubernetes.io/component=ingest | head -1 | cut -d/ -f2) loop-train-0; do
  kubectl -n loop delete pod "$pod" >/dev/null
  sleep 1
  kubectl -n loop wait --for=condition=Ready pod -l app.kubernetes.io/instance=loop --timeout=180s >/dev/null
done
end "a pod of serve, of ingest and of train deleted under load"

ids=$(python3 -c "import json; print(','.join(json.load(open('$temporary/load.json'))['acknowledged']))")
acknowledged=$(tr ',' '\n' <<<"$ids" | wc -l)
rows=$(kubectl -n loop exec postgres -- psql -h /tmp -U springtide -At -c "select
  (select count(*) from generation where id = any('{$ids}')), (select count(*) from feedback where generation_id = any('{$ids}'))")
say "acknowledged answers of the last load: $acknowledged; rows of generation|feedback: $rows"
[ "$rows" = "$acknowledged|$acknowledged" ] || fail "acknowledged events are missing or doubled"
helm rollback loop 1 -n loop --wait --timeout 5m >/dev/null
start=$(seconds)
helm uninstall loop -n loop --wait >/dev/null
kubectl -n loop delete job loop-migrate >/dev/null # Helm leaves its hooks
kubectl -n loop wait --for=delete pod -l app.kubernetes.io/instance=loop --timeout=90s >/dev/null
left=$(kubectl -n loop get all,pdb,netpol,cm -l app.kubernetes.io/instance=loop -o name | wc -l)
say "uninstall: $(since "$start"); objects left: $left"
[ "$left" = 0 ] || fail "objects are left"
say "passed"
