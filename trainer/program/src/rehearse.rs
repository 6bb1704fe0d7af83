//! `springtide rehearse`: hands the rehearsal a learner with the settings of `[trainer.realtime]`.

use std::sync::Arc;

use anyhow::{Context, ensure};
use artifact::checkpoint::Checkpoint;
use demo::rehearsal::{self, Signal, Step, Trajectory};
use model::exact::{Arithmetic, Compute};
use runs::advantage::{BaselineKind, Baselines};
use runs::explore;
use runs::options::Realtime;
use runs::sample::Sample;
use runs::settings::{Aggregation, Loss};
use serde_json::{Value, json};
use springtide::cli::App;
use trainer::learn::learner::{Learner, Outcome};
use uuid::Uuid;

pub async fn run(args: rehearsal::Args, app: &App) -> anyhow::Result<()> {
    let config = &app.config;
    ensure!(
        config.policy.compute == Compute::F32,
        "a rehearsal samples in f32, so what policy.compute = \"bf16\" computes would not be what was sampled: set it to \
             \"f32\""
    );
    ensure!(
        config.policy.serves.is_none(),
        "a rehearsal samples with a version's own weights, and policy.serves names a copy of them: remove it"
    );
    let mut settings = config.trainer.realtime.clone();
    if args.signal == Signal::Typed {
        settings.step.loss = Loss::CrossEntropy;
        settings.baseline = BaselineKind::Zero; // all that is typed has the same reward
    }
    ensure!(
        args.served == 0.0 || settings.step.loss.reads_own_probabilities(),
        "--served learns from greedy texts, and only the loss `verdicts` can: set trainer.realtime.step.loss"
    );
    ensure!(
        args.signal != Signal::Demonstrations || settings.demonstration_share_max > 0.0,
        "--signal demonstrations: set trainer.realtime.demonstration_share_max above 0"
    );
    let dir = &config.policy.base;
    let base = Checkpoint::read_dir(dir).with_context(|| format!("read the base {}", dir.display()))?;
    let arithmetic =
        Arithmetic::new(config.policy.compute, config.trainer.threads.into()).context("trainer.threads")?;
    let work = move || {
        let mut learner = Rehearsed::new(Arc::new(base), arithmetic, settings, &args)?;
        rehearsal::run(&args, &mut learner)
    };
    tokio::task::spawn_blocking(work).await.context("rehearse")?
}

/// The trainer's own step, on trajectories that no table has.
struct Rehearsed {
    learner: Learner,
    settings: Realtime,
    explore: f32,
    baselines: Baselines,
}

impl Rehearsed {
    fn new(
        base: Arc<Checkpoint>,
        arithmetic: Arithmetic,
        settings: Realtime,
        args: &rehearsal::Args,
    ) -> anyhow::Result<Self> {
        let learner = match &settings.lora {
            None => Learner::with_arithmetic(base, arithmetic),
            Some(lora) => Learner::with_lora(base, arithmetic, (1, None), lora, args.seed),
        };
        Ok(Self {
            learner: learner?,
            settings,
            explore: args.explore as f32,
            baselines: Baselines::new(),
        })
    }

    fn sample(&self, one: &Trajectory) -> Sample {
        Sample {
            generation: Uuid::now_v7(),
            tenant: "default".into(),
            user: one.user.to_string(),
            replica: "rehearsal".into(),
            engine: None,
            class: CLASS.into(),
            group: None,
            turn: None,
            version: 1,
            staleness: one.staleness as usize,
            prompt: one.prompt.clone(),
            mask: vec![true; one.tokens.len()],
            tokens: one.tokens.clone(),
            logprobs: one.log_probs.clone(),
            temperature: one.temperature,
            behavior: None,
            experts: None,
            reward: one.reward,
            kept: one.kept,
            typed: None,
            suppressed: one.suppressed,
            weight: explore::weight(one.declined, (self.explore > 0.0).then_some(self.explore)),
        }
    }
}

/// All trajectories of a rehearsal share one baseline.
const CLASS: &str = "completion";

impl rehearsal::Learner for Rehearsed {
    fn checkpoint(&self) -> Arc<Checkpoint> {
        Arc::clone(self.learner.checkpoint())
    }

    fn cohort_size(&self) -> usize {
        self.settings.cohort_size as usize
    }

    fn staleness_max(&self) -> u64 {
        self.settings.staleness_max.into()
    }

    fn has_gradient(&self, reward: f64) -> bool {
        self.settings.baseline.advantages(&self.baselines, &[CLASS], &[reward]) != [0.0]
    }

    fn learn(&mut self, cohort: &[Trajectory]) -> anyhow::Result<Option<Step>> {
        let rewards: Vec<f64> = cohort.iter().map(|one| one.reward).collect();
        let classes = vec![CLASS; rewards.len()];
        let baseline = self.settings.baseline;
        let mut advantages = baseline.advantages(&self.baselines, &classes, &rewards);
        let mut samples: Vec<Sample> = cohort.iter().map(|one| self.sample(one)).collect();
        let Realtime { step, guards, .. } = &self.settings;
        let room = (self.settings.demonstration_share_max * f64::from(self.settings.cohort_size)) as usize;
        let given = cohort.iter().enumerate();
        let given = given.filter_map(|(at, one)| Some((at, one.typed.as_ref()?)));
        for (at, tokens) in given.take(room) {
            samples[at] = samples[at].clone().instead(tokens.clone(), Uuid::nil());
            advantages[at] = 1.0;
        }
        let (metrics, is_made) = match self.learner.propose(&samples, &advantages, step, guards)? {
            Outcome::Proposed(proposal) => {
                self.learner.accept();
                (proposal.metrics, true)
            }
            Outcome::Empty(metrics) => (metrics, false),
            Outcome::Refused { breach, metrics } => {
                eprintln!("a guard refused a step: {breach}");
                (metrics, false)
            }
        };
        ensure!(
            metrics.quarantined == 0,
            "{} of {} samples have other log-probabilities than they were sampled with: sampler and learner differ",
            metrics.quarantined,
            samples.len()
        );
        if !is_made {
            return Ok(None);
        }
        let is_nats_per_text = step.loss.is_supervised() && step.aggregation == Aggregation::SeqMeanTokenSum;
        baseline.update(&mut self.baselines, &classes, &rewards);
        Ok(Some(Step {
            nats_per_text: is_nats_per_text.then_some(metrics.loss),
            entropy: metrics.entropy,
            gradient_norm: metrics.gradient_norm,
            kl: metrics.kl,
        }))
    }

    fn settings(&self) -> Value {
        json!(self.settings)
    }
}
