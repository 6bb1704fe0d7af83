#!/usr/bin/env bash
# Starts a Kubernetes of one node in a network namespace, for tests of the chart. Needs root, containerd, runc, CNI plugins
# (Debian: containerd runc containernetworking-plugins iptables iproute2) and the programs of tools.sh in BIN.
# Afterwards: export KUBECONFIG=DIR/admin.kc; nsenter --net=/run/netns/springtide BIN/kubectl get nodes
# Usage: up.sh DIR BIN
set -euo pipefail
dir=$(realpath -m "$1") bin=$(realpath "$2")
inside="nsenter --net=/run/netns/springtide"
run=/run/springtide-kube # a socket's path is short
rm -rf "$dir" "$run"
mkdir -p "$dir"/{log,certs,cni,kubelet} "$run"
cd "$dir"
sysctl -n vm.overcommit_memory kernel.panic kernel.panic_on_oops >sysctl # the kubelet sets them
ip netns add springtide
ip -n springtide link set lo up
ip -n springtide link add node type veth peer name other
ip -n springtide link set other up
ip -n springtide addr add 10.250.0.2/24 dev node
ip -n springtide link set node up
ip -n springtide route add default dev node
$inside sysctl -qw net.ipv4.ip_forward=1
openssl genrsa -out certs/sa.key 2048 2>/dev/null
printf 'admintoken,admin,admin,system:masters\nkubelettoken,system:node:n1,kn,system:nodes\n' >tokens.csv
for user in admin kubelet; do cat >$user.kc <<X
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:6443", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: ${user}token}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
X
done
cat >cni/10.conflist <<'X'
{"cniVersion": "0.4.0", "name": "br", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
 "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
 {"type": "portmap", "capabilities": {"portMappings": true}}]}
X
cat >containerd.toml <<X
version = 2
root = "$dir/containerd"
state = "$run/containerd"
[grpc]
  address = "$run/sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$dir/cni"
X
cat >kubelet.yaml <<X
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
clusterDNS: ["10.250.0.2"]
clusterDomain: cluster.local
oomScoreAdj: 0
containerRuntimeEndpoint: unix://$run/sock
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
enforceNodeAllocatable: []
evictionHard: {memory.available: "100Mi"}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
featureGates: {KubeletInUserNamespace: true}
X
cat >proxy.yaml <<X
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
clientConnection: {kubeconfig: $dir/admin.kc}
hostnameOverride: n1
clusterCIDR: 10.244.0.0/16
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
X
cat >Corefile <<X
.:53 {
  bind 10.250.0.2
  kubernetes cluster.local {
    kubeconfig $dir/admin.kc x
  }
  errors
}
X
start() { # start NAME COMMAND…
  local name=$1
  shift
  setsid nohup $inside "$@" >"log/$name" 2>&1 &
  echo $! >"$run/$name.pid"
}
start etcd "$bin/etcd" --data-dir etcd --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
  --listen-peer-urls http://127.0.0.1:2380 --log-level warn --unsafe-no-fsync
start apiserver "$bin/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 --advertise-address=10.250.0.2 --cert-dir=certs \
  --service-account-key-file=certs/sa.key --service-account-signing-key-file=certs/sa.key \
  --service-account-issuer=https://kubernetes.default.svc --service-cluster-ip-range=10.96.0.0/16 --authorization-mode=Node,RBAC \
  --token-auth-file=tokens.csv --allow-privileged=true --kubelet-preferred-address-types=InternalIP
start containerd containerd -c containerd.toml
ready() { [ "$($inside curl -sk -H 'Authorization: Bearer admintoken' https://127.0.0.1:6443/readyz)" = ok ]; }
for _ in $(seq 300); do ready && break; sleep 0.2; done
ready
start controller "$bin/kube-controller-manager" --kubeconfig=admin.kc --service-account-private-key-file=certs/sa.key \
  --root-ca-file=certs/apiserver.crt --use-service-account-credentials=false --leader-elect=false
start scheduler "$bin/kube-scheduler" --kubeconfig=admin.kc --leader-elect=false
start kubelet "$bin/kubelet" --config=kubelet.yaml --kubeconfig=kubelet.kc --hostname-override=n1 --node-ip=10.250.0.2 --root-dir="$dir/kubelet"
start proxy "$bin/kube-proxy" --config=proxy.yaml
start dns "$bin/coredns" -conf Corefile
export KUBECONFIG=$dir/admin.kc
for _ in $(seq 300); do $inside "$bin/kubectl" wait node/n1 --for=condition=Ready --timeout=1s >/dev/null 2>&1 && exit; sleep 0.2; done
echo "the node did not become ready; its logs are in $dir/log" >&2
exit 1
