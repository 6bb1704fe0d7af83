-- who may call: written by the crate `edge` alone.

create table tenant (
    id          text primary key,                       -- short name, e.g. 'default'; part of every event's identity
    created_at  timestamptz not null default now()
);

insert into tenant (id) values ('default');

create table api_key (
    id          uuid primary key default uuidv7(),
    tenant_id   text not null references tenant (id),
    role        text not null,                          -- what the key may do, see edge::auth::Role
    digest      bytea not null,                         -- BLAKE3 of the secret; the secret itself is never stored
    label       text not null default '',               -- for people: who holds it
    created_at  timestamptz not null default now(),
    revoked_at  timestamptz,                            -- set once, never cleared
    constraint api_key_role check (role in ('serving', 'research', 'release', 'admin')),
    constraint api_key_digest_unique unique (digest)
);
