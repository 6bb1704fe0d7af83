//! Scores an episode: which turns belong to it, until when signals count, and its reward. Pure
//! functions.
//!
//! ```text
//!  turn ── turn ───── turn ──────── horizon ───────┤ closes_at      turn: late
//!  turn ── turn ── end ┤ closes_at   turn: still of it ┤ 1 s later   turn: late
//! ```
//!
//! Which turns belong to it follows from the times of turns, end and deciding feedback alone, not
//! from the order in which they arrived. A turn that was stored after the closure is late too; the
//! closer knows that.

use std::collections::{BTreeMap, BTreeSet};

use event_log::event::{Purpose, Value, to_microseconds};
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use super::{Closing, EpisodeFacts, Outcome, Rule, Signal};
pub(crate) use event_log::event::TURNS_MAX;

/// Open turns of an episode, also those that came after its end. Further ones do not join it.
pub(crate) const OPEN_TURNS_MAX: usize = 2 * TURNS_MAX;
/// How long after its first turn further turns may join an episode. Retention keeps its week, and the
/// later ones, until it closes, so anybody could fill the disk with one that goes on.
pub(crate) const JOIN_MAX: Duration = Duration::days(7);
/// How long after something has closed an episode early a turn still belongs to it. The turn's time
/// is of another host than that of the end, and clocks differ.
pub(crate) const EARLY_CLOSE_SLACK: Duration = Duration::SECOND;

/// Censor codes of episodes only.
pub(crate) const LATE_TURN: &str = "late_turn";
pub(crate) const TOO_MANY_TURNS: &str = "too_many_turns";
pub(crate) const NOT_SHOWN: &str = "not_shown";

/// A generation of an episode.
#[derive(Debug, Clone)]
pub(crate) struct Turn {
    pub id: Uuid,
    pub surface: String,
    pub policy: String,
    pub run_id: Option<Uuid>,
    pub segment: i32,
    /// Its number in the session, as its producer counts.
    pub number: i32,
    pub sampled_at: OffsetDateTime,
    pub stored_at: OffsetDateTime,
    pub closing: Closing,
}

/// The turns of an episode, divided at its close.
#[derive(Debug, Clone)]
pub(crate) struct Divided {
    /// In the order of the session. Not empty.
    pub turns: Vec<Turn>,
    /// Those that came after its close.
    pub late: Vec<Turn>,
    /// Event time after which no signal counts.
    pub closes_at: OffsetDateTime,
    /// Event time after which no turn belongs to it.
    pub over_at: OffsetDateTime,
}

/// The turn whose surface's rule applies: the first by event time.
pub(crate) fn first(turns: &[Turn]) -> Option<&Turn> {
    turns.iter().min_by_key(|turn| (turn.closing.starts_at, turn.id))
}

/// Divides the turns of an episode by its rule. `signals` are those about the episode. `turns` is
/// not empty.
pub(crate) fn divide(
    mut turns: Vec<Turn>,
    ended_at: Option<OffsetDateTime>,
    rule: &Rule,
    signals: &[Signal],
) -> Divided {
    let definition = &rule.definition;
    turns.sort_by_key(|turn| (turn.closing.starts_at, turn.id));
    let ended = ended_at.filter(|_| definition.close_on_episode_end);
    let deciding = signals.iter().filter(|signal| signal.metric == definition.metric);
    let decided = deciding.map(|signal| signal.given_at).min();
    let decided = decided.filter(|_| definition.close_on_feedback);
    // Not before its first turn: what is dated back must not shut out the others.
    let begins_at = turns
        .first()
        .map_or(OffsetDateTime::UNIX_EPOCH, |turn| turn.closing.starts_at);
    let closed_early = [ended, decided].into_iter().flatten().map(|at| at.max(begins_at)).min();
    let joins_until = closed_early.map(|at| at + EARLY_CLOSE_SLACK);
    let horizon_of = |turn: &Turn| to_microseconds(turn.closing.starts_at + definition.horizon());
    let mut horizon = turns.first().map_or(OffsetDateTime::UNIX_EPOCH, horizon_of);
    let longest = turns.first().map_or(horizon, |turn| turn.closing.starts_at + JOIN_MAX);
    let mut count = 1;
    for turn in turns.iter().skip(1) {
        let until = horizon.min(longest).min(joins_until.unwrap_or(horizon));
        if turn.closing.starts_at > until {
            break;
        }
        horizon = horizon_of(turn);
        count += 1;
    }
    let late = turns.split_off(count.min(turns.len()));
    turns.sort_by_key(|turn| (turn.segment, turn.number, turn.id));
    Divided {
        turns,
        late,
        closes_at: closed_early.map_or(horizon, |at| at.min(horizon)),
        over_at: joins_until.map_or(horizon, |at| at.min(horizon)),
    }
}

/// The turns in which the policy said something. In the others the engine failed before the first
/// token, so they are no part of what the session is rewarded for.
fn sampled(turns: &[Turn]) -> impl Iterator<Item = &Turn> {
    turns.iter().filter(|turn| turn.closing.tokens > 0)
}

fn all_declined(turns: &[Turn]) -> bool {
    sampled(turns).next().is_some() && sampled(turns).all(|turn| turn.closing.declined)
}

/// Why these turns have no reward, whatever the feedback.
pub(crate) fn barred(turns: &[Turn]) -> Option<&'static str> {
    let differ = |kind: fn(&Turn) -> (&str, Purpose, Option<Uuid>)| {
        let mut kinds = turns.iter().map(kind);
        let first = kinds.next();
        kinds.any(|other| Some(other) != first)
    };
    let is_production = turns.iter().all(|turn| turn.closing.purpose == Purpose::Production);
    let nobody_saw = |turn: &Turn| turn.closing.declined || turn.closing.shown == Some(false);
    let checks = [
        ("no_consent", turns.iter().any(|turn| !turn.closing.consent)),
        (
            "evaluation",
            turns.iter().any(|turn| turn.closing.purpose == Purpose::Evaluation),
        ),
        (
            "mixed_purposes",
            differ(|turn| {
                let run = turn.run_id.filter(|_| turn.closing.purpose == Purpose::Rollout);
                ("", turn.closing.purpose, run)
            }),
        ),
        (
            "mixed_surfaces",
            differ(|turn| (turn.surface.as_str(), Purpose::Production, None)),
        ),
        (
            "mixed_policies",
            differ(|turn| (turn.policy.as_str(), Purpose::Production, None)),
        ),
        (
            NOT_SHOWN,
            is_production && turns.iter().all(nobody_saw) && !all_declined(turns),
        ),
    ];
    checks.into_iter().find_map(|(code, applies)| applies.then_some(code))
}

/// The score of an episode whose turns are read page by page.
pub(crate) struct Scoring<'a> {
    rule: &'a Rule,
    turns: &'a [Turn],
    closes_at: OffsetDateTime,
    ended: bool,
    /// About the episode, in the order of event time.
    counting: Vec<Signal>,
    /// The first value of each metric of each turn.
    values: Vec<BTreeMap<String, Value>>,
    turn_rewards: Vec<Option<f64>>,
    is_retracted: bool,
    has_failed: bool,
    feedback_at: Option<OffsetDateTime>,
}

impl<'a> Scoring<'a> {
    /// `signals` are those about the episode.
    pub(crate) fn new(
        rule: &'a Rule,
        divided: &'a Divided,
        ended_at: Option<OffsetDateTime>,
        signals: Vec<Signal>,
    ) -> Self {
        let closes_at = divided.closes_at;
        let (counting, retracted) = counting(signals, closes_at, |metric| rule.reads(metric));
        Self {
            rule,
            turns: &divided.turns,
            closes_at,
            ended: ended_at.is_some_and(|at| at <= closes_at),
            feedback_at: counting.last().map(|signal| signal.given_at),
            counting,
            values: vec![BTreeMap::new(); divided.turns.len()],
            turn_rewards: vec![None; divided.turns.len()],
            is_retracted: retracted,
            has_failed: false,
        }
    }

    /// Adds all signals about one turn, given by its place in [`Divided::turns`].
    pub(crate) fn turn(&mut self, nth: usize, signals: Vec<Signal>) {
        let Some(turn) = self.turns.get(nth) else { return };
        let of_episode: BTreeSet<&str> = self
            .rule
            .expression
            .iter()
            .flat_map(|expression| expression.turn_metrics())
            .map(String::as_str)
            .collect();
        let is_retracted = signals.iter().any(|signal| {
            of_episode.contains(signal.metric.as_str())
                && signal.given_at <= self.closes_at
                && signal.retracted_at.is_some_and(|at| at <= self.closes_at)
        });
        self.is_retracted |= is_retracted;
        let (counting, _) = counting(signals, self.closes_at, |_| true);
        if let Some(expression) = self.rule.turn_expression.as_ref().filter(|_| turn.closing.tokens > 0) {
            let read: Vec<&Signal> = counting
                .iter()
                .filter(|signal| expression.reads(&signal.metric))
                .collect();
            match expression.reward(&turn.closing, &read) {
                Ok(reward) => self.turn_rewards[nth] = reward,
                Err(_) => self.has_failed = true,
            }
        }
        for signal in counting {
            if of_episode.contains(signal.metric.as_str()) {
                self.feedback_at = self.feedback_at.max(Some(signal.given_at));
                // Only how many texts there are is of interest.
                let value = match signal.value {
                    Value::Text(_) => Value::Text(String::new()),
                    value => value,
                };
                self.values[nth].entry(signal.metric).or_insert(value);
            }
        }
    }

    /// The outcome of the episode, and the own reward of each turn.
    pub(crate) fn finish(self) -> (Outcome, Vec<Option<f64>>) {
        let censored = |code| (Outcome::Censored { code }, vec![None; self.turns.len()]);
        if self.has_failed {
            return censored("reward_error");
        }
        let definition = &self.rule.definition;
        let rewarded = match &self.rule.expression {
            Some(expression) => {
                let counting: Vec<&Signal> = self.counting.iter().collect();
                match expression.episode_reward(&self.facts(), &counting) {
                    Ok(reward) => reward.map(|reward| (reward, "expression", self.feedback_at)),
                    // Not logged, because the error may quote user text. The metric counts the code.
                    Err(_) => return censored("reward_error"),
                }
            }
            None => match (all_declined(self.turns), definition.decline) {
                (true, Some(reward)) => Some((reward, "decline", None)),
                _ => self.counting.iter().find_map(|signal| {
                    let (reward, name) = definition.reward_of(&signal.value)?;
                    Some((reward, name, Some(signal.given_at)))
                }),
            },
        };
        match rewarded {
            Some((reward, signal, feedback_at)) => {
                let outcome = Outcome::Rewarded {
                    reward,
                    signal,
                    feedback_at,
                };
                (outcome, self.turn_rewards)
            }
            None if self.is_retracted => censored("retracted"),
            None => censored("no_feedback"),
        }
    }

    fn facts(&self) -> EpisodeFacts {
        let sampled = || sampled(self.turns);
        let segments: BTreeSet<i32> = sampled().map(|turn| turn.segment).collect();
        let begun = sampled().map(|turn| turn.sampled_at).min();
        let last = sampled().map(|turn| turn.closing.starts_at).max();
        let mut of_turns: BTreeMap<String, Vec<Value>> = BTreeMap::new();
        for values in &self.values {
            for (metric, value) in values {
                of_turns.entry(metric.clone()).or_default().push(value.clone());
            }
        }
        EpisodeFacts {
            turns: sampled().count(),
            segments: segments.len(),
            tokens: sampled().map(|turn| u64::from(turn.closing.tokens)).sum(),
            seconds: begun
                .zip(last)
                .map_or(0.0, |(begun, last)| (last - begun).as_seconds_f64()),
            ended: self.ended,
            declined: all_declined(self.turns),
            finish_reason: sampled()
                .last()
                .map_or_else(String::new, |turn| turn.closing.finish_reason.clone()),
            of_turns,
        }
    }
}

/// The signals that count, in the order of event time, and whether any was retracted.
fn counting(signals: Vec<Signal>, closes_at: OffsetDateTime, reads: impl Fn(&str) -> bool) -> (Vec<Signal>, bool) {
    let (retracted, mut counting): (Vec<Signal>, Vec<Signal>) = signals
        .into_iter()
        .filter(|signal| reads(&signal.metric) && signal.given_at <= closes_at)
        .partition(|signal| signal.retracted_at.is_some_and(|at| at <= closes_at));
    counting.sort_by_key(|signal| (signal.given_at, signal.id));
    (counting, !retracted.is_empty())
}

#[cfg(test)]
mod tests;
