-- how much a sample may steer a step: bounds of rewards, and the weight of each user. What the trainer excludes for it is a
-- `dropped` row of `disposition` whose code says why.

-- A field of a document if it is a number, else null: older definitions may have another shape.
create function number_of(document jsonb, field text) returns double precision
language sql immutable parallel safe as $$
    select case jsonb_typeof(document -> field) when 'number' then (document ->> field)::double precision end
$$;

-- The bounds of the rewards that a definition gives (`reward_min`, `reward_max`). A definition without bounds has −1 to 1, widened by
-- its own rewards of an accept, a reject and a decline.
create function reward_lowest(definition jsonb) returns double precision
language sql immutable parallel safe as $$
    select coalesce(number_of(definition, 'reward_min'),
                    least(-1, number_of(definition, 'accept'), number_of(definition, 'reject'), number_of(definition, 'decline')))
$$;
create function reward_highest(definition jsonb) returns double precision
language sql immutable parallel safe as $$
    select coalesce(number_of(definition, 'reward_max'),
                    greatest(1, number_of(definition, 'accept'), number_of(definition, 'reject'), number_of(definition, 'decline')))
$$;

-- Whether a reward lies within the bounds of the definition that gave it.
create function reward_in_bounds(reward double precision, definition jsonb) returns boolean
language sql immutable parallel safe as $$
    select reward >= reward_lowest(definition) and reward <= reward_highest(definition)
$$;

-- Of the newest trained trajectories of a run, how many come from each user of each surface, the heaviest first.
create function trained_share(run uuid, newest integer)
returns table (tenant_id text, user_key text, surface text, trajectories bigint, share double precision)
language sql stable as $$
    with latest as (
        select d.generation_id from disposition d
        where d.run_id = run and d.kind = 'trained'
        order by d.step desc
        limit newest
    )
    select g.tenant_id, g.user_key, g.surface, count(*), count(*)::double precision / sum(count(*)) over ()
    from latest
    join generation g on g.id = latest.generation_id
    group by g.tenant_id, g.user_key, g.surface
    order by count(*) desc, g.tenant_id, g.user_key, g.surface
$$;

-- The oldest open generation of a surface is where its cohort ends: a surface with a long horizon does not stop the others.
create index open_generation_by_surface on open_generation (surface, generation_id);
