#!/usr/bin/env bash
# What an operator does before `helm install`: the keys of the roles, and how to reach Postgres, Kafka and S3, as Secrets.
# docs/deploy.md explains each. Here the servers are those of servers.yaml.
# Usage: secrets.sh SPRINGTIDE RELEASE NAMESPACE
set -euo pipefail
springtide=$1 release=$2 namespace=$3
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"$springtide" secrets "$dir" --replicas "$release-serve-0,$release-serve-1" >/dev/null
for role in control train serve follow app prometheus admin; do
  kubectl -n "$namespace" create secret generic "springtide-$role" --from-file="$dir/$role"
done
url() { echo "postgres://$1:$2@postgres/springtide?sslmode=disable"; }
kubectl -n "$namespace" create secret generic springtide-postgres --from-literal=owner="$(url springtide p-owner)" \
  --from-literal=serve="$(url springtide_serve p-serve)" --from-literal=ingest="$(url springtide_ingest p-ingest)" \
  --from-literal=control="$(url springtide_control p-control)" --from-literal=train="$(url springtide_train p-train)"
kubectl -n "$namespace" create secret generic springtide-kafka --from-literal=kafka.properties=security.protocol=plaintext
kubectl -n "$namespace" create secret generic springtide-s3 --from-literal=AWS_ACCESS_KEY_ID=springtide \
  --from-literal=AWS_SECRET_ACCESS_KEY=p-s3 --from-literal=AWS_REGION=us-east-1 --from-literal=AWS_ENDPOINT=http://s3:7070 \
  --from-literal=AWS_ALLOW_HTTP=true
