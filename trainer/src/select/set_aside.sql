-- Production trajectories that this run will never train on, with the reason. Parameters: policy,
-- learning alias, head, context in tokens, run, oldest generation id to look at, maximum rows, size
-- of the vocabulary, whether the model is dense; then who has reached a cap: tenants and user keys
-- (pairs, in two arrays), tenants, surfaces; and the generations that are in the cohort.
with candidate as (
    select g.id,
           case
               -- other arms are kept for comparison
               when g.arm <> $2 then 'other_arm'
               -- a harness's surface pays what its grader says; users must not be able to
               when g.surface = 'rollout' or w.definition ->> 'purpose' = 'rollout' then 'quarantined_surface'
               -- real-time runs admit staleness 0 only
               when g.version_oldest <> $3 or g.version <> $3 then 'stale'
               when f.provenance is not null then f.provenance
               -- a point mass has no gradient
               when g.temperature <= 0 or g.sampling ->> 'top_k' = '1' then 'greedy'
               -- a dense model cannot have sampled it
               when $9 and exists (select from payload_reference r where r.generation_id = g.id and r.kind = 'experts') then 'has_experts'
               when cardinality(g.prompt_ids) = 0 and g.payload_digest is null and g.prompt_prefix_len = 0
                    or cardinality(g.token_ids) = 0 then 'empty'
               when cardinality(g.train_mask) <> cardinality(g.token_ids) then 'malformed_mask'
               -- needs only this row and its payload's size, no parents and no object store
               when g.prompt_prefix_len + cardinality(g.prompt_ids) + cardinality(g.token_ids)
                    + coalesce((select r.size_bytes / 4 from payload_reference r
                                where g.payload_digest is not null and r.generation_id = g.id and r.kind = 'prompt'), 0)
                    > $4 then 'longer_than_context'
               when exists (select from unnest(g.prompt_ids || g.token_ids) as id where id < 0 or id >= $8) then 'token_outside_vocabulary'
               when t.reward in ('NaN', 'Infinity', '-Infinity') then 'reward_not_finite'
               when not reward_in_bounds(t.reward, w.definition) then 'quarantined_reward'
               when g.logprobs && array['NaN', 'Infinity', '-Infinity']::real[] then 'logprob_not_finite'
               -- a decline weighs 1 / (1 - share), and no arm explores more than half
               when g.exploration_share > 0.5 then 'quarantined_exploration'
               -- members of the cohort are within the caps already
               when g.id = any ($14) then null
               when g.surface = any ($13) then 'capped_surface'
               when g.tenant_id = any ($12) then 'capped_tenant'
               when exists (select from unnest($10::text[], $11::text[]) as capped (tenant_id, user_key)
                            where capped.tenant_id = g.tenant_id and capped.user_key = g.user_key) then 'capped_user'
           end as why
    from generation g
    join trajectory t on t.generation_id = g.id
    cross join lateral (
        select case when g.arm = $2 and g.version = $3
                    then provenance_fault(g.sampler, g.replica, g.policy, g.arm, g.version, g.sampled_at, g.stored_at)
               end as provenance
    ) f
    left join reward_definition w on w.surface = t.surface and w.version = t.reward_definition
    where g.policy = $1
      and g.purpose = 'production'
      and g.id >= $6
      and t.reward is not null
      and not exists (select from disposition d where d.generation_id = g.id)
)
insert into disposition (generation_id, kind, code, run_id)
select id, case why when 'other_arm' then 'held_out' else 'dropped' end, why, $5
from candidate
where why is not null
order by id
limit $7
on conflict (generation_id) do nothing
returning kind, code as "code!"
