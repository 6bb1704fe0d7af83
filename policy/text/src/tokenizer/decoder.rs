//! Text of ids that come one by one.
//!
//! Decoders look at more than one token: bytes of several tokens make one character, the first token of a text loses its
//! space. So a window of ids is decoded again with every id: one piece of context, whose text has been given out, and what
//! came after it. What the decoder ends with U+FFFD may be the beginning of a character and is held back.

use super::{Error, Tokenizer};

const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// No character has this many tokens: what says nothing but U+FFFD for longer is not going to become one, and decoding it
/// again with every id would cost ever more.
const HELD_BACK_IDS_MAX: usize = 64;

/// The tokens over which an incomplete character can spread: it has at most three of its four bytes.
const INCOMPLETE_IDS_MAX: usize = 3;

/// Turns ids that come one by one into text. A character whose bytes are spread over several tokens is held back until it
/// is whole. The pieces put together are what [`Tokenizer::decode`] makes of all ids, as long as these are UTF-8; broken bytes
/// become U+FFFD, but how many of them may differ.
#[derive(Debug)]
pub struct Decoder {
    tokenizer: Tokenizer,
    /// The window.
    ids: Vec<u32>,
    /// Ids of the window before this one are context.
    read: usize,
    /// What of the window's text has been given out, the context's and possibly more.
    given: String,
    /// Ids since the last piece.
    held_back: usize,
}

impl Decoder {
    pub(super) fn new(tokenizer: Tokenizer) -> Self {
        Decoder {
            tokenizer,
            ids: vec![],
            read: 0,
            given: String::new(),
            held_back: 0,
        }
    }

    /// The text that `id` completes; empty while a character is incomplete, and for special tokens.
    pub fn push(&mut self, id: u32) -> Result<String, Error> {
        if !self.tokenizer.is_text(id) {
            return Ok(String::new());
        }
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids)?;
        let certain = text.trim_end_matches(REPLACEMENT);
        let complete = certain.len() == text.len();
        match certain.strip_prefix(&self.given) {
            Some(piece) if !piece.is_empty() => {
                let piece = piece.to_string();
                if complete {
                    self.slide(self.read)?;
                } else {
                    self.given = certain.to_string();
                }
                self.held_back = 0;
                Ok(piece)
            }
            // a space at the beginning, which only what follows makes visible
            Some(_) if complete => Ok(String::new()),
            // bytes that were never going to be characters are over: with byte fallback, they spoil what was good before them
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

    /// The rest, when no more ids come: an incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> Result<String, Error> {
        let rest = self.restart(self.ids.len())?;
        *self = Decoder::new(self.tokenizer.clone());
        Ok(rest)
    }

    /// Makes the window's ids from `start` on the context.
    fn slide(&mut self, start: usize) -> Result<(), Error> {
        self.ids.drain(..start);
        self.read = self.ids.len();
        self.given = self.tokenizer.decode(&self.ids)?;
        Ok(())
    }

    /// What has not been given out of the ids before `end`, whatever it is. The window begins anew after them.
    fn restart(&mut self, end: usize) -> Result<String, Error> {
        let text = self.tokenizer.decode(&self.ids[..end])?;
        let piece = match text.strip_prefix(&self.given) {
            Some(piece) => piece.to_string(),
            None => self.tokenizer.decode(&self.ids[self.read.min(end)..end])?,
        };
        let context = if end == self.ids.len() { self.read } else { end };
        self.ids.drain(..context);
        self.read = end - context;
        self.given = self.tokenizer.decode(&self.ids[..self.read])?;
        self.held_back = 0;
        Ok(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use artifact::checkpoint::Checkpoint;
    use proptest::prelude::*;

    /// The two kinds of decoders that language models have: byte-level, and ▁ with byte fallback. Tokens of the first often end
    /// inside a character.
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

    /// Text of all kinds: any characters, emoji with modifiers and joiners, combining marks, scripts with and without spaces.
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
        fn text_comes_out_whole_and_without_broken_characters(text in text()) {
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
        fn a_cut_text_has_no_broken_characters_before_its_end(text in text(), cut in any::<prop::sample::Index>()) {
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
        fn any_ids_come_out_as_their_whole_decode(ids in prop::collection::vec(0u32..430, 0..60)) {
            let tokenizer = tokenizer("byte_level.json");
            prop_assert_eq!(pieces(&tokenizer, &ids).concat(), tokenizer.decode(&ids).unwrap());
        }

        #[test]
        fn any_ids_with_byte_fallback_come_out_as_their_whole_decode_if_they_are_text(ids in prop::collection::vec(0u32..400, 0..200)) {
            let tokenizer = tokenizer("byte_fallback.json");
            let (pieces, whole) = (pieces(&tokenizer, &ids).concat(), tokenizer.decode(&ids).unwrap());
            prop_assert!(whole.contains(REPLACEMENT) || pieces == whole, "{pieces:?} {whole:?}");
        }
    }

    #[test]
    fn a_character_after_a_newline_that_is_a_byte_does_not_end_the_stream() {
        // the bytes of one run are decoded together: a newline and half an emoji are five U+FFFD
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
    fn what_is_whole_is_given_out_beside_what_is_not() {
        // "Ġ" and the first byte of 你 in one token would hold the space back too
        let tokenizer = tokenizer("byte_level.json");
        let ids: Vec<u32> = "x你".bytes().map(|byte| byte_id(&tokenizer, byte)).collect();
        assert_eq!(pieces(&tokenizer, &ids), ["x", "", "", "你", ""]);
    }

    #[test]
    fn endless_broken_bytes_come_out_and_a_character_after_them_is_whole() {
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
