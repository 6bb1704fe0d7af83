-- Every generation and its disposition: exactly one, always. Each crate appends its own facts; this view joins them.
-- What training decided wins over what the horizon decided; before either, a generation is open.
create view ledger as
    select g.id as generation_id,
           g.tenant_id,
           g.policy,
           g.purpose,
           g.arm,
           g.version,
           g.sampled_at,
           case
               when d.kind is not null then d.kind
               when t.generation_id is null then 'open'
               when t.censor_code is not null then 'censored'
               else 'queued'
           end as disposition,
           coalesce(d.code, t.censor_code) as code,
           d.run_id,
           d.step,
           t.reward
    from generation g
    left join trajectory t on t.generation_id = g.id
    left join disposition d on d.generation_id = g.id;
