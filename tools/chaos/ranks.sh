# Ranks of FSDP2 and agents of torchrun are killed while they train a GRPO run from leases: steps lost, generations
# trained on twice. 100 kills take 35 minutes; downloads torch, 2 GB. KILLS=10
need build
python=.springtide/trainers-venv/bin/python
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
tools/trainers-venv.sh .springtide/trainers-venv
python3 tools/kill_ranks.py --springtide "$springtide" --bin "$(dirname "$python")" --kills "${KILLS:-100}" \
  --psql "$(psql)" --json "$target/bench/ranks.json" "${args[@]}"
