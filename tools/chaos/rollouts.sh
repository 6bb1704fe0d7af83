# Kills harnesses, their worlds, the gateway, the trainer, control and ingest while offline runs learn. KILLS=120 (13
# minutes) SEED=
need stack python-test
[ -z "${SEED:-}" ] || export "SPRINGTIDE_ROLLOUT_SEED=$SEED"
SPRINGTIDE_ROLLOUT_KILLS=${KILLS:-120} SPRINGTIDE_PYTHON=$target/python/bin/python it learning rollout_kills
