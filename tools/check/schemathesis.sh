# Schemathesis: the OpenAPI document of each role against the role. EXAMPLES=200 SEED=1 ROLES='ingest serve'
need stack
packages curl
# shellcheck disable=SC2086 # one argument per role
on_stack tools/schemathesis.sh "$springtide" "${EXAMPLES:-200}" "${SEED:-1}" ${ROLES:-}
