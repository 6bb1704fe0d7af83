-- Feedback stored in [$1, $2) whose target is not in the tables, oldest first. $3 maximum rows.
select id, tenant_id, generation_id, episode_id, metric_name, value_bool, value_float, value_text, tags, given_at, stored_at
from feedback f
where f.stored_at >= $1 and f.stored_at < $2 and f.orphaned_at is null
  and case
          when f.generation_id is not null then
              not exists (select 1 from generation g where g.id = f.generation_id and g.tenant_id = f.tenant_id)
          else
              not exists (select 1 from generation g where g.episode_id = f.episode_id and g.tenant_id = f.tenant_id)
      end
order by f.stored_at
limit $3
