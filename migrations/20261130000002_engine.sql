-- Which engine computed a generation. Engines other than our own have log-probabilities that differ from the trainer's by
-- rounding, so the trainer judges and corrects theirs in another way.

-- A name such as 'vllm'; null: our own, as all were before. Written by the crate `ingest`.
alter table generation add column engine text;
