# Share of the trainer's idle time that rollouts use on its machine, and what a step takes without them, beside them,
# and with serve.tide.beside_trainer. 5 minutes. STEPS=6
need stack
SPRINGTIDE_BESIDE_STEPS=${STEPS:-6} it learning beside_trainer
