# Disks that fill under the spool, Postgres and the broker. As root, to mount them. FILLS=50
need stack
SPRINGTIDE_DISK_FILLS=${FILLS:-50} it log disk::
