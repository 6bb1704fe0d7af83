# Trains a few steps, saves, and lets transformers and PEFT read the result. Needs 5 GB, as `make golden`.
need libtorch
tools/saved.sh
