# Random requests of two tenants to every route of every role, with ids of each other's objects. N=100000 SEED=1
need stack
SPRINGTIDE_FUZZ_REQUESTS=${N:-100000} SPRINGTIDE_FUZZ_SEED=${SEED:-1} it operations tenants::fuzz
