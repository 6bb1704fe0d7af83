//! A made-up report of a made-up run, large enough to look at: for tests, and for whoever works on the page
//! (`cargo test -p springtide sample_page -- --ignored` writes it to the temporary folder).

use std::{collections::BTreeMap, time::Duration};

use super::{Latency, Parameters, Report, Staleness, Stretch, SwapPause, Third};
use crate::demo::{
    draw::Draws,
    history::{StepTaken, Swap, Traffic},
    records::{FeedbackToServing, Ledger, Phase},
    references::{Comparison, Example, Headroom, Reference, Shadow, Suggested},
    replay::Counts,
    tally::{self, FROZEN, Figures, LEARNING, Measure, Outcome, Verdict, tests::outcome},
};

const SECONDS: u64 = 600;
const PAUSES: u64 = 4800;
const USERS: usize = 300;
const TAU: f64 = 0.25;

/// Ten minutes in which the learning arm comes to show less and to be right more often.
pub fn report() -> Report {
    let length = Duration::from_secs(SECONDS);
    let outcomes = outcomes(0.9);
    let of_arm = |arm: &str| outcomes.iter().filter(|outcome| outcome.arm == arm).count() as i64;
    let timeline = timeline(&outcomes, length);
    let own = |show: f64, right: f64| shadow_figures(show, right);
    let shadows = [
        ("base, T = 1", own(0.93, 0.34)),
        ("base, greedy", own(0.93, 0.41)),
        ("base, greedy, best threshold", own(0.62, 0.58)),
        ("oracle", own(0.75, 1.0)),
    ];
    Report {
        parameters: parameters(),
        started_at: "2026-11-21T10:00:00Z".to_owned(),
        seconds: 604.2,
        interrupted: false,
        arms: tally::arms(outcomes.iter(), TAU),
        difference: tally::difference(&outcomes, Measure::Reward, TAU),
        difference_accepts_per_100: tally::difference(&outcomes, Measure::Accepts, TAU),
        thirds: tally::thirds(outcomes.clone(), length)
            .iter()
            .map(|third| Third {
                arms: tally::arms(third.iter(), TAU),
                difference: tally::difference(third, Measure::Reward, TAU),
            })
            .collect(),
        versions_served: tally::versions_served(&outcomes),
        roots_agree: true,
        feedback_to_serving_seconds: FeedbackToServing {
            p50: Some(8.4),
            p95: Some(14.9),
            n: 1510,
            not_served: 32,
        },
        swap_pause_ms: SwapPause {
            p50: Some(0.21),
            max: Some(1.94),
            n: 92,
        },
        delta_ratio: Some(0.0231),
        steps: 92,
        parity_log_prob_difference_max: Some(3.1e-6),
        ledger: ledger(of_arm(FROZEN)),
        settled: true,
        trajectories: BTreeMap::new(),
        completion_latency_ms: Latency {
            p50: Some(61.0),
            p95: Some(148.0),
        },
        counts: Counts {
            due: PAUSES,
            prompts_shortened: 914,
            feedback_acknowledged: 2811,
            arrival_lateness_ms_max: 12,
            errors: BTreeMap::from([("completion: http 503".to_owned(), 3)]),
            failed: 3,
            ..Counts::default()
        },
        headroom: Some(Headroom {
            beforehand: shadows
                .iter()
                .map(|(name, figures)| Reference {
                    name: (*name).to_owned(),
                    figures: figures.clone(),
                })
                .collect(),
            shadows: shadows
                .iter()
                .map(|(name, figures)| shadow(name, figures, &outcomes))
                .collect(),
            examples: examples(),
        }),
        staleness: Staleness::of(LEARNING, &timeline),
        by_version: tally::by_version(&outcomes, LEARNING, 190, TAU),
        steps_taken: steps(),
        swaps: swaps(),
        alarms: Vec::new(),
        feedback_to_serving_phases: [
            ("horizon", 3.1, 3.9),
            ("cohort", 2.9, 7.4),
            ("step", 1.2, 1.9),
            ("swap", 0.3, 0.8),
        ]
        .map(|(name, p50, p95)| Phase {
            name: name.to_owned(),
            p50,
            p95,
        })
        .into(),
        timeline,
    }
}

/// `best`: how much of its way the learning arm has gone at the end, 0 to 1.
pub fn outcomes(best: f64) -> Vec<Outcome> {
    (0..PAUSES)
        .map(|nth| {
            let mut draws = Draws::new("sample report", &[nth]);
            let user = draws.below(USERS);
            let learning = user * 5 < USERS * 3;
            let progress = if learning {
                best * nth as f64 / PAUSES as f64
            } else {
                0.0
            };
            let skill = 0.06 * ((user % 7) as f64 - 3.0) / 3.0;
            let verdict = if !draws.chance(0.92 - 0.3 * progress) {
                Verdict::Declined
            } else if draws.chance(0.34 + skill + 0.2 * progress) {
                Verdict::Right
            } else {
                Verdict::Wrong
            };
            let arm = if learning { LEARNING } else { FROZEN };
            Outcome {
                at: Duration::from_secs_f64(SECONDS as f64 * nth as f64 / PAUSES as f64),
                version: if learning { 1 + (nth / 52) as i64 } else { 1 },
                root: "5f".repeat(32),
                ..outcome(user, arm, verdict, draws.chance(0.8))
            }
        })
        .collect()
}

fn timeline(outcomes: &[Outcome], length: Duration) -> Vec<Stretch> {
    let stretches = tally::timeline(outcomes, length, 20, TAU).into_iter().zip(0_i64..);
    stretches
        .map(|(stretch, nth)| {
            let traffic = |(arm, figures): (&String, &Figures)| {
                let traffic = Traffic {
                    generations: figures.pauses as i64,
                    closed: figures.pauses as i64,
                    censored: figures.unanswered as i64,
                    stale: if arm == LEARNING { 3 + nth * 7 % 5 } else { 0 },
                    tokens_mean: Some(7.1 - if arm == LEARNING { 0.06 * nth as f64 } else { 0.0 }),
                };
                (arm.clone(), traffic)
            };
            Stretch {
                from_seconds: stretch.from.as_secs_f64(),
                until_seconds: stretch.until.as_secs_f64(),
                traffic: stretch.arms.iter().map(traffic).collect(),
                arms: stretch.arms,
                difference: stretch.difference,
            }
        })
        .collect()
}

fn shadow_figures(show: f64, right: f64) -> Figures {
    let outcomes = (0..2000).map(|nth| {
        let mut draws = Draws::new("sample shadow", &[nth]);
        let verdict = match (draws.chance(show), draws.chance(right)) {
            (false, _) => Verdict::Declined,
            (true, true) => Verdict::Right,
            (true, false) => Verdict::Wrong,
        };
        outcome(nth as usize % 180, FROZEN, verdict, true)
    });
    tally::figures(outcomes.collect::<Vec<_>>().iter(), TAU)
}

fn shadow(name: &str, figures: &Figures, outcomes: &[Outcome]) -> Shadow {
    let learning = tally::figures(outcomes.iter().filter(|outcome| outcome.arm == LEARNING), TAU);
    let interval = |of: fn(&Figures) -> Option<f64>, half: f64| {
        let mean = of(&learning)? - of(figures)?;
        Some(crate::demo::interval::Interval {
            mean,
            ci95: [mean - half, mean + half],
        })
    };
    let comparison = || Comparison {
        reference: figures.clone(),
        reward: interval(|figures| figures.reward_mean, 0.017),
        accepts_per_100: interval(|figures| figures.accepts_per_100, 1.8),
    };
    Shadow {
        name: name.to_owned(),
        whole: comparison(),
        thirds: (0..3).map(|_| comparison()).collect(),
    }
}

fn steps() -> Vec<StepTaken> {
    let steps = (1..=92).map(|step| {
        let mut draws = Draws::new("sample step", &[step]);
        StepTaken {
            step: step as i64,
            version: step as i64 + 1,
            at_seconds: 6.4 * step as f64,
            entropy: Some(1.9 - 0.006 * step as f64 + 0.05 * draws.normal()),
            kl: Some(2e-4 * (1.0 + 0.3 * draws.normal().abs())),
            density: Some(0.041 + 0.006 * draws.normal()),
            delta_ratio: Some(0.023 + 0.002 * draws.normal()),
        }
    });
    steps.collect()
}

fn swaps() -> Vec<Swap> {
    let swaps = (1..=92).map(|nth| Swap {
        version: nth as i64 + 1,
        at_seconds: 6.4 * nth as f64 + 0.4,
        pause_ms: 0.2 * Draws::new("sample swap", &[nth]).normal().abs().exp(),
    });
    swaps.collect()
}

fn ledger(held_out: i64) -> Ledger {
    let (trained, censored, queued) = (1542, 711, 20);
    let dropped = PAUSES as i64 - held_out - trained - censored - queued;
    Ledger {
        generations: PAUSES as i64,
        queued,
        trained,
        censored,
        dropped,
        held_out,
        balanced: true,
        reasons: BTreeMap::from([
            ("censored: no_feedback".to_owned(), censored),
            ("dropped: stale".to_owned(), dropped - 4),
            ("dropped: greedy".to_owned(), 4),
        ]),
        ..Ledger::default()
    }
}

fn parameters() -> Parameters {
    Parameters {
        policy: "demo".to_owned(),
        seed: 1,
        minutes: 10.0,
        rate: 8.0,
        temperature: 1.0,
        control: false,
        users: crate::demo::Users::House,
        developers: USERS,
        files: 412,
        corpus: None,
        tau: TAU,
        horizon_seconds: 3.0,
        silent_share: 0.2,
        delay_median_seconds: 1.0,
        delay_sigma: 0.5,
        completions_in_flight_max: 64,
    }
}

fn examples() -> Vec<Example> {
    let suggested = |version, text: Option<&str>, right| Suggested {
        version,
        text: text.map(str::to_owned),
        right,
    };
    let example = |context: &str, typed: &str, before: Option<&str>, after: Option<&str>| Example {
        file: "hashbrown/src/map.rs".to_owned(),
        context: context.to_owned(),
        typed: typed.to_owned(),
        before: suggested(1, before, before == Some(typed)),
        after: suggested(93, after, after == Some(typed)),
    };
    let map = "impl<K, V, S> HashMap<K, V, S>\nwhere\n    K: Eq + Hash,\n{\n    /// Returns the number of elements.\n    pub fn len(&self) -> ";
    let ten = [
        example(map, "usize {", Some("usize {"), Some("usize {")),
        example(
            "    let mut iter = self.table.iter();\n    while let Some(bucket) = iter.",
            "next() {",
            Some("next().unwrap()"),
            Some("next() {"),
        ),
        example("        if self.items == 0 ", "{", Some("{"), Some("{")),
        example(
            "    #[inline]\n    pub fn reserve(&mut self, ",
            "additional: usize) {",
            Some("value: V) -> Option<V> {"),
            None,
        ),
        example("use core::fmt::{self, ", "Debug};", Some("Display};"), Some("Debug};")),
        example(
            "    fn drop(&mut self) {\n        unsafe { self.",
            "table.drop_elements::<T>() }",
            Some("inner.drop() }"),
            None,
        ),
        example(
            "            Some(value) => ",
            "Ok(value),",
            Some("value,"),
            Some("Ok(value),"),
        ),
        example("    pub const fn new() -> Self ", "{", Some("{"), None),
        example(
            "        assert!(self.len() < ",
            "self.capacity());",
            Some("self.len());"),
            Some("self.len());"),
        ),
        example("#[derive(Clone, ", "Debug)]", Some("Copy)]"), Some("Debug)]")),
    ];
    ten.into()
}
