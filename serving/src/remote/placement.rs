//! Which engine holds which version, and which one answers or changes next. Pure: no network, no
//! clock.

use crate::engine::TrafficClass;
use std::collections::BTreeSet;

/// What an engine may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It does not answer.
    Down,
    /// It answers, but holds no version that was probed.
    Unproven,
    /// It holds the version of this serial, which was probed.
    Serving(i64),
    /// It will change its version. It finishes what was routed to it, if no other engine can.
    Draining(i64),
    /// Its weights are being replaced or probed.
    Changing,
}

#[derive(Debug, Clone)]
pub struct EngineState {
    pub state: State,
    /// Running sequences.
    pub production: usize,
    pub background: usize,
}

impl EngineState {
    fn running(&self) -> usize {
        self.production + self.background
    }
}

/// All engines of a pool.
#[derive(Debug)]
pub struct Placement {
    pub engines: Vec<EngineState>,
    /// Sequences that one engine samples together.
    slots: usize,
    /// How many of them background sequences never use.
    reserved: usize,
}

impl Placement {
    pub fn new(engines: usize, slots: usize, reserved: usize) -> Self {
        let down = EngineState {
            state: State::Down,
            production: 0,
            background: 0,
        };
        Placement {
            engines: vec![down; engines],
            slots,
            reserved,
        }
    }

    /// The engine for the next sequence of a version: of those with a free slot, the one that runs the
    /// fewest.
    pub fn pick(&self, serial: i64, class: TrafficClass) -> Option<usize> {
        let in_state = |state: State| {
            let engines = self.engines.iter().enumerate();
            engines
                .filter(|(_, engine)| engine.state == state && self.has_room(engine, class))
                .min_by_key(|(_, engine)| engine.running())
                .map(|(index, _)| index)
        };
        match self.servers(serial) {
            0 => in_state(State::Draining(serial)),
            _ => in_state(State::Serving(serial)),
        }
    }

    fn has_room(&self, engine: &EngineState, class: TrafficClass) -> bool {
        let (slots, running) = (self.slots, engine.running());
        match class {
            TrafficClass::Production => running < slots,
            TrafficClass::Background => running < slots.saturating_sub(self.reserved),
        }
    }

    /// How many engines take requests for a version.
    pub fn servers(&self, serial: i64) -> usize {
        let engines = self.engines.iter();
        engines.filter(|engine| engine.state == State::Serving(serial)).count()
    }

    /// The engine that gets a version that no engine serves. `kept`: versions that must go on being
    /// served. Prefers an engine without version, then one of a version that nobody needs, then one of
    /// several with the same version.
    pub fn place(&self, kept: &BTreeSet<i64>) -> Option<usize> {
        let engines = self.engines.iter().enumerate();
        let ranked = engines.filter_map(|(index, engine)| {
            let rank = match engine.state {
                State::Unproven => 0,
                State::Serving(serial) => match (kept.contains(&serial), self.servers(serial)) {
                    // the others go on without it
                    (false, 2..) => 1,
                    (false, _) => 2,
                    (true, 2..) => 3,
                    (true, _) => return None,
                },
                State::Down | State::Draining(_) | State::Changing => return None,
            };
            Some((rank, engine.running(), index))
        });
        ranked.min().map(|(_, _, index)| index)
    }

    /// What a spare engine should hold: of the versions with their weights, the one that has the fewest
    /// engines for its weight. `None`: no engine is spare.
    pub fn spare(&self, wanted: &[(i64, f64)]) -> Option<(usize, i64)> {
        let is_wanted = |serial| wanted.iter().any(|&(one, _)| one == serial);
        let engines = self.engines.iter().enumerate();
        let spare = engines
            .filter(|(_, engine)| match engine.state {
                State::Unproven => true,
                State::Serving(serial) => !is_wanted(serial),
                State::Down | State::Draining(_) | State::Changing => false,
            })
            .min_by_key(|(_, engine)| (engine.state != State::Unproven, engine.running()));
        let (index, _) = spare?;
        let load = |&(serial, weight): &(i64, f64)| match self.servers(serial) {
            0 => f64::INFINITY,
            servers => weight / servers as f64,
        };
        let neediest = wanted.iter().max_by(|a, b| load(a).total_cmp(&load(b)))?;
        Some((index, neediest.0))
    }
}

#[cfg(test)]
mod tests {
    use super::TrafficClass::{Background, Production};
    use super::*;

    fn placement(states: &[State]) -> Placement {
        let mut placement = Placement::new(states.len(), 4, 1);
        for (engine, &state) in placement.engines.iter_mut().zip(states) {
            engine.state = state;
        }
        placement
    }

    #[test]
    fn a_sequence_goes_to_the_engine_of_its_version_that_runs_the_fewest() {
        let mut engines = placement(&[State::Serving(7), State::Serving(7), State::Serving(1), State::Down]);
        engines.engines[0].production = 1;
        assert_eq!(engines.pick(7, Production), Some(1));
        assert_eq!(engines.pick(1, Production), Some(2));
        assert_eq!(engines.pick(9, Production), None);
    }

    #[test]
    fn background_sequences_leave_the_reserved_slots() {
        let mut engines = placement(&[State::Serving(7)]);
        engines.engines[0].background = 3;
        assert_eq!(engines.pick(7, Background), None);
        assert_eq!(engines.pick(7, Production), Some(0));
        engines.engines[0].production = 1;
        assert_eq!(engines.pick(7, Production), None);
    }

    #[test]
    fn a_draining_engine_finishes_what_no_other_engine_can() {
        let mut engines = placement(&[State::Draining(7)]);
        assert_eq!((engines.servers(7), engines.pick(7, Production)), (0, Some(0)));
        engines = placement(&[State::Draining(7), State::Serving(7)]);
        assert_eq!(engines.pick(7, Production), Some(1));
    }

    #[test]
    fn a_new_version_takes_the_engine_that_is_missed_least() {
        use State::{Down, Serving, Unproven};
        let kept = BTreeSet::from([1, 8]);
        let place = |states: &[State]| placement(states).place(&kept);
        assert_eq!(place(&[Serving(7), Unproven]), Some(1));
        assert_eq!(place(&[Serving(6), Serving(7), Serving(7)]), Some(1));
        assert_eq!(place(&[Serving(1), Serving(7)]), Some(1));
        assert_eq!(place(&[Serving(8), Serving(1), Serving(1)]), Some(1));
        assert_eq!(place(&[Serving(8), Serving(1), Down]), None);
    }

    #[test]
    fn spare_engines_go_to_the_version_that_lacks_them_most() {
        use State::{Serving, Unproven};
        let wanted = [(8, 0.7), (1, 0.3)];
        let spare = |states: &[State]| placement(states).spare(&wanted);
        assert_eq!(spare(&[Serving(8), Serving(1), Unproven]), Some((2, 8)));
        assert_eq!(
            spare(&[Serving(8), Serving(8), Serving(8), Serving(1), Serving(7)]),
            Some((4, 1))
        );
        assert_eq!(spare(&[Serving(8), Unproven]), Some((1, 1)));
        assert_eq!(spare(&[Serving(8), Serving(1)]), None);
    }
}
