-- what happened: from when on a horizon counts, and when it had passed. With both, a closed trajectory can be scored again as
-- another definition would have. Written by the crate `ingest` alone.

-- Event time of the generation: its last token was sampled, and the horizon counts from here (from `sampled_at` where that is
-- later). Null: stored before this column was; `sampled_at` is the nearest that is known then.
alter table generation add column finished_at timestamptz;

-- Event time after which nothing counted: the end of the horizon, or what ended it sooner. Null: closed before this column was.
alter table trajectory add column closes_at timestamptz;
