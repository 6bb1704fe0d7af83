-- What the tables of tenant $1 hold about each id in $2: a generation, or an episode where $3 is
-- true. Generations and episodes have separate branches, so that each uses its index.
select
    w.id as "id!",
    w.episode as "episode!",
    count(g.id) as "generations!",
    count(o.generation_id) as "open!",
    max(o.closes_at) as closes_at,
    (select count(*) from feedback where not w.episode and generation_id = w.id and tenant_id = $1)
        + (select count(*) from feedback where w.episode and episode_id = w.id and tenant_id = $1) as "feedback!"
from unnest($2::uuid[], $3::bool[]) as w (id, episode)
left join lateral (
    select id from generation where not w.episode and id = w.id and tenant_id = $1
    union all
    select id from generation where w.episode and episode_id = w.id and tenant_id = $1
) g on true
left join open_generation o on o.generation_id = g.id
group by w.id, w.episode
