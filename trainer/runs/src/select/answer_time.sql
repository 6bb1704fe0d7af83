-- How long the answers of each surface take from the first token to the last: of these arms'
-- newest production generations on the surface, the time within which 99% were complete. Answers
-- that nobody proved to have sampled do not count, however many there are. Parameters: policy,
-- arms that are learned from, oldest generation id, maximum rows of each arm on each surface.
select defined.surface as "surface!",
       coalesce(percentile_disc(0.99) within group (order by newest.seconds), 0) as "seconds!"
from (select distinct surface from reward_definition) as defined
cross join unnest($2::text[]) as learned (arm)
cross join lateral (
    select extract(epoch from g.finished_at - g.sampled_at)::double precision as seconds
    from generation g
    where g.policy = $1 and g.arm = learned.arm and g.surface = defined.surface
      and g.proven and g.purpose = 'production' and g.id >= $3
      and coalesce(g.untrainable, '') not in ('engine_failed', 'no_first_token') -- they may have ended before the first token
      and g.tenant_id = any ((select consenting_tenants($1))::text[])
    order by g.id desc
    limit $4
) as newest
group by defined.surface
