//! The states of a canary and the ways between them, as data. Pure.
//!
//! ```text
//!            approve        pass                pass
//! proposed ─────────► gated ──────────► canary ──────► champion ──────► retired
//!                       │ shadow   pass ▲ │  ▲ │ step          supersede
//!                       └─────► shadow ─┘ │  │ │
//!                                    hold ▼  │ │
//!                        held, paused ───────┘ └► rolled_back, aborted
//!                                     resume
//! ```
//! With `strategy.watch` there is `watched` before `champion`: it is given to all but a few of the users, and
//! harm still takes it back.
//!
//! The words are those of Argo Rollouts: a failed analysis aborts to weight 0, an inconclusive one
//! pauses for a person.

use serde::{Deserialize, Serialize};

/// Where a canary is. The names are those in the table and the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Waits for approvals, and for the canary before it.
    Proposed,
    /// Approved. Its gates are looked at, and replicas load it; no user gets it.
    Gated,
    /// Replicas answer some of `champion`'s requests a second time with it; no user sees that.
    Shadow,
    /// Some of `champion`'s users get it.
    Canary,
    /// The evidence was not conclusive in time. Its users keep it until a person decides.
    Paused,
    /// A person or a monitor stopped it. Its users keep it until a person decides.
    Held,
    /// It is `champion`, and beside it a few users still have the version before.
    Watched,
    /// It is `champion`.
    Champion,
    /// Another version became `champion` after it.
    Retired,
    /// It ended before it became `champion`, and not for harm.
    Aborted,
    /// It did harm, or a person went back from it.
    RolledBack,
}

/// What can happen to a canary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// All approvals are there, and no other canary is under way.
    Approve,
    /// All gates passed: replicas load it.
    Prepare,
    /// Replicas hold it: they answer with it unseen.
    Shadow,
    /// Replicas hold it; its unseen answers are no worse; or all steps were made.
    Pass,
    /// A gate refused the version.
    Refuse,
    /// All steps were made, or a person gives it to all users: it is watched first.
    Watch,
    /// The next step of the strategy.
    Step,
    /// The evidence shows harm.
    Harm,
    /// The time of an analysis is over, and it is still inconclusive.
    Inconclusive,
    /// A monitor rings, or a person wants it to stay as it is.
    Hold,
    /// A person lets it go on.
    Resume,
    /// A person gives it to all users at once.
    Promote,
    /// A person ends it.
    Abort,
    /// A person goes back from it after it became `champion`.
    Rollback,
    /// `champion` moved without it.
    Supersede,
}

/// All ways from one state to another. What is not here is refused.
pub const TRANSITIONS: &[(State, Event, State)] = {
    use Event as E;
    use State as S;
    &[
        (S::Proposed, E::Approve, S::Gated),
        (S::Proposed, E::Abort, S::Aborted),
        (S::Gated, E::Prepare, S::Gated),
        (S::Gated, E::Shadow, S::Shadow),
        (S::Gated, E::Pass, S::Canary),
        (S::Gated, E::Refuse, S::Aborted),
        (S::Gated, E::Abort, S::Aborted),
        (S::Gated, E::Supersede, S::Aborted),
        (S::Shadow, E::Pass, S::Canary),
        (S::Shadow, E::Refuse, S::Aborted),
        (S::Shadow, E::Abort, S::Aborted),
        (S::Shadow, E::Supersede, S::Aborted),
        (S::Canary, E::Step, S::Canary),
        (S::Canary, E::Pass, S::Champion),
        (S::Canary, E::Promote, S::Champion),
        (S::Canary, E::Harm, S::RolledBack),
        (S::Canary, E::Inconclusive, S::Paused),
        (S::Canary, E::Hold, S::Held),
        (S::Canary, E::Resume, S::Canary),
        (S::Canary, E::Abort, S::Aborted),
        (S::Canary, E::Supersede, S::Aborted),
        (S::Paused, E::Resume, S::Canary),
        (S::Paused, E::Promote, S::Champion),
        (S::Paused, E::Harm, S::RolledBack),
        (S::Paused, E::Hold, S::Held),
        (S::Paused, E::Abort, S::Aborted),
        (S::Paused, E::Supersede, S::Aborted),
        (S::Held, E::Resume, S::Canary),
        (S::Held, E::Promote, S::Champion),
        (S::Held, E::Harm, S::RolledBack),
        (S::Held, E::Abort, S::Aborted),
        (S::Held, E::Supersede, S::Aborted),
        (S::Canary, E::Watch, S::Watched),
        (S::Paused, E::Watch, S::Watched),
        (S::Held, E::Watch, S::Watched),
        (S::Watched, E::Pass, S::Champion),
        (S::Watched, E::Promote, S::Champion),
        (S::Watched, E::Harm, S::RolledBack),
        (S::Watched, E::Rollback, S::RolledBack),
        (S::Watched, E::Supersede, S::Retired),
        (S::Champion, E::Rollback, S::RolledBack),
        (S::Champion, E::Supersede, S::Retired),
    ]
};

/// An event that a state does not allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a canary that is {} cannot {}; it can {}", from.name(), event.name(), possible(*from))]
pub struct Refused {
    pub from: State,
    pub event: Event,
}

impl State {
    pub const ALL: [State; 11] = [
        State::Proposed,
        State::Gated,
        State::Shadow,
        State::Canary,
        State::Paused,
        State::Held,
        State::Watched,
        State::Champion,
        State::Retired,
        State::Aborted,
        State::RolledBack,
    ];

    pub fn name(self) -> &'static str {
        match self {
            State::Proposed => "proposed",
            State::Gated => "gated",
            State::Shadow => "shadow",
            State::Canary => "canary",
            State::Paused => "paused",
            State::Held => "held",
            State::Watched => "watched",
            State::Champion => "champion",
            State::Retired => "retired",
            State::Aborted => "aborted",
            State::RolledBack => "rolled_back",
        }
    }

    pub fn of(name: &str) -> Option<State> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }

    /// Where `event` leads.
    pub fn after(self, event: Event) -> Result<State, Refused> {
        TRANSITIONS
            .iter()
            .find(|(from, on, _)| (*from, *on) == (self, event))
            .map(|(.., to)| *to)
            .ok_or(Refused { from: self, event })
    }

    /// Whether it is beyond its approvals and has no users yet.
    pub fn is_before_users(self) -> bool {
        matches!(self, State::Gated | State::Shadow)
    }

    /// Whether its answers are compared with those of the `champion` before it.
    pub fn is_compared(self) -> bool {
        self.serves() || matches!(self, State::Shadow | State::Watched)
    }

    /// Whether `champion` is it.
    pub fn is_champion(self) -> bool {
        matches!(self, State::Watched | State::Champion)
    }

    /// Whether some users get it beside `champion`.
    pub fn serves(self) -> bool {
        matches!(self, State::Canary | State::Paused | State::Held)
    }
}

impl Event {
    pub fn name(self) -> &'static str {
        match self {
            Event::Approve => "approve",
            Event::Prepare => "prepare",
            Event::Shadow => "shadow",
            Event::Pass => "pass",
            Event::Refuse => "refuse",
            Event::Watch => "watch",
            Event::Step => "step",
            Event::Harm => "harm",
            Event::Inconclusive => "inconclusive",
            Event::Hold => "hold",
            Event::Resume => "resume",
            Event::Promote => "promote",
            Event::Abort => "abort",
            Event::Rollback => "rollback",
            Event::Supersede => "supersede",
        }
    }

    /// Whether a person may ask for it.
    pub fn is_a_request(self) -> bool {
        matches!(
            self,
            Event::Approve | Event::Hold | Event::Resume | Event::Promote | Event::Abort | Event::Rollback
        )
    }
}

/// What a person can do from a state, for the refusal.
fn possible(from: State) -> String {
    let events = TRANSITIONS.iter().filter(|(at, ..)| *at == from);
    let requests: Vec<&str> = events
        .map(|(_, event, _)| *event)
        .filter(|event| event.is_a_request())
        .map(Event::name)
        .collect();
    match requests.is_empty() {
        true => "not change any more".to_owned(),
        false => requests.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const EVENTS: [Event; 15] = [
        Event::Approve,
        Event::Prepare,
        Event::Shadow,
        Event::Pass,
        Event::Refuse,
        Event::Watch,
        Event::Step,
        Event::Harm,
        Event::Inconclusive,
        Event::Hold,
        Event::Resume,
        Event::Promote,
        Event::Abort,
        Event::Rollback,
        Event::Supersede,
    ];

    fn reached_from(state: State) -> BTreeSet<State> {
        let mut found = BTreeSet::from([state]);
        loop {
            let next = TRANSITIONS.iter().filter(|(from, ..)| found.contains(from));
            let next: BTreeSet<State> = next.map(|(.., to)| *to).collect();
            let before = found.len();
            found.extend(next);
            if found.len() == before {
                return found;
            }
        }
    }

    #[test]
    fn every_pair_of_state_and_event_has_one_way_or_is_refused() {
        for from in State::ALL {
            for event in EVENTS {
                let ways: Vec<_> = TRANSITIONS
                    .iter()
                    .filter(|(at, on, _)| (*at, *on) == (from, event))
                    .collect();
                match (ways.as_slice(), from.after(event)) {
                    ([(.., to)], Ok(state)) => assert_eq!(state, *to),
                    ([], Err(refused)) => assert_eq!(refused, Refused { from, event }),
                    (ways, found) => panic!("{from:?}, {event:?}: {ways:?}, {found:?}"),
                }
            }
        }
    }

    #[test]
    fn every_state_is_reached_and_every_one_that_serves_can_be_ended() {
        assert_eq!(reached_from(State::Proposed), BTreeSet::from(State::ALL));
        for state in State::ALL.into_iter().filter(|state| state.serves()) {
            for end in [Event::Harm, Event::Abort, Event::Promote, Event::Supersede] {
                assert!(state.after(end).is_ok(), "{state:?} {end:?}");
            }
        }
        let is_over = |state: &State| TRANSITIONS.iter().all(|(from, ..)| from != state);
        let over: Vec<State> = State::ALL.into_iter().filter(is_over).collect();
        assert_eq!(over, [State::Retired, State::Aborted, State::RolledBack]);
    }

    /// Nobody becomes `champion` without its gates, and none that ended comes back.
    #[test]
    fn champion_is_reached_only_from_states_that_passed_the_gates() {
        let before = TRANSITIONS.iter().filter(|(.., to)| *to == State::Champion);
        assert!(
            before.clone().count() > 0
                && before
                    .clone()
                    .all(|(from, ..)| from.serves() || *from == State::Watched)
        );
        let into_serving = TRANSITIONS.iter().filter(|(from, _, to)| !from.serves() && to.serves());
        let into_serving: Vec<_> = into_serving.collect();
        let passed = [State::Gated, State::Shadow].map(|from| (from, Event::Pass, State::Canary));
        assert_eq!(into_serving, passed.iter().collect::<Vec<_>>());
        let into_shadow: Vec<_> = TRANSITIONS.iter().filter(|(.., to)| *to == State::Shadow).collect();
        assert_eq!(into_shadow, [&(State::Gated, Event::Shadow, State::Shadow)]);
        for state in [State::Aborted, State::RolledBack] {
            assert_eq!(reached_from(state), BTreeSet::from([state]));
        }
    }

    #[test]
    fn names_are_read_back_and_a_refusal_says_what_is_possible() {
        for state in State::ALL {
            assert_eq!(State::of(state.name()), Some(state));
        }
        let refused = State::Paused.after(Event::Rollback).unwrap_err().to_string();
        assert_eq!(
            refused,
            "a canary that is paused cannot rollback; it can resume, promote, hold, abort"
        );
        let over = State::Retired.after(Event::Abort).unwrap_err().to_string();
        assert!(over.ends_with("it can not change any more"), "{over}");
    }
}
