# Three brokers, killed in turn and restarted in order, and a Postgres that fails over to its standby five times, under load.
# With RESTORES=1, Postgres is restored to random moments instead of killing brokers. KILLS=27 MINUTES=12 RATE= SEED=
need stack
export SPRINGTIDE_CHAOS_REPLICATED=1 SPRINGTIDE_CHAOS_KILLS=${KILLS:-27} SPRINGTIDE_CHAOS_MINUTES=${MINUTES:-12}
for name in RATE SEED RESTORES; do
  [ -z "${!name:-}" ] || export "SPRINGTIDE_CHAOS_$name=${!name}"
done
cargo test --locked --workspace --test log chaos::no_acknowledged -- --nocapture --test-threads 1
