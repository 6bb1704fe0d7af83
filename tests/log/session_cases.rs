//! What random sessions ([`crate::session_stories`]) contain, counted, so that a run shows that it
//! has met every case.

use std::collections::{BTreeMap, BTreeSet};

use crate::ingest_order::Role;
use crate::session_model::Row;
use crate::session_stories::{Action, EPISODE, Step, Turn};

/// Every case, with how many sessions have it.
#[derive(Debug)]
pub struct Cases(BTreeMap<&'static str, usize>);

/// One session as it was sent.
pub struct Sent<'a> {
    /// What came before it could close.
    pub steps: &'a [Step],
    /// What came after it had closed.
    pub late: &'a [Step],
    /// The roles in the order of arrival, repetitions included.
    pub arrival: &'a [Role],
    /// What the model says of the turns.
    pub rows: &'a BTreeMap<Role, Row>,
}

impl Cases {
    pub fn new() -> Self {
        Self(ALL.iter().map(|(name, _)| (*name, 0)).collect())
    }

    pub fn count(&mut self, sent: &Sent<'_>) {
        for (name, holds) in ALL {
            *self.0.entry(name).or_default() += usize::from(holds(sent));
        }
    }

    /// Fails if a case has not occurred.
    pub fn print_all(&self) {
        for (name, sessions) in &self.0 {
            println!("{sessions:>8} sessions with {name}");
        }
        let missing: Vec<_> = self.0.iter().filter(|(_, sessions)| **sessions == 0).collect();
        assert!(missing.is_empty(), "no session has {missing:?}");
    }
}

type Holds = fn(&Sent<'_>) -> bool;

const ALL: [(&str, Holds); 27] = [
    // order
    ("turns that arrived in another order", |sent| {
        let mut turns: Vec<_> = sent.turns().map(|(at, turn)| (sent.first(turn.role), at)).collect();
        turns.sort_unstable();
        !turns.is_sorted_by_key(|(_, at)| *at)
    }),
    ("feedback that arrived before its turn", |sent| {
        sent.steps.iter().any(|step| match &step.action {
            Action::Feedback {
                role, turn: Some(turn), ..
            } => sent.first(*role) < sent.first(*turn),
            _ => false,
        })
    }),
    ("feedback that arrived before all turns", |sent| {
        let turns = sent.turns().map(|(_, turn)| sent.first(turn.role)).min();
        let mut feedback = sent.feedback();
        feedback.any(|(_, role, turn)| turn.is_none() && Some(sent.first(role)) < turns)
    }),
    ("a retraction that arrived before its feedback", |sent| {
        let given: BTreeSet<Role> = sent.feedback().map(|(_, role, _)| role).collect();
        sent.retractions()
            .any(|(_, role, feedback)| given.contains(&feedback) && sent.first(role) < sent.first(feedback))
    }),
    ("an end that arrived before a turn", |sent| {
        let last = sent.turns().map(|(_, turn)| sent.first(turn.role)).max();
        sent.ends().next().is_some() && Some(sent.first(EPISODE)) < last
    }),
    // doubling
    ("an event that arrived twice", |sent| {
        let known: BTreeSet<Role> = sent.arrival.iter().copied().collect();
        known.len() < sent.arrival.len()
    }),
    ("an event that arrived again after the close", |sent| {
        sent.late
            .iter()
            .any(|late| late.role() != EPISODE && sent.steps.iter().any(|step| step.role() == late.role()))
    }),
    // delay
    ("a turn that arrived after the close", |sent| {
        sent.is_late(|action| matches!(action, Action::Turn(_)))
    }),
    ("feedback that arrived after the close", |sent| {
        sent.is_late(|action| matches!(action, Action::Feedback { .. }))
    }),
    ("a retraction that arrived after the close", |sent| {
        sent.is_late(|action| matches!(action, Action::Retraction { .. }))
    }),
    ("an end that arrived after the close", |sent| {
        sent.is_late(|action| matches!(action, Action::End { .. }))
    }),
    // time
    ("a turn after the close", |sent| {
        sent.turns().any(|(_, turn)| sent.rows[&turn.role].turns.is_none())
    }),
    ("a turn within the second after an early close", |sent| {
        sent.members().any(|(at, turn)| at > sent.rows[&turn.role].closes_ms)
    }),
    ("feedback after the close", |sent| {
        sent.feedback().any(|(at, ..)| at > sent.closes_ms())
    }),
    ("events at one time", |sent| {
        let times: BTreeSet<i64> = sent.steps.iter().map(|step| step.at).collect();
        times.len() < sent.steps.len()
    }),
    ("an end that closed it", |sent| {
        sent.is_of("task") && sent.ends().any(|at| at == sent.closes_ms())
    }),
    ("feedback that closed it", |sent| {
        sent.is_of("exam") && sent.feedback().any(|(at, ..)| at == sent.closes_ms())
    }),
    ("two ends", |sent| sent.ends().count() == 2),
    // retraction
    ("feedback that was retracted in time", |sent| {
        sent.retracted(|at, closes_ms| at <= closes_ms)
    }),
    ("feedback that was retracted after the close", |sent| {
        sent.retracted(|at, closes_ms| at > closes_ms)
    }),
    ("a retraction of nothing", |sent| {
        let given: BTreeSet<Role> = sent.feedback().map(|(_, role, _)| role).collect();
        sent.retractions().any(|(.., feedback)| !given.contains(&feedback))
    }),
    // turns of several versions, segments
    ("turns of several versions", |sent| {
        let newest: BTreeSet<i64> = sent.members().map(|(_, turn)| turn.versions[0].0).collect();
        newest.len() > 1
    }),
    ("a turn of two versions", |sent| {
        sent.members().any(|(_, turn)| turn.versions.len() > 1)
    }),
    ("several segments", |sent| {
        let segments: BTreeSet<u32> = sent.members().map(|(_, turn)| turn.segment).collect();
        segments.len() > 1
    }),
    ("a turn in an earlier segment", |sent| {
        let mut turns: Vec<_> = sent.members().map(|(at, turn)| (at, turn.role, turn.segment)).collect();
        turns.sort_unstable();
        !turns.is_sorted_by_key(|(.., segment)| *segment)
    }),
    ("turns with one number", |sent| {
        let numbers: BTreeSet<(u32, u32)> = sent.members().map(|(_, turn)| (turn.segment, turn.number)).collect();
        numbers.len() < sent.members().count()
    }),
    ("rollouts with a reward", |sent| {
        sent.members()
            .any(|(_, turn)| turn.run.is_some() && sent.rows[&turn.role].reward.is_some())
    }),
];

impl<'a> Sent<'a> {
    fn first(&self, role: Role) -> usize {
        let place = self.arrival.iter().position(|arrived| *arrived == role);
        place.unwrap_or(usize::MAX)
    }

    fn turns(&self) -> impl Iterator<Item = (i64, &'a Turn)> {
        self.steps.iter().filter_map(|step| match &step.action {
            Action::Turn(turn) => Some((step.at, turn)),
            _ => None,
        })
    }

    /// The turns that belong to the session.
    fn members(&self) -> impl Iterator<Item = (i64, &'a Turn)> {
        let rows = self.rows;
        self.turns().filter(|(_, turn)| rows[&turn.role].turns.is_some())
    }

    fn feedback(&self) -> impl Iterator<Item = (i64, Role, Option<Role>)> {
        self.steps.iter().filter_map(|step| match &step.action {
            Action::Feedback { role, turn, .. } => Some((step.at, *role, *turn)),
            _ => None,
        })
    }

    fn retractions(&self) -> impl Iterator<Item = (i64, Role, Role)> {
        self.steps.iter().filter_map(|step| match &step.action {
            Action::Retraction { role, feedback } => Some((step.at, *role, *feedback)),
            _ => None,
        })
    }

    fn ends(&self) -> impl Iterator<Item = i64> {
        let ends = self.steps.iter();
        ends.filter_map(|step| matches!(step.action, Action::End { .. }).then_some(step.at))
    }

    fn closes_ms(&self) -> i64 {
        let closes = self.members().map(|(_, turn)| self.rows[&turn.role].closes_ms);
        closes.max().unwrap_or(i64::MAX)
    }

    fn is_of(&self, surface: &str) -> bool {
        self.turns().next().is_some_and(|(_, turn)| turn.surface == surface)
    }

    /// Whether something of this kind came after the close for the first time.
    fn is_late(&self, kind: fn(&Action) -> bool) -> bool {
        let mut late = self.late.iter().filter(|late| kind(&late.action));
        late.any(|late| late.role() == EPISODE || !self.steps.iter().any(|step| step.role() == late.role()))
    }

    fn retracted(&self, when: fn(i64, i64) -> bool) -> bool {
        let given: BTreeMap<Role, i64> = self.feedback().map(|(at, role, _)| (role, at)).collect();
        let closes_ms = self.closes_ms();
        self.retractions().any(|(at, _, feedback)| {
            given.get(&feedback).is_some_and(|given| *given <= closes_ms) && when(at, closes_ms)
        })
    }
}
