//! Decodes a stream of ids to text.
//!
//! Tokens cannot be decoded one by one: a character may span several tokens, and the first token of
//! a text loses its leading space. Every new id therefore decodes a window of ids again. The window
//! consists of context, whose text has been returned, and the ids after it. A trailing U+FFFD may
//! be the start of a character and is held back.
//!
//! `tokenizers::DecodeStream` is not used: after invalid bytes it can fail with `InvalidPrefix`, it
//! holds back invalid bytes without a limit, and it cannot return an incomplete end.

use super::{Error, Tokenizer};

const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// No character has this many tokens, so more ids without text are invalid bytes. Without a limit,
/// each new id would decode a longer window.
const HELD_BACK_IDS_MAX: usize = 64;

/// An incomplete character has at most three bytes, so at most three tokens.
const INCOMPLETE_IDS_MAX: usize = 3;

/// Converts a stream of ids to text. Holds a character back until all its tokens are there. The
/// concatenated pieces equal [`Tokenizer::decode`] of all ids if these are valid UTF-8. Otherwise
/// the number of U+FFFD may differ.
#[derive(Debug)]
pub struct Decoder {
    tokenizer: Tokenizer,
    ids: Vec<u32>,
    /// The first `read` ids are context.
    read: usize,
    /// The window's text that has been returned: the context's and possibly more.
    returned: String,
    /// Ids since text was last returned.
    held_back: usize,
    /// Special tokens that appear in the text.
    shown: Vec<(u32, &'static str)>,
}

impl Decoder {
    pub(super) fn new(tokenizer: Tokenizer, shown: Vec<(u32, &'static str)>) -> Self {
        Decoder {
            tokenizer,
            shown,
            ids: vec![],
            read: 0,
            returned: String::new(),
            held_back: 0,
        }
    }

    /// Adds an id and returns the text that it completes. Empty while a character is incomplete and
    /// for special tokens, unless they are shown.
    pub fn push(&mut self, id: u32) -> Result<String, Error> {
        if !self.tokenizer.is_text(id) {
            let shown = self.shown.iter().find(|(special, _)| *special == id);
            return match shown.map(|(_, mark)| *mark) {
                Some(mark) => Ok(self.restart(self.ids.len())? + mark),
                None => Ok(String::new()),
            };
        }
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids)?;
        let certain = text.trim_end_matches(REPLACEMENT);
        let complete = certain.len() == text.len();
        match certain.strip_prefix(&self.returned) {
            Some(piece) if !piece.is_empty() => {
                let piece = piece.to_string();
                if complete {
                    self.slide(self.read)?;
                } else {
                    self.returned = certain.to_string();
                }
                self.held_back = 0;
                Ok(piece)
            }
            // A leading space, which appears only with the next token.
            Some(_) if complete => Ok(String::new()),
            // A run of invalid bytes has ended. With byte fallback, it also replaced valid bytes
            // before it.
            None if complete => self.restart(self.ids.len()),
            _ => {
                self.held_back += 1;
                if self.held_back < HELD_BACK_IDS_MAX {
                    return Ok(String::new());
                }
                self.restart(self.ids.len() - INCOMPLETE_IDS_MAX)
            }
        }
    }

    /// Returns the rest after the last id. An incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> Result<String, Error> {
        let rest = self.restart(self.ids.len())?;
        *self = Decoder::new(self.tokenizer.clone(), std::mem::take(&mut self.shown));
        Ok(rest)
    }

    /// Keeps the ids from `start` on as context.
    fn slide(&mut self, start: usize) -> Result<(), Error> {
        self.ids.drain(..start);
        self.read = self.ids.len();
        self.returned = self.tokenizer.decode(&self.ids)?;
        Ok(())
    }

    /// Returns all remaining text of the ids before `end`. The window restarts after them.
    fn restart(&mut self, end: usize) -> Result<String, Error> {
        let text = self.tokenizer.decode(&self.ids[..end])?;
        let piece = match text.strip_prefix(&self.returned) {
            Some(piece) => piece.to_string(),
            None => self.tokenizer.decode(&self.ids[self.read.min(end)..end])?,
        };
        let context = if end == self.ids.len() { self.read } else { end };
        self.ids.drain(..context);
        self.read = end - context;
        self.returned = self.tokenizer.decode(&self.ids[..self.read])?;
        self.held_back = 0;
        Ok(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use artifact::checkpoint::Checkpoint;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    /// Language models use two kinds of decoders: byte-level, and ▁ with byte fallback. Byte-level
    /// tokens often end inside a character.
    fn tokenizer(file: &str) -> Tokenizer {
        let path = format!("{}/tests/golden/chat/{file}", env!("CARGO_MANIFEST_DIR"));
        let bytes = std::fs::read(path).unwrap();
        Tokenizer::from_checkpoint(&Checkpoint {
            files: [("tokenizer.json".to_string(), bytes.into())].into(),
            ..Checkpoint::default()
        })
        .unwrap()
    }

    fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
        let mut decoder = tokenizer.decoder();
        let mut pieces: Vec<String> = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
        pieces.push(decoder.finish().unwrap());
        pieces
    }

    /// Any characters, emoji with modifiers and joiners, combining marks, scripts with and without
    /// spaces.
    fn text() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            any::<char>().prop_map(String::from),
            prop::char::range('\u{1f300}', '\u{1faff}').prop_map(String::from),
            prop::char::range('\u{300}', '\u{36f}').prop_map(|mark| format!("e{mark}")),
            prop::char::range('\u{4e00}', '\u{9fff}').prop_map(String::from),
            prop::char::range('\u{ac00}', '\u{d7a3}').prop_map(String::from),
            "[a-z ]{1,6}",
            prop::sample::select(vec![
                "👩‍👩‍👧‍👦",
                "👋🏽",
                "🇨🇭",
                "\n",
                "\r\n",
                "  ",
                " the",
                "你好",
                "नमस्ते",
                "مرحبا",
                "\u{0}"
            ])
            .prop_map(String::from),
        ];
        prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn text_is_returned_completely_and_without_broken_characters(text in text()) {
            prop_assume!(!text.contains(REPLACEMENT));
            for file in ["byte_level.json", "byte_fallback.json"] {
                let tokenizer = tokenizer(file);
                let ids = tokenizer.encode(&text).unwrap();
                let pieces = pieces(&tokenizer, &ids);
                prop_assert!(pieces.iter().all(|piece| !piece.contains(REPLACEMENT)), "{file}: {pieces:?}");
                prop_assert_eq!(pieces.concat(), tokenizer.decode(&ids).unwrap());
                prop_assert_eq!(pieces.concat(), text.clone());
            }
        }

        #[test]
        fn a_truncated_text_has_no_broken_characters_before_its_end(text in text(), cut in any::<prop::sample::Index>()) {
            prop_assume!(!text.contains(REPLACEMENT));
            for file in ["byte_level.json", "byte_fallback.json"] {
                let tokenizer = tokenizer(file);
                let ids = tokenizer.encode(&text).unwrap();
                let pieces = pieces(&tokenizer, &ids[..cut.index(ids.len() + 1)]);
                let (end, before) = pieces.split_last().unwrap();
                prop_assert!(text.starts_with(&before.concat()), "{file}: {pieces:?}");
                prop_assert!(end.chars().all(|c| c == REPLACEMENT), "{file}: {pieces:?}");
            }
        }

        #[test]
        fn any_ids_are_returned_as_if_decoded_at_once(ids in prop::collection::vec(0u32..430, 0..60)) {
            let tokenizer = tokenizer("byte_level.json");
            prop_assert_eq!(pieces(&tokenizer, &ids).concat(), tokenizer.decode(&ids).unwrap());
        }

        #[test]
        fn valid_ids_with_byte_fallback_are_returned_as_if_decoded_at_once(texts in prop::collection::vec(text(), 0..12)) {
            let tokenizer = tokenizer("byte_fallback.json");
            prop_assume!(texts.iter().all(|text| !text.contains(REPLACEMENT)));
            // each text on its own, so that tokens meet that no text would bring together
            let ids: Vec<u32> = texts.iter().flat_map(|text| tokenizer.encode(text).unwrap()).collect();
            let at_once = tokenizer.decode(&ids).unwrap();
            prop_assert!(!at_once.contains(REPLACEMENT));
            prop_assert_eq!(pieces(&tokenizer, &ids).concat(), at_once);
        }

        #[test]
        fn every_kind_of_tokenizer_returns_in_pieces_what_it_decodes_at_once(text in text(), spaces in "[ ]{0,3}") {
            prop_assume!(!text.contains(REPLACEMENT));
            let text = spaces + &text;
            for (kind, tokenizer) in kinds() {
                let ids = tokenizer.encode(&text).unwrap();
                let at_once = tokenizer.decode(&ids).unwrap();
                prop_assert_eq!(pieces(tokenizer, &ids).concat(), at_once.clone(), "{}", kind);
                let mut bytes = Vec::new();
                for (place, &id) in ids.iter().enumerate() {
                    bytes.extend(tokenizer.token_bytes(id, place == 0).unwrap().unwrap_or_default());
                }
                // a decoder of words also mends the space before punctuation
                prop_assert!(*kind == "words" || bytes == at_once.as_bytes(), "{kind}: {:?}", String::from_utf8_lossy(&bytes));
            }
        }
    }

    /// Unigram with byte fallback as SentencePiece writes it, Metaspace without it, WordPiece, and the
    /// two kinds of BPE, with added tokens.
    fn kinds() -> &'static [(&'static str, Tokenizer)] {
        static KINDS: std::sync::OnceLock<Vec<(&str, Tokenizer)>> = std::sync::OnceLock::new();
        KINDS.get_or_init(|| {
            let mut pieces = vec![json!(["<unk>", 0.0]), json!(["</s>", 0.0])];
            pieces.extend((0..=255u8).map(|byte| json!([format!("<0x{byte:02X}>"), -9.0])));
            let words = ["▁", "▁the", "▁a", "▁▁", "the", "a", "b", "c", "d", "e", "é", "你", "好", "你好", "s", "t"];
            pieces.extend(words.map(|word| json!([word, -2.0])));
            let added = json!([
                {"id": 1, "content": "</s>", "special": true, "normalized": false, "single_word": false, "lstrip": false, "rstrip": false},
                {"id": pieces.len(), "content": "<tool>", "special": false, "normalized": false, "single_word": false, "lstrip": false, "rstrip": false},
            ]);
            let of = |normalizer: Value, pre_tokenizer: Value, decoder: Value, model: Value| {
                let json = json!({"version": "1.0", "added_tokens": added, "normalizer": normalizer,
                    "pre_tokenizer": pre_tokenizer, "decoder": decoder, "model": model});
                Tokenizer::from_checkpoint(&Checkpoint {
                    files: [("tokenizer.json".to_string(), json.to_string().into())].into(),
                    ..Checkpoint::default()
                })
                .unwrap()
            };
            let unigram = |byte_fallback: bool| json!({"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": byte_fallback});
            let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
            let prepend = json!({"type": "Prepend", "prepend": "▁"});
            let back = json!([{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]);
            let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
            let vocab: serde_json::Map<String, Value> = ["[UNK]", "</s>", "the", "##s", "a", "b", "##a", "##b", "c", ".", "!", "é", "你"]
                .iter().zip(0u32..).map(|(word, id)| ((*word).to_owned(), id.into())).collect();
            let word_piece = json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100, "vocab": vocab});
            vec![
                ("byte-level", tokenizer("byte_level.json")),
                ("byte fallback", tokenizer("byte_fallback.json")),
                ("unigram", of(json!({"type": "Sequence", "normalizers": [prepend, replace]}), Value::Null,
                    json!({"type": "Sequence", "decoders": back}), unigram(true))),
                ("metaspace", of(Value::Null, metaspace.clone(), metaspace, unigram(false))),
                ("words", of(Value::Null, json!({"type": "BertPreTokenizer"}),
                    json!({"type": "WordPiece", "prefix": "##", "cleanup": true}), word_piece)),
            ]
        })
    }

    #[test]
    fn a_character_after_a_newline_that_is_a_byte_does_not_end_the_stream() {
        // A run of bytes is decoded together: a newline and an incomplete emoji become U+FFFD.
        let tokenizer = tokenizer("byte_fallback.json");
        let ids = tokenizer.encode("a\n😀 b").unwrap();
        assert_eq!(pieces(&tokenizer, &ids).concat(), "a\n😀 b");
    }

    #[test]
    fn a_special_token_takes_no_space_from_the_next_one() {
        let tokenizer = tokenizer("byte_fallback.json");
        let mut ids = tokenizer.encode("a").unwrap();
        ids.push(tokenizer.token_id("</s>").unwrap());
        ids.extend(tokenizer.encode("the").unwrap());
        assert_eq!(tokenizer.decode(&ids).unwrap(), "a the");
        assert_eq!(pieces(&tokenizer, &ids).concat(), "a the");
    }

    #[test]
    fn a_complete_character_is_returned_before_an_incomplete_one() {
        // The complete character is returned although the next one is incomplete.
        let tokenizer = tokenizer("byte_level.json");
        let ids: Vec<u32> = "x你".bytes().map(|byte| byte_id(&tokenizer, byte)).collect();
        assert_eq!(pieces(&tokenizer, &ids), ["x", "", "", "你", ""]);
    }

    #[test]
    fn endless_invalid_bytes_are_returned_and_a_character_after_them_is_intact() {
        let tokenizer = tokenizer("byte_level.json");
        let broken = byte_id(&tokenizer, 0x80);
        for n in 0..200 {
            let mut ids = vec![broken; n];
            ids.extend("é!".bytes().map(|byte| byte_id(&tokenizer, byte)));
            let pieces = pieces(&tokenizer, &ids);
            assert_eq!(pieces.concat(), "\u{fffd}".repeat(n) + "é!", "{n}");
            assert!(
                pieces
                    .iter()
                    .all(|piece| piece.chars().count() <= HELD_BACK_IDS_MAX + INCOMPLETE_IDS_MAX),
                "{n}"
            );
        }
    }

    fn byte_id(tokenizer: &Tokenizer, byte: u8) -> u32 {
        tokenizer
            .token_id(&crate::tokenizer::tests::byte_char(byte).to_string())
            .unwrap()
    }
}
