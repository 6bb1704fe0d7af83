# Ten times what ingest can take, under a memory limit. SECONDS=30 for each of four parts, TIMES=10
need stack
SPRINGTIDE_OVERLOAD_SECONDS=${FOR:-30} SPRINGTIDE_OVERLOAD_TIMES=${TIMES:-10} it log overload::
