//! Converts text to token ids and back with a checkpoint's `tokenizer.json`, and reads the ids that
//! end a generation.
//!
//! Prompts are tokenized once, when they arrive. Sampled ids are never converted to text and back,
//! because training uses the ids. Chat templates are in `chat`.

mod decoder;

pub use decoder::Decoder;

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use serde_json::Value;

use crate::constraint::{self, Grammars, Matcher};
use artifact::checkpoint::Checkpoint;

/// Why a tokenizer could not be loaded or used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the checkpoint has no {0}")]
    MissingFile(&'static str),
    #[error("{file}: {reason}")]
    Malformed { file: &'static str, reason: String },
    #[error("encode text: {0}")]
    Encode(String),
    #[error("decode ids: {0}")]
    Decode(String),
}

/// A version's tokenizer. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>);

struct Inner {
    tokenizer: tokenizers::Tokenizer,
    stop_ids: Vec<u32>,
    decline_id: Option<u32>,
    spelling: Spelling,
    /// Made when the first request needs it.
    grammars: OnceLock<Result<Grammars, constraint::Error>>,
}

/// How a vocabulary writes the bytes of its tokens.
#[derive(Debug, Clone, Copy)]
enum Spelling {
    /// A printable character for each byte.
    ByteLevel,
    /// This character for a space, and `<0x0A>` for a byte.
    Spaces(char),
    Other,
}

impl Spelling {
    fn of(tokenizer: &tokenizers::Tokenizer) -> Self {
        let decoder = serde_json::to_value(tokenizer.get_decoder()).unwrap_or_default();
        let decoders = decoder["decoders"]
            .as_array()
            .map_or(std::slice::from_ref(&decoder), Vec::as_slice);
        let spelling = |decoder: &Value| match decoder["type"].as_str()? {
            "ByteLevel" => Some(Spelling::ByteLevel),
            "Metaspace" => Some(Spelling::Spaces(decoder["replacement"].as_str()?.chars().next()?)),
            "Replace" if decoder["content"] == " " => {
                Some(Spelling::Spaces(decoder["pattern"]["String"].as_str()?.chars().next()?))
            }
            _ => None,
        };
        decoders.iter().find_map(spelling).unwrap_or(Spelling::Other)
    }
}

/// The byte that a byte-level vocabulary writes as this character.
fn byte_of_char(character: char) -> Option<u8> {
    let printable = |byte: &u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    match u32::from(character) {
        code @ 256.. => (0..=255).filter(|byte| !printable(byte)).nth(code as usize - 256),
        code => u8::try_from(code).ok().filter(printable),
    }
}

impl Tokenizer {
    /// Whether both are clones of one.
    pub fn is(&self, other: &Tokenizer) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Reads `tokenizer.json`. Also reads `eos_token_id` (a number or a list) and
    /// `springtide_decline_token_id` from `generation_config.json`; without the former,
    /// `eos_token_id` from `config.json`. The `eos_token` of `tokenizer_config.json` is one more. Refuses ids outside the vocabulary.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self, Error> {
        let file = "tokenizer.json";
        let bytes = checkpoint.files.get(file).ok_or(Error::MissingFile(file))?;
        let malformed = |reason: String| Error::Malformed { file, reason };
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| malformed(error.to_string()))?;
        // These are for training in batches. They would truncate or pad prompts without an error.
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(|error| malformed(error.to_string()))?;

        let generation = json(checkpoint, "generation_config.json")?;
        let config = json(checkpoint, "config.json")?;
        let mut stop_ids = ids(&generation, "generation_config.json", "eos_token_id")?;
        if stop_ids.is_empty() {
            stop_ids = ids(&config, "config.json", "eos_token_id")?;
        }
        // vLLM stops at both, too
        let of_tokenizer = &json(checkpoint, "tokenizer_config.json")?["eos_token"];
        let of_tokenizer = of_tokenizer.as_str().or(of_tokenizer["content"].as_str());
        let end = of_tokenizer.and_then(|token| tokenizer.token_to_id(token));
        stop_ids.extend(end.filter(|id| !stop_ids.contains(id)));
        let decline_id = decline_id(checkpoint)?;
        for &id in stop_ids.iter().chain(&decline_id) {
            if tokenizer.id_to_token(id).is_none() {
                return Err(malformed(format!("it has no token {id}, which the model stops at")));
            }
        }
        Ok(Tokenizer(Arc::new(Inner {
            spelling: Spelling::of(&tokenizer),
            tokenizer,
            stop_ids,
            decline_id,
            grammars: OnceLock::new(),
        })))
    }

    /// The ids of `text`. Recognizes special tokens in it and adds none.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.encode_with(text, false)
    }

    /// The ids of a whole prompt, including the special tokens that `tokenizer.json` adds.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.encode_with(text, true)
    }

    fn encode_with(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, Error> {
        let encoding = self
            .0
            .tokenizer
            .encode_fast(text, add_special_tokens)
            .map_err(|error| Error::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The ids of `text`, as [`Tokenizer::encode`], and for each whether any of its bytes are in
    /// `spans`.
    pub fn encode_marked(&self, text: &str, spans: &[Range<usize>]) -> Result<(Vec<u32>, Vec<bool>), Error> {
        let encoding = self
            .0
            .tokenizer
            .encode(text, false)
            .map_err(|error| Error::Encode(error.to_string()))?;
        let marked = encoding
            .get_offsets()
            .iter()
            .map(|&(start, end)| spans.iter().any(|span| start < span.end && span.start < end));
        Ok((encoding.get_ids().to_vec(), marked.collect()))
    }

    /// The text of `ids` without special tokens. Invalid UTF-8 becomes U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String, Error> {
        self.0
            .tokenizer
            .decode(ids, true)
            .map_err(|error| Error::Decode(error.to_string()))
    }

    /// The text of `ids` with special tokens. Invalid UTF-8 becomes U+FFFD.
    pub fn decode_whole(&self, ids: &[u32]) -> Result<String, Error> {
        self.0
            .tokenizer
            .decode(ids, false)
            .map_err(|error| Error::Decode(error.to_string()))
    }

    /// The bytes of a token: those of a text's tokens are the text's, even where a token ends inside a
    /// character. `first`: it begins the text, where some decoders drop a space. `None`: it has no text.
    pub fn token_bytes(&self, id: u32, first: bool) -> Result<Option<Vec<u8>>, Error> {
        if !self.is_text(id) {
            return Ok(None);
        }
        let token = self.0.tokenizer.id_to_token(id).unwrap_or_default();
        let bytes = match self.0.spelling {
            _ if self
                .0
                .tokenizer
                .get_added_vocabulary()
                .get_added_tokens_decoder()
                .contains_key(&id) =>
            {
                None
            }
            Spelling::ByteLevel => token.chars().map(byte_of_char).collect(),
            Spelling::Spaces(space) => {
                let hex = token.strip_prefix("<0x").and_then(|token| token.strip_suffix('>'));
                let byte = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
                Some(byte.map_or_else(|| token.replace(space, " ").into_bytes(), |byte| vec![byte]))
            }
            Spelling::Other => None,
        };
        let alone = self.decode(&[id])?;
        Ok(Some(match bytes {
            Some(bytes) if first && bytes.strip_prefix(b" ") == Some(alone.as_bytes()) => alone.into_bytes(),
            Some(bytes) => bytes,
            None => alone.into_bytes(),
        }))
    }

    /// Whether `id` can decode to text. Special tokens and unknown ids decode to nothing.
    pub fn is_text(&self, id: u32) -> bool {
        let tokenizer = &self.0.tokenizer;
        let token = tokenizer.id_to_token(id);
        token.is_some_and(|token| !tokenizer.get_added_vocabulary().is_special_token(&token))
    }

    /// A decoder for a stream of ids.
    #[cfg(test)]
    pub fn decoder(&self) -> Decoder {
        self.decoder_showing(&[])
    }

    /// A decoder whose text has these tokens even if they are special.
    pub fn decoder_showing(&self, tokens: &[&'static str]) -> Decoder {
        let shown = tokens.iter().filter_map(|token| Some((self.token_id(token)?, *token)));
        Decoder::new(self.clone(), shown.collect())
    }

    /// Allows only JSON of a schema. Takes up to a second for the first schema, and some 20 ms for
    /// each.
    pub fn constrain(&self, schema: &Value) -> Result<Matcher, constraint::Error> {
        let grammars = self.0.grammars.get_or_init(|| {
            let json = self.0.tokenizer.to_string(false);
            let json = json.map_err(|error| constraint::Error::Tokenizer(error.to_string()))?;
            let stops = self.stop_ids().iter().copied();
            Grammars::new(&json, stops.into_iter().find(|&id| Some(id) != self.decline_id()))
        });
        match grammars {
            Ok(grammars) => grammars.compile(schema),
            Err(error) => Err(constraint::Error::Tokenizer(error.to_string())),
        }
    }

    /// Ids that end a generation, including the decline token if `eos_token_id` lists it.
    pub fn stop_ids(&self) -> &[u32] {
        &self.0.stop_ids
    }

    /// Ids that end a sequence: the decline token too, even if the model's configuration does not list
    /// it.
    pub fn ending_ids(&self) -> Vec<u32> {
        let mut ids = self.0.stop_ids.clone();
        ids.extend(self.0.decline_id.filter(|id| !self.0.stop_ids.contains(id)));
        ids
    }

    /// The token that the policy samples to decline.
    pub fn decline_id(&self) -> Option<u32> {
        self.0.decline_id
    }

    /// The id of a token such as `<|cut|>`.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.0.tokenizer.token_to_id(token)
    }

    /// The number of tokens, including special ones.
    pub fn vocab_size(&self) -> usize {
        self.0.tokenizer.get_vocab_size(true)
    }
}

/// The decline token, without loading the tokenizer.
pub fn decline_id(checkpoint: &Checkpoint) -> Result<Option<u32>, Error> {
    let file = "generation_config.json";
    let ids = ids(&json(checkpoint, file)?, file, "springtide_decline_token_id")?;
    Ok(ids.first().copied())
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("stop_ids", &self.0.stop_ids)
            .field("decline_id", &self.0.decline_id)
            .finish()
    }
}

fn json(checkpoint: &Checkpoint, file: &'static str) -> Result<Value, Error> {
    let Some(bytes) = checkpoint.files.get(file) else {
        return Ok(Value::Null);
    };
    serde_json::from_slice(bytes).map_err(|error| Error::Malformed {
        file,
        reason: error.to_string(),
    })
}

/// A number or a list of numbers; empty if the field is missing or null.
fn ids(json: &Value, file: &'static str, field: &str) -> Result<Vec<u32>, Error> {
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| Error::Malformed {
            file,
            reason: format!("`{field}` is {value}, not a token id"),
        })
    };
    match &json[field] {
        Value::Null => Ok(vec![]),
        Value::Array(values) => values.iter().map(id).collect(),
        value => Ok(vec![id(value)?]),
    }
}

#[cfg(test)]
pub(crate) use tests::{byte_char, tokenizer as example};

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use proptest::prelude::*;

    /// Byte-level BPE without merges: 256 byte tokens, then `<|cut|>` 256, `<|eol|>` 257,
    /// `<|decline|>` 258, `<|end|>` 259.
    fn checkpoint(generation_config: &str) -> Checkpoint {
        let special = ["<|cut|>", "<|eol|>", "<|decline|>", "<|end|>"];
        let vocab: serde_json::Map<String, Value> = (0..=255u8)
            .map(|byte| (byte_char(byte).to_string(), Value::from(byte)))
            .collect();
        let added: Vec<Value> = special
            .iter()
            .enumerate()
            .map(|(i, content)| {
                serde_json::json!({"id": 256 + i, "content": content, "single_word": false,
                    "lstrip": false, "rstrip": false, "normalized": false, "special": true})
            })
            .collect();
        let tokenizer = serde_json::json!({
            "version": "1.0",
            "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
            "padding": null,
            "added_tokens": added,
            "normalizer": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
        });
        Checkpoint {
            files: [
                ("tokenizer.json".to_string(), Bytes::from(tokenizer.to_string())),
                (
                    "generation_config.json".to_string(),
                    Bytes::from(generation_config.to_string()),
                ),
                (
                    "config.json".to_string(),
                    Bytes::from_static(b"{\"eos_token_id\": 259}"),
                ),
            ]
            .into(),
            ..Checkpoint::default()
        }
    }

    /// The printable character for a byte in byte-level vocabularies.
    pub(crate) fn byte_char(byte: u8) -> char {
        let printable = |b: u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
        if printable(byte) {
            return char::from(byte);
        }
        let rank = (0..byte).filter(|&b| !printable(b)).count() as u32;
        char::from_u32(256 + rank).unwrap()
    }

    pub(crate) fn tokenizer() -> Tokenizer {
        let config = r#"{"eos_token_id": [257, 258, 259], "springtide_decline_token_id": 258}"#;
        Tokenizer::from_checkpoint(&checkpoint(config)).unwrap()
    }

    #[test]
    fn special_tokens_are_recognized_in_text_and_skipped_in_output() {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode("ab<|cut|>c").unwrap();
        assert_eq!(ids, [97, 98, 256, 99]);
        assert_eq!(tokenizer.decode(&ids).unwrap(), "abc");
        assert_eq!(tokenizer.token_id("<|cut|>"), Some(256));
        assert_eq!(tokenizer.vocab_size(), 260);
    }

    #[test]
    fn a_long_text_is_not_truncated_by_settings_in_the_file() {
        assert_eq!(tokenizer().encode("abcdef").unwrap().len(), 6);
    }

    #[test]
    fn stop_and_decline_ids_come_from_the_generation_config() {
        assert_eq!(tokenizer().stop_ids(), [257, 258, 259]);
        assert_eq!(tokenizer().decline_id(), Some(258));
        let plain = Tokenizer::from_checkpoint(&checkpoint("{}")).unwrap();
        assert_eq!(plain.stop_ids(), [259], "config.json is the fallback");
        assert_eq!(plain.decline_id(), None);
    }

    #[test]
    fn the_end_token_of_the_tokenizer_ends_a_generation_too() {
        let with = |config: &str| {
            let mut checkpoint = checkpoint(r#"{"eos_token_id": 259}"#);
            let config = Bytes::from(config.to_string());
            checkpoint.files.insert("tokenizer_config.json".into(), config);
            Tokenizer::from_checkpoint(&checkpoint).unwrap().stop_ids().to_vec()
        };
        assert_eq!(with(r#"{"eos_token": "<|eol|>"}"#), [259, 257]);
        assert_eq!(with(r#"{"eos_token": {"content": "<|eol|>"}}"#), [259, 257]);
        assert_eq!(with(r#"{"eos_token": "<|end|>"}"#), [259]);
        assert_eq!(with(r#"{"eos_token": null}"#), [259]);
        assert_eq!(with(r#"{"eos_token": "<|not in the vocabulary|>"}"#), [259]);
    }

    #[test]
    fn a_missing_tokenizer_a_broken_file_and_an_unknown_id_are_refused() {
        assert!(Tokenizer::from_checkpoint(&Checkpoint::default()).is_err());
        assert!(Tokenizer::from_checkpoint(&checkpoint("{")).is_err());
        assert!(Tokenizer::from_checkpoint(&checkpoint(r#"{"eos_token_id": 4000}"#)).is_err());
        assert!(Tokenizer::from_checkpoint(&checkpoint(r#"{"eos_token_id": "x"}"#)).is_err());
    }

    #[test]
    fn a_character_is_held_back_until_it_is_complete() {
        let mut decoder = tokenizer().decoder();
        let pieces: Vec<String> = "é€".bytes().map(|b| decoder.push(b.into()).unwrap()).collect();
        assert_eq!(pieces, ["", "é", "", "", "€"]);
        decoder.push(0xe2).unwrap();
        assert_eq!(decoder.finish().unwrap(), "\u{fffd}");
        assert_eq!(decoder.finish().unwrap(), "");
    }

    #[test]
    fn a_decoder_shows_the_special_tokens_that_it_was_asked_for() {
        let mut decoder = tokenizer().decoder_showing(&["<|cut|>", "<|unknown|>"]);
        let ids = [97, 256, 98, 257, 0xe2, 256];
        let text: String = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
        assert_eq!(text, "a<|cut|>b\u{fffd}<|cut|>");
    }

    #[test]
    fn endless_invalid_bytes_are_returned_in_pieces() {
        let mut decoder = tokenizer().decoder();
        let text: String = (0..200).map(|_| decoder.push(0x80).unwrap()).collect();
        assert_eq!(text.chars().count(), 189);
        assert_eq!(decoder.finish().unwrap().chars().count(), 11);
        assert_eq!(decoder.push(97).unwrap(), "a");
    }

    proptest! {
        #[test]
        fn concatenated_pieces_equal_the_decoded_text(ids in prop::collection::vec(0u32..260, 0..40)) {
            let tokenizer = tokenizer();
            let mut decoder = tokenizer.decoder();
            let mut text = String::new();
            for &id in &ids {
                text += &decoder.push(id).unwrap();
            }
            text += &decoder.finish().unwrap();
            prop_assert_eq!(text, tokenizer.decode(&ids).unwrap());
        }

        #[test]
        fn text_survives_encoding(text in "\\PC{0,40}") {
            let tokenizer = tokenizer();
            let ids = tokenizer.encode(&text).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        }
    }
}
