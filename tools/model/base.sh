# Trains the demo's base model again, into .springtide/base. About an hour on one idle core.
need build
base=.springtide/base
"$springtide" corpus build --out $base/plain
"$springtide" train sft --data $base/plain --out $base/plain/model
"$springtide" corpus build --out $base --house 0.03 --tokenizer $base/plain
"$springtide" train sft --from $base/plain/model --data $base --out $base/model --steps 400 --matrix-rate 0.006 --vector-rate 0.001
"$springtide" corpus evaluate --model $base/model
"$springtide" corpus evaluate --model $base/model --users house
