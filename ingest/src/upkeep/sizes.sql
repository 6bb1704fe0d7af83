-- The size of every table that ingest writes, with indexes and out-of-line values. Each
-- partition has its own row.
select c.relname::text as "name!", pg_total_relation_size(c.oid) as "bytes!"
from pg_class c
where c.relkind = 'r'
  and c.relnamespace = (select relnamespace from pg_class where oid = 'generation'::regclass)
  and (c.oid in (select inhrelid from pg_inherits where inhparent in ('generation'::regclass, 'trajectory'::regclass))
       or c.relname in ('event_key', 'open_generation', 'open_episode', 'feedback', 'retraction', 'episode_end', 'judgement', 'payload_reference',
                        'expired_generation', 'expiring_generation', 'payload_unreferenced', 'payload_sweep', 'reward_definition', 'consumer_offset'))
