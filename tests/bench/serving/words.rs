//! Text whose number of tokens is known: words that the tokenizer writes as one token each.

use std::path::Path;

use anyhow::{Context, ensure};
use artifact::checkpoint::Checkpoint;
use text::tokenizer::Tokenizer;

#[derive(Debug)]
pub struct Words(Vec<String>);

impl Words {
    /// Of a Hugging Face folder with a byte-level BPE tokenizer: ids that are a space and letters.
    pub fn read(folder: &Path) -> anyhow::Result<Self> {
        let checkpoint = Checkpoint::read_dir(folder).with_context(|| format!("read {}", folder.display()))?;
        let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
        let mut words = Vec::new();
        for id in 0..u32::try_from(tokenizer.vocab_size())? {
            let word = tokenizer.decode(&[id])?;
            let letters = word.strip_prefix(' ').unwrap_or_default();
            let is_word = !letters.is_empty() && letters.chars().all(|letter| letter.is_ascii_lowercase());
            // such a word is split off before merging, so it is one token beside others, too
            if is_word && tokenizer.encode(&word)? == [id] {
                words.push(word);
            }
        }
        ensure!(!words.is_empty(), "{} has no word of one token", folder.display());
        Ok(Words(words))
    }

    /// Any id gives a word.
    pub fn word(&self, id: u32) -> &str {
        &self.0[id as usize % self.0.len()]
    }
}
