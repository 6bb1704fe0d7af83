//! Random sessions, whose trajectory is the episode. [`crate::session_model`] says what becomes of
//! them.

use std::collections::BTreeMap;

use event_log::event::{EpisodeEnd, Event, Feedback, Generation, Purpose, Retraction, Target, Value, VersionSpan};
use ingest::reward::{Definition, MetricType, Unit};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use uuid::Uuid;

use crate::ingest_order::{Role, StoryCopy};
use fixture::ingest::generation;

const SOURCE: &str = "tests/session";
pub const EPISODE: Role = 0;

/// How the three surfaces close, and what they pay.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    pub horizon_ms: i64,
    /// The surface `task` closes at the end of the session.
    pub ending: bool,
    /// The surface `exam` closes at the first score.
    pub graded: bool,
}

pub const RULES: Rules = Rules {
    horizon_ms: 2_000,
    ending: true,
    graded: true,
};

/// `talk` has thumbs, `task` an expression and rewards of turns, `exam` a grader.
pub const SURFACES: [&str; 3] = ["talk", "task", "exam"];
/// Depends on everything that an expression knows of a session's turns, also on their order.
const TASK: &str = "score != null ? score : turn.count.accept == 0 ? null : \
                    turn.mean.accept + 0.125 * double(turns) + 0.25 * double(segments) + double(tokens) / 1024.0 \
                    + (turn.last.accept ? 8.0 : 0.0) + (ended ? 16.0 : 0.0)";
const TASK_TURN: &str = "accept == null ? null : (accept ? 1.0 : -1.0)";

pub fn surfaces(rules: Rules) -> Vec<Definition> {
    let named = |name: &str| Definition {
        name: name.to_owned(),
        trajectory: Unit::Episode,
        horizon_seconds: rules.horizon_ms as f64 / 1_000.0,
        ..Definition::completion()
    };
    vec![
        named("talk"),
        Definition {
            metric: "score".to_owned(),
            metric_type: MetricType::Float,
            reward: Some(TASK.to_owned()),
            turn_reward: Some(TASK_TURN.to_owned()),
            close_on_episode_end: rules.ending,
            ..named("task")
        },
        Definition {
            metric: "score".to_owned(),
            metric_type: MetricType::Float,
            decline: None,
            close_on_feedback: rules.graded,
            ..named("exam")
        },
    ]
}

#[derive(Debug, Clone)]
pub struct Step {
    /// Milliseconds after the session began.
    pub at: i64,
    pub action: Action,
}

#[derive(Debug, Clone)]
pub enum Action {
    Turn(Turn),
    Feedback {
        role: Role,
        /// Absent: about the session.
        turn: Option<Role>,
        metric: &'static str,
        value: Value,
    },
    Retraction {
        role: Role,
        feedback: Role,
    },
    End {
        nth: u16,
    },
}

#[derive(Debug, Clone)]
pub struct Turn {
    pub role: Role,
    pub number: u32,
    pub segment: u32,
    pub surface: &'static str,
    pub policy: &'static str,
    pub purpose: Purpose,
    /// Of a rollout.
    pub run: Option<Uuid>,
    /// Versions and how many tokens each sampled.
    pub versions: Vec<(i64, u32)>,
    pub consent: bool,
    pub declined: bool,
    pub shown: Option<bool>,
}

impl Turn {
    pub fn tokens(&self) -> u32 {
        self.versions.iter().map(|(_, tokens)| tokens).sum()
    }
}

impl Step {
    /// The role of the row, and whether several sources may write it.
    pub fn role(&self) -> Role {
        match &self.action {
            Action::Turn(turn) => turn.role,
            Action::Feedback { role, .. } | Action::Retraction { role, .. } => *role,
            Action::End { .. } => EPISODE,
        }
    }

    pub fn is_feedback(&self) -> bool {
        matches!(self.action, Action::Feedback { .. } | Action::Retraction { .. })
    }
}

/// One to six turns of growing versions in growing segments, some of them late, some that do not
/// belong together, and up to ten events about them.
pub fn session(rng: &mut StdRng) -> Vec<Step> {
    let mut next = EPISODE;
    let mut role = || {
        next += 1;
        next
    };
    let surface = *SURFACES.choose(rng).unwrap();
    let unseen = rng.random_bool(0.05);
    let runs = [Uuid::from_u128(1), Uuid::from_u128(2)];
    let of_harness = rng.random_bool(0.1);
    let mut steps = Vec::new();
    let mut turns = Vec::new();
    let (mut at, mut segment, mut version) = (0, 0, 3);
    for number in 0..rng.random_range(1..=6) {
        // Few distinct times, so that some coincide. Some pauses are longer than the horizon.
        at += 250 * rng.random_range(0..=5) + if rng.random_bool(0.08) { 1_500 } else { 0 };
        segment += u32::from(rng.random_bool(0.2));
        version += i64::from(rng.random_bool(0.15));
        let mut versions = vec![(version, rng.random_range(1..=8))];
        if rng.random_bool(0.15) {
            version += 1;
            versions.push((version, rng.random_range(1..=8)));
        }
        let (purpose, run) = match rng.random_range(0..100) {
            0 => (Purpose::Evaluation, None),
            1 => (Purpose::Rollout, Some(runs[1])),
            _ if of_harness => (Purpose::Rollout, Some(runs[0])),
            _ => (Purpose::Production, None),
        };
        let turn = Turn {
            role: role(),
            // Producers count, and some count wrong. A subagent goes on in an earlier segment.
            number: number - u32::from(number > 0 && rng.random_bool(0.05)),
            segment: if rng.random_bool(0.05) { 0 } else { segment },
            surface: if rng.random_bool(0.02) { "exam" } else { surface },
            policy: if rng.random_bool(0.02) { "other" } else { "demo" },
            purpose,
            run,
            versions,
            consent: !rng.random_bool(0.02),
            declined: rng.random_bool(0.15),
            shown: if unseen {
                Some(false)
            } else {
                *[None, Some(true), Some(false)].choose(rng).unwrap()
            },
        };
        turns.push(turn.role);
        steps.push(Step {
            at,
            action: Action::Turn(turn),
        });
    }
    let last = at;
    let feedback: Vec<Role> = (0..rng.random_range(0..=6)).map(|_| role()).collect();
    for &role in &feedback {
        let turn = rng.random_bool(0.5).then(|| *turns.choose(rng).unwrap());
        let (metric, value) = match rng.random_range(0..5) {
            0 => ("comment", Value::Text("well".to_owned())),
            1 | 2 => ("score", Value::Float(f64::from(rng.random_range(0..5)))),
            _ => ("accept", Value::Bool(rng.random_bool(0.5))),
        };
        let action = Action::Feedback {
            role,
            turn,
            metric,
            value,
        };
        steps.push(Step {
            at: 250 * rng.random_range(0..=(last + 2_500) / 250),
            action,
        });
    }
    for _ in 0..rng.random_range(0..=2) {
        let missing = feedback.is_empty() || rng.random_bool(0.1);
        let feedback = if missing {
            role()
        } else {
            *feedback.choose(rng).unwrap()
        };
        steps.push(Step {
            at: 250 * rng.random_range(0..=(last + 2_500) / 250),
            action: Action::Retraction { role: role(), feedback },
        });
    }
    for nth in 0..rng.random_range(0..=2) {
        steps.push(Step {
            at: 250 * rng.random_range(0..=(last + 1_000) / 250),
            action: Action::End { nth },
        });
    }
    steps
}

/// Whether its turns are on several surfaces.
pub fn is_mixed(steps: &[Step]) -> bool {
    let mut surfaces = steps.iter().filter_map(|step| match &step.action {
        Action::Turn(turn) => Some(turn.surface),
        _ => None,
    });
    let first = surfaces.next();
    surfaces.any(|surface| Some(surface) != first)
}

/// What comes after everything has closed: a turn, and feedback about the session and about a turn.
pub fn afterwards(steps: &[Step]) -> Vec<Step> {
    let first = steps.iter().find_map(|step| match &step.action {
        Action::Turn(turn) => Some((step.at, turn.clone())),
        _ => None,
    });
    let (at, first) = first.unwrap();
    let about = |role, turn| Step {
        at,
        action: Action::Feedback {
            role,
            turn,
            metric: "accept",
            value: Value::Bool(true),
        },
    };
    let turn = Turn {
        role: 900,
        number: 900,
        ..first.clone()
    };
    vec![
        Step {
            at,
            action: Action::Turn(turn),
        },
        about(901, None),
        about(902, Some(first.role)),
    ]
}

impl StoryCopy {
    pub fn event_of_session(self, step: &Step) -> Event {
        let time = self.begin() + time::Duration::milliseconds(step.at);
        match &step.action {
            Action::Turn(turn) => {
                let tokens = turn.tokens();
                let span = |(version, tokens): &(i64, u32)| VersionSpan {
                    version: *version,
                    root: [u8::try_from(*version).unwrap(); 32],
                    tokens: *tokens,
                };
                let generation = Generation {
                    id: self.id(turn.role),
                    episode_id: self.id(EPISODE),
                    segment: turn.segment,
                    turn: turn.number,
                    surface: turn.surface.to_owned(),
                    policy: turn.policy.to_owned(),
                    purpose: turn.purpose,
                    run_id: turn.run,
                    versions: turn.versions.iter().map(span).collect(),
                    token_ids: (0..tokens).collect(),
                    logprobs: vec![-0.5; tokens as usize],
                    train_mask: None,
                    sampling: None,
                    consent: turn.consent,
                    declined: turn.declined,
                    decline_suppressed: false,
                    shown: turn.shown,
                    ..generation()
                };
                let mut event = generation.into_event("default", SOURCE);
                event.time = time;
                event
            }
            Action::Feedback {
                role,
                turn,
                metric,
                value,
            } => Feedback {
                id: self.id(*role),
                target: match turn {
                    Some(turn) => Target::Generation(self.id(*turn)),
                    None => Target::Episode(self.id(EPISODE)),
                },
                metric_name: (*metric).to_owned(),
                value: value.clone(),
                tags: BTreeMap::new(),
            }
            .into_event("default", SOURCE, time),
            Action::Retraction { role, feedback } => Retraction {
                id: self.id(*role),
                feedback_id: self.id(*feedback),
                reason: String::new(),
            }
            .into_event("default", SOURCE, time),
            Action::End { nth } => {
                let end = EpisodeEnd {
                    episode_id: self.id(EPISODE),
                };
                end.into_event("default", format!("{SOURCE}/{nth}"), time)
            }
        }
    }
}
