#!/usr/bin/env bash
# The entry point of the Kafka image for tests: like that of apache/kafka, it makes KAFKA_X_Y the property x.y, formats the
# storage once and runs the node.
set -euo pipefail
file=/tmp/server.properties
env | sed -n "s/^KAFKA_//p" | while IFS='=' read -r name value; do
  name=${name,,}
  printf '%s=%s\n' "${name//_/.}" "$value"
done >"$file"
java=$JAVA
$java -Dlog4j2.level=ERROR -cp '/opt/kafka/*' kafka.tools.StorageTool format --ignore-formatted --config "$file" \
  --cluster-id "${CLUSTER_ID:-5L6g3nShT-eMCtK--X86sw}"
exec $java -Xms128m -Xmx384m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dlog4j2.level=WARN -cp '/opt/kafka/*' kafka.Kafka "$file"
