# Kills the trainer anywhere while it learns from a frozen log: the versions must be those of one that was not killed.
# KILLS=100 SEED=
need stack
[ -z "${SEED:-}" ] || export "SPRINGTIDE_TRAINER_SEED=$SEED"
SPRINGTIDE_TRAINER_KILLS=${KILLS:-100} it learning frozen_log
