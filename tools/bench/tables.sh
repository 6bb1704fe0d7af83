# A world with a Postgres for each attempt, answers from a script: attempts per minute, what forks share, what dies with a
# machine. ACCELERATOR=tcg ARGS='--tasks 10'
need world-image
packages qemu-system-x86_64 bwrap
tools/environments-venv.sh .springtide/environments-venv
"$environments" examples/environments/tables/scripted.py --springtide "$springtide" --accelerator "$(accelerator)" \
  --json "$target/bench/tables.json" "${args[@]}"
