-- What is wrong with assignments. Those up to the epoch that the audit noted as known are not looked at.
-- A move that a person requested must be in the audit with the same version, epoch, person and reason. The release loop's
-- own moves (kind `follow`) are not in the audit, but may only do what `decide::automatic` does.
with known as (
    select subject as policy, max(substring(detail from 'up to epoch ([0-9]+)$')::bigint) as epoch
    from audit where action = 'release.known' group by subject
), requested as (
    select subject, action, detail, actor, reason from audit
    where action in ('release.promote', 'release.rollback', 'release.pin')
), moved as (
    select a.policy, a.alias, a.epoch, a.version, a.follows, a.withdrawn, v.line,
           row_number() over earlier = 1 as is_first,
           lag(a.version) over earlier as version_before,
           lag(a.follows) over earlier as follows_before,
           lag(a.withdrawn) over earlier as withdrawn_before
    from assignment a
    left join version v on v.policy = a.policy and v.serial = a.version
    window earlier as (partition by a.policy, a.alias order by a.epoch)
), released as (
    select r.policy, r.alias, r.kind, r.to_version, t.epoch, t.actor, t.reason
    from release r join transition t on t.release_id = r.id
    where r.status = 'done'
), compared as (
    select m.policy, m.alias, m.epoch,
           case
               when r.kind is null then 'no release led to it'
               when r.to_version <> m.version then format('its release names version %s', r.to_version)
               when r.kind = 'canary' and exists (
                        select from canary c
                        join canary_transition t on t.canary_id = c.id
                        -- somebody proposed it
                        join audit p on p.action = 'canary.propose' and p.subject = c.id::text
                                    and p.detail = format('version %s of %s', c.version, c.policy)
                        where c.policy = m.policy and t.epoch = m.epoch
                          and (m.alias = 'canary' and m.version = c.version
                               or m.alias = 'canary' and m.version = c.control and t.event = 'watch'
                               or m.alias = 'champion' and m.version = c.version and t.event in ('pass', 'promote', 'watch')
                               or m.alias = 'champion' and m.version = c.control and t.event in ('rollback', 'harm')
                               -- what becomes of a learner that was trained on top of it
                               or m.alias = 'learner' and t.event in ('harm', 'rollback')
                                  and (m.version = c.control or m.version = m.version_before and m.follows is null))
                          -- and a person who decided is in the audit with the same reason
                          and (t.actor = 'release' or exists (
                                   select from audit a
                                   where a.action in ('canary.' || t.event, case t.event when 'watch' then 'canary.promote' end) and a.subject = c.id::text
                                     and (a.actor, a.reason) = (t.actor, t.reason)))) then null
               when r.kind = 'canary' then 'no decision about a canary led to it'
               when r.kind <> 'follow' and q.action is null then format('the audit has no request to %s it', r.kind)
               when r.kind <> 'follow' and (q.actor, q.reason) <> (r.actor, r.reason)
                   then 'the audit names another person or reason'
               when r.kind <> 'follow' then null
               when m.is_first and (m.alias in ('learner', 'champion', 'base') and m.line = 'realtime' or m.alias like 'run-%') then null
               -- a learner that is younger than champion begins as champion is
               when m.is_first and m.alias = 'learner' and exists (
                        select from assignment c
                        where c.policy = m.policy and c.alias = 'champion' and c.version = m.version and c.epoch < m.epoch) then null
               when (m.version, m.follows, m.withdrawn)
                    is not distinct from (m.version_before, m.follows_before, m.withdrawn_before) then null
               when m.withdrawn and m.alias like 'run-%' then null
               when m.alias = 'candidate' and exists (
                        select from run where run.policy = m.policy and run.line = m.line and run.kind <> 'realtime') then null
               when not m.withdrawn and m.follows = m.follows_before and m.line = m.follows then null
               -- champion follows the line by way of learner, wherever a person moved that
               when not m.withdrawn and m.follows = m.follows_before and m.alias = 'champion' and exists (
                        select from assignment l
                        where l.policy = m.policy and l.alias = 'learner' and l.version = m.version and l.epoch <= m.epoch) then null
               else 'nobody requested it, and the release loop does not move an alias like that'
           end as fault
    from moved m
    left join known k on k.policy = m.policy
    left join released r on r.policy = m.policy and r.alias = m.alias and r.epoch = m.epoch
    left join requested q on q.subject = m.policy || '@' || m.alias and q.action = 'release.' || r.kind
                         and q.detail = format('version %s, epoch %s', m.version, m.epoch)
    where m.epoch > coalesce(k.epoch, 0)
)
select format('alias %s of %s, epoch %s: %s', alias, policy, epoch, fault) as "fault!"
from compared where fault is not null
union all
select format('the audit has %s of %s (%s), but no assignment: somebody removed it', q.action, q.subject, q.detail)
from requested q
where not exists (
    select from assignment a
    where q.subject = a.policy || '@' || a.alias and q.detail = format('version %s, epoch %s', a.version, a.epoch))
