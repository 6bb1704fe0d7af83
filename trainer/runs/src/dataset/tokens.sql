-- How many tokens generations have, with what they share with their parents and what lies in the store
-- of payloads. Parameters: generation ids.
select g.id,
       (g.prompt_prefix_len + cardinality(g.prompt_ids) + cardinality(g.token_ids)
        + coalesce((select r.size_bytes / 4 from payload_reference r
                    where g.payload_digest is not null and r.generation_id = g.id and r.kind = 'prompt'), 0))::bigint as "tokens!"
from generation g
where g.id = any ($1)
