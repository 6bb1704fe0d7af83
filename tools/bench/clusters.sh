# A run in four clusters over links with delay and loss: harnesses there against harnesses here. As root; 2 minutes for
# 6 steps. STEPS=10
need stack python-test
SPRINGTIDE_CLUSTERS_STEPS=${STEPS:-10} SPRINGTIDE_PYTHON=$target/python/bin/python it learning clusters
