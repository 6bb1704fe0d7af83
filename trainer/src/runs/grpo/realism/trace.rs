//! What a trace shows of the policy's behavior, as numbers. Pure.

use std::collections::BTreeMap;
use std::fmt;

/// How many of a trace's first tokens are features.
pub(super) const FIRST_TOKENS: i32 = 4;
/// A token is a feature if at least this share of the traces has it. So no feature is of few users.
const TOKEN_SHARE_MIN: f64 = 0.05;

/// The turns of a rollout, or of a user's session. At least one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Trace(pub Vec<Turn>);

/// What the policy did in one turn.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Turn {
    /// Sampled tokens.
    pub tokens: u32,
    /// The first of them, up to [`FIRST_TOKENS`].
    pub first: Vec<i32>,
    /// The policy ended it. False: a limit did.
    pub ended: bool,
    /// False: the policy declined.
    pub shown: bool,
}

/// One number about a trace, 0 or more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Feature {
    Turns,
    Tokens,
    TokensOfFirstTurn,
    Ended,
    Shown,
    /// Token number `place` (from 0) of the first turn is this one.
    First {
        place: usize,
        token: i32,
    },
    /// A turn after the first begins with this token, such as that of a tool call.
    LaterFirst {
        token: i32,
    },
}

impl Feature {
    pub fn value(self, Trace(turns): &Trace) -> f64 {
        let share = |of: &dyn Fn(&Turn) -> bool, turns: &[Turn]| {
            let count = turns.iter().filter(|turn| of(turn)).count();
            count as f64 / turns.len().max(1) as f64
        };
        let first = turns.first();
        match self {
            Feature::Turns => turns.len() as f64,
            Feature::Tokens => turns.iter().map(|turn| f64::from(turn.tokens)).sum(),
            Feature::TokensOfFirstTurn => first.map_or(0.0, |turn| f64::from(turn.tokens)),
            Feature::Ended => share(&|turn| turn.ended, turns),
            Feature::Shown => share(&|turn| turn.shown, turns),
            Feature::First { place, token } => f64::from(u8::from(
                first.is_some_and(|turn| turn.first.get(place) == Some(&token)),
            )),
            Feature::LaterFirst { token } => {
                let later = turns.get(1..).unwrap_or_default();
                share(&|turn| turn.first.first() == Some(&token), later)
            }
        }
    }
}

/// In plain words, for a table whose columns are means.
impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Feature::Turns => write!(f, "turns"),
            Feature::Tokens => write!(f, "sampled tokens"),
            Feature::TokensOfFirstTurn => write!(f, "sampled tokens of the first turn"),
            Feature::Ended => write!(f, "share of turns that the policy ended itself"),
            Feature::Shown => write!(f, "share of turns that show something"),
            Feature::First { place, token } => write!(f, "token {} of the first turn is id {token}", place + 1),
            Feature::LaterFirst { token } => write!(f, "share of later turns that begin with token id {token}"),
        }
    }
}

/// The features of these traces: those that every trace has, and the tokens that enough of them begin
/// with.
pub(super) fn features(traces: &[&Trace]) -> Vec<Feature> {
    let mut seen: BTreeMap<Feature, usize> = BTreeMap::new();
    for Trace(turns) in traces {
        let (first, later) = turns.split_at(turns.len().min(1));
        let of_first = first.iter().flat_map(|turn| turn.first.iter().enumerate());
        let mut tokens: Vec<Feature> = of_first
            .map(|(place, &token)| Feature::First { place, token })
            .collect();
        let of_later = later.iter().filter_map(|turn| turn.first.first());
        tokens.extend(of_later.map(|&token| Feature::LaterFirst { token }));
        tokens.sort_unstable();
        tokens.dedup();
        for token in tokens {
            *seen.entry(token).or_default() += 1;
        }
    }
    let count_min = TOKEN_SHARE_MIN * traces.len() as f64;
    let tokens = seen.into_iter().filter(|(_, count)| *count as f64 >= count_min);
    let always = [
        Feature::Turns,
        Feature::Tokens,
        Feature::TokensOfFirstTurn,
        Feature::Ended,
        Feature::Shown,
    ];
    always.into_iter().chain(tokens.map(|(token, _)| token)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(tokens: u32, first: &[i32], ended: bool) -> Turn {
        Turn {
            tokens,
            first: first.to_vec(),
            ended,
            shown: !ended,
        }
    }

    #[test]
    fn features_are_counts_and_shares_of_the_turns() {
        let trace = Trace(vec![
            turn(10, &[7, 8], true),
            turn(5, &[9], false),
            turn(1, &[7], false),
        ]);
        let value = |feature: Feature| feature.value(&trace);
        assert_eq!((value(Feature::Turns), value(Feature::Tokens)), (3.0, 16.0));
        assert_eq!(value(Feature::TokensOfFirstTurn), 10.0);
        assert_eq!((value(Feature::Ended), value(Feature::Shown)), (1.0 / 3.0, 2.0 / 3.0));
        assert_eq!(value(Feature::First { place: 1, token: 8 }), 1.0);
        assert_eq!(value(Feature::First { place: 2, token: 8 }), 0.0);
        assert_eq!(value(Feature::LaterFirst { token: 9 }), 0.5);
        let single = Trace(vec![turn(1, &[], true)]);
        assert_eq!(Feature::LaterFirst { token: 9 }.value(&single), 0.0);
    }

    #[test]
    fn only_tokens_of_enough_traces_are_features() {
        let of = |token: i32| Trace(vec![turn(1, &[token], true), turn(1, &[token], true)]);
        let traces: Vec<Trace> = (0..41).map(|nth| of(if nth < 3 { 5 } else { 100 + nth })).collect();
        let features = features(&traces.iter().collect::<Vec<_>>());
        let tokens = [Feature::First { place: 0, token: 5 }, Feature::LaterFirst { token: 5 }];
        assert_eq!(features[5..], tokens, "3 of 41 are more than 5%, 1 is less");
    }
}
