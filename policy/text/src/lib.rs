//! Text to token ids and back: tokenizers and chat templates, read from the files of a checkpoint.
//!
//! Of `artifact` it needs only a checkpoint's files. Knows no weights, no model and no network.

pub mod chat;
pub mod tokenizer;
