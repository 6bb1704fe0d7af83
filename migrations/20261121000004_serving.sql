-- who is served by what: written by the crate `serving` alone.

-- alias → version. One row per change; the row with the highest epoch of an alias is in force.
-- The same facts go to every follower as one signed document per epoch (policy::assignment).
create table assignment (
    policy      text not null,
    epoch       bigint not null,                        -- rises with every change of any alias of the policy
    alias       text not null,
    version     bigint not null,
    follows     text,                                   -- line whose head the alias follows while guards pass; null: pinned by hand
    branch      integer not null default 0,             -- only heads of this branch of that line or a later one are followed
    withdrawn   boolean not null default false,         -- the alias no longer exists (a finished run's)
    created_at  timestamptz not null default now(),
    constraint assignment_pkey primary key (policy, epoch, alias)
);

-- An alias moving from one version to another: why, by whom, how it ended.
create table release (
    id            uuid primary key default uuidv7(),
    policy        text not null,
    alias         text not null,
    from_version  bigint,
    to_version    bigint not null,
    kind          text not null,
    status        text not null,
    created_at    timestamptz not null default now(),
    constraint release_kind check (kind in ('follow', 'promote', 'rollback', 'pin')),
    constraint release_status check (status in ('done', 'refused'))
);

-- The audit: one row per decision.
create table transition (
    id          uuid primary key default uuidv7(),
    release_id  uuid not null references release (id),
    epoch       bigint,                                 -- the assignment it led to; null: refused
    actor       text not null,                          -- 'follow', or the API key's label, or 'operator'
    reason      text not null,
    at          timestamptz not null default now()
);

-- What each engine last said of itself.
create table replica (
    id           text primary key,
    cluster      text not null,
    policy       text not null,
    address      text not null,
    epoch        bigint not null,                       -- the assignment it has applied
    resident     jsonb not null,                        -- [{"version": 7, "root": "…", "aliases": ["champion"]}, …]
    ready        boolean not null,
    reported_at  timestamptz not null default now()
);

-- One version becoming resident on one replica: where the time went.
create table swap (
    id         uuid primary key default uuidv7(),
    replica    text not null,
    policy     text not null,
    version    bigint not null,
    epoch      bigint not null,
    fetch_ms   double precision not null,
    verify_ms  double precision not null,               -- decode the delta, digest the result
    stage_ms   double precision not null,               -- build the network beside the serving one
    pause_ms   double precision not null,               -- the engine did nothing else for this long
    at         timestamptz not null default now()
);

-- alias → version now.
create view alias as
    select distinct on (policy, alias) policy, alias, version, follows, branch, epoch, withdrawn, created_at
    from assignment
    order by policy, alias, epoch desc;
