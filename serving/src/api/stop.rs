//! Stop strings in a text that comes in pieces: what is certain not to begin one is let through, the rest is held back.
//! Pure.

/// Watches one text.
#[derive(Debug)]
pub struct Matcher {
    stops: Vec<String>,
    held: String,
}

/// What one piece led to.
#[derive(Debug, PartialEq, Eq)]
pub struct Step {
    /// Text that may be shown now.
    pub text: String,
    /// The stop string that was met; nothing follows it.
    pub stop: Option<String>,
}

impl Matcher {
    /// `stops` are not empty strings.
    pub fn new(stops: Vec<String>) -> Self {
        Matcher {
            stops,
            held: String::new(),
        }
    }

    /// Takes the next piece. The text before the earliest stop string comes out; the stop string itself never does.
    pub fn push(&mut self, piece: &str) -> Step {
        self.held.push_str(piece);
        let met = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()).map(|at| (at, stop)))
            // of two that begin at one place, the longer
            .min_by_key(|(at, stop)| (*at, std::cmp::Reverse(stop.len())));
        if let Some((at, stop)) = met {
            let stop = stop.clone();
            self.held.truncate(at);
            return Step {
                text: std::mem::take(&mut self.held),
                stop: Some(stop),
            };
        }
        let keep = self.possible_beginning();
        let rest = self.held.split_off(self.held.len() - keep);
        Step {
            text: std::mem::replace(&mut self.held, rest),
            stop: None,
        }
    }

    /// What was held back, when no more text comes.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes at the end of the held text that begin a stop string.
    fn possible_beginning(&self) -> usize {
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
        let mut matcher = Matcher::new(stops.iter().map(|s| s.to_string()).collect());
        let mut shown = Vec::new();
        for piece in pieces {
            let step = matcher.push(piece);
            shown.push(step.text);
            if step.stop.is_some() {
                return (shown, step.stop);
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
    fn what_only_looked_like_a_beginning_comes_out_later() {
        let (shown, stop) = run(&["abc"], &["xab", "d", "ab"]);
        assert_eq!(shown, ["x", "abd", "", "ab"]);
        assert_eq!(stop, None);
    }

    #[test]
    fn the_earliest_stop_wins_and_of_two_at_one_place_the_longer() {
        assert_eq!(run(&["c", "ab"], &["xabc"]), (vec!["x".into()], Some("ab".into())));
        assert_eq!(run(&["a", "ab"], &["xab"]), (vec!["x".into()], Some("ab".into())));
    }

    #[test]
    fn characters_of_several_bytes_are_never_cut() {
        let (shown, stop) = run(&["→x"], &["é→", "y→", "x"]);
        assert_eq!(shown, ["é", "→y", ""]);
        assert_eq!(stop.as_deref(), Some("→x"));
    }

    #[test]
    fn without_stop_strings_everything_passes_at_once() {
        assert_eq!(run(&[], &["a", "b"]).0, ["a", "b", ""]);
    }

    proptest! {
        #[test]
        fn pieces_never_matter(text in "[abé]{0,12}", cuts in proptest::collection::vec(0usize..12, 0..4), stop in "[abé]{1,3}") {
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
