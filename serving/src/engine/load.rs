//! What an engine is doing now, what it has done so far, and how much of it rollouts may use.
//! Everything that `tide` knows of an engine. Pure data.

use super::caller::Work;
use std::collections::BTreeMap;
use std::time::Duration;

/// Kinds of work that are counted one by one. Those of further runs are counted without their run.
const WORKS_MAX: usize = 1024;

/// How much of an engine rollouts and evaluations may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// Slots, over all versions. More are taken back between two passes.
    pub slots: usize,
    /// Production goes to other engines of its version, as long as they have free slots.
    pub whole: bool,
}

impl Default for Limit {
    /// All that production leaves.
    fn default() -> Self {
        Limit {
            slots: usize::MAX,
            whole: false,
        }
    }
}

/// A look at one engine.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Load {
    /// Whether it takes requests now.
    pub serves: bool,
    /// Whether another engine that is not lent whole serves the same version.
    pub has_substitute: bool,
    /// Sequences that run.
    pub production: usize,
    pub background: usize,
    /// Sequences that wait for this engine, or for any of several.
    pub production_waiting: usize,
    pub background_waiting: usize,
    /// Background sequences that gave their slots back and will continue. They are also among those that
    /// wait.
    pub parked: usize,
    pub totals: Totals,
}

/// Counted since the engine's start. Nothing here ever falls.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Totals {
    pub work: BTreeMap<Work, Used>,
    /// How often a running background sequence lost its slot.
    pub taken_back: u64,
    /// The longest time from a request for slots to the last of them being free, in seconds.
    pub taking_back_seconds_max: f64,
    /// Of production, in passes without background sequences and in passes with some.
    pub alone: Felt,
    pub beside: Felt,
}

/// What one kind of work has used.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Used {
    /// Tokens that were sampled and not thrown away.
    pub sampled: u64,
    /// Tokens of prompts that were read.
    pub read: u64,
    /// Tokens that were read a second time, after a slot was taken back.
    pub read_again: u64,
    /// Tokens that were sampled and thrown away.
    pub thrown_away: u64,
    /// One sequence in a slot for a second is one.
    pub slot_seconds: f64,
    /// Its part of the engine's time. Of our own engine by tokens in each pass, of others by slots.
    pub engine_seconds: f64,
}

/// What users felt.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Felt {
    pub first_tokens: u64,
    /// From the request's arrival.
    pub first_token_seconds: f64,
    /// Tokens after the first.
    pub tokens: u64,
    /// From one token to the next.
    pub token_seconds: f64,
}

/// A sequence's part of one pass.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    pub work: Work,
    /// Of the class [`Background`](super::TrafficClass::Background).
    pub background: bool,
    pub read: usize,
    pub read_again: usize,
    pub samples: bool,
    /// From the request to this token, if it is the first of its sequence.
    pub first_token: Option<Duration>,
}

impl Totals {
    pub fn of(&mut self, work: Work) -> &mut Used {
        let known = self.work.contains_key(&work) || self.work.len() < WORKS_MAX;
        self.work
            .entry(if known { work } else { work.without_run() })
            .or_default()
    }

    /// Counts a pass that took so long.
    pub fn count(&mut self, parts: &[Part], took: Duration) {
        let took = took.as_secs_f64();
        let tokens: usize = parts.iter().map(|part| part.read).sum();
        let shared = parts.iter().any(|part| part.background);
        for part in parts {
            let used = self.of(part.work);
            used.slot_seconds += took;
            used.engine_seconds += took * part.read as f64 / tokens.max(1) as f64;
            used.read += (part.read - part.read_again) as u64;
            used.read_again += part.read_again as u64;
            used.sampled += u64::from(part.samples);
            if part.background || !part.samples {
                continue;
            }
            let felt = match shared {
                true => &mut self.beside,
                false => &mut self.alone,
            };
            match part.first_token {
                Some(waited) => {
                    felt.first_tokens += 1;
                    felt.first_token_seconds += waited.as_secs_f64();
                }
                None => {
                    felt.tokens += 1;
                    felt.token_seconds += took;
                }
            }
        }
    }

    /// Slots were free so long after they were asked for.
    pub fn taken_back_after(&mut self, waited: Duration) {
        let waited = waited.as_secs_f64();
        metrics::histogram!("springtide_tide_taking_back_seconds").record(waited);
        self.taking_back_seconds_max = self.taking_back_seconds_max.max(waited);
    }

    /// A background sequence ended without an answer: its tokens are of no use.
    pub fn throw_away(&mut self, work: Work, tokens: u64) {
        let used = self.of(work);
        let tokens = tokens.min(used.sampled);
        used.sampled -= tokens;
        used.thrown_away += tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn part(work: Work, read: usize, read_again: usize, samples: bool) -> Part {
        Part {
            work,
            background: work != Work::Production,
            read,
            read_again,
            samples,
            first_token: None,
        }
    }

    #[test]
    fn a_pass_is_divided_by_tokens_and_each_slot_counts_its_time() {
        let run = Work::Rollout(Some(Uuid::from_u128(1)));
        let mut totals = Totals::default();
        let parts = [part(Work::Production, 1, 0, true), part(run, 3, 2, true)];
        totals.count(&parts, Duration::from_millis(400));
        totals.count(&parts[..1], Duration::from_millis(100));
        let user = totals.work[&Work::Production];
        assert!((user.engine_seconds - 0.2).abs() < 1e-9 && (user.slot_seconds - 0.5).abs() < 1e-9);
        let rollout = totals.work[&run];
        assert!((rollout.engine_seconds - 0.3).abs() < 1e-9);
        assert_eq!((rollout.read, rollout.read_again, rollout.sampled), (1, 2, 1));
        assert_eq!((totals.beside.tokens, totals.alone.tokens), (1, 1));
        assert!((totals.beside.token_seconds - 0.4).abs() < 1e-9);
    }

    #[test]
    fn thrown_away_tokens_are_no_longer_of_use() {
        let mut totals = Totals::default();
        let run = Work::Rollout(None);
        totals.count(&[part(run, 1, 0, true)], Duration::ZERO);
        totals.throw_away(run, 5);
        assert_eq!((totals.work[&run].sampled, totals.work[&run].thrown_away), (0, 1));
    }

    #[test]
    fn more_runs_than_are_counted_share_one_count() {
        let mut totals = Totals::default();
        for run in 0..WORKS_MAX as u128 + 5 {
            totals.of(Work::Rollout(Some(Uuid::from_u128(run)))).sampled += 1;
        }
        assert_eq!(totals.work.len(), WORKS_MAX + 1);
        assert_eq!(totals.work[&Work::Rollout(None)].sampled, 5);
    }
}
