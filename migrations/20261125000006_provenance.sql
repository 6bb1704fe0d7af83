-- who sampled a generation, and the proof of it.

-- A process whose generations may be trained on. Written by the crate `edge` alone.
create table sampler (
    id          text primary key,                       -- BLAKE3 of the public key, hexadecimal: what generations name
    public_key  bytea not null,                         -- Ed25519
    name        text not null,                          -- what `generation.replica` must be
    policy      text,                                   -- the only policy it samples; null: every policy
    created_at  timestamptz not null default clock_timestamp(),
    expires_at  timestamptz,                            -- null: never
    revoked_at  timestamptz,                            -- set once, never cleared
    constraint sampler_public_key check (octet_length(public_key) = 32)
);

-- The proof as it was logged. The trainer verifies it. Null: unproven, never trained on.
alter table generation
    add column sampler text,                            -- id of the key that signed
    add column signature bytea,                         -- Ed25519, 64 bytes, over ingest::event::signed_bytes
    add column unsigned_digest bytea;                   -- BLAKE3 of the body without its proof

-- Written by the crate `serving`, as its table is: was this version ever assigned to this arm?
create index assignment_by_version on assignment (policy, alias, version, epoch);

-- Why a generation may not be trained on, as far as tables tell; null: nothing speaks against it. The signature itself is
-- verified outside. A sampler may be registered after it has sampled. Clocks may differ by five seconds. A replica may
-- answer by the previous assignment for five minutes: requests that began on it end on it.
create function provenance_fault(
    sampler_id text, replica text, policy_name text, arm text, version_serial bigint,
    sampled_at timestamptz, stored_at timestamptz
) returns text
language sql stable as $$
    select case
        when sampler_id is null then 'unproven'
        when s.id is null then 'unknown_sampler'
        when s.revoked_at is not null then 'revoked_sampler'
        when s.expires_at <= stored_at then 'expired_sampler'
        when s.name <> replica then 'sampler_of_another_replica'
        when s.policy <> policy_name then 'sampler_of_another_policy'
        when sampled_at > stored_at + interval '5 seconds' then 'sampled_in_the_future'
        when not exists (
            select from assignment a
            where a.policy = policy_name and a.alias = arm and a.version = version_serial and not a.withdrawn
              and a.created_at <= sampled_at + interval '5 seconds'
              and not exists (
                  select from assignment later
                  where later.policy = policy_name and later.alias = arm and later.epoch > a.epoch
                    and (later.version <> version_serial or later.withdrawn)
                    and later.created_at < sampled_at - interval '5 minutes')
        ) then 'version_not_assigned'
    end
    from (select 1) as one
    left join sampler s on s.id = sampler_id
$$;
