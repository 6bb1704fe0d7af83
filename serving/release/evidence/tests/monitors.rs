//! The simulations of `make bench NAME=monitors`, small.

#[path = "../benches/monitors/hacks.rs"]
mod hacks;
#[path = "../benches/monitors/sessions.rs"]
mod sessions;
#[path = "../benches/monitors/streams.rs"]
mod streams;

use evidence::change::Design;
use evidence::figure::Figure;
use sessions::{HONEST_VERSIONS, Hack};
use streams::{ALONE, Stream, WITH_OTHERS};

/// The defaults of `trainer.realtime.alarms`.
fn design(figure: Figure) -> Design {
    figure.design(0.05, 100_000.0, 1_000)
}

#[test]
fn where_nothing_changes_false_alarms_are_rarer_than_declared() {
    // One in 100,000 trajectories would be 8 of each figure.
    for figure in Figure::ALL {
        let alarms: u32 = (0..40)
            .map(|seed| {
                let traffic = if seed % 2 == 0 { WITH_OTHERS } else { ALONE };
                streams::alarms(&design(figure), &mut Stream::new(figure, traffic, seed), 20_000)
            })
            .sum();
        assert!(alarms <= 8, "{}: {alarms}", figure.name());
    }
}

#[test]
fn a_share_or_a_length_that_jumps_is_seen_in_each_traffic() {
    for (figure, effect) in [(Figure::Unscored, 0.4), (Figure::Accepted, -0.2), (Figure::Length, 2.0)] {
        assert!(streams::level(figure).0 > 0.2);
        for traffic in [WITH_OTHERS, ALONE] {
            for seed in 0..10 {
                let mut stream = Stream::new(figure, traffic, seed);
                let seen = streams::until_alarm(&design(figure), &mut stream, effect, 20_000);
                assert!(seen.is_some(), "{} with seed {seed}", figure.name());
            }
        }
    }
}

#[test]
fn a_policy_that_avoids_being_scored_looks_better_and_is_caught() {
    for hack in [Hack::BrokenCall, Hack::Question] {
        for seed in 0..10 {
            let outcome = hacks::play(design, hack, 16, seed);
            let [before, after] = outcome.rewards;
            assert!(after > before + 0.08, "{hack:?}: {before} → {after}");
            let unscored = outcome.alarms.get(&Figure::Unscored);
            assert!(unscored.is_some_and(|at| *at > 0), "{hack:?}: {:?}", outcome.alarms);
        }
    }
}

#[test]
fn a_policy_that_stays_as_it_is_raises_no_alarm() {
    for seed in 0..10 {
        let outcome = hacks::play(design, Hack::None, 16, seed);
        assert!(outcome.alarms.is_empty(), "{:?}", outcome.alarms);
    }
    assert_eq!(sessions::share(HONEST_VERSIONS - 1), 0.0);
}
