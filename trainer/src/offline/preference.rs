//! DPO and KTO runs: the trajectories of a dataset, compared by their rewards.
//!
//! A step has two forward passes with the weights that serve: of the head, and of the run's base version,
//! which is the reference. The latter is computed once per generation while the run executes. From their
//! sums come the loss and its derivative by each trajectory ([`crate::learn::preference`]), and the
//! learner adds the trajectory's gradient times that derivative. What the sampler logged decides nothing.
//!
//! KTO's reference point z₀ is measured on answers with other prompts: the first prompt of each
//! trajectory of the batch, with what the next one says after its own first prompt.
//!
//! A trajectory with a turn that may not be used is left out as a whole, with its partner. Every step
//! notes how many, and a DPO run has an event about what is in no pair.

use super::Failed;
use super::execution::Execution;
use super::order::{Order, Position, Unit};
use super::pages::{Pages, generations_of};
use super::pairs::{Candidate, Candidates, Pair, Unpaired};
use super::training::{self, Accumulated, Batch, Batches, Plan, supervised};
use crate::computing::Computing;
use crate::executor::Executor;
use crate::learn::preference::{self, LogProbs};
use crate::learn::score;
use crate::trainer::Trainer;
use anyhow::Context;
use model::exact::ExactModel;
use runs::api::preference::{Dpo, Kto, PairBy, step_settings};
use runs::claim;
use runs::dataset::Member;
use runs::sample::Sample;
use runs::select::Answers;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use uuid::Uuid;

/// What the two kinds do differently.
pub(super) trait Objective: DeserializeOwned {
    /// What has a loss of its own.
    type Unit: Unit + Send + Sync;

    fn plan(&self) -> Plan<'_>;

    /// Units per step.
    fn batch_size(&self) -> usize;

    /// What there is to train on.
    async fn units(
        &self,
        run: &Execution<'_>,
        executor: &Executor<'_>,
        members: Vec<Member>,
    ) -> anyhow::Result<Vec<Self::Unit>>;

    fn members(unit: &Self::Unit) -> Vec<&Member>;

    /// Samples of which z₀ is the mean, each with the trajectory's index.
    fn mismatched(trajectories: &[Vec<Sample>], context: usize) -> Vec<(usize, Sample)>;

    /// For a trainer outside: the sign of each trajectory, with its weight. What has the same number is one unit.
    fn sides(&self, trajectories: &[Vec<Sample>]) -> Vec<(usize, f64)>;

    /// The mean loss over the units, and for each trajectory what its gradient is weighed with. The
    /// learner divides by the number of trajectories.
    fn judge(&self, trajectories: &[Scored], mismatched: &[LogProbs]) -> Judged;
}

/// A trajectory with its log-probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Scored {
    log_probs: LogProbs,
    reward: f64,
}

/// What a batch's loss is.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Judged {
    loss: f64,
    /// −∂(sum of losses)/∂log π of each trajectory, times the trajectories of a unit.
    advantages: Vec<f64>,
    /// For the step's notes.
    metrics: Value,
}

/// The units of a run, and what they are compared by.
struct Comparison<'a, O> {
    run: &'a Execution<'a>,
    config: &'a O,
    /// `None`: a trainer outside has its own.
    reference: Option<Referee>,
}

/// The base version, and what it gave so far.
struct Referee {
    model: Arc<ExactModel>,
    computing: Computing,
    known: HashMap<Uuid, f64>,
}

pub(super) async fn train<O: Objective>(run: &Execution<'_>) -> anyhow::Result<()> {
    let config: O = run.config()?;
    let plan = config.plan();
    let executor = run.open(plan.trainer, plan.lora, plan.seed).await?;
    let reference = match executor.outside {
        Some(_) => None,
        None => Some(Referee::load(run.trainer, run.base_version.unwrap_or(executor.head)).await?),
    };
    let (_, members) = run.dataset(plan.dataset, None).await?;
    let units = config.units(run, &executor, members).await?;
    if units.is_empty() {
        let reason = format!(
            "dataset {} has nothing to compare; the events of this run say why",
            plan.dataset
        );
        return Err(Failed(reason).into());
    }
    let batches = Comparison {
        run,
        config: &config,
        reference,
    };
    training::make_steps(run, executor, plan, units, batches).await
}

impl<O: Objective> Batches for Comparison<'_, O> {
    type Unit = O::Unit;

    async fn accumulate(
        &mut self,
        executor: &mut Executor<'_>,
        units: &mut Order<O::Unit>,
        position: &mut Position,
    ) -> anyhow::Result<Accumulated> {
        let units = units.take(position, self.config.batch_size());
        let members: Vec<Member> = units.iter().flat_map(O::members).cloned().collect();
        let mut read = Batch::new(&members);
        let mut by_id: HashMap<Uuid, Sample> = HashMap::new();
        let mut pages = Pages::new(self.run, generations_of(&members));
        while let Some(page) = pages.read(&executor.model_limits, Answers::Sampled).await? {
            let samples = read.add(page).into_iter();
            by_id.extend(samples.map(|sample| (sample.generation, sample)));
        }
        let whole = |member: &&Member| member.generations.iter().all(|id| by_id.contains_key(id));
        let kept = units.iter().map(O::members).filter(|unit| unit.iter().all(whole));
        let mut trajectories: Vec<Vec<Sample>> = kept
            .flatten()
            .map(|member| {
                member
                    .generations
                    .iter()
                    .filter_map(|id| by_id.get(id).cloned())
                    .collect()
            })
            .collect();
        let incomplete = members.len() - trajectories.len();
        let mut notes = json!({"refused": read.refused, "missing": read.missing, "incomplete": incomplete});
        if trajectories.is_empty() {
            return Ok(Accumulated {
                loss: None,
                is_empty: true,
                notes,
            });
        }
        let judged = match self.reference.is_some() {
            true => self.judge(executor, &trajectories).await?,
            false => self.sided(&mut trajectories),
        };
        let (settings, limits) = (self.config.plan().settings, self.run.trainer.options.offline.guards);
        let turns = trajectories.iter().zip(&judged.advantages);
        let advantages = turns.flat_map(|(turns, advantage)| turns.iter().map(|_| *advantage));
        let advantages: Vec<f64> = advantages.collect();
        let samples: Vec<Sample> = trajectories.into_iter().flatten().collect();
        executor.accumulate(samples, advantages, settings, limits).await?;
        notes["preference"] = judged.metrics;
        Ok(Accumulated {
            loss: self.reference.is_some().then_some(judged.loss),
            is_empty: false,
            notes,
        })
    }
}

impl<O: Objective> Comparison<'_, O> {
    /// What a trainer outside gets: which trajectories are one unit, and the sign of each as its advantage.
    fn sided(&self, trajectories: &mut [Vec<Sample>]) -> Judged {
        let sides = self.config.sides(trajectories);
        for (turns, (unit, _)) in trajectories.iter_mut().zip(&sides) {
            turns.iter_mut().for_each(|turn| turn.group = Some(unit.to_string()));
        }
        Judged {
            loss: 0.0,
            advantages: sides.into_iter().map(|(_, side)| side).collect(),
            metrics: Value::Null,
        }
    }

    async fn judge(&mut self, executor: &Executor<'_>, trajectories: &[Vec<Sample>]) -> anyhow::Result<Judged> {
        let context = usize::try_from(executor.model_limits.context).unwrap_or(usize::MAX);
        let samples: Vec<Sample> = trajectories.iter().flatten().cloned().collect();
        let policy = of_head(executor, samples.clone()).await?;
        let referee = self.reference.as_mut().context("no reference is loaded")?;
        let reference = referee.of(samples).await?;
        let mut sums = policy.into_iter().zip(reference);
        let scored: Vec<Scored> = trajectories
            .iter()
            .map(|turns| {
                let mut scored = Scored::default();
                for (turn, (policy, reference)) in turns.iter().zip(&mut sums) {
                    scored.log_probs.add(LogProbs { policy, reference });
                    scored.reward = turn.reward;
                }
                scored
            })
            .collect();
        let (of, samples): (Vec<usize>, Vec<Sample>) = O::mismatched(trajectories, context).into_iter().unzip();
        let policy = of_head(executor, samples.clone()).await?;
        let reference = referee.compute(samples).await?;
        let mut mismatched: BTreeMap<usize, LogProbs> = BTreeMap::new();
        for (trajectory, (policy, reference)) in of.into_iter().zip(policy.into_iter().zip(reference)) {
            let sum = mismatched.entry(trajectory).or_default();
            sum.add(LogProbs { policy, reference });
        }
        let mismatched: Vec<LogProbs> = mismatched.into_values().collect();
        Ok(self.config.judge(&scored, &mismatched))
    }
}

/// Σ log π of samples by the head.
async fn of_head(executor: &Executor<'_>, samples: Vec<Sample>) -> anyhow::Result<Vec<f64>> {
    executor.learner.with(move |learner| learner.log_probs(&samples)).await
}

impl Referee {
    async fn load(trainer: &Trainer, version: i64) -> anyhow::Result<Self> {
        let checkpoint = trainer.publisher.load(version).await.context("load the base version")?;
        let arithmetic = trainer.arithmetic.clone();
        let build = move || ExactModel::with_arithmetic(&checkpoint, &arithmetic);
        let computing = trainer.computing.clone();
        let model = computing
            .on_blocking_thread(build)
            .await?
            .context("build the model of the base version")?;
        Ok(Referee {
            model: Arc::new(model),
            computing,
            known: HashMap::new(),
        })
    }

    /// Σ log π_ref of generations, each computed once.
    async fn of(&mut self, samples: Vec<Sample>) -> anyhow::Result<Vec<f64>> {
        let ids: Vec<Uuid> = samples.iter().map(|sample| sample.generation).collect();
        let new: Vec<Sample> = samples
            .into_iter()
            .filter(|sample| !self.known.contains_key(&sample.generation))
            .collect();
        let of: Vec<Uuid> = new.iter().map(|sample| sample.generation).collect();
        self.known.extend(of.into_iter().zip(self.compute(new).await?));
        Ok(ids.iter().filter_map(|id| self.known.get(id).copied()).collect())
    }

    /// Σ log π_ref of samples that are no generations.
    async fn compute(&self, samples: Vec<Sample>) -> anyhow::Result<Vec<f64>> {
        let model = Arc::clone(&self.model);
        let work = move || score::log_probs(&model, &samples, score::TOKENS_AT_ONCE);
        self.computing.on_blocking_thread(work).await?
    }
}

impl Objective for Dpo {
    type Unit = Pair;

    fn plan(&self) -> Plan<'_> {
        Plan {
            dataset: &self.dataset,
            steps: self.steps,
            settings: step_settings(self.learning_rate),
            seed: self.seed,
            lora: self.lora.as_ref(),
            trainer: &self.trainer,
        }
    }

    fn batch_size(&self) -> usize {
        self.batch_size as usize
    }

    /// Reads the first turn of every trajectory to pair them.
    async fn units(
        &self,
        run: &Execution<'_>,
        executor: &Executor<'_>,
        members: Vec<Member>,
    ) -> anyhow::Result<Vec<Pair>> {
        let trajectories = members.len();
        let first = |member: Member| member.generations.first().copied().map(|id| (id, member));
        let mut by_first: HashMap<Uuid, Member> = members.into_iter().filter_map(first).collect();
        let mut ids: Vec<Uuid> = by_first.keys().copied().collect();
        ids.sort_unstable();
        let mut candidates = Candidates::default();
        let mut pages = Pages::new(run, ids);
        while let Some(read) = pages.read(&executor.model_limits, Answers::Sampled).await? {
            for (code, ids) in read.refused {
                *candidates.unpaired.refused.entry(code).or_default() += ids.len();
            }
            candidates.unpaired.missing += read.missing;
            for sample in read.samples {
                let Some(member) = by_first.remove(&sample.generation) else {
                    continue;
                };
                match key(self.pair_by, &sample) {
                    Some(key) => {
                        let candidate = Candidate {
                            reward: sample.reward,
                            member,
                            tokens: sample.tokens,
                        };
                        candidates.add(key, candidate);
                    }
                    None => candidates.unpaired.no_group += 1,
                }
            }
        }
        let (pairs, unpaired) = candidates.pair(self.margin);
        note_pairs(run, trajectories, pairs.len(), &unpaired).await?;
        Ok(pairs)
    }

    fn members(pair: &Pair) -> Vec<&Member> {
        vec![&pair.chosen, &pair.rejected]
    }

    fn mismatched(_: &[Vec<Sample>], _: usize) -> Vec<(usize, Sample)> {
        vec![]
    }

    fn sides(&self, trajectories: &[Vec<Sample>]) -> Vec<(usize, f64)> {
        let alternating = [1.0, -1.0].into_iter().cycle().take(trajectories.len());
        alternating.enumerate().map(|(place, side)| (place / 2, side)).collect()
    }

    fn judge(&self, trajectories: &[Scored], _: &[LogProbs]) -> Judged {
        let (mut loss, mut margin, mut right) = (0.0, 0.0, 0.0);
        let mut rewards = [0.0; 2];
        let mut advantages = Vec::with_capacity(trajectories.len());
        let pairs = trajectories.as_chunks::<2>().0;
        for [chosen, rejected] in pairs {
            let pair = preference::dpo(chosen.log_probs, rejected.log_probs, self.beta);
            let gained = [chosen, rejected].map(|one| self.beta * one.log_probs.log_ratio());
            loss += pair.loss;
            margin += gained[0] - gained[1];
            right += f64::from(u8::from(gained[0] > gained[1]));
            rewards = [rewards[0] + gained[0], rewards[1] + gained[1]];
            advantages.extend(pair.gradient.map(|gradient| -2.0 * gradient));
        }
        let mean = |sum: f64| sum / pairs.len().max(1) as f64;
        let metrics = json!({
            "pairs": pairs.len(),
            "accuracy": mean(right),
            "margin": mean(margin),
            "chosen": mean(rewards[0]),
            "rejected": mean(rewards[1]),
        });
        Judged {
            loss: mean(loss),
            advantages,
            metrics,
        }
    }
}

/// What a trajectory has in common with its partner. `None`: it was not sampled in a group.
fn key(by: PairBy, first: &Sample) -> Option<Vec<u8>> {
    match by {
        PairBy::Prompt => {
            let mut hasher = blake3::Hasher::new();
            for id in &first.prompt {
                hasher.update(&id.to_le_bytes());
            }
            Some(hasher.finalize().as_bytes().to_vec())
        }
        PairBy::Group => first.group.as_ref().map(|group| group.clone().into_bytes()),
    }
}

async fn note_pairs(run: &Execution<'_>, trajectories: usize, pairs: usize, unpaired: &Unpaired) -> anyhow::Result<()> {
    let data = json!({"trajectories": trajectories, "pairs": pairs, "unpaired": unpaired});
    let message = format!(
        "{pairs} pairs of {trajectories} trajectories; in no pair: {}",
        data["unpaired"]
    );
    let mut connection = run.trainer.pool.acquire().await?;
    claim::append_event(&mut connection, run.claim.run, "info", &message, &data).await?;
    Ok(())
}

impl Objective for Kto {
    type Unit = Member;

    fn plan(&self) -> Plan<'_> {
        Plan {
            dataset: &self.dataset,
            steps: self.steps.unwrap_or(1),
            settings: step_settings(self.learning_rate),
            seed: self.seed,
            lora: self.lora.as_ref(),
            trainer: &self.trainer,
        }
    }

    fn batch_size(&self) -> usize {
        self.batch_size as usize
    }

    async fn units(&self, _: &Execution<'_>, _: &Executor<'_>, members: Vec<Member>) -> anyhow::Result<Vec<Member>> {
        Ok(members)
    }

    fn members(member: &Member) -> Vec<&Member> {
        vec![member]
    }

    fn mismatched(trajectories: &[Vec<Sample>], context: usize) -> Vec<(usize, Sample)> {
        let count = trajectories.len();
        let with_next = (0..count).map(|at| (at, &trajectories[at], &trajectories[(at + 1) % count]));
        let other = with_next.filter(|_| count > 1).filter_map(|(at, turns, next)| {
            let prompt = &turns.first()?.prompt;
            let own = &next.first()?.prompt;
            let moved = |turn: &Sample| {
                let after = turn.prompt.strip_prefix(own.as_slice())?;
                let prompt = [prompt.as_slice(), after].concat();
                let moved = supervised(Sample { prompt, ..turn.clone() });
                (moved.input_len() <= context).then_some((at, moved))
            };
            next.iter().map(moved).collect::<Option<Vec<_>>>()
        });
        other.flatten().collect()
    }

    fn sides(&self, trajectories: &[Vec<Sample>]) -> Vec<(usize, f64)> {
        let rewards = trajectories
            .iter()
            .map(|turns| turns.first().map_or(0.0, |turn| turn.reward));
        let side = |reward: f64| match reward >= self.threshold {
            true => self.desirable_weight,
            false => -self.undesirable_weight,
        };
        rewards.map(side).enumerate().collect()
    }

    fn judge(&self, trajectories: &[Scored], mismatched: &[LogProbs]) -> Judged {
        let reference_point = preference::kto_reference_point(mismatched);
        let (mut loss, mut desirable) = (0.0, 0);
        let mut rewards = [0.0; 2];
        let mut advantages = Vec::with_capacity(trajectories.len());
        for one in trajectories {
            let good = one.reward >= self.threshold;
            let weight = if good {
                self.desirable_weight
            } else {
                self.undesirable_weight
            };
            let single = preference::kto(one.log_probs, good, reference_point, self.beta, weight);
            loss += single.loss;
            desirable += usize::from(good);
            rewards[usize::from(!good)] += self.beta * one.log_probs.log_ratio();
            advantages.push(-single.gradient);
        }
        let undesirable = trajectories.len() - desirable;
        let metrics = json!({
            "desirable": desirable,
            "undesirable": undesirable,
            "reference_point": reference_point,
            "mismatched": mismatched.len(),
            "chosen": rewards[0] / desirable.max(1) as f64,
            "rejected": rewards[1] / undesirable.max(1) as f64,
        });
        Judged {
            loss: loss / trajectories.len().max(1) as f64,
            advantages,
            metrics,
        }
    }
}

#[cfg(test)]
mod tests;
