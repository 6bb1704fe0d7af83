-- exploration: a policy that may decline can fall silent, and silence earns no answers to learn from. For a small share of
-- an arm's requests a coin forbids declining; what it decided, and with which probability, is kept with the generation,
-- because importance weights need it. Written by the crate `ingest`, like the rest of `generation`.
alter table generation
    add column decline_suppressed boolean not null default false,   -- the decline token was masked: logprobs are of the distribution without it
    add column exploration_share real,                              -- probability with which the coin does that; null: it was not tossed
    add constraint generation_exploration check (not decline_suppressed or (exploration_share is not null and not declined));
