# The tests of the delta kernels on an NVIDIA GPU. GPU=0
need nvrtc
SPRINGTIDE_TEST_DEVICE=${GPU:-0} with_nvrtc cargo test --locked --package artifact --features artifact/cuda --lib device:: -- --test-threads 1
