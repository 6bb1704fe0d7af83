# Backs up the whole stack and restores it to random moments, under load; every fifth time as if the machine were lost.
# RESTORES=20, about a minute each at first and more as the store grows; SEED=
need stack
python3 tools/restores.py --springtide "$springtide" --base $model --cache .stack --work .springtide/restores \
  --rounds "${RESTORES:-20}" ${SEED:+--seed "$SEED"} --json "$target/chaos/restores.json"
