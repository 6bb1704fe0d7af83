# The query plans on many rows. 10⁷: about an hour and 15 GB of disk. ROWS=10000000
need stack
SPRINGTIDE_PLANS_ROWS=${ROWS:-10000000} it log plans::
