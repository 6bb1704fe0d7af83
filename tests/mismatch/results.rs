//! What was measured, and the table of it.

use serde::Serialize;
use trainer::learn::learner::Metrics;

use crate::Args;

#[derive(Debug, Serialize)]
pub struct Results {
    pub settings: Args,
    /// The base, before anything is learned.
    pub base: HeldOut,
    pub runs: Vec<Run>,
}

/// Per pause of held-out users.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct HeldOut {
    pub reward: f64,
    pub right: f64,
    pub shown: f64,
}

/// One seed of one engine and correction. Means over the run's steps, unless said.
#[derive(Debug, Serialize)]
pub struct Run {
    /// The process that sampled the tokens: `ours`, or the name of a vLLM server.
    pub sampled_by: String,
    pub correction: String,
    pub seed: u64,
    pub steps: usize,
    pub tokens: usize,
    /// Samples, of all steps.
    pub quarantined: usize,
    /// Logged against recomputed log-probabilities: nats.
    pub k3: f64,
    pub difference_p50: f64,
    pub difference_p99: f64,
    /// The largest of all steps.
    pub difference_max: f64,
    pub truncated: f64,
    pub ess: f64,
    /// Reward of the cohorts of the last third.
    pub reward_last_third: f64,
    pub held_out: HeldOut,
    pub seconds: f64,
    /// Reward of each cohort.
    pub rewards: Vec<f64>,
}

impl Run {
    pub fn new(sampled_by: &str, correction: &str, seed: u64) -> Self {
        Run {
            sampled_by: sampled_by.to_owned(),
            correction: correction.to_owned(),
            seed,
            steps: 0,
            tokens: 0,
            quarantined: 0,
            k3: 0.0,
            difference_p50: 0.0,
            difference_p99: 0.0,
            difference_max: 0.0,
            truncated: 0.0,
            ess: 0.0,
            reward_last_third: 0.0,
            held_out: HeldOut::default(),
            seconds: 0.0,
            rewards: Vec::new(),
        }
    }

    /// Adds a step. Sums become means in [`Self::finish`].
    pub fn add(&mut self, metrics: &Metrics) {
        let of = match metrics.remote.tokens {
            0 => metrics.mismatch,
            _ => metrics.remote,
        };
        self.steps += 1;
        self.tokens += metrics.tokens;
        self.quarantined += metrics.quarantined;
        self.k3 += of.k3;
        self.difference_p50 += of.difference_p50;
        self.difference_p99 += of.difference_p99;
        self.difference_max = self.difference_max.max(of.difference_max);
        self.truncated += metrics.correction.truncated;
        self.ess += metrics.correction.ess;
        self.rewards.push(metrics.reward_mean);
    }

    pub fn finish(&mut self, seconds: f64) {
        let steps = self.steps.max(1) as f64;
        for sum in [
            &mut self.k3,
            &mut self.difference_p50,
            &mut self.difference_p99,
            &mut self.truncated,
            &mut self.ess,
        ] {
            *sum /= steps;
        }
        let last = &self.rewards[self.rewards.len() - self.rewards.len().div_ceil(3)..];
        self.reward_last_third = mean(last.iter().copied());
        self.seconds = seconds;
    }
}

impl Results {
    /// Adds a run and says so: a measurement takes minutes.
    pub fn add(&mut self, run: Run) {
        eprintln!(
            "{}, {}, seed {}: held-out reward {:+.4}, k3 {:.1e}, {:.0} s",
            run.sampled_by, run.correction, run.seed, run.held_out.reward, run.k3, run.seconds
        );
        self.runs.push(run);
    }

    /// One row per engine and correction, as Markdown. ± is the standard error of the difference from
    /// our engine over the seeds, each with its own users.
    pub fn table(&self) -> String {
        let mut table = format!(
            "The base: reward {:+.4}, right {:.1}%, shown {:.1}%.\n\n\
             | sampled by | correction | k3 | Δ p50, p99, max | truncated | quarantined | ESS | held-out reward | \
             minus ours | right | shown |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
            self.base.reward,
            100.0 * self.base.right,
            100.0 * self.base.shown
        );
        let mut kinds: Vec<(&str, &str)> = Vec::new();
        for run in &self.runs {
            let kind = (run.sampled_by.as_str(), run.correction.as_str());
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        for (sampled_by, correction) in kinds {
            let of_kind = |run: &&Run| run.sampled_by == sampled_by && run.correction == correction;
            let runs: Vec<&Run> = self.runs.iter().filter(of_kind).collect();
            let average = |value: fn(&Run) -> f64| mean(runs.iter().map(|run| value(run)));
            let differences: Vec<f64> = runs.iter().filter_map(|run| self.minus_ours(run)).collect();
            let samples = (self.settings.steps as usize * self.settings.cohort).max(1) as f64;
            let largest = runs
                .iter()
                .map(|run| run.difference_max)
                .max_by(f64::total_cmp)
                .unwrap_or(0.0);
            table += &format!(
                "| {sampled_by} | {correction} | {:.1e} | {:.1e}, {:.1e}, {largest:.1e} | {:.3}% | {:.2}% | {:.5} | {:+.4} | \
                 {:+.4} ± {:.4} | {:.1}% | {:.1}% |\n",
                average(|run| run.k3),
                average(|run| run.difference_p50),
                average(|run| run.difference_p99),
                100.0 * average(|run| run.truncated),
                100.0 * average(|run| run.quarantined as f64) / samples,
                average(|run| run.ess),
                average(|run| run.held_out.reward),
                mean(differences.iter().copied()),
                standard_error(&differences),
                100.0 * average(|run| run.held_out.right),
                100.0 * average(|run| run.held_out.shown),
            );
        }
        table
    }

    /// Its held-out reward minus that of our engine's run with the same seed.
    fn minus_ours(&self, run: &Run) -> Option<f64> {
        let mut ours = self.runs.iter().filter(|other| other.sampled_by == "ours");
        let ours = ours.find(|other| other.seed == run.seed)?;
        Some(run.held_out.reward - ours.held_out.reward)
    }
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1) as f64;
    values.sum::<f64>() / count
}

fn standard_error(values: &[f64]) -> f64 {
    let average = mean(values.iter().copied());
    let squares: f64 = values.iter().map(|value| (value - average).powi(2)).sum();
    (squares / (values.len().saturating_sub(1).max(1) * values.len().max(1)) as f64).sqrt()
}
