-- The root digests that the trainer committed for the versions that answered.
-- $1 policy, $2 serials
select serial, root
from version
where policy = $1 and serial = any ($2)
