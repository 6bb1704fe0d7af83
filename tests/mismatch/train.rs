//! One run: as many steps as asked for, each on what the engine sampled with the newest version.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use artifact::checkpoint::Checkpoint;
use artifact::quant::Spec;
use demo::Reaction;
use model::exact::Arithmetic;
use runs::sample::Sample;
use runs::settings::{Limits, StepSettings};
use trainer::learn::learner::{Learner, Metrics, Outcome};
use uuid::Uuid;

use crate::engines::{Answer, Exact, Sampler, Version};
use crate::results::{HeldOut, Run};
use crate::users::{Request, Users, reward};
use crate::{Args, Kind};

/// Seed of our engine's draws for held-out users.
const HELD_OUT_SEED: u64 = 77;

pub struct Training<'a> {
    pub args: &'a Args,
    pub users: &'a Users,
    pub base: &'a Arc<Checkpoint>,
    pub exact: &'a Exact,
}

impl Training<'_> {
    /// `engine`: its name. `serial` is of the last version so far.
    pub async fn run(
        &self,
        sampler: &Sampler<'_>,
        engine: &str,
        kind: Kind,
        seed: u64,
        serial: &mut i64,
    ) -> anyhow::Result<Run> {
        let Kind {
            label,
            correction,
            quarantines,
            rounds,
        } = kind;
        let args = self.args;
        let mut settings = StepSettings {
            correction,
            ..StepSettings::default()
        };
        settings.optimizer.learning_rate = args.learning_rate;
        let mut limits = Limits::default();
        if !quarantines {
            limits.k3_max = f64::MAX; // nothing is left out: what a correction does is to be seen
        }
        let started = Instant::now();
        let arithmetic = Arithmetic {
            quantized: sampler.quantized().filter(|_| rounds),
            ..Arithmetic::default()
        };
        let mut learner = Learner::with_arithmetic(self.base.clone(), arithmetic)?;
        let mut run = Run::new(engine, label, seed);
        for step in 0..args.steps {
            *serial += 1;
            let (checkpoint, tokenizer) = (learner.checkpoint().clone(), self.users.tokenizer());
            let version = Version::new(*serial, checkpoint, sampler.quantized(), tokenizer)?;
            let requests = self.users.cohort(seed, step, args.cohort)?;
            let prompts = requests.iter().map(|request| request.prompt.clone());
            let answers = sampler.answer(&version, prompts, seed << 16 | u64::from(step)).await?;
            let samples = self.samples(&requests, &answers, sampler.engine().as_deref())?;
            let advantages: Vec<f64> = samples.iter().map(|sample| sample.reward).collect();
            let (back, metrics) = tokio::task::spawn_blocking(move || {
                let metrics = propose(&mut learner, &samples, &advantages, &settings, &limits)?;
                anyhow::Ok((learner, metrics))
            })
            .await
            .context("compute a step")??;
            learner = back;
            run.add(&metrics);
        }
        *serial += 1;
        run.held_out = self
            .held_out(learner.checkpoint(), sampler.quantized(), *serial)
            .await?;
        run.finish(started.elapsed().as_secs_f64());
        Ok(run)
    }

    fn samples(&self, requests: &[Request], answers: &[Answer], engine: Option<&str>) -> anyhow::Result<Vec<Sample>> {
        let sample = |(request, answer): (&Request, &Answer)| {
            let reaction = self.users.judge(request, &answer.tokens)?;
            Ok(Sample {
                generation: Uuid::now_v7(),
                tenant: "default".into(),
                user: "bench".into(),
                replica: "bench".into(),
                engine: engine.map(str::to_owned),
                class: "completion".into(),
                group: None,
                turn: None,
                version: 1,
                staleness: 0,
                prompt: request.prompt.to_vec(),
                tokens: answer.tokens.clone(),
                logprobs: answer.logprobs.clone(),
                mask: vec![true; answer.tokens.len()],
                temperature: 1.0,
                behavior: None,
                experts: None,
                reward: reward(reaction),
                kept: None,
                typed: None,
                suppressed: false,
                weight: 1.0,
            })
        };
        requests.iter().zip(answers).map(sample).collect()
    }

    /// What held-out users get from a version, or its copy, answered by our own engine.
    pub async fn held_out(
        &self,
        checkpoint: &Arc<Checkpoint>,
        quantized: Option<Spec>,
        serial: i64,
    ) -> anyhow::Result<HeldOut> {
        let version = Version::new(serial, checkpoint.clone(), quantized, self.users.tokenizer())?;
        let requests = self.users.held_out(self.args.held_out)?;
        let prompts = requests.iter().map(|request| request.prompt.clone());
        let answers = Sampler::Exact(self.exact, quantized)
            .answer(&version, prompts, HELD_OUT_SEED)
            .await?;
        let mut held_out = HeldOut::default();
        for (request, answer) in requests.iter().zip(&answers) {
            let reaction = self.users.judge(request, &answer.tokens)?;
            held_out.reward += reward(reaction);
            held_out.right += f64::from(u8::from(reaction == Reaction::Right));
            held_out.shown += f64::from(u8::from(reaction != Reaction::Declined));
        }
        let pauses = requests.len().max(1) as f64;
        Ok(HeldOut {
            reward: held_out.reward / pauses,
            right: held_out.right / pauses,
            shown: held_out.shown / pauses,
        })
    }
}

/// One step, accepted. A cohort without a gradient makes none.
fn propose(
    learner: &mut Learner,
    samples: &[Sample],
    advantages: &[f64],
    settings: &StepSettings,
    limits: &Limits,
) -> anyhow::Result<Metrics> {
    match learner.propose(samples, advantages, settings, limits)? {
        Outcome::Proposed(proposal) => {
            learner.accept();
            Ok(proposal.metrics)
        }
        Outcome::Empty(metrics) => Ok(metrics),
        Outcome::Refused { breach, .. } => bail!("a step was refused: {breach}"),
    }
}
