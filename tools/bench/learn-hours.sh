# Two hours of learning, by period and along the run. 2 hours. USERS=house SEED=41 ARGS='--corpus DIR'
need build
users=${USERS:-house} seed=${SEED:-41}
tools/learn.sh "$springtide" "$users" "$seed" 120 --capability-points 12 "${args[@]}"
tools/learning_hours.py .springtide/learn-hours.json ".springtide/learn/$users-$seed.json"
