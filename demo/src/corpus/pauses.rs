//! Pauses: places where a developer stops typing and a suggestion completes the line.

use std::ops::Range;

use rand::Rng;

/// Longest suggestion, in tokens.
pub const SUGGESTION_TOKENS_MAX: usize = 16;

/// A place in a text, in bytes. The text up to `at` has been typed; `at..end` is what will be typed
/// next on this line, without trailing blanks. It is never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pause {
    pub at: usize,
    pub end: usize,
}

/// Where one can pause on `line` of `text` (a byte range without its newline): every character from
/// the end of the indentation, because editors indent, to the last one that is not blank. Empty on
/// a blank line.
pub fn columns(text: &str, line: Range<usize>) -> Vec<usize> {
    let typed = text[line.clone()].trim_end();
    let indentation = typed.len() - typed.trim_start().len();
    let from = line.start + indentation;
    typed[indentation..].char_indices().map(|(at, _)| from + at).collect()
}

/// A pause at a random column of a line; `None` on a blank one.
pub fn on_line(text: &str, line: Range<usize>, rng: &mut impl Rng) -> Option<Pause> {
    let columns = columns(text, line.clone());
    let end = line.start + text[line].trim_end().len();
    (!columns.is_empty()).then(|| Pause {
        at: columns[rng.random_range(0..columns.len())],
        end,
    })
}

/// Byte ranges of a text's lines, without their newlines.
pub fn lines(text: &str) -> Vec<Range<usize>> {
    let mut at = 0;
    let lines = text.split('\n').map(|line| {
        let range = at..at + line.len();
        at += line.len() + 1;
        range
    });
    lines.collect()
}

/// What a prompt contains of the text before byte `at`: at most the last `chars` characters. It
/// starts at the start of a line, unless the cursor's own line is longer than that.
pub fn tail(text: &str, at: usize, chars: usize) -> &str {
    let before = &text[..at];
    let nth_last = before.char_indices().rev().nth(chars.saturating_sub(1));
    let Some((first, _)) = nth_last.filter(|(at, _)| *at > 0) else {
        return before;
    };
    if before.as_bytes()[first - 1] == b'\n' {
        return &before[first..];
    }
    match before[first..].find('\n') {
        Some(line_end) => &before[first + line_end + 1..],
        None => &before[first..],
    }
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng, rngs::StdRng};

    use super::*;

    #[test]
    fn a_pause_leaves_something_to_type_and_is_never_in_the_indentation() {
        let text = "fn main() {\n    let x = 1;   \n\n}\n";
        let mut rng = StdRng::seed_from_u64(1);
        for range in lines(text) {
            for _ in 0..50 {
                match on_line(text, range.clone(), &mut rng) {
                    Some(pause) => {
                        let rest = &text[pause.at..pause.end];
                        assert!(!rest.is_empty() && rest.trim_end() == rest);
                        assert!(!text[range.start..pause.at].is_empty() || !rest.starts_with(' '));
                    }
                    None => assert!(text[range.clone()].trim().is_empty()),
                }
            }
        }
    }

    #[test]
    fn the_tail_is_bounded_in_characters_and_starts_on_a_line_of_its_own() {
        let text = "one\ntwo\nthree";
        assert_eq!(tail(text, 10, 100), "one\ntwo\nth");
        assert_eq!(tail(text, 10, 10), "one\ntwo\nth");
        assert_eq!(tail(text, 10, 9), "two\nth");
        assert_eq!(
            tail(text, 10, 6),
            "two\nth",
            "a bound at the start of a line keeps that line"
        );
        assert_eq!(tail(text, 10, 5), "th");
        assert_eq!(tail(text, 10, 1), "h", "the cursor's own line is cut where it must be");
        assert_eq!(tail("äöü\nxyz", 9, 4), "xy");
        assert_eq!(tail("äöüxyz", 9, 4), "üxyz");
        assert_eq!(tail(text, 0, 10), "");
    }
}
