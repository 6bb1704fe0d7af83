# What the policy learns from sessions: by a verdict at the end, by judged turns, and a control. About 105 minutes.
# SEEDS=3 VARIANTS='end turns random' SMALL=1 (one seed, half a minute each)
need stack
# not to be changed after a reported run has been seen
run=() seeds=3
[ -z "${SMALL:-}" ] || run=(0.5 --rate 4 --start-sessions 60,10) seeds=1
tools/session.sh "$springtide" "${VARIANTS:-end turns random}" "$(seq -s' ' "${SEEDS:-$seeds}")" "${run[@]}" "${args[@]}"
