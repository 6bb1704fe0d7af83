-- Tenants that hold more than $3 of the limit, and whose share of everything is more than twice
-- their share of the week below $4, which would have to go for them. Estimated from $1 percent
-- of the pages. $2: bytes of the tables, as a fraction of the limit.
with held as (
    select tenant_id, sum(bytes)::double precision as bytes,
           (sum(bytes) filter (where id < $4))::double precision as oldest
    from (
        select tenant_id, id, 500 + pg_column_size(prompt_ids) + pg_column_size(token_ids) + pg_column_size(logprobs) as bytes
        from generation tablesample system ($1::real)
        union all
        select tenant_id, id, 200 + coalesce(pg_column_size(value_text), 0) + pg_column_size(tags)
        from feedback tablesample system ($1::real)
    ) sample
    group by tenant_id
),
total as (
    select sum(bytes) as bytes, coalesce(sum(oldest), 0) as oldest from held
)
select h.tenant_id as "tenant!"
from held h, total t
where h.bytes / t.bytes * $2::double precision > $3::double precision
  and coalesce(h.oldest, 0) * t.bytes * 2 < h.bytes * t.oldest
