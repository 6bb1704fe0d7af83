# Trains the model of the example environments again (demo/models/agent), into .springtide/agent. Half an hour on one core.
# STEPS=875
need build
tools/environments-venv.sh .springtide/environments-venv
"$environments" examples/environments/base/build.py base .springtide/agent
"$springtide" train sft --data .springtide/agent --out .springtide/agent/model --shape examples/environments/base/config.json \
  --batch 16 --steps "${STEPS:-875}"
