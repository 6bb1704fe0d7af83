-- The show rate of a run's starting version, over its first generations. Parameters: policy,
-- version, maximum generations.
with first as (
    select declined
    from generation
    where policy = $1
      and version = $2
      and purpose = 'production'
      and not decline_suppressed
      and tenant_id = any ((select consenting_tenants($1))::text[])
      and finish_reason <> 'abort'
    order by id
    limit $3
)
select count(*) as "generations!", count(*) filter (where not declined) as "shown!" from first
