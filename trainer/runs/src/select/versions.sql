-- The head and the versions that it was trained from, one step after the other, the head first.
-- Parameters: policy, head, how many steps.
with recursive path as (
    select serial, parent, 0 as steps from version where policy = $1 and serial = $2
    union all
    select v.serial, v.parent, path.steps + 1
    from path
    join version v on v.policy = $1 and v.serial = path.parent
    where path.steps < $3
)
select serial as "serial!" from path order by steps
