# Kills two trainers outside, the gateway, the trainer, control and ingest while leased cohorts become steps. KILLS=200 (15
# minutes) SEED=
need stack python-test
[ -z "${SEED:-}" ] || export "SPRINGTIDE_DOOR_SEED=$SEED"
SPRINGTIDE_DOOR_KILLS=${KILLS:-200} SPRINGTIDE_PYTHON=$target/python/bin/python it learning door_kills
