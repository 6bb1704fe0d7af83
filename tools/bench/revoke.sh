# Each kind of key is stolen and revoked: seconds until the thief is out, and whether releases go on.
need stack
SPRINGTIDE_REVOKE_JSON=$target/bench/revoke.json it serving revocation::
