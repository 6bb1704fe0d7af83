//! Which engine holds which version, and which one answers or changes next. Pure: no network, and
//! the clock is a parameter.

use crate::engine::TrafficClass;
use crate::engine::load::Limit;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// What an engine may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum State {
    /// It does not answer.
    #[default]
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

#[derive(Debug, Clone, Default)]
pub struct EngineState {
    pub state: State,
    /// Running sequences.
    pub production: usize,
    pub background: usize,
    /// What background sequences may use of it.
    pub limit: Limit,
    /// How many sequences it gets beside others. Above 0.
    pub weight: f64,
    /// Whether we can change its version.
    pub takes_weights: bool,
    /// The versions that it is said to hold, without a probe; the newest first. More than one while
    /// requests are routed to the one before.
    pub vouched: Vec<i64>,
    /// The versions that it serves at once, each probed: adapters, and their base. Empty: it holds one version.
    pub beside: Vec<i64>,
    /// The version that it is about to get.
    pub promised: Option<i64>,
    /// When it began to serve its version.
    pub since: Option<Instant>,
    /// Updates after which it may have sampled with wrong weights.
    pub failed_updates: u64,
    /// Updates that have begun.
    pub updates: u64,
    /// After a failed update: others are tried before it until then.
    pub retry_at: Option<Instant>,
}

impl EngineState {
    /// Whether it takes requests for a version.
    fn serves(&self, serial: i64) -> bool {
        match self.state {
            State::Serving(one) => one == serial || self.vouched.contains(&serial) || self.beside.contains(&serial),
            State::Down | State::Unproven | State::Draining(_) | State::Changing => false,
        }
    }

    /// Whether an update of it failed a moment ago.
    fn failed_lately(&self, now: Instant) -> bool {
        self.retry_at.is_some_and(|at| now < at)
    }

    fn running(&self) -> usize {
        self.production + self.background
    }

    /// How busy it would be with one sequence more, for its weight.
    fn load(&self) -> f64 {
        (self.running() + 1) as f64 / self.weight
    }
}

/// How sequences are divided among the engines of a version.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// Sequences that one engine samples together.
    pub slots: usize,
    /// How many of them background sequences never use.
    pub reserved: usize,
    /// How long an engine beside others takes to get all its slots.
    pub slow_start: Duration,
    /// How many more sequences than the least busy engine one may run and still get the turns of its
    /// sessions.
    pub affinity_slack: usize,
}

/// A sequence that waits for an engine.
#[derive(Debug, Clone, Copy)]
pub struct Waiting {
    pub serial: i64,
    pub class: TrafficClass,
    /// The episode of which it is a turn.
    pub session: Option<Uuid>,
}

/// All engines of a pool.
#[derive(Debug)]
pub struct Placement {
    pub engines: Vec<EngineState>,
    rules: Rules,
}

impl Placement {
    /// Engines with these weights, all down.
    pub fn new(weights: &[f64], rules: Rules) -> Self {
        let down = |&weight: &f64| EngineState {
            weight,
            takes_weights: true,
            ..EngineState::default()
        };
        Placement {
            engines: weights.iter().map(down).collect(),
            rules,
        }
    }

    pub fn set_state(&mut self, engine: usize, state: State, now: Instant) {
        let engine = &mut self.engines[engine];
        if engine.state != state {
            engine.since = matches!(state, State::Serving(_)).then_some(now);
        }
        if !matches!(state, State::Serving(_)) {
            engine.beside.clear();
        }
        engine.state = state;
    }

    /// The engine for a sequence: of those of its version with a free slot, the one that runs the fewest
    /// for its weight. Production uses an engine that is lent whole only if no other has a free slot. The turns of a session stay on one engine, unless it is clearly busier.
    pub fn pick(&self, sequence: Waiting, now: Instant) -> Option<usize> {
        let serial = sequence.serial;
        let draining = self.servers(serial) == 0;
        let engines = self.engines.iter().enumerate();
        let of_version: Vec<usize> = engines
            .filter(|(_, engine)| match draining {
                true => engine.state == State::Draining(serial),
                false => engine.serves(serial),
            })
            .map(|(index, _)| index)
            .collect();
        let has_room = |&index: &usize| self.has_room(index, &of_version, sequence.class, now);
        let avoids = |index: usize| sequence.class == TrafficClass::Production && self.engines[index].limit.whole;
        let own = of_version.iter().filter(|&&index| !avoids(index)).any(has_room);
        let free = |index: &usize| has_room(index) && !(own && avoids(*index));
        let least = of_version.iter().copied().filter(free).min_by(|&a, &b| {
            let loads = self.engines[a].load().total_cmp(&self.engines[b].load());
            loads.then(a.cmp(&b))
        })?;
        let slack = self.rules.affinity_slack;
        let home = sequence.session.and_then(|session| self.home(session, &of_version));
        let stays = |&home: &usize| {
            let engine = &self.engines[home];
            slack > 0 && free(&home) && engine.load() <= self.engines[least].load() + slack as f64 / engine.weight
        };
        Some(home.filter(stays).unwrap_or(least))
    }

    /// The engine of a session, by rendezvous hashing: another engine that comes or goes moves only the
    /// sessions that it gets or had. Heavier engines have more sessions.
    fn home(&self, session: Uuid, engines: &[usize]) -> Option<usize> {
        let score = |index: usize| {
            let mut hasher = blake3::Hasher::new();
            hasher.update(session.as_bytes());
            hasher.update(&(index as u64).to_le_bytes());
            let mut first = [0; 8];
            first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
            // uniform in (0, 1); the logarithm makes shares proportional to weights
            let uniform = ((u64::from_le_bytes(first) >> 12) as f64 + 0.5) / (1u64 << 52) as f64;
            -self.engines[index].weight / uniform.ln()
        };
        let engines = engines.iter().copied();
        engines.max_by(|&a, &b| score(a).total_cmp(&score(b)))
    }

    /// `peers`: the engines of the same version.
    fn has_room(&self, index: usize, peers: &[usize], class: TrafficClass, now: Instant) -> bool {
        let (slots, running) = (self.slots(index, peers, now), self.engines[index].running());
        match class {
            TrafficClass::Production => running < slots,
            TrafficClass::Background => {
                let engine = &self.engines[index];
                let reserved = if engine.limit.whole { 0 } else { self.rules.reserved };
                running < slots.saturating_sub(reserved) && engine.background < engine.limit.slots
            }
        }
    }

    /// The slots of an engine. They grow after its probe, while an engine of the same version has all of
    /// its own.
    fn slots(&self, index: usize, peers: &[usize], now: Instant) -> usize {
        let warmth = |index: usize| {
            let since = self.engines[index].since.unwrap_or(now);
            let age = now.saturating_duration_since(since).as_secs_f64();
            match self.rules.slow_start.is_zero() {
                true => 1.0,
                false => (age / self.rules.slow_start.as_secs_f64()).min(1.0),
            }
        };
        let all = self.rules.slots;
        match peers.iter().any(|&peer| warmth(peer) >= 1.0) {
            true => ((all as f64 * warmth(index)).ceil() as usize).clamp(1, all),
            false => all,
        }
    }

    /// The engines that take requests for a version.
    pub fn serving(&self, serial: i64) -> impl Iterator<Item = usize> {
        let engines = self.engines.iter().enumerate();
        engines
            .filter(move |(_, engine)| engine.serves(serial))
            .map(|(index, _)| index)
    }

    /// Whether another engine that is not lent whole takes requests for the version of this one.
    pub fn has_substitute(&self, index: usize) -> bool {
        let State::Serving(serial) = self.engines[index].state else {
            return false;
        };
        self.serving(serial)
            .any(|other| other != index && !self.engines[other].limit.whole)
    }

    /// How many engines take requests for a version.
    pub fn servers(&self, serial: i64) -> usize {
        let engines = self.engines.iter();
        engines.filter(|engine| engine.serves(serial)).count()
    }

    /// Whether an engine takes requests for a version, or finishes those that were routed to it.
    pub fn holds(&self, serial: i64) -> bool {
        let mut engines = self.engines.iter();
        engines.any(|engine| engine.serves(serial) || engine.state == State::Draining(serial))
    }

    /// How many engines take requests for a version and will not get another one.
    pub fn staying(&self, serial: i64) -> usize {
        let engines = self.engines.iter();
        engines
            .filter(|engine| engine.serves(serial) && engine.promised.is_none())
            .count()
    }

    /// The engine that is about to get a version.
    pub fn promised_to(&self, serial: i64) -> Option<usize> {
        self.engines.iter().position(|engine| engine.promised == Some(serial))
    }

    /// An engine that still holds a version and is about to get one that is not `kept`.
    pub fn leaving(&self, serial: i64, kept: &BTreeSet<i64>) -> Option<usize> {
        let holds = |engine: &EngineState| engine.serves(serial) || engine.state == State::Draining(serial);
        let unwanted = |engine: &EngineState| engine.promised.is_some_and(|promised| !kept.contains(&promised));
        self.engines.iter().position(|engine| holds(engine) && unwanted(engine))
    }

    /// The engine that gets a version that no engine serves. `kept`: versions that must go on being
    /// served. Prefers an engine without version, then one of a version that nobody needs, then one of
    /// several with the same version, then one that is getting a version that nobody needs. One whose update
    /// failed a moment ago comes last.
    pub fn place(&self, kept: &BTreeSet<i64>, now: Instant) -> Option<usize> {
        let engines = self.engines.iter().enumerate();
        let engines = engines.filter(|(_, engine)| engine.takes_weights);
        let ranked = engines.filter_map(|(index, engine)| {
            let rank = match (engine.promised, engine.state) {
                (_, State::Down) => return None,
                (Some(promised), _) if kept.contains(&promised) => return None,
                (Some(_), _) => 4,
                (None, State::Unproven) => 0,
                (None, State::Serving(serial)) => match (kept.contains(&serial), self.staying(serial)) {
                    // the others go on without it
                    (false, 2..) => 1,
                    (false, _) => 2,
                    (true, 2..) => 3,
                    (true, _) => return None,
                },
                (None, State::Draining(_) | State::Changing) => return None,
            };
            Some((engine.failed_lately(now), rank, engine.running(), index))
        });
        ranked.min().map(|(.., index)| index)
    }

    /// What a spare engine should hold: of the versions with their weights, the one that has the fewest
    /// engines for its weight. `None`: no engine is spare. One whose update failed a moment ago is not.
    pub fn spare(&self, wanted: &[(i64, f64)], now: Instant) -> Option<(usize, i64)> {
        let is_wanted = |serial| wanted.iter().any(|&(one, _)| one == serial);
        let engines = self.engines.iter().enumerate();
        let spare = engines
            .filter(|(_, engine)| engine.takes_weights && engine.promised.is_none() && !engine.failed_lately(now))
            .filter(|(_, engine)| match engine.state {
                State::Unproven => true,
                State::Serving(serial) => !is_wanted(serial),
                State::Down | State::Draining(_) | State::Changing => false,
            })
            .min_by_key(|(_, engine)| (engine.state != State::Unproven, engine.running()));
        let (index, _) = spare?;
        let promised = |serial| {
            self.engines
                .iter()
                .filter(move |engine| engine.promised == Some(serial))
        };
        let load = |&(serial, weight): &(i64, f64)| match self.servers(serial) + promised(serial).count() {
            0 => f64::INFINITY,
            servers => weight / servers as f64,
        };
        let neediest = wanted.iter().max_by(|a, b| load(a).total_cmp(&load(b)))?;
        Some((index, neediest.0))
    }
}

#[cfg(test)]
mod tests;
