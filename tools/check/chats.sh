# Prompts against those of transformers: the chat templates of 72 files of TRL and 36 conversations each. Fetches 300 MB.
# ARGS='--show 20'
build text --example render_chats
tools/chat-matrix.sh "$target/debug/examples/render_chats" "${args[@]}"
