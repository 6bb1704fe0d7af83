-- Each alias, the move that led to it, and the version that it served before and that was not judged bad. $1 policy.
--
-- A move is stored in the transaction of its assignment, so its id, a UUIDv7, is of the same minute. That finds it without
-- reading other moves.
select a.alias as "alias!", a.version as "version!", a.follows, a.epoch as "epoch!", a.created_at as "since!",
       why.kind as "kind?", why.actor as "actor?", why.reason as "reason?",
       before.version as "before?"
from alias a
left join lateral (
    select r.kind, t.actor, t.reason
    from release r
    join transition t
      on t.release_id = r.id and t.epoch = a.epoch
     and t.id >= first_generation_id(a.created_at) and t.id < first_generation_id(a.created_at + interval '1 minute')
    where r.policy = a.policy and r.alias = a.alias
      and r.id >= first_generation_id(a.created_at) and r.id < first_generation_id(a.created_at + interval '1 minute')
    limit 1
) why on true
left join lateral (
    select b.version
    from assignment b
    where b.policy = a.policy and b.alias = a.alias and b.version <> a.version and not b.withdrawn
      and b.epoch < a.epoch and b.epoch >= a.epoch - 10000
      and not exists (select from version_judgment j where j.policy = b.policy and j.version = b.version and j.verdict = 'bad')
    order by b.epoch desc
    limit 1
) before on true
where a.policy = $1 and not a.withdrawn
order by a.alias
limit 100
