//! Finds stop strings in streamed text. Text that might begin a stop string is held back until that
//! is decided. Pure.

/// Watches the text of one choice.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
}

impl StopMatcher {
    /// `stops` must not contain empty strings.
    pub fn new(stops: Vec<String>) -> Self {
        StopMatcher {
            stops,
            held: String::new(),
        }
    }

    /// Takes the next piece. Returns the text that may be shown now and the stop string it met; no
    /// text follows a stop string, and the stop string itself is never shown.
    pub fn push(&mut self, piece: &str) -> (String, Option<String>) {
        self.held.push_str(piece);
        let first_stop = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()).map(|at| (at, stop)))
            // if two begin at the same place, the longer one
            .min_by_key(|(at, stop)| (*at, std::cmp::Reverse(stop.len())));
        if let Some((at, stop)) = first_stop {
            let stop = stop.clone();
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), Some(stop));
        }
        let rest = self.held.split_off(self.held.len() - self.held_bytes());
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// The text held back, once no more text comes.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes at the end of the text that may begin a stop string.
    fn held_bytes(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest.saturating_sub(1));
        self.held
            .char_indices()
            .map(|(at, _)| at)
            .filter(|at| *at >= from)
            .find(|&at| self.stops.iter().any(|stop| stop.starts_with(&self.held[at..])))
            .map_or(0, |at| self.held.len() - at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<String>) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| s.to_string()).collect());
        let mut shown = Vec::new();
        for piece in pieces {
            let (text, stop) = matcher.push(piece);
            shown.push(text);
            if stop.is_some() {
                return (shown, stop);
            }
        }
        shown.push(matcher.finish());
        (shown, None)
    }

    #[test]
    fn a_stop_string_spread_over_pieces_is_never_shown() {
        let (shown, stop) = run(&["\n\n"], &["fn main", "() {\n", "\n}"]);
        assert_eq!(shown, ["fn main", "() {", ""]);
        assert_eq!(stop.as_deref(), Some("\n\n"));
    }

    #[test]
    fn text_that_only_resembled_a_stop_string_is_shown_later() {
        let (shown, stop) = run(&["abc"], &["xab", "d", "ab"]);
        assert_eq!(shown, ["x", "abd", "", "ab"]);
        assert_eq!(stop, None);
    }

    #[test]
    fn the_earliest_stop_wins_and_at_the_same_place_the_longer() {
        assert_eq!(run(&["c", "ab"], &["xabc"]), (vec!["x".into()], Some("ab".into())));
        assert_eq!(run(&["a", "ab"], &["xab"]), (vec!["x".into()], Some("ab".into())));
    }

    #[test]
    fn multibyte_characters_are_never_split() {
        let (shown, stop) = run(&["→x"], &["é→", "y→", "x"]);
        assert_eq!(shown, ["é", "→y", ""]);
        assert_eq!(stop.as_deref(), Some("→x"));
    }

    #[test]
    fn without_stop_strings_all_text_passes_at_once() {
        assert_eq!(run(&[], &["a", "b"]).0, ["a", "b", ""]);
    }

    proptest! {
        #[test]
        fn the_result_does_not_depend_on_the_pieces(text in "[abé]{0,12}", cuts in proptest::collection::vec(0usize..12, 0..4), stop in "[abé]{1,3}") {
            let chars: Vec<char> = text.chars().collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(chars.len())).collect();
            cuts.extend([0, chars.len()]);
            cuts.sort_unstable();
            let pieces: Vec<String> = cuts.windows(2).map(|w| chars[w[0]..w[1]].iter().collect()).collect();
            let (shown, met) = run(&[&stop], &pieces.iter().map(String::as_str).collect::<Vec<_>>());
            prop_assert_eq!(met.is_some(), text.contains(&stop));
            prop_assert_eq!(shown.concat(), text.split(&stop).next().unwrap_or_default());
        }
    }
}
