-- Some answers cannot be trained on, whatever they earn: an engine returned no token ids, or a grammar forced the tokens.
-- Their sampler says so in the event, and its signature covers it. Written by the crate `ingest`, like the rest of
-- `generation`; the trainer drops them with this code.

-- Lower-case letters, digits and underscores. Null: it may be trained on.
alter table generation add column untrainable text;
