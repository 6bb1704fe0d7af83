//! The figures of a rehearsal.

use std::{f64::consts::LN_2, path::Path};

use anyhow::Context;
use report::number::{decimal, interval};
use serde::Serialize;
use serde_json::{Value, json};
use text::kept::Kept;

use super::{Args, Step, Trajectory};
use crate::{
    references::Tried,
    stats::{ArmStats, Observation},
};

/// What happened in a minute.
#[derive(Debug, Default)]
pub struct Period {
    seen: Vec<Observation>,
    tau: f64,
    /// Suggestions that nobody answered.
    pub unanswered: usize,
    /// Trajectories that were too old for the step that would have come.
    pub stale: usize,
    /// Trajectories of cohorts that made no version.
    pub without_step: usize,
    trained: usize,
    /// Of those, from older versions than the head.
    trained_older: usize,
    steps: Vec<Step>,
    /// Pauses; if what was typed is learned from, texts.
    heard: usize,
    /// Their surprise to the policy, summed.
    bits: f64,
}

impl Period {
    /// Adds the surprise of a pause's answer in bits: −log₂ p of an accept, −log₂(1 − p) of a reject, 0 if nothing was
    /// shown or answered. What was kept is an accept of its tokens and a reject of the word after them. `log_probs`: of each
    /// token, nats, of the distribution that it was drawn from. The mean is a cross-entropy, so it is at least what answers
    /// tell about anything else.
    pub fn hear(&mut self, reward: f64, kept: Option<Kept>, log_probs: &[f32]) {
        const PROBABILITY_MAX: f64 = 1.0 - 1e-6;
        let of = |tokens: &[f32]| tokens.iter().map(|&one| f64::from(one)).sum::<f64>().min(0.0);
        let accepted = |tokens: &[f32]| -of(tokens) / LN_2;
        let rejected = |tokens: &[f32]| -(1.0 - of(tokens).exp().min(PROBABILITY_MAX)).log2();
        self.heard += 1;
        self.bits += match kept {
            Some(kept) if reward != 0.0 => {
                let (right, rest) = log_probs.split_at(kept.right.min(log_probs.len()));
                let wrong = &rest[..kept.wrong.min(rest.len())];
                accepted(right) + if wrong.is_empty() { 0.0 } else { rejected(wrong) }
            }
            _ if reward > 0.0 => accepted(log_probs),
            _ if reward < 0.0 => rejected(log_probs),
            _ => 0.0,
        };
    }

    /// Adds texts that were typed, with their mean −log p in nats.
    fn hear_texts(&mut self, texts: usize, nats: f64) {
        self.heard += texts;
        self.bits += texts as f64 * nats / LN_2;
    }

    pub fn see(&mut self, observation: Observation, tau: f64) {
        self.seen.push(observation);
        self.tau = tau;
    }

    pub fn add_step(&mut self, cohort: &[Trajectory], step: Step) {
        self.trained += cohort.len();
        self.trained_older += cohort.iter().filter(|one| one.staleness > 0).count();
        if let Some(nats) = step.nats_per_text {
            self.hear_texts(cohort.len(), nats);
        }
        self.steps.push(step);
    }
}

/// A line of the report: what users got, and what was trained on.
#[derive(Debug, Serialize)]
struct Minute {
    minute: f64,
    reward: Option<f64>,
    accepts_per_100: Option<f64>,
    show_rate: Option<f64>,
    steps: usize,
    trained: usize,
    trained_older: usize,
    stale: usize,
    without_step: usize,
    unanswered: usize,
    entropy: Option<f64>,
    gradient_norm: Option<f64>,
    kl: Option<f64>,
    bits_per_pause: Option<f64>,
}

pub struct Report {
    arguments: Value,
    settings: Value,
    base: Tried,
    minutes: Vec<Minute>,
    trials: Vec<Value>,
}

impl Report {
    pub fn new(args: &Args, settings: Value, base: Tried) -> Self {
        let arguments = json!({
            "users": args.corpus.users, "development": args.corpus.development, "seed": args.seed,
            "minutes": args.minutes, "rate": args.rate, "learner": args.learner, "served": args.served, "tau": args.tau,
            "probability_min": args.probability_min, "served_probability_min": args.served_probability_min,
            "temperature": args.temperature, "explore": args.explore, "horizon": args.horizon,
            "step_seconds": args.step_seconds, "signal": args.signal, "pauses": args.pauses, "every": args.every,
            "developers": args.corpus.developers, "corpus": args.corpus.corpus,
        });
        Self {
            arguments,
            settings,
            base,
            minutes: Vec::new(),
            trials: Vec::new(),
        }
    }

    /// The base at other users' pauses, and the heading of the lines that follow.
    pub fn base(&self) -> String {
        format!(
            "base: {}\n{:>6} {:>7} {:>7} {:>6} {:>5} {:>7} {:>6} {:>6} {:>7} {:>7} {:>7} {:>6}",
            self.base,
            "minute",
            "reward",
            "accepts",
            "shown",
            "steps",
            "trained",
            "older",
            "stale",
            "entropy",
            "norm",
            "kl",
            "bits"
        )
    }

    pub fn add(&mut self, minute: f64, period: Period) -> String {
        let stats = ArmStats::of(period.seen, period.tau);
        let mean = |of: fn(&Step) -> f64| {
            let count = period.steps.len() as f64;
            (count > 0.0).then(|| period.steps.iter().map(of).sum::<f64>() / count)
        };
        let one = Minute {
            minute,
            reward: stats.reward_mean,
            accepts_per_100: stats.accepts_per_100,
            show_rate: stats.show_rate,
            steps: period.steps.len(),
            trained: period.trained,
            trained_older: period.trained_older,
            stale: period.stale,
            without_step: period.without_step,
            unanswered: period.unanswered,
            entropy: mean(|step| step.entropy),
            gradient_norm: mean(|step| step.gradient_norm),
            kl: mean(|step| step.kl),
            bits_per_pause: (period.heard > 0).then(|| period.bits / period.heard as f64),
        };
        let line = format!(
            "{:>6} {:>7} {:>7} {:>6} {:>5} {:>7} {:>6} {:>6} {:>7} {:>7} {:>7} {:>6}",
            one.minute,
            decimal(one.reward, 3),
            decimal(one.accepts_per_100, 1),
            decimal(one.show_rate, 2),
            one.steps,
            one.trained,
            one.trained_older,
            one.stale,
            decimal(one.entropy, 3),
            decimal(one.gradient_norm, 2),
            decimal(one.kl, 4),
            decimal(one.bits_per_pause, 3)
        );
        self.minutes.push(one);
        line
    }

    /// The version after `steps` steps at the same pauses as the base.
    pub fn tried(&mut self, minute: f64, steps: u64, version: &Tried) -> String {
        let differences = version.minus(&self.base);
        self.trials.push(json!({
            "minute": minute, "steps": steps, "ways": version.ways(), "minus_base": differences,
        }));
        format!(
            "after {steps} steps: {version}\n  minus the base, right: {}\n  minus the base, sampled: {}\n  minus the base, greedy: \
             {}\n  minus the base, greedy, both above a threshold: {}\n  greedy, minus the base greedy above a threshold: {}",
            interval(differences.right_per_100, 1),
            interval(differences.sampled, 3),
            interval(differences.greedy, 3),
            interval(differences.greedy_above_threshold, 3),
            interval(differences.greedy_minus_base_above_threshold, 3),
        )
    }

    pub fn write(&self, file: &Path) -> anyhow::Result<()> {
        let report = json!({
            "arguments": self.arguments, "settings": self.settings, "base": self.base.ways(),
            "minutes": self.minutes, "trials": self.trials,
        });
        std::fs::write(file, serde_json::to_vec_pretty(&report)?).with_context(|| format!("write {}", file.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_worth_its_surprise() {
        let mut period = Period::default();
        period.hear(0.75, None, &[0.5f32.ln(); 2]); // 2 bits
        period.hear(-0.25, None, &[0.5f32.ln()]); // 1 bit
        period.hear(0.0, None, &[0.9f32.ln()]); // declined, or no answer
        period.hear(-0.25, None, &[0.0]); // the policy was sure, and wrong: about 20 bits, not infinitely many
        assert_eq!(period.heard, 4);
        assert!((period.bits - 3.0 - 1e6f64.log2()).abs() < 1e-6, "{}", period.bits);
        let mut kept = Period::default();
        let half = Kept { right: 1, wrong: 2 };
        kept.hear(-0.25, Some(half), &[0.5f32.ln(); 4]); // 1 bit, and −log₂(1 − 1/4)
        assert!((kept.bits - 1.0 + 0.75f64.log2()).abs() < 1e-6, "{}", kept.bits);
        let mut typed = Period::default();
        typed.hear_texts(10, 3.0 * LN_2);
        assert!((typed.bits - 30.0).abs() < 1e-9);
    }
}
