# Kills ingest, the broker and Postgres under load, and counts what is lost. KILLS=1000 MINUTES=120 RATE= SEED= SWAPS=20
need stack
for name in KILLS MINUTES RATE SEED SWAPS; do
  [ -z "${!name:-}" ] || export "SPRINGTIDE_CHAOS_$name=${!name}"
done
cargo test --locked --workspace --test log chaos -- --nocapture --test-threads 1
