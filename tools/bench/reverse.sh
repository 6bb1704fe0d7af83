# GRPO on reversed words beside TRL's GRPOTrainer: the same weights, prompts and settings, 5 seeds. Needs 5 GB, as
# `make golden`. ARGS='--seeds 1 --steps 10'
need stack
python=$(tools/golden-venv.sh)
if [ ! -f .springtide/reverse/model/model.safetensors ]; then
  "$python" examples/environments/reverse/words.py .springtide/reverse
  # not to be changed after a reported run has been seen
  "$springtide" train sft --data .springtide/reverse --out .springtide/reverse/model --steps 104 --batch 64 --precision f32 \
    --shape examples/environments/reverse/config.json
fi
HF_HUB_OFFLINE=1 tools/bench-environments.sh "$springtide" "$python" .springtide/reverse reverse/bench reverse "${args[@]}"
