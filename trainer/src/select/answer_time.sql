-- How long the answers of each surface take from the first token to the last: of the learning arm's
-- newest production generations, the time within which 99% were complete. Parameters: policy,
-- learning alias, oldest generation id, maximum rows.
with newest as (
    select surface, extract(epoch from finished_at - sampled_at)::double precision as seconds
    from generation
    where policy = $1 and purpose = 'production' and arm = $2 and id >= $3
    order by id desc
    limit $4
)
select surface as "surface!",
       coalesce(percentile_disc(0.99) within group (order by seconds), 0) as "seconds!"
from newest
group by surface
