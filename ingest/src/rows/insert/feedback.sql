-- `late`: the target has closed. `held`: it is a generation that is open until the end of this
-- transaction.
insert into feedback (
    id, tenant_id, generation_id, episode_id, metric_name, value_bool, value_float, value_text, tags, given_at, teacher, late
)
select
    f.id, f.tenant_id, f.generation_id, f.episode_id, f.metric_name,
    f.value_bool, f.value_float, f.value_text, f.tags, f.given_at, f.teacher,
    case
        when f.held then false
        when f.generation_id is not null then
            exists (select 1 from trajectory t where t.generation_id = f.generation_id)
        else episode_feedback_late(f.tenant_id, f.episode_id)
    end
from unnest(
    $1::uuid[], $2::text[], $3::uuid[], $4::uuid[], $5::text[], $6::bool[], $7::double precision[], $8::text[],
    $9::jsonb[], $10::timestamptz[], $11::uuid[], $12::bool[]
) as f (
    id, tenant_id, generation_id, episode_id, metric_name, value_bool, value_float, value_text, tags, given_at, teacher, held
)
on conflict (id, tenant_id) do nothing
returning tenant_id, id, late
