-- The content hashes that the trainer committed for these versions.
-- $1 policy, $2 serials
select serial, root
from version
where policy = $1 and serial = any ($2)
