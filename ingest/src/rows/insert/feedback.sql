-- `late`: the target has closed. `held`: it is a generation that is open until the end of this
-- transaction. An episode has closed if it has trajectories and no open generation that may use the
-- feedback. A turn that is open after its episode has closed uses none.
insert into feedback (
    id, tenant_id, generation_id, episode_id, metric_name, value_bool, value_float, value_text, tags, given_at, late
)
select
    f.id, f.tenant_id, f.generation_id, f.episode_id, f.metric_name,
    f.value_bool, f.value_float, f.value_text, f.tags, f.given_at,
    case
        when f.held then false
        when f.generation_id is not null then
            exists (select 1 from trajectory t where t.generation_id = f.generation_id)
        else
            exists (
                select 1 from generation g join trajectory t on t.generation_id = g.id
                where g.episode_id = f.episode_id and g.tenant_id = f.tenant_id
            )
            and not exists (
                select 1 from generation g join open_generation o on o.generation_id = g.id
                where g.episode_id = f.episode_id and g.tenant_id = f.tenant_id
                  and (o.episode_id is null or not episode_closed(f.tenant_id, f.episode_id))
            )
    end
from unnest(
    $1::uuid[], $2::text[], $3::uuid[], $4::uuid[], $5::text[], $6::bool[], $7::double precision[], $8::text[],
    $9::jsonb[], $10::timestamptz[], $11::bool[]
) as f (
    id, tenant_id, generation_id, episode_id, metric_name, value_bool, value_float, value_text, tags, given_at, held
)
on conflict (id, tenant_id) do nothing
returning tenant_id, id, late
