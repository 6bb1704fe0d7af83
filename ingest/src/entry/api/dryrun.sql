-- What the tables of tenant $1 hold about each id in $2: a generation, or an episode where $3 is
-- true. Generations and episodes have separate branches, so that each uses its index. Turns close
-- with their episode; one that came after its episode had closed is not open for feedback. Looks at
-- the newest 256 generations of an episode, and counts feedback up to 1,000 events.
select
    w.id as "id!",
    w.episode as "episode!",
    count(g.id) as "generations!",
    count(o.generation_id) filter (where not late.late) as "open!",
    max(case when o.episode_id is null then o.closes_at else e.closes_at end)
        filter (where not late.late) as closes_at,
    (select count(*) from (
        (select from feedback where not w.episode and generation_id = w.id and tenant_id = $1 limit 1000)
        union all
        (select from feedback where w.episode and episode_id = w.id and tenant_id = $1 limit 1000)
     ) f) as "feedback!"
from unnest($2::uuid[], $3::bool[]) as w (id, episode)
left join lateral (
    select id from generation where not w.episode and id = w.id and tenant_id = $1
    union all
    (select id from generation where w.episode and episode_id = w.id and tenant_id = $1 order by id desc limit 256)
) g on true
left join open_generation o on o.generation_id = g.id
left join open_episode e on e.episode_id = o.episode_id and e.tenant_id = $1
left join lateral (select o.stray or o.episode_id is not null and episode_closed($1, o.episode_id) as late) late on true
group by w.id, w.episode
