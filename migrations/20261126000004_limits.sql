-- Limits of single keys. Written by the crate `edge`.

alter table api_key
    add column requests_per_second integer,             -- that each process takes of it; null: auth.limits.key_requests_per_second
    add constraint api_key_requests_per_second check (requests_per_second > 0);

-- A changed limit is a change of the key, so it raises the revision and processes read the keys again.
drop trigger api_key_changed on api_key;
create trigger api_key_changed
    after insert or delete or update of id, tenant_id, role, digest, label, revoked_at, scopes, expires_at, replica, lineage,
        requests_per_second
    on api_key for each statement execute function raise_api_key_revision();
