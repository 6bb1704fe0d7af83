//! A tokenizer and its constraints, for the tests of this crate and of `trainer`.

use artifact::checkpoint::Checkpoint;
use event_log::event::Constraint;
use serde_json::{Value, json};
use text::constraint::FORMAT;

/// Each is a token, and the next one ends a text. None is white space.
pub const CHARACTERS: &str = "{}[]:,.\"-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN";
pub const END: u32 = 59;

/// A checkpoint's files with a tokenizer of 60 tokens, in a vocabulary of 61.
pub fn with_tokenizer(mut checkpoint: Checkpoint) -> Checkpoint {
    let written = CHARACTERS.chars().zip(0u32..);
    let vocab: serde_json::Map<String, Value> = written.map(|(c, id)| (c.to_string(), id.into())).collect();
    assert_eq!(vocab.len(), END as usize);
    let end = json!({"id": END, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true});
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let tokenizer = json!({"version": "1.0", "added_tokens": [end], "decoder": bytes,
        "model": {"type": "BPE", "vocab": vocab, "merges": []}});
    let generation = json!({"eos_token_id": END});
    for (name, json) in [("tokenizer.json", tokenizer), ("generation_config.json", generation)] {
        checkpoint.files.insert(name.into(), json.to_string().into());
    }
    checkpoint
}

pub fn constraint(schema: &Value) -> Constraint {
    Constraint {
        format: FORMAT.into(),
        schema: schema.to_string(),
    }
}
