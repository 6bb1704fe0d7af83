//! Reference policies: what other ways of serving the base model would have earned on the same
//! pauses. They are computed in this process and only reported; the trainer never sees them.

mod capability;
mod tried;

use std::sync::Arc;

use anyhow::{bail, ensure};
use artifact::checkpoint::Checkpoint;
use report::{
    Interval,
    number::{range, signed},
};
use serde::Serialize;

use crate::{
    args::Args,
    developer::{self, FilePart, Pause},
    random::Draws,
    stats::{self, ArmStats, FROZEN, LEARNING, Measure, Observation, Outcome, Reaction},
    suggester::{Draft, Method, on_all_cores},
};

pub use self::{
    capability::{Capability, VersionAt, served_along},
    tried::Tried,
};

/// The reference policies of a run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct References {
    /// Measured before the run, on pauses of other users, with thresholds from half of these users for the
    /// other half.
    pub beforehand: Vec<Reference>,
    /// On the learning arm's own pauses.
    #[serde(rename = "shadows")]
    pub comparisons: Vec<Comparison>,
    /// Of the last version that the learning arm served. `None`: it served only the base, or that
    /// version could not be loaded.
    pub capability: Option<Capability>,
    /// Of versions before it along the run, oldest first.
    pub earlier: Vec<Capability>,
}

/// What one policy earns on a set of pauses.
#[derive(Debug, Clone, Serialize)]
pub struct Reference {
    pub name: String,
    #[serde(rename = "figures")]
    pub stats: ArmStats,
}

/// The learning arm, and all users outside the frozen arm, against one reference on their own pauses.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    pub name: String,
    pub whole: Paired,
    /// First, second and last third of the run.
    pub thirds: Vec<Paired>,
    /// All users outside the frozen arm against this reference, in the last third of the run.
    pub together: Paired,
}

/// Users minus reference, paired by pause, with intervals clustered by user.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Paired {
    pub reference: ArmStats,
    /// Reward per pause.
    pub reward: Option<Interval>,
    pub accepts_per_100: Option<Interval>,
}

impl References {
    /// All comparisons but that with the oracle, which knows what will be typed: no way of serving
    /// the base's greedy text beats it.
    pub fn of_the_base(&self) -> impl Iterator<Item = &Comparison> {
        let oracle = Policy::Oracle.name(0.0);
        self.comparisons
            .iter()
            .filter(move |comparison| comparison.name != oracle)
    }

    /// With the way of serving the base that earned most beforehand, at pauses of other users. Chosen at the
    /// pauses that are compared, it would look better than it is. `None`: nothing was measured beforehand.
    pub fn best(&self) -> Option<&Comparison> {
        let beforehand = |comparison: &Comparison| {
            let named = |reference: &&Reference| reference.name == comparison.name;
            self.beforehand.iter().find(named)?.stats.reward_mean
        };
        let measured = self.of_the_base().filter_map(|one| Some((beforehand(one)?, one)));
        let best = measured.max_by(|(a, _), (b, _)| a.total_cmp(b));
        best.map(|(_, comparison)| comparison)
    }

    /// For the terminal: the learning arm minus each reference.
    pub fn table(&self) -> String {
        let mut text = format!(
            "{LEARNING} minus each reference policy, on {LEARNING}'s own pauses; all: all users outside {FROZEN} minus it\n\
             {:<34} {:>26} {:>26} {:>22} {:>26}\n",
            "", "reward, whole run", "last third", "accepts, last third", "all: reward, last third"
        );
        let difference = |interval: Option<Interval>, digits| {
            let [mean, ends] = [
                signed(interval.map(|interval| interval.mean), digits),
                range(interval.map(|interval| interval.ci95), digits),
            ];
            format!("{mean} ({ends})")
        };
        for comparison in &self.comparisons {
            let last = comparison.thirds.last();
            text += &format!(
                "{:<34} {:>26} {:>26} {:>22} {:>26}\n",
                comparison.name,
                difference(comparison.whole.reward, 3),
                difference(last.and_then(|third| third.reward), 3),
                difference(last.and_then(|third| third.accepts_per_100), 1),
                difference(comparison.together.reward, 3)
            );
        }
        for capability in self.earlier.iter().chain(&self.capability) {
            text += &format!("\n{capability}\n");
        }
        text
    }
}

/// A way of serving the base model.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Policy {
    /// Sampled, as the frozen arm is served.
    Sampled,
    Greedy,
    /// Sampled, but shown only if it is probable enough.
    SampledAboveThreshold,
    GreedyAboveThreshold,
    /// Knows what will be typed, and shows the greedy suggestion only if it is right.
    Oracle,
}

impl Policy {
    const ALL: [Self; 5] = [
        Self::Sampled,
        Self::Greedy,
        Self::SampledAboveThreshold,
        Self::GreedyAboveThreshold,
        Self::Oracle,
    ];

    fn name(self, temperature: f32) -> String {
        match self {
            Self::Sampled => format!("base, T = {temperature}"),
            Self::Greedy => "base, greedy".to_owned(),
            Self::SampledAboveThreshold => format!("base, T = {temperature}, best threshold"),
            Self::GreedyAboveThreshold => "base, greedy, best threshold".to_owned(),
            Self::Oracle => "oracle: greedy, only where right".to_owned(),
        }
    }

    /// What the developer would have seen.
    fn observe(self, trial: &Trial, thresholds: Thresholds) -> Observation {
        let Trial { sampled, greedy, .. } = trial;
        let (suggestion, shown) = match self {
            Self::Sampled => (sampled, !sampled.declined),
            Self::Greedy => (greedy, !greedy.declined),
            Self::SampledAboveThreshold => (sampled, sampled.is_above(thresholds.sampled)),
            Self::GreedyAboveThreshold => (greedy, greedy.is_above(thresholds.greedy)),
            Self::Oracle => (greedy, greedy.reaction == Reaction::Right),
        };
        Observation {
            reaction: if shown { suggestion.reaction } else { Reaction::Declined },
            ..trial.shown(suggestion)
        }
    }
}

/// A pause, and two suggestions of the base there.
#[derive(Debug, Clone)]
struct Trial {
    user: usize,
    answers: bool,
    sampled: Judged,
    greedy: Judged,
}

impl Trial {
    fn shown(&self, suggestion: &Judged) -> Observation {
        Observation {
            user: self.user,
            answers: self.answers,
            reaction: suggestion.reaction,
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Judged {
    /// If it is shown.
    reaction: Reaction,
    declined: bool,
    /// Of the whole suggestion, nats.
    log_prob: f64,
}

impl Judged {
    fn new(draft: &Draft, pause: &Pause) -> Self {
        Self {
            reaction: pause.judge(&draft.text),
            declined: draft.declined,
            log_prob: draft.log_prob,
        }
    }

    fn is_above(&self, threshold: f64) -> bool {
        !self.declined && self.log_prob >= threshold
    }
}

/// Smallest log-probability of a suggestion that is shown, nats.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Thresholds {
    sampled: f64,
    greedy: f64,
}

impl Thresholds {
    /// The thresholds that earn most on these pauses.
    fn choose(trials: &[Trial], tau: f64) -> Self {
        let best = |of: fn(&Trial) -> &Judged| {
            let mut candidates: Vec<&Trial> = trials.iter().filter(|trial| !of(trial).declined).collect();
            candidates.sort_by(|a, b| of(b).log_prob.total_cmp(&of(a).log_prob));
            let (mut sum, mut most, mut threshold) = (0.0, 0.0, f64::INFINITY);
            // A threshold shows all of equal probability, or none.
            for equal in candidates.chunk_by(|a, b| of(a).log_prob == of(b).log_prob) {
                sum += equal
                    .iter()
                    .map(|trial| trial.shown(of(trial)).reward(tau))
                    .sum::<f64>();
                if sum > most {
                    (most, threshold) = (sum, of(equal[0]).log_prob);
                }
            }
            threshold
        };
        Self {
            sampled: best(|trial| &trial.sampled),
            greedy: best(|trial| &trial.greedy),
        }
    }
}

/// The base model, with thresholds that were chosen on pauses of other users.
pub struct Base {
    checkpoint: Arc<Checkpoint>,
    thresholds: Thresholds,
    temperature: f32,
    tau: f64,
    seed: u64,
    beforehand: Vec<Reference>,
    /// Of other users, and what the base would write there.
    pauses: Vec<(usize, Pause)>,
    tried: Tried,
}

impl Base {
    /// Tries the base at pauses of `others`, users who are not replayed and are numbered from
    /// `first`.
    pub fn measure(
        checkpoint: Arc<Checkpoint>,
        (others, first): (&[Vec<FilePart>], usize),
        args: &Args,
        tau: f64,
    ) -> anyhow::Result<Self> {
        let (temperature, seed) = (args.temperature, args.seed);
        let pauses = draw(others, first, seed, args.reference_pauses);
        let trials = try_out(&checkpoint, &pauses, temperature, seed)?;
        let thresholds = Thresholds::choose(&trials, tau);
        let tried = Tried { trials, tau };
        let reference = |policy: Policy| Reference {
            name: policy.name(temperature),
            stats: ArmStats::of(tried.observations(policy), tau),
        };
        Ok(Self {
            beforehand: Policy::ALL.map(reference).into(),
            checkpoint,
            thresholds,
            temperature,
            tau,
            seed,
            pauses,
            tried,
        })
    }

    /// Compares the learning arm with the references on its own pauses, and all users outside the frozen
    /// arm on theirs in the last third. Pauses whose developer never answers are left out, as
    /// everywhere.
    pub fn compare(
        &self,
        outcomes: &[Outcome],
        user_parts: &[Vec<FilePart>],
        run_seconds: f64,
    ) -> anyhow::Result<References> {
        self.check_frozen_arm(outcomes)?;
        let pause_of = |outcome: &Outcome| {
            let user = outcome.observation.user;
            Some((user, developer::pause(&user_parts[user], self.seed, user, outcome.nth)?))
        };
        let third_of = |outcome: &Outcome| ((3.0 * outcome.at.as_secs_f64() / run_seconds) as usize).min(2);
        let others = outcomes
            .iter()
            .filter(|outcome| ![LEARNING, FROZEN].contains(&outcome.arm.as_str()));
        let others = others.filter(|outcome| third_of(outcome) == 2);
        let own = stats::of_arm(outcomes, LEARNING).chain(others);
        let own = own.filter(|outcome| outcome.observation.answers);
        let pauses: Vec<(usize, Pause)> = own.clone().filter_map(pause_of).collect();
        let trials = try_out(&self.checkpoint, &pauses, self.temperature, self.seed)?;
        // Both lists are the same pauses in the same order, because the server answered at all of
        // them.
        ensure!(
            trials.len() == own.clone().count(),
            "a pause that was answered does not fit the base's context"
        );
        let pairs: Vec<(&Outcome, Trial)> = own.zip(trials).collect();
        let learning = || pairs.iter().filter(|(outcome, _)| outcome.arm == LEARNING);
        let comparison = |policy: Policy| Comparison {
            name: policy.name(self.temperature),
            whole: self.paired(policy, learning()),
            thirds: (0..3)
                .map(|third| self.paired(policy, learning().filter(|(outcome, _)| third_of(outcome) == third)))
                .collect(),
            together: self.paired(policy, pairs.iter().filter(|(outcome, _)| third_of(outcome) == 2)),
        };
        Ok(References {
            comparisons: Policy::ALL.map(comparison).into(),
            beforehand: self.beforehand.clone(),
            ..References::default()
        })
    }

    /// Errors when the frozen arm did not serve the base that the references are computed with.
    fn check_frozen_arm(&self, outcomes: &[Outcome]) -> anyhow::Result<()> {
        let base = self.checkpoint.root().to_string();
        if let Some(other) = stats::of_arm(outcomes, FROZEN).find(|outcome| outcome.root != base) {
            bail!(
                "the frozen arm served version {} with content hash {}, but the configured base has {base}: \
                 point `policy.base` at the folder of that version",
                other.version,
                other.root
            );
        }
        Ok(())
    }

    fn paired<'a>(&self, policy: Policy, pairs: impl Iterator<Item = &'a (&'a Outcome, Trial)>) -> Paired {
        let pairs: Vec<(Observation, Observation)> = pairs
            .map(|(own, trial)| (own.observation, policy.observe(trial, self.thresholds)))
            .collect();
        let difference = |measure| stats::paired_difference(pairs.iter().copied(), measure, self.tau);
        Paired {
            reference: ArmStats::of(pairs.iter().map(|(_, reference)| *reference), self.tau),
            reward: difference(Measure::Reward),
            accepts_per_100: difference(Measure::Accepts),
        }
    }
}

/// `n` pauses of random users, who are numbered from `first`.
fn draw(user_parts: &[Vec<FilePart>], first: usize, seed: u64, n: usize) -> Vec<(usize, Pause)> {
    let mut draws = Draws::new("springtide demo headroom 1", &[seed, first as u64]);
    let mut drawn = vec![0u64; user_parts.len()];
    let pauses = (0..n).filter_map(|_| {
        let user = draws.below(user_parts.len());
        drawn[user] += 1;
        let pause = developer::pause(&user_parts[user], seed, first + user, drawn[user])?;
        Some((first + user, pause))
    });
    pauses.collect()
}

/// Asks the base at each pause, sampled and greedily, on all cores. Pauses whose context never fits
/// are left out.
fn try_out(
    checkpoint: &Checkpoint,
    pauses: &[(usize, Pause)],
    temperature: f32,
    seed: u64,
) -> anyhow::Result<Vec<Trial>> {
    on_all_cores(checkpoint, pauses, |suggester, part| {
        let (mut fitting, mut prompts) = (Vec::new(), Vec::new());
        for &(nth, (user, pause)) in part {
            if let Some(ids) = suggester.prompt(pause)? {
                let seed = Draws::new("springtide demo reference 2", &[seed, nth]).seed();
                prompts.push((ids, [Method::sampled(temperature, seed), Method::Greedy]));
                fitting.push((user, pause));
            }
        }
        let drafts = suggester.suggest(&prompts)?;
        let trials = fitting
            .into_iter()
            .zip(drafts)
            .map(|((user, pause), [sampled, greedy])| Trial {
                user: *user,
                answers: pause.answers,
                sampled: Judged::new(&sampled, pause),
                greedy: Judged::new(&greedy, pause),
            });
        Ok(trials.collect())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(right: bool, declined: bool, log_prob: f64) -> Judged {
        let reaction = if right { Reaction::Right } else { Reaction::Wrong };
        Judged {
            reaction,
            declined,
            log_prob,
        }
    }

    fn trial(user: usize, sampled: Judged, greedy: Judged) -> Trial {
        Trial {
            user,
            answers: true,
            sampled,
            greedy,
        }
    }

    #[test]
    fn the_threshold_is_the_one_that_earns_most() {
        // By falling log-probability: +0.75, −0.25, +0.75, −0.25. The sum is largest after the
        // third, at −3.
        let sampled = [
            judged(true, false, -1.0),
            judged(false, false, -2.0),
            judged(true, false, -3.0),
            judged(false, false, -4.0),
            judged(true, true, -0.1),
        ];
        let trials = sampled.map(|sampled| trial(1, sampled, judged(false, false, -1.0)));
        let thresholds = Thresholds::choose(&trials, 0.25);
        assert_eq!(thresholds.sampled, -3.0);
        assert_eq!(thresholds.greedy, f64::INFINITY, "nothing is right: show nothing");
        let shown = |policy: Policy| {
            let seen = trials.iter().map(|trial| policy.observe(trial, thresholds).reaction);
            seen.filter(|reaction| *reaction != Reaction::Declined).count()
        };
        assert_eq!(Policy::ALL.map(shown), [4, 5, 3, 0, 0]);
    }

    #[test]
    fn a_threshold_counts_all_suggestions_of_its_probability() {
        let right_and_wrong = [(true, -1.0), (false, -1.0), (false, -1.0), (false, -1.0), (false, -1.0)];
        let trials = right_and_wrong.map(|(right, log_prob)| {
            let suggestion = judged(right, false, log_prob);
            trial(1, suggestion, suggestion)
        });
        assert_eq!(
            Thresholds::choose(&trials, 0.25).sampled,
            f64::INFINITY,
            "all together lose"
        );
    }

    #[test]
    fn the_best_way_of_the_base_is_chosen_beforehand() {
        let named = |name: &str, reward_mean: f64| Reference {
            name: name.to_owned(),
            stats: ArmStats {
                reward_mean: Some(reward_mean),
                ..ArmStats::default()
            },
        };
        let compared = |name: &str, mean: f64| Comparison {
            name: name.to_owned(),
            whole: Paired::default(),
            thirds: vec![],
            together: Paired {
                reward: Some(Interval {
                    mean,
                    ci95: [mean - 0.1, mean + 0.1],
                }),
                ..Paired::default()
            },
        };
        let references = References {
            beforehand: vec![named("a", 0.1), named("b", 0.2)],
            // By chance "a" does better at the pauses of the run.
            comparisons: vec![compared("a", -0.3), compared("b", 0.1)],
            ..References::default()
        };
        assert_eq!(references.best().unwrap().name, "b");
    }

    #[test]
    fn the_oracle_earns_what_the_greedy_suggestion_gets_right() {
        let trials = [
            trial(1, judged(false, true, -1.0), judged(true, true, -1.0)),
            trial(2, judged(false, false, -1.0), judged(false, false, -1.0)),
        ];
        let thresholds = Thresholds::choose(&trials, 0.25);
        let reward = |policy: Policy| {
            ArmStats::of(trials.iter().map(|trial| policy.observe(trial, thresholds)), 0.25).reward_mean
        };
        assert_eq!(reward(Policy::Oracle), Some(0.375));
        assert_eq!(reward(Policy::Sampled), Some(-0.125), "one declined, one wrong");
    }
}
