-- the trainer takes whole episodes.
--
-- Cost on an existing database: `trajectory` is read twice. Beside the first read everybody works on (SHARE UPDATE EXCLUSIVE).
-- During the second, nothing closes, and readers go on (SHARE). The index stays empty: no row is a turn yet.

-- What 20261127000003 has left unchecked: no old row has one of the new columns.
alter table trajectory validate constraint trajectory_episode, validate constraint trajectory_turn_reward;

-- The trainer finds the turns of an episode with it, and which of them is the last. `episode_closed` uses it too.
create index trajectory_by_episode on trajectory (episode_id, generation_id) where episode_id is not null;

-- Of the trajectories that a run's newest trained generations belong to, how many come from each user of each surface, and how
-- many of their trained tokens, the heaviest first. An episode is one trajectory, and counts for each user of its turns.
drop function trained_share(uuid, integer);
create function trained_share(run uuid, newest integer)
returns table (tenant_id text, user_key text, surface text, trajectories bigint, share double precision,
               tokens bigint, token_share double precision)
language sql stable as $$
    with latest as (
        select d.generation_id, d.step from disposition d
        where d.run_id = run and d.kind = 'trained'
        order by d.step desc
        limit newest
    ),
    of_users as (
        select g.tenant_id, g.user_key, g.surface,
               count(distinct (latest.step, coalesce(t.episode_id, g.id))) as trajectories,
               sum(case when g.train_mask is null then cardinality(g.token_ids)
                        else cardinality(array_positions(g.train_mask, true)) end)::bigint as tokens
        from latest
        join generation g on g.id = latest.generation_id
        join trajectory t on t.generation_id = g.id
        group by g.tenant_id, g.user_key, g.surface
    ),
    shares as (
        select o.*, o.trajectories::double precision / sum(o.trajectories) over () as share,
               o.tokens::double precision / greatest(1, sum(o.tokens) over ()) as token_share
        from of_users o
    )
    select s.tenant_id, s.user_key, s.surface, s.trajectories, s.share, s.tokens, s.token_share
    from shares s
    order by greatest(s.share, s.token_share) desc, s.tenant_id, s.user_key, s.surface
$$;
