-- Which of these trajectories may not be trained on, and why. Every trajectory passes here before it
-- becomes a sample, of production and of offline runs, whatever its age. What needs the whole prompt
-- or the signature is checked after it (context.rs). Some of these codes are for a whole episode if
-- one of its turns has them (queue.rs). Parameters: generation ids, the versions that they
-- may come from, the head first (null: samples of any version will do), context in tokens,
-- size of the vocabulary, whether the model is dense; who has reached a cap: tenants and user keys
-- (pairs, in two arrays; requests without a user have one key), tenants, surfaces, replicas; whether
-- turns' own rewards count; what turns are credited with (ids, and values of the same number);
-- which answers may be used: 'sampled', 'judged' or 'any' (`Answers` in select.rs).
select checked.id as "id!", checked.code as "code!"
from (
    select g.id,
           case
               when g.tenant_id <> all (consenting.tenants) then 'tenant_without_consent'
               -- a harness's surface pays what its grader says; users must not be able to
               when g.purpose = 'production' and (g.surface = 'rollout' or w.definition ->> 'purpose' = 'rollout')
                   then 'quarantined_surface'
               when g.purpose = 'production' and (g.version_oldest <> all ($2) or g.version <> all ($2)) then 'stale'
               when f.provenance is not null then f.provenance
               -- the sink has verified the signature
               when not g.proven then 'bad_signature'
               -- registered, and not unlinked yet
               when exists (select from erasure e
                            where e.tenant_id = g.tenant_id and e.user_digest = user_digest(g.tenant_id, g.user_key)) then 'erased'
               -- its sampler says why
               when g.untrainable is not null then g.untrainable
               -- a point mass has no gradient; a loss may learn from greedy answers all the same
               when $14 <> 'any' and case when g.temperature <= 0 then $14 = 'sampled'
                                          else coalesce(g.sampling ->> 'top_k' = '1', false) end then 'greedy'
               -- a loss that learns from greedy answers takes a reward for a user's verdict
               when $14 = 'judged' and g.declined and t.reward <> 0 then 'declined'
               -- a dense model cannot have sampled it
               when $5 and exists (select from payload_reference r where r.generation_id = g.id and r.kind = 'experts') then 'has_experts'
               when cardinality(g.prompt_ids) = 0 and g.payload_digest is null and g.prompt_prefix_len = 0
                    or cardinality(g.token_ids) = 0 then 'empty'
               when cardinality(g.train_mask) <> cardinality(g.token_ids) then 'malformed_mask'
               -- needs only this row and its payload's size, no parents and no object store
               when g.prompt_prefix_len + cardinality(g.prompt_ids) + cardinality(g.token_ids)
                    + coalesce((select r.size_bytes / 4 from payload_reference r
                                where g.payload_digest is not null and r.generation_id = g.id and r.kind = 'prompt'), 0)
                    > $3 then 'longer_than_context'
               when exists (select from unnest(g.prompt_ids || g.token_ids) as id where id < 0 or id >= $4) then 'token_outside_vocabulary'
               when own.reward in ('NaN', 'Infinity', '-Infinity')
                    or $11 and t.turn_reward in ('NaN', 'Infinity', '-Infinity')
                    or credited.value in ('NaN', 'Infinity', '-Infinity') then 'reward_not_finite'
               when not reward_in_bounds(own.reward, w.definition)
                    or $11 and not reward_in_bounds(t.turn_reward, w.definition)
                    or not reward_in_bounds(credited.value, w.definition) then 'quarantined_reward'
               when g.logprobs && array['NaN', 'Infinity', '-Infinity']::real[] then 'logprob_not_finite'
               -- a decline weighs 1 / (1 - share), and no arm explores more than half
               when g.exploration_share > 0.5 then 'quarantined_exploration'
               when g.replica = any ($10) then 'capped_replica'
               when g.surface = any ($9) then 'capped_surface'
               when g.tenant_id = any ($8) then 'capped_tenant'
               when (g.tenant_id, case when starts_with(g.user_key, 'anonymous-') then 'anonymous-' else g.user_key end)
                    in (select * from unnest($6::text[], $7::text[])) then 'capped_user'
           end as code
    from generation g
    join trajectory t on t.generation_id = g.id
    cross join lateral (
        select provenance_fault(g.sampler, g.replica, g.policy, g.arm, g.version, g.sampled_at, g.stored_at) as provenance
        offset 0 -- calls it once
    ) f
    join (
        select policy, consenting_tenants(policy) as tenants
        from (select distinct policy from generation where id = any ($1)) as policies
        offset 0 -- calls it once for each policy
    ) consenting on consenting.policy = g.policy
    -- of a rollout what its harness posted counts, whatever others posted
    cross join lateral (
        select coalesce((select r.reward from rollout r where g.purpose = 'rollout' and r.id = g.episode_id and r.run_id = g.run_id),
                        t.reward) as reward
    ) own
    left join unnest($12::uuid[], $13::double precision[]) as credited (id, value) on credited.id = g.id
    left join reward_definition w on w.surface = t.surface and w.version = t.reward_definition
    -- both, or Postgres may read all trajectories
    where g.id = any ($1) and t.generation_id = any ($1)
    offset 0 -- checks once
) checked
where checked.code is not null
