# Compiles the delta kernels for two kinds of GPU without one (PTX in target/ptx) and runs them as C++ on the CPU.
need nvrtc
SPRINGTIDE_PTX=$target/ptx with_nvrtc cargo test --locked --package artifact --features artifact/cuda --lib device::
