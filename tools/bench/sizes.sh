# Memory and time of everything that moves whole versions, for generated models of several sizes, in a memory cgroup:
# import, publish, verify, pull, publish from 8 ranks, squash, follow; and kills of a pull. As root, on a disk with 7
# times the largest size free; 1 and 3 GB take 5 minutes. GB='1 3 10' LIMIT_MIB=1536 ARGS='--kills 50'
need build
on_stack python3 tools/bench_sizes.py --springtide "$springtide" --json "$target/bench/sizes.json" --gb ${GB:-1 3} \
  --limit-mib "${LIMIT_MIB:-1536}" "${args[@]}"
