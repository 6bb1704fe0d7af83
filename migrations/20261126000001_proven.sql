-- whether the sink could verify who sampled a generation. Before, an open generation that nobody had sampled could hold back
-- the cohort of its surface, and a flood of them the cohorts of all surfaces.

-- True: when it was stored, its signature was that of a sampler that was registered for its replica and policy, and was
-- neither revoked nor expired. False: it was not. Null: not checked, because it has no proof, because its sampler was not
-- registered yet, or because it was stored before this column was. Written by the crate `ingest`. The trainer verifies the
-- signature again before it trains on the generation.
alter table generation add column proven boolean;

-- Only proven generations hold a cohort back, and only they are found here.
alter table open_generation add column proven boolean not null default false;
drop index open_generation_by_surface;
create index open_generation_proven on open_generation (surface, generation_id) where proven;

-- The newest answers of a surface, however many others there are: how long its answers take. Nothing is proven yet, so it
-- is empty, but building it reads the table once.
create index generation_answer on generation (policy, arm, surface, id) where proven and purpose = 'production';
