//! The run and the loop in one line of text, for output that is not a terminal. Pure.

use std::time::Duration;

use report::number::{decimal, percent, signed};

use crate::{
    progress::Progress,
    queries::Live,
    stats::{self, FOLLOWING, FROZEN, LEARNING, Outcome},
};

/// All figures of the arms are over the run so far.
pub fn line(elapsed: Duration, progress: &Progress<Outcome>, live: &Live, tau: f64) -> String {
    let arms = stats::arms(&progress.outcomes, tau);
    let mut parts = vec![clock(elapsed), rate(elapsed, progress)];
    parts.extend([LEARNING, FOLLOWING, FROZEN].map(|arm| {
        let stats = &arms[arm];
        let (reward, shown) = (signed(stats.reward_mean, 3), percent(stats.show_rate, 0));
        format!("{arm} {reward} shown {shown} of {}", stats.pauses)
    }));
    parts.push(loop_facts(live));
    parts.extend(problems(progress));
    parts.extend(live.state.halted().map(|reason| format!("training {reason}")));
    parts.join(" | ")
}

/// Mean pauses per second.
pub fn rate<T>(elapsed: Duration, progress: &Progress<T>) -> String {
    format!("{:.1}/s", progress.counts.due as f64 / elapsed.as_secs_f64().max(1.0))
}

/// The state of the loop.
pub fn loop_facts(live: &Live) -> String {
    let state = &live.state;
    let integer = |value: Option<i64>| decimal(value.map(|value| value as f64), 0);
    [
        format!("v{} step {}", integer(state.learner), integer(state.step)),
        format!("feedback to serving {} s", decimal(live.feedback_to_serving, 1)),
        format!("lag {} s", decimal(state.lag_seconds, 1)),
        format!("delta {}", percent(state.delta_ratio, 2)),
        format!("swap {} ms", decimal(state.swap_pause_ms, 3)),
    ]
    .join(" | ")
}

/// What went wrong so far, with counts.
pub fn problems<T>(progress: &Progress<T>) -> Vec<String> {
    let counts = &progress.counts;
    let shed = (counts.shed > 0).then(|| format!("shed {}", counts.shed));
    let errors = counts.errors.iter().map(|(error, n)| format!("{error} {n}"));
    shed.into_iter().chain(errors).collect()
}

pub fn clock(time: Duration) -> String {
    format!("{:02}:{:02}", time.as_secs() / 60, time.as_secs() % 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        queries::LoopState,
        stats::{Reaction, tests::outcome},
    };

    #[test]
    fn the_line_shows_the_arms_the_version_and_only_the_problems_there_are() {
        let mut progress = Progress {
            outcomes: vec![
                outcome(1, "learner", Reaction::Right, true),
                outcome(1, "learner", Reaction::Declined, true),
                outcome(3, "champion", Reaction::Right, true),
                outcome(2, "base", Reaction::Wrong, true),
            ],
            ..Progress::default()
        };
        (progress.counts.due, progress.counts.shed) = (1620, 2);
        let state = LoopState {
            learner: Some(37),
            step: Some(36),
            lag_seconds: Some(0.44),
            delta_ratio: Some(0.031),
            ..LoopState::default()
        };
        let live = Live {
            state,
            ..Live::default()
        };
        assert_eq!(
            line(Duration::from_secs(200), &progress, &live, 0.25),
            "03:20 | 8.1/s | learner +0.375 shown 50% of 2 | champion +0.750 shown 100% of 1 \
             | base −0.250 shown 100% of 1 | v37 step 36 | feedback to serving – s | lag 0.4 s | delta 3.10% | swap – ms | shed 2"
        );
    }
}
