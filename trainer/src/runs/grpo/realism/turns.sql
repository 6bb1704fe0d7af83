-- The turns of traces that have closed, in the order of each trace. Parameters: the traces (ids), the
-- episode id that their generations have, whether they are all generations with it or only the one
-- that the trace is called after (three arrays of the same length), an id from before all turns, how
-- many first tokens.
select trace.id as "trace!",
       trace.is_episode as "is_episode!",
       -- of the whole prompt, if the row has it
       case when g.prompt_prefix_len = 0 and g.payload_digest is null and row_number() over in_order = 1
            then hash_array_extended(g.prompt_ids, 0) end as prompt,
       g.version_oldest as "began_with!",
       concat_ws(' ', g.temperature, g.top_p, coalesce(g.sampling - 'kept', '{}'), g.engine) as "settings!",
       -- neither its user nor a coin changed what it shows, it is whole, and it may be used
       (g.finish_reason <> 'abort' and not g.decline_suppressed and g.consent
            and coalesce(t.episode_turns, 1) = count(*) over whole) as "is_comparable!",
       cardinality(g.token_ids) as "tokens!",
       g.token_ids[1:$5] as "first_tokens!",
       g.finish_reason = 'stop' as "ended!",
       not g.declined as "shown!"
from unnest($1::uuid[], $2::uuid[], $3::boolean[]) as trace (id, episode_id, is_episode)
join generation g on g.episode_id = trace.episode_id and (trace.is_episode or g.id = trace.id)
join trajectory t on t.generation_id = g.id
where g.id >= $4
  and t.generation_id >= $4
  -- a production trace is called after a generation; another tenant may have an episode of the same id
  and g.tenant_id = coalesce((select one.tenant_id from generation one where one.id = trace.id), g.tenant_id)
  and t.episode_id is not distinct from case when trace.is_episode then trace.episode_id end
window whole as (partition by trace.id),
       in_order as (partition by trace.id order by g.segment, g.turn, g.id)
order by trace.id, g.segment, g.turn, g.id
