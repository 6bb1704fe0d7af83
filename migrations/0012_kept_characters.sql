-- How much of an answer its user kept: more than a verdict on the whole of it. Written by the crate
-- `ingest` when a trajectory closes.
alter table trajectory
    add column kept_characters integer;  -- of the shown text, from its beginning; null: nobody said
