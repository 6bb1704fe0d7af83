# What attackers make a small policy learn, with caps and without. Half an hour.
# SEEDS=5 STEPS=48 WARM_UP=12 USERS=200 CASES='nobody; 5% × 20' PARALLEL=2
need stack
SPRINGTIDE_POISON_CASES=${CASES:-all} SPRINGTIDE_POISON_SEEDS=${SEEDS:-5} SPRINGTIDE_POISON_STEPS=${STEPS:-48} \
  SPRINGTIDE_POISON_WARM_UP=${WARM_UP:-12} SPRINGTIDE_POISON_USERS=${USERS:-200} SPRINGTIDE_POISON_PARALLEL=${PARALLEL:-2} \
  SPRINGTIDE_POISON_JSON=$target/bench/poison.json it learning trainer::poison
