-- One row per generation of a batch. $44 to $47 hold the lists of all rows, one after another. Each
-- row has the bounds of its own slices.
insert into generation (
    id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose,
    run_id, task_id, group_id, surface, episode_id, segment, turn, parent_id, user_key, arm,
    arm_probability, prompt_prefix_len, prompt_prefix_hash, prompt_ids, token_ids, logprobs, train_mask,
    payload_digest, temperature, top_p, seed, finish_reason, declined, shown, consent, sampled_at,
    decline_suppressed, exploration_share, finished_at, sampling, sampler, signature, unsigned_digest,
    proven, untrainable, engine
)
select
    g.id, g.tenant_id, g.policy, g.version, g.version_oldest, g.version_spans, g.root, g.line, g.replica, g.purpose,
    g.run_id, g.task_id, g.group_id, g.surface, g.episode_id, g.segment, g.turn, g.parent_id, g.user_key, g.arm,
    g.arm_probability, g.prompt_prefix_len, g.prompt_prefix_hash,
    ($44::int[])[g.prompt_from:g.prompt_until],
    ($45::int[])[g.token_from:g.token_until],
    ($46::real[])[g.token_from:g.token_until],
    case when g.masked then ($47::bool[])[g.mask_from:g.mask_until] end,
    g.payload_digest, g.temperature, g.top_p, g.seed, g.finish_reason, g.declined, g.shown, g.consent, g.sampled_at,
    g.decline_suppressed, g.exploration_share, g.finished_at, g.sampling, g.sampler, g.signature, g.unsigned_digest,
    g.proven, g.untrainable, g.engine
from unnest(
    $1::uuid[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::jsonb[], $7::bytea[], $8::text[], $9::text[],
    $10::text[], $11::uuid[], $12::text[], $13::text[], $14::text[], $15::uuid[], $16::int[], $17::int[], $18::uuid[],
    $19::text[], $20::text[], $21::real[], $22::int[], $23::bytea[], $24::bool[], $25::bytea[], $26::real[],
    $27::real[], $28::bigint[], $29::text[], $30::bool[], $31::bool[], $32::bool[], $33::timestamptz[],
    $34::bool[], $35::real[], $36::timestamptz[], $37::jsonb[],
    $38::int[], $39::int[], $40::int[], $41::int[], $42::int[], $43::int[],
    $48::text[], $49::bytea[], $50::bytea[], $51::bool[], $52::text[], $53::text[]
) as g (
    id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica,
    purpose, run_id, task_id, group_id, surface, episode_id, segment, turn, parent_id,
    user_key, arm, arm_probability, prompt_prefix_len, prompt_prefix_hash, masked, payload_digest, temperature,
    top_p, seed, finish_reason, declined, shown, consent, sampled_at,
    decline_suppressed, exploration_share, finished_at, sampling, prompt_from, prompt_until, token_from, token_until, mask_from, mask_until,
    sampler, signature, unsigned_digest, proven, untrainable, engine
)
on conflict (id) do nothing
returning id
