//! `springtide rehearse`: what a run of the demo learns, without the stack. Users, sampler and learner
//! are in one process. Time is simulated: answers come after the horizon, a step takes as long as the
//! arguments say, and meanwhile users get the version before. Nothing is shed, nothing is
//! exact-once, and nobody has the frozen arm. For choosing parameters on users whom no reported run has.

mod figures;
mod queue;

use std::{num::NonZero, path::PathBuf, sync::Arc, time::Duration};

use anyhow::ensure;
use artifact::{assignment::EXPLORE_MAX, checkpoint::Checkpoint};
use model::sampling::TRAINABLE_TEMPERATURES;
use text::kept::Kept;

use crate::{
    args::{Corpus, Dealt, positive},
    arrivals::{Arrival, Arrivals},
    corpus::{pauses::SUGGESTION_TOKENS_MAX, tokenizer::EOL},
    developer::{self, FilePart, Pause},
    random::Draws,
    references::Tried,
    shuffle::Shuffle,
    stats::{Observation, Reaction},
    suggester::{Draft, Method, Suggester},
    users::share,
};
use figures::{Period, Report};
use queue::{Queue, Waiting};

/// Learns from simulated users as fast as this machine can, to choose parameters with.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub corpus: Corpus,
    /// Simulated minutes.
    #[arg(long, default_value_t = 10.0, value_parser = positive::<f64>)]
    pub minutes: f64,
    /// Mean pauses per second, over all users.
    #[arg(long, default_value_t = 16.0, value_parser = positive::<f64>)]
    pub rate: f64,
    /// Share of the users who have the learning arm. The others are not simulated.
    #[arg(long, default_value_t = 0.3, value_parser = positive_share)]
    pub learner: f64,
    /// Share of the users who get greedy texts, as `--served-probability-min` says, and are learned from, too.
    #[arg(long, default_value_t = 0.0, value_parser = share)]
    pub served: f64,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Price of showing a wrong suggestion.
    #[arg(long, default_value_t = 0.25, value_parser = share)]
    pub tau: f64,
    /// Sampling temperature of the learning arm, 0.5 to 1.5: others are not trained on.
    #[arg(long, default_value_t = 1.0, value_parser = trainable)]
    pub temperature: f32,
    /// Share of the requests that must not decline, at most 0.5.
    #[arg(long, default_value_t = 0.02, value_parser = explored)]
    pub explore: f64,
    /// The learning arm shows no text whose probability is below this.
    #[arg(long, default_value_t = 0.0, value_parser = share)]
    pub probability_min: f64,
    /// The same for what users get: a version's greedy texts.
    #[arg(long, default_value_t = 0.0, value_parser = share)]
    pub served_probability_min: f64,
    /// How long an answer is waited for, in seconds.
    #[arg(long, default_value_t = 3.0, value_parser = positive::<f64>)]
    pub horizon: f64,
    /// From a full cohort until its version is served, in seconds.
    #[arg(long, default_value_t = 4.0, value_parser = positive::<f64>)]
    pub step_seconds: f64,
    /// What is learned from.
    #[arg(long, value_enum, default_value_t = Signal::Answers)]
    pub signal: Signal,
    /// Pauses of other users at which versions are tried.
    #[arg(long, default_value = "1500")]
    pub pauses: NonZero<usize>,
    /// Simulated minutes between two of these trials.
    #[arg(long, default_value_t = 10.0, value_parser = positive::<f64>)]
    pub every: f64,
    /// Where to write the figures as JSON.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Where to write the last version as a Hugging Face folder.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Signal {
    /// Accepts and rejects.
    Answers,
    /// The same, and how many words were kept.
    Kept,
    /// The same, and what users who answer typed: in `trainer.realtime.demonstration_share_max` of a cohort.
    Demonstrations,
    /// Answers to other suggestions: nothing to learn.
    Permuted,
    /// What was really typed, at every pause: the supervised bound.
    Typed,
}

fn positive_share(text: &str) -> Result<f64, String> {
    share(text).and_then(|value| {
        (value > 0.0)
            .then_some(value)
            .ok_or_else(|| "must be above 0".to_owned())
    })
}

fn explored(text: &str) -> Result<f64, String> {
    let value = share(text)?;
    let allowed = value <= EXPLORE_MAX;
    allowed
        .then_some(value)
        .ok_or_else(|| format!("must be at most {EXPLORE_MAX}, as for an arm"))
}

fn trainable(text: &str) -> Result<f32, String> {
    let value = text.parse().map_err(|error| format!("{error}"))?;
    let range = TRAINABLE_TEMPERATURES;
    let message = || format!("must be from {} to {}", range.start(), range.end());
    range.contains(&value).then_some(value).ok_or_else(message)
}

/// One suggestion, with what its user said.
#[derive(Debug, Clone)]
pub struct Trajectory {
    pub user: usize,
    pub prompt: Vec<u32>,
    pub tokens: Vec<u32>,
    /// log μ of each token, nats.
    pub log_probs: Vec<f32>,
    pub temperature: f32,
    pub declined: bool,
    /// It had to be shown: declining was masked.
    pub suppressed: bool,
    pub reward: f64,
    /// How much of it was kept. `None`: nobody said.
    pub kept: Option<Kept>,
    /// What its user typed, as tokens. `None`: nobody said.
    pub typed: Option<Vec<u32>>,
    /// Steps between the version that sampled it and the head.
    pub staleness: u64,
}

/// What makes new versions of trajectories.
pub trait Learner {
    fn checkpoint(&self) -> Arc<Checkpoint>;
    /// Trajectories of a step.
    fn cohort_size(&self) -> usize;
    /// The most steps that a trajectory may be behind the head.
    fn staleness_max(&self) -> u64;
    /// Whether a trajectory with this reward has a gradient.
    fn has_gradient(&self, reward: f64) -> bool;
    /// `None`: no version came of it, because nothing had a gradient or a guard refused the step.
    fn learn(&mut self, cohort: &[Trajectory]) -> anyhow::Result<Option<Step>>;
    /// Its settings, for the report.
    fn settings(&self) -> serde_json::Value;
}

/// What a step measured.
#[derive(Debug, Clone, Copy, Default, serde::Serialize)]
pub struct Step {
    /// Mean −log p of the texts of a supervised cohort, nats, of the policy before. `None`: not supervised, or texts are
    /// averaged by token.
    pub nats_per_text: Option<f64>,
    /// Nats, of the policy before.
    pub entropy: f64,
    pub gradient_norm: f64,
    /// KL(old‖new), nats per token.
    pub kl: f64,
}

/// Rehearses, prints a line for each minute, and returns when the time is over.
pub fn run(args: &Args, learner: &mut dyn Learner) -> anyhow::Result<()> {
    ensure!(args.minutes >= 1.0, "--minutes must be at least 1");
    let Dealt {
        replayed: user_parts,
        others,
        ..
    } = args.corpus.deal()?;
    let first = user_parts.len();
    let base = learner.checkpoint();
    let try_out = |checkpoint: &Checkpoint| {
        let (others, pauses) = (others.as_slice(), args.pauses.get());
        Tried::at_pauses_of(
            checkpoint,
            (others, first),
            pauses,
            args.temperature,
            args.seed,
            args.tau,
        )
    };
    let tried = try_out(&base)?;
    let mut report = Report::new(args, learner.settings(), tried);
    println!("{}", report.base());
    let learners = ((first as f64) * args.learner).round().max(1.0) as usize;
    let served = ((first as f64) * args.served).round() as usize;
    ensure!(
        learners + served <= first,
        "--learner and --served are more than all users"
    );
    let rate = args.rate * (learners + served) as f64 / first as f64;
    let mut stage = Stage {
        args,
        user_parts: &user_parts[..learners + served],
        learners,
        suggester: Suggester::new(&base)?,
        shuffle: (args.signal == Signal::Permuted).then(|| Shuffle::new(args.seed)),
        version: 0,
        queue: Queue::default(),
    };
    let length = Duration::from_secs_f64(60.0 * args.minutes);
    let mut arrivals = Arrivals::new(args.seed, rate, length, learners + served).peekable();
    let mut head = 0;
    let mut publishing: Option<(f64, Arc<Checkpoint>)> = None;
    let mut period = Period::default();
    let (seconds, every) = (
        length.as_secs_f64().ceil() as u64,
        (60.0 * args.every).round().max(1.0) as u64,
    );
    for second in 1..=seconds {
        let now = (second - 1) as f64;
        if let Some((_, checkpoint)) = publishing.take_if(|(at, _)| *at <= now) {
            stage.suggester = Suggester::new(&checkpoint)?;
            stage.version = head;
        }
        let mut arrived = Vec::new();
        while let Some(arrival) = arrivals.next_if(|arrival| arrival.at.as_secs_f64() < now + 1.0) {
            arrived.push(arrival);
        }
        stage.suggest(&arrived, &mut period)?;
        if publishing.is_none()
            && let Some(cohort) = {
                period.stale += stage.queue.drop_stale(head, learner.staleness_max());
                let has_gradient = |reward| learner.has_gradient(reward);
                stage.queue.cohort(now, head, learner.cohort_size(), has_gradient)
            }
        {
            match learner.learn(&cohort)? {
                Some(step) => {
                    head += 1;
                    period.add_step(&cohort, step);
                    publishing = Some((now + args.step_seconds, learner.checkpoint()));
                }
                None => period.without_step += cohort.len(),
            }
        }
        let minute = second as f64 / 60.0;
        if second % 60 == 0 || second == seconds {
            println!("{}", report.add(minute, std::mem::take(&mut period)));
        }
        if second % every == 0 && second < seconds {
            let tried = try_out(&learner.checkpoint())?.served_above(args.served_probability_min);
            println!("{}", report.tried(minute, head, &tried));
        }
    }
    let last = learner.checkpoint();
    let tried = try_out(&last)?.served_above(args.served_probability_min);
    println!("{}", report.tried(args.minutes, head, &tried));
    if let Some(dir) = &args.out {
        last.write_dir(dir)?;
    }
    args.report.as_deref().map_or(Ok(()), |file| report.write(file))
}

/// The users, and what serves them.
struct Stage<'a> {
    args: &'a Args,
    user_parts: &'a [Vec<FilePart>],
    /// How many of the users have the learning arm. They come first.
    learners: usize,
    suggester: Suggester,
    shuffle: Option<Shuffle>,
    /// How many steps made the version that is served.
    version: u64,
    queue: Queue,
}

impl Stage<'_> {
    /// Answers the pauses of a second.
    fn suggest(&mut self, arrived: &[Arrival], period: &mut Period) -> anyhow::Result<()> {
        let args = self.args;
        let (mut pauses, mut prompts) = (Vec::new(), Vec::new());
        for arrival in arrived {
            let Some(pause) = developer::pause(&self.user_parts[arrival.user], args.seed, arrival.user, arrival.nth)
            else {
                continue;
            };
            let Some(ids) = self.suggester.prompt(&pause)? else {
                continue;
            };
            let mut draws = Draws::new(
                "springtide rehearse suggestion 1",
                &[args.seed, arrival.user as u64, arrival.nth],
            );
            let method = match arrival.user < self.learners {
                true => Method::Sampled {
                    temperature: args.temperature,
                    seed: draws.seed(),
                    suppressed: draws.chance(args.explore),
                },
                false => Method::Greedy,
            };
            prompts.push((ids, [method]));
            pauses.push((arrival, pause));
        }
        let drafts = match args.signal {
            Signal::Typed => Vec::new(), // nobody asks
            _ => self.suggester.suggest(&prompts)?,
        };
        let mut drafts = drafts.into_iter();
        for ((arrival, pause), (prompt, [method])) in pauses.into_iter().zip(prompts) {
            let trajectory = match drafts.next() {
                None => Some(self.typed(arrival.user, &pause, prompt)?),
                Some([draft]) => {
                    let suppressed = matches!(method, Method::Sampled { suppressed: true, .. });
                    let mut draft = draft;
                    let probability_min = match arrival.user < self.learners {
                        true => args.probability_min,
                        false => args.served_probability_min,
                    };
                    draft.declined |= !suppressed && draft.log_prob < probability_min.ln();
                    let observation = observe(arrival.user, &pause, &draft);
                    if arrival.user < self.learners {
                        period.see(observation, args.tau);
                    }
                    let (log_probs, text) = (draft.log_probs.clone(), draft.text.clone());
                    let mut answered = self.answered(observation, prompt, draft, suppressed);
                    if matches!(args.signal, Signal::Kept | Signal::Demonstrations)
                        && let Some(answered) = answered.as_mut().filter(|one| !one.declined)
                    {
                        let accepted = answered.reward > 0.0;
                        answered.kept = self.suggester.kept(&answered.tokens, pause.kept(&text), accepted)?;
                    }
                    if args.signal == Signal::Demonstrations
                        && pause.answers
                        && let Some(answered) = answered.as_mut()
                    {
                        answered.typed = Some(self.typed_tokens(&pause)?);
                    }
                    let said = answered.as_ref().map_or((0.0, None), |one| (one.reward, one.kept));
                    period.hear(said.0, said.1, &log_probs);
                    answered
                }
            };
            let Some(trajectory) = trajectory else {
                period.unanswered += 1;
                continue;
            };
            self.queue.push(Waiting {
                ready: arrival.at.as_secs_f64() + args.horizon,
                version: self.version,
                trajectory,
            });
        }
        Ok(())
    }

    /// `None`: nobody answered.
    fn answered(
        &self,
        observation: Observation,
        prompt: Vec<u32>,
        draft: Draft,
        suppressed: bool,
    ) -> Option<Trajectory> {
        if observation.reaction != Reaction::Declined && !observation.answers {
            return None;
        }
        let reaction = match &self.shuffle {
            Some(shuffle) if observation.reaction != Reaction::Declined => shuffle.swap(observation.reaction),
            _ => observation.reaction,
        };
        let said = Observation {
            reaction,
            ..observation
        };
        Some(Trajectory {
            user: observation.user,
            prompt,
            tokens: draft.tokens,
            log_probs: draft.log_probs,
            temperature: if observation.user < self.learners {
                self.args.temperature
            } else {
                1.0
            },
            declined: draft.declined,
            suppressed,
            reward: said.reward(self.args.tau),
            kept: None,
            typed: None,
            staleness: 0,
        })
    }

    fn typed_tokens(&self, pause: &Pause) -> anyhow::Result<Vec<u32>> {
        let tokens = self.suggester.encode(&format!("{}{EOL}", pause.rest().trim_end()))?;
        Ok(tokens.into_iter().take(SUGGESTION_TOKENS_MAX).collect())
    }

    /// What the user typed, as if it had been suggested and accepted.
    fn typed(&self, user: usize, pause: &Pause, prompt: Vec<u32>) -> anyhow::Result<Trajectory> {
        let tokens = self.typed_tokens(pause)?;
        Ok(Trajectory {
            user,
            prompt,
            log_probs: vec![0.0; tokens.len()],
            tokens,
            temperature: 1.0,
            declined: false,
            suppressed: false,
            reward: 1.0,
            kept: None,
            typed: None,
            staleness: 0,
        })
    }
}

fn observe(user: usize, pause: &Pause, draft: &Draft) -> Observation {
    Observation {
        user,
        answers: pause.answers,
        reaction: match draft.declined {
            true => Reaction::Declined,
            false => pause.judge(&draft.text),
        },
    }
}
