//! Text to token ids and back: tokenizers and chat templates, read from the files of a checkpoint.
//!
//! It reads only a checkpoint's files: no weights, no model and no network.

pub mod answer;
pub mod chat;
pub mod constraint;
pub mod kept;
pub mod tokenizer;
