//! How much of a shown text its reader kept, in tokens.

use crate::tokenizer::{Error, Tokenizer};

/// The bytes of the next word of `text`: blanks, and after them letters, digits and `_`, or other
/// characters in a row. As much as editors accept at once with "accept the next word".
pub fn next_word(text: &str) -> usize {
    let blanks = text.len() - text.trim_start().len();
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let begins_word = text[blanks..].starts_with(is_word);
    let ends = |c: char| c.is_whitespace() || is_word(c) != begins_word;
    text[blanks..].find(ends).map_or(text.len(), |end| blanks + end)
}

/// What a reader's keeping says about the tokens of a text: the first `right` are what they wanted, and
/// one of the next `wrong` is not. It says nothing about those after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Kept {
    pub right: usize,
    pub wrong: usize,
}

impl Kept {
    /// Of sampled `tokens`, whose text is still there up to its first `characters`. What follows is
    /// wrong as a word, because readers keep whole words: its first token may be right. Where they typed a longer word
    /// that begins with this one, none of its tokens is; that is rare, and not seen here. A text that is
    /// kept whole ended rightly if it was `accepted`, else its stop token is wrong. `None`: the tokens
    /// are no text.
    pub fn of(tokenizer: &Tokenizer, tokens: &[u32], characters: usize, accepted: bool) -> Result<Option<Self>, Error> {
        let stop = |id: &u32| tokenizer.stop_ids().contains(id) || tokenizer.decline_id() == Some(*id);
        let shown = &tokens[..tokens.iter().position(stop).unwrap_or(tokens.len())];
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for (index, &id) in shown.iter().enumerate() {
            bytes.extend(tokenizer.token_bytes(id, index == 0)?.unwrap_or_default());
            ends.push(bytes.len());
        }
        let Ok(text) = std::str::from_utf8(&bytes) else {
            return Ok(None);
        };
        let at = text.char_indices().nth(characters).map_or(text.len(), |(at, _)| at);
        let is_whole = text[at..].trim().is_empty();
        if is_whole {
            let right = if accepted { tokens.len() } else { shown.len() };
            let wrong = tokens.len() - right;
            return Ok(Some(Self { right, wrong }));
        }
        let word_end = at + next_word(&text[at..]);
        let right = ends.partition_point(|&end| end <= at);
        let reached = ends.partition_point(|&end| end < word_end) + 1;
        let wrong = reached.min(shown.len()) - right;
        Ok(Some(Self { right, wrong }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_what_editors_accept_at_once() {
        let words = |mut text: &str| {
            let mut words = Vec::new();
            while !text.is_empty() {
                let (word, rest) = text.split_at(next_word(text));
                words.push(word.to_owned());
                text = rest;
            }
            words
        };
        assert_eq!(words("let x_1 = f(&ä);"), ["let", " x_1", " =", " f", "(&", "ä", ");"]);
        assert_eq!(words("  \n "), ["  \n "]);
    }
    #[test]
    fn what_is_kept_is_told_in_tokens() {
        let tokenizer = crate::tokenizer::example();
        // a token for each byte, and the end of the line
        let tokens = tokenizer.encode("lä x();<|eol|>").unwrap();
        let kept = |characters, accepted| {
            let kept = Kept::of(&tokenizer, &tokens, characters, accepted).unwrap().unwrap();
            (kept.right, kept.wrong)
        };
        assert_eq!(tokens.len(), 9);
        assert_eq!(kept(7, true), (9, 0));
        assert_eq!(kept(99, false), (8, 1), "the line goes on");
        assert_eq!(kept(4, false), (5, 3), "one of the signs");
        assert_eq!(kept(4, true), (5, 3), "accepted, and changed later");
        assert_eq!(kept(0, false), (0, 3), "the whole first word");
        assert_eq!(kept(1, false), (1, 2), "the second half of a word");
        let cut = &tokens[..2];
        let of_cut = |characters| Kept::of(&tokenizer, cut, characters, false).unwrap();
        assert_eq!(of_cut(1), None, "half a character is no text");
        let unended = Kept::of(&tokenizer, &tokens[..8], 7, false).unwrap();
        assert_eq!(unended, Some(Kept { right: 8, wrong: 0 }));
    }
}
