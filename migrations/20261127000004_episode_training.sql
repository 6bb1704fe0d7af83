-- the trainer takes whole episodes.
--
-- On an existing database the index reads `trajectory` once and stays empty: no row is a turn yet.

-- The trainer finds the turns of an episode with it, and which of them is the last. `episode_closed` uses it too.
create index trajectory_by_episode on trajectory (episode_id, generation_id) where episode_id is not null;

-- Of the trajectories that a run's newest trained generations belong to, how many come from each user of each surface, the
-- heaviest first. An episode is one, and counts for each user of its turns.
create or replace function trained_share(run uuid, newest integer)
returns table (tenant_id text, user_key text, surface text, trajectories bigint, share double precision)
language sql stable as $$
    with latest as (
        select d.generation_id, d.step from disposition d
        where d.run_id = run and d.kind = 'trained'
        order by d.step desc
        limit newest
    ),
    of_users as (
        select distinct g.tenant_id, g.user_key, g.surface, coalesce(t.episode_id, g.id) as trajectory, latest.step
        from latest
        join generation g on g.id = latest.generation_id
        join trajectory t on t.generation_id = g.id
    )
    select o.tenant_id, o.user_key, o.surface, count(*), count(*)::double precision / sum(count(*)) over ()
    from of_users o
    group by o.tenant_id, o.user_key, o.surface
    order by count(*) desc, o.tenant_id, o.user_key, o.surface
$$;
