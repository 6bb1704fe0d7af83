# What users type as a second teacher, apart from accepts and rejects: a live demo, a supervised run, three evaluations.
# 10 minutes. USERS=house SEED=31 MINUTES=5
need build
tools/typed.sh "$springtide" "${USERS:-house}" "${SEED:-31}" "${MINUTES:-5}" .springtide/typed
