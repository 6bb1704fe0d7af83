-- Every swap during the run: when, to which version, and how long the engine did nothing else.
-- $1 policy, $2 when the run began, $3 when its first pause was
select version, extract(epoch from at - $3)::float8 as "at_seconds!", pause_ms
from swap
where policy = $1 and at >= $2
order by at
