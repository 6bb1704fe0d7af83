# From a step's bytes to the last follower serving them, and what a streaming client notices.
# MIB=1024 FOLLOWERS=2 STEPS=6 THREADS=2
need stack
SPRINGTIDE_SYNC_MIB=${MIB:-1024} SPRINGTIDE_SYNC_FOLLOWERS=${FOLLOWERS:-2} SPRINGTIDE_SYNC_STEPS=${STEPS:-6} \
  SPRINGTIDE_SYNC_THREADS=${THREADS:-2} SPRINGTIDE_SYNC_JSON=$target/bench/sync.json it serving sync::
