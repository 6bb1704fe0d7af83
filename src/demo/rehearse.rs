//! `springtide demo rehearse`: the learning part of a run without the stack: the same users, sampler and learner in one
//! process, on policy, with no delays. For choosing parameters on other code than the demo replays. Its figures are not a
//! run's: nothing waits, nothing is stale, nobody else is on the machine.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Context, bail};
use policy::image::Image;
use trainer::{
    advantage::{self, Baselines},
    guards::Limits,
    learner::{Learner, Outcome as Stepped},
    sample::Sample,
    settings::StepSettings,
};
use uuid::Uuid;

use super::{
    args::{positive_f32, price},
    developer::{self, Pause},
    draw::Draws,
    headroom::Judged,
    suggester::{Suggester, Way},
    tally::{self, Outcome, Verdict},
    users::Corpus,
};

/// Learns from simulated users as fast as this machine can, to choose parameters with.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub corpus: Corpus,
    #[arg(long, default_value = "models/demo-base")]
    pub model: PathBuf,
    /// Trajectories to train on.
    #[arg(long, default_value_t = 2000)]
    pub trained: usize,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    #[arg(long, default_value_t = 0.25, value_parser = price)]
    pub tau: f64,
    #[arg(long, default_value_t = 1.0, value_parser = positive_f32)]
    pub temperature: f32,
    #[arg(long, default_value = "32", value_parser = at_least_one)]
    pub cohort: usize,
    #[arg(long, default_value_t = StepSettings::default().optimiser.learning_rate)]
    pub learning_rate: f64,
    /// What a reward is compared with: zero or ema.
    #[arg(long, default_value = "zero", value_parser = ["zero", "ema"])]
    pub baseline: String,
    /// Trajectories of one printed line.
    #[arg(long, default_value = "500", value_parser = at_least_one)]
    pub every: usize,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".to_owned()),
        Ok(n) => Ok(n),
        Err(error) => Err(format!("{error}")),
    }
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let mut image = Arc::new(Image::read_dir(&args.model)?);
    let desks = developer::deal(&args.corpus.files()?, args.corpus.developers as usize)?;
    let mut suggester = Suggester::new(&image)?;
    let mut learner = Learner::from_image(Arc::clone(&image))?;
    let mut settings = StepSettings::default();
    settings.optimiser.learning_rate = args.learning_rate;
    let mut baselines = Baselines::new();
    let mut draws = Draws::new("springtide demo rehearse 1", &[args.seed]);
    let mut nth = vec![0u64; desks.len()];
    let mut seen: Vec<Outcome> = Vec::new();
    let mut trained = 0;
    let mut printed = 0;
    println!(
        "{:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "trained", "reward", "accepts", "of shown", "shown", "entropy", "norm", "kl", "seconds"
    );
    let started = std::time::Instant::now();
    while trained < args.trained {
        let mut cohort: Vec<Sample> = Vec::new();
        while cohort.len() < args.cohort {
            let mut pauses: Vec<(usize, Pause, Vec<u32>)> = Vec::new();
            while pauses.len() < 32 {
                let user = draws.below(desks.len());
                nth[user] += 1;
                let Some(pause) = developer::pause(&desks[user], args.seed, user, nth[user]) else {
                    continue;
                };
                if let Some(ids) = suggester.prompt(&pause)? {
                    pauses.push((user, pause, ids));
                }
            }
            let prompts: Vec<(&[u32], Vec<Way>)> = pauses
                .iter()
                .map(|(_, _, ids)| {
                    let seed = draws.below(1 << 53) as u64;
                    let temperature = args.temperature;
                    (ids.as_slice(), vec![Way::Sampled { temperature, seed }])
                })
                .collect();
            let drafts = suggester.suggest(&prompts)?;
            for ((user, pause, ids), mut drafts) in pauses.into_iter().zip(drafts) {
                let draft = drafts.swap_remove(0);
                let judged = Judged::new(&draft, &pause);
                let verdict = match (judged.declined, judged.right) {
                    (true, _) => Verdict::Declined,
                    (_, true) => Verdict::Right,
                    (_, false) => Verdict::Wrong,
                };
                let outcome = Outcome::of_reference(user, pause.answers, verdict);
                if let Some(reward) = outcome.recorded_reward(args.tau)
                    && cohort.len() < args.cohort
                {
                    cohort.push(Sample {
                        generation: Uuid::now_v7(),
                        class: "completion".into(),
                        group: None,
                        version: 1,
                        prompt: ids,
                        mask: vec![true; draft.tokens.len()],
                        tokens: draft.tokens,
                        logprobs: draft.logprobs,
                        temperature: args.temperature,
                        drawing: None,
                        experts: None,
                        reward,
                        suppressed: false,
                        weight: 1.0,
                    });
                }
                seen.push(outcome);
            }
        }
        let rewards: Vec<f64> = cohort.iter().map(|sample| sample.reward).collect();
        let advantages = match args.baseline.as_str() {
            "zero" => advantage::zero(&rewards),
            "ema" => {
                let classes = vec!["completion"; rewards.len()];
                let against = advantage::against(&baselines, &classes, &rewards);
                advantage::observe(&mut baselines, &classes, &rewards);
                against
            }
            other => bail!("--baseline {other}: zero or ema"),
        };
        trained += cohort.len();
        let (entropy, norm, kl) = match learner.propose(&cohort, &advantages, &settings, &Limits::default())? {
            Stepped::Proposed(proposal) => {
                learner.accept();
                image = proposal.image;
                let metrics = proposal.metrics;
                (metrics.entropy, metrics.gradient_norm, metrics.kl)
            }
            Stepped::Refused { breach, .. } => bail!("a guard refused the step: {breach}"),
        };
        suggester.load(&image).context("serve the new version")?;
        if trained / args.every > printed {
            printed = trained / args.every;
            let figures = tally::figures(seen.iter(), args.tau);
            let number = |value: Option<f64>, digits| super::number::or_dash(value, digits);
            println!(
                "{trained:>8} {:>8} {:>8} {:>8} {:>8} {entropy:>8.3} {norm:>8.2} {kl:>8.4} {:>8.0}",
                number(figures.reward_mean, 3),
                number(figures.accepts_per_100, 1),
                number(figures.accept_rate, 3),
                number(figures.show_rate, 3),
                started.elapsed().as_secs_f64()
            );
            seen.clear();
        }
    }
    Ok(())
}
