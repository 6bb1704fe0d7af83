#!/usr/bin/env bash
# Says whether Linux allows the user namespaces that sandboxes need, as in a container it may not.
# `sandboxes.sh skip` prints the arguments of `cargo test` that leave out the tests that need them.
set -euo pipefail
bwrap --unshare-all --ro-bind / / true 2>/dev/null && exit
if [ "${1:-}" = skip ]; then
  echo "-- --skip sandbox:: --skip in_a_sandbox --skip rollout_kills:: --skip grader::python::"
else
  echo "Linux allows no user namespaces here, so the tests of sandboxes are skipped: sandbox::, in_a_sandbox," \
    "rollout_kills::, grader::python::. To run them, see user.max_user_namespaces, kernel.unprivileged_userns_clone (Debian)," \
    "kernel.apparmor_restrict_unprivileged_userns (Ubuntu) or the container's seccomp profile."
fi
