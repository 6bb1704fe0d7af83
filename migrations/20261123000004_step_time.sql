-- how policies improve: steps are asked for by time, and there are many.
create index step_by_committed_at on step (committed_at);
