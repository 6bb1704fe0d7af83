//! The demo's tokenizer: byte-level BPE, trained on the train split and saved as Hugging Face
//! files.

use anyhow::{Context, anyhow};
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::{AddedToken, Tokenizer};

/// Between the file so far and the rest of the line.
pub const CUT: &str = "<|cut|>";
/// The rest of the line is complete.
pub const EOL: &str = "<|eol|>";
/// Nothing should be shown. May be sampled at any token of a suggestion.
pub const DECLINE: &str = "<|decline|>";
/// The end of a file.
pub const END: &str = "<|end|>";

/// Trains on `texts`. Ids 0 to 3 are the special tokens, in the order [`END`], [`CUT`], [`EOL`],
/// [`DECLINE`].
pub fn train<'a>(texts: impl Iterator<Item = &'a str> + Send, vocab_size: usize) -> anyhow::Result<Tokenizer> {
    let mut tokenizer = Tokenizer::new(BPE::default());
    let bytes = ByteLevel::new(false, true, true);
    tokenizer.with_pre_tokenizer(Some(bytes)).with_decoder(Some(bytes));
    let specials = [END, CUT, EOL, DECLINE].map(|t| AddedToken::from(t, true));
    let trainer = BpeTrainerBuilder::new()
        .vocab_size(vocab_size)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(specials.to_vec())
        .build();
    let mut trainer = TrainerWrapper::BpeTrainer(trainer);
    tokenizer
        .train(&mut trainer, texts)
        .map_err(|e| anyhow!("train the tokenizer: {e}"))?;
    Ok(tokenizer)
}

/// The id of a special token.
pub fn id(tokenizer: &Tokenizer, token: &str) -> anyhow::Result<u32> {
    tokenizer
        .token_to_id(token)
        .with_context(|| format!("the tokenizer has no {token}"))
}

/// Token ids of plain text: no special token is added.
pub fn encode(tokenizer: &Tokenizer, text: &str) -> anyhow::Result<Vec<u32>> {
    let encoding = tokenizer
        .encode_fast(text, false)
        .map_err(|e| anyhow!("tokenize: {e}"))?;
    Ok(encoding.get_ids().to_vec())
}

/// The files beside `tokenizer.json` that `transformers` and the engine read.
pub fn side_files(tokenizer: &Tokenizer, context: usize) -> anyhow::Result<Vec<(&'static str, String)>> {
    let config = serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": context,
        "clean_up_tokenization_spaces": false,
    });
    let generation = serde_json::json!({
        "eos_token_id": [id(tokenizer, EOL)?, id(tokenizer, DECLINE)?, id(tokenizer, END)?],
        "pad_token_id": id(tokenizer, END)?,
        "springtide_decline_token_id": id(tokenizer, DECLINE)?,
        "do_sample": true,
        "temperature": 1.0,
    });
    Ok(vec![
        ("tokenizer_config.json", format!("{config:#}\n")),
        ("generation_config.json", format!("{generation:#}\n")),
    ])
}
