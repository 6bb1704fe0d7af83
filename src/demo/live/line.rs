//! What the run and the loop look like right now in one line of text, for output that is no terminal. Pure.

use std::time::Duration;

use crate::demo::{
    number::{or_dash, signed},
    records::Live,
    replay::Replayed,
    tally::{self, Figures},
};

/// `rate` in pauses per second since the last line; the arms' figures are over the run so far.
pub fn line(elapsed: Duration, rate: f64, replayed: &Replayed, live: &Live, tau: f64) -> String {
    let arms = tally::arms(replayed.outcomes.iter(), tau);
    let mut parts = vec![
        format!("{:02}:{:02}", elapsed.as_secs() / 60, elapsed.as_secs() % 60),
        format!("{rate:.1}/s"),
        format!("lag {} s", or_dash(live.lag_seconds, 1)),
        arm(tally::LEARNING, arms.get(tally::LEARNING)),
        arm(tally::FROZEN, arms.get(tally::FROZEN)),
        format!("v{} step {}", integer(live.champion), integer(live.step)),
        format!("delta {} %", or_dash(live.delta_ratio.map(|ratio| 100.0 * ratio), 2)),
        format!("swap {} ms", or_dash(live.swap_pause_ms, 3)),
    ];
    let counts = &replayed.counts;
    let errors = counts.errors.values().sum::<u64>();
    let troubles = [("shed", counts.shed), ("errors", errors)]
        .into_iter()
        .filter(|(_, n)| *n > 0);
    parts.extend(troubles.map(|(what, n)| format!("{what} {n}")));
    parts.extend(live.halted.as_ref().map(|reason| format!("training {reason}")));
    parts.join(" | ")
}

fn arm(name: &str, figures: Option<&Figures>) -> String {
    let (reward, show, pauses) = figures.map_or((None, None, 0), |f| (f.reward_mean, f.show_rate, f.pauses));
    let reward = signed(reward, 3);
    format!("{name} {reward} show {} of {pauses}", or_dash(show, 2))
}

fn integer(value: Option<i64>) -> String {
    value.map_or("–".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::tally::{Verdict, tests::outcome};

    #[test]
    fn the_line_shows_both_arms_the_version_and_only_the_troubles_there_are() {
        let mut replayed = Replayed {
            outcomes: vec![
                outcome(1, "champion", Verdict::Right, true),
                outcome(1, "champion", Verdict::Declined, true),
                outcome(2, "base", Verdict::Wrong, true),
            ],
            ..Replayed::default()
        };
        replayed.counts.shed = 2;
        let live = Live {
            champion: Some(37),
            step: Some(36),
            halted: None,
            lag_seconds: Some(0.44),
            delta_ratio: Some(0.031),
            ..Live::default()
        };
        assert_eq!(
            line(Duration::from_secs(200), 8.06, &replayed, &live, 0.25),
            "03:20 | 8.1/s | lag 0.4 s | champion +0.375 show 0.50 of 2 | base -0.250 show 1.00 of 1 \
             | v37 step 36 | delta 3.10 % | swap – ms | shed 2"
        );
    }
}
