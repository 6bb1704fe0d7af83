-- Production generations that no cohort of this run will take, with the reason. What remains is the
-- queue: it is checked when its turn comes (faults.sql). Open episodes have no trajectories, so
-- their turns wait. Parameters: policy, arms that are learned from, versions that they may come
-- from (the head first), run, oldest generation id to look at, maximum rows.
with candidate as (
    select g.id,
           case
               -- arms that are not learned from are kept for comparison
               when g.arm <> all ($2) then 'other_arm'
               when g.version_oldest <> all ($3) or g.version <> all ($3) then 'stale'
               -- so that a flood of them takes nobody's turn
               when g.sampler is null then 'unproven'
           end as why
    from generation g
    join trajectory t on t.generation_id = g.id
    where g.policy = $1
      and g.purpose = 'production'
      and g.id >= $5
      and t.reward is not null
      and not exists (select from disposition d where d.generation_id = g.id)
)
insert into disposition (generation_id, kind, code, run_id)
select id, case why when 'other_arm' then 'held_out' else 'dropped' end, why, $4
from candidate
where why is not null
order by id
limit $6
on conflict (generation_id) do nothing
returning kind, code as "code!"
