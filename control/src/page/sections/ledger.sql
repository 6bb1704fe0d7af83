-- What became of the generations of some hours. $1 policy, $2 hours back, $3 tenant; null: all. The view `ledger` says the same of
-- all time; here each table has its own bound, so that only the ids of that time are read.
select g.purpose,
       disposition_of(d.kind, t.generation_id is not null, t.censor_code) as "disposition!",
       coalesce(d.code, t.censor_code) as code,
       count(*) as "generations!"
from generation g
left join trajectory t
  on t.generation_id = g.id and t.generation_id >= first_generation_id(now() - make_interval(hours => $2))
left join disposition d
  on d.generation_id = g.id and d.generation_id >= first_generation_id(now() - make_interval(hours => $2))
where g.policy = $1
  and g.id >= first_generation_id(now() - make_interval(hours => $2))
  and ($3::text is null or g.tenant_id = $3)
group by 1, 2, 3
order by 4 desc
limit 500
