# Whether it learns, with the settings of `make up`: 5 seeds, both kinds of users, 10 minutes each. 2 hours.
# USERS='house plain' SEEDS='11 12 13 14 15' MINUTES=10 ARGS=
need build
users=${USERS:-house plain} seeds=${SEEDS:-11 12 13 14 15}
tools/learn.sh "$springtide" "$users" "$seeds" "${MINUTES:-10}" "${args[@]}"
# shellcheck disable=SC2086 # one argument per seed
tools/learning_table.py .springtide/learn .springtide/learn.json "$users" $seeds
