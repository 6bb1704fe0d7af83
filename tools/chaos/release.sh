# Kills both release loops while canaries are proposed, promoted and taken back. KILLS=200 SEED=
need stack
[ -z "${SEED:-}" ] || export "SPRINGTIDE_RELEASE_SEED=$SEED"
SPRINGTIDE_RELEASE_KILLS=${KILLS:-200} it serving release_kills
