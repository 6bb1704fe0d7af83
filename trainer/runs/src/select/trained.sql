-- Whom the newest trained trajectories of a run come from, newest first: of a page of whole steps.
-- An episode is one trajectory; each name is the one that most of its turns have. Those of tenants
-- that have withdrawn their consent have no names. Parameters: run, how many trained generations a
-- page has at least, oldest time, the step before which it begins.
select newest.step as "step!", newest.decided_at as "decided_at!", known.tenant_id as "tenant_id?",
       mode() within group (order by known.user_key collate "C") as user_key,
       mode() within group (order by known.surface collate "C") as surface,
       mode() within group (order by known.replica collate "C") as replica,
       count(*) as "generations!",
       -- as Sample::trained_tokens, and one of a generation that has none
       sum(greatest(1, coalesce(newest.typed_tokens, known.trained_tokens, 0)))::bigint as "tokens!"
from (
    select generation_id, step, decided_at, typed_tokens
    from disposition
    where run_id = $1 and kind = 'trained' and step < $4
    order by step desc
    fetch first $2 rows with ties
) as newest
left join lateral (
    select g.tenant_id, g.user_key, g.surface, g.replica, coalesce(t.episode_id, g.id) as trajectory,
           case when g.train_mask is null then cardinality(g.token_ids)
                else cardinality(array_positions(g.train_mask, true)) end as trained_tokens
    from generation g
    join trajectory t on t.generation_id = g.id
    where g.id = newest.generation_id and t.generation_id = newest.generation_id
      and g.tenant_id = any ((select consenting_tenants(r.policy) from run r where r.id = $1)::text[])
    offset 0 -- one by one, or Postgres may read all of them
) as known on true
-- after the page, or it would look through all that is older
where newest.decided_at >= $3
group by newest.step, newest.decided_at, known.tenant_id, known.trajectory
order by newest.step desc
