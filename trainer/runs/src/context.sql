-- What each generation adds to its parent's context, with its prompt's payload. $1 generations.
select g.id, g.tenant_id, g.parent_id, g.prompt_prefix_len, g.prompt_prefix_hash, g.prompt_ids, g.token_ids,
       p.digest as "digest?", p.size_bytes as "size_bytes?", p.media_type as "media_type?"
from generation g
left join payload_reference p on p.generation_id = g.id and p.kind = 'prompt'
where g.id = any($1)
