//! The requests that wait for engines, and one task per running sequence.

mod lent;
mod pass;
mod watch;

use lent::Lent;
pub use pass::{Pass, Updates};

use super::client::Client;
use super::http::Error;
use super::options::{InFlight, Options};
use super::placement::{self, EngineState, Placement, Rules, State};
use super::sequence::{self, End, Taking};
use crate::engine::caller::Tally;
use crate::engine::load::{Limit, Load, Totals};
use crate::engine::queue::{Full, Queue};
use crate::engine::{Config, Engine, LoadedVersion, SampleEvent, SampleRequest, SubmitError, TrafficClass};
use artifact::digest::Digest;
use artifact::quant::Spec;
use futures::future::BoxFuture;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// How often waiting requests are checked and engines are asked whether they answer.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// How often a sequence can lose its engine to production. Its channel has room for so many beginnings.
const TAKEN_BACK_MAX: u32 = 8;

/// A request that makes so many engines fail is not sent to another one.
const FAILURES_MAX: u32 = 3;

/// Cheap to clone.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    clients: Vec<Client>,
    config: Config,
    send_seeds: bool,
    in_flight: InFlight,
    /// The copy that engines serve.
    quantized: Option<Spec>,
    /// Sequences that one engine samples together.
    slots: usize,
    work: Mutex<Work>,
    /// An engine changed its state.
    changed: Notify,
}

struct Waiting {
    request: SampleRequest,
    /// Engines that failed before its first token.
    failures: u32,
    /// How often it lost its engine to production.
    taken_back: u32,
}

/// A sequence that begins on an engine.
struct Running {
    id: u64,
    engine: usize,
    updates: Updates,
    taking: Arc<Taking>,
}

struct Work {
    queue: Queue<Waiting>,
    placement: Placement,
    /// The names of the engines' weights.
    weights: Vec<String>,
    /// The versions that engines held or may hold soon, by the names of their weights.
    known: BTreeMap<String, (i64, Digest)>,
    /// The versions that requests are routed to. `None`: not told.
    in_force: Option<BTreeSet<i64>>,
    running: Tally,
    lent: BTreeMap<u64, Lent>,
    /// Sequences that have begun.
    begun: u64,
    /// Of each engine.
    totals: Vec<Totals>,
    stopping: bool,
}

impl Engine for Pool {
    fn submit(&self, requests: Vec<SampleRequest>) -> Result<(), SubmitError> {
        let Some(first) = requests.first() else {
            return Ok(());
        };
        let (caller, class, priority) = (first.caller.clone(), first.class, first.priority);
        let mut work = self.lock();
        if work.stopping {
            return Err(SubmitError::Stopped);
        }
        let requests = requests.into_iter();
        let new = |request| Waiting {
            request,
            failures: 0,
            taken_back: 0,
        };
        let waiting = requests.map(new).collect();
        let displaced = work.queue.push(class, priority, &caller, waiting);
        let waiting = work.queue.len();
        let displaced = displaced.map_err(|Full| SubmitError::Full { waiting })?;
        drop(work);
        for waiting in displaced {
            metrics::counter!("springtide_choices_displaced_total").increment(1);
            let _ = waiting.request.events.try_send(SampleEvent::Displaced);
        }
        self.start_waiting();
        Ok(())
    }

    fn unavailable(&self, version: &LoadedVersion) -> Option<BoxFuture<'static, ()>> {
        let pool = self.clone();
        let serial = version.serial;
        if pool.lock().placement.servers(serial) > 0 {
            return None;
        }
        Some(Box::pin(async move {
            // the timeout covers a change between the look and the wait
            let _ = tokio::time::timeout(CHECK_INTERVAL, pool.shared.changed.notified()).await;
        }))
    }

    fn stop(&self) {
        let mut work = self.lock();
        work.stopping = true;
        work.queue.drain().for_each(drop);
    }

    fn loads(&self) -> Vec<Load> {
        let work = self.lock();
        let engines = work.placement.engines.iter().enumerate();
        let load = |(index, engine): (usize, &EngineState)| Load {
            serves: matches!(engine.state, State::Serving(_)),
            has_substitute: work.placement.has_substitute(index),
            production: engine.production,
            background: engine.background,
            production_waiting: work.queue.waiting(TrafficClass::Production),
            background_waiting: work.queue.waiting(TrafficClass::Background),
            parked: 0,
            totals: work.totals[index].clone(),
        };
        engines.map(load).collect()
    }

    fn lend(&self, limits: &[Limit]) {
        let mut work = self.lock();
        for (engine, limit) in work.placement.engines.iter_mut().zip(limits) {
            engine.limit = *limit;
        }
        for engine in 0..work.placement.engines.len() {
            let over = work
                .to_stay(engine)
                .saturating_sub(work.placement.engines[engine].limit.slots);
            work.take_back(engine, over);
        }
        drop(work);
        self.start_waiting();
    }
}

impl Pool {
    pub fn new(options: &Options, slots: usize, config: Config) -> anyhow::Result<Self> {
        let clients = Client::all(options)?;
        let rules = Rules {
            slots,
            reserved: config.slots_reserved_for_production,
            slow_start: Duration::from_millis(options.slow_start_ms),
            affinity_slack: options.affinity_slack,
        };
        let mut placement = Placement::new(&options.shares(), rules);
        for (engine, client) in placement.engines.iter_mut().zip(&clients) {
            engine.takes_weights = client.takes_weights();
        }
        let work = Work {
            queue: Queue::new(config.queue_choices_max),
            placement,
            weights: vec![String::new(); clients.len()],
            known: BTreeMap::new(),
            in_force: None,
            running: Tally::default(),
            lent: BTreeMap::new(),
            begun: 0,
            totals: vec![Totals::default(); clients.len()],
            stopping: false,
        };
        Ok(Pool {
            shared: Arc::new(Shared {
                clients,
                config,
                send_seeds: options.send_seeds,
                in_flight: options.in_flight,
                quantized: options.quantized,
                slots,
                work: Mutex::new(work),
                changed: Notify::new(),
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Work> {
        // consistent after every statement, so a panic elsewhere does no harm
        self.shared.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn engines(&self) -> usize {
        self.shared.clients.len()
    }

    pub(super) fn client(&self, engine: usize) -> &Client {
        &self.shared.clients[engine]
    }

    /// What generations are logged with as their engine: its kind, and the copy that the fleet serves.
    pub(super) fn label(&self, engine: usize) -> Arc<str> {
        let kind = self.client(engine).kind();
        match self.shared.quantized.filter(|_| self.client(engine).names_weights()) {
            None => kind.into(),
            Some(spec) => format!("{kind} {spec}").into(),
        }
    }

    /// Looks at the placement, without changing it.
    pub(crate) fn placement<T>(&self, look: impl FnOnce(&Placement) -> T) -> T {
        look(&self.lock().placement)
    }

    pub(super) fn state(&self, engine: usize) -> State {
        self.lock().placement.engines[engine].state
    }

    /// The version that an engine without token ids is said to hold, beside the one before.
    pub(super) fn vouch(&self, engine: usize, serial: i64) {
        let before = self.lock().placement.engines[engine].vouched.clone();
        let others = before.into_iter().filter(|&one| one != serial);
        self.set_vouched(engine, [serial].into_iter().chain(others).collect());
    }

    /// The same, and no other. `None`: none of those in force.
    pub(super) fn vouch_only(&self, engine: usize, serial: Option<i64>) {
        self.set_vouched(engine, serial.into_iter().collect());
    }

    /// An engine serves this version from now on, beside others, unless it does not answer. `weights`: what it calls its
    /// base weights.
    pub(super) fn serves_beside(&self, engine: usize, serial: i64, weights: &str) {
        let mut work = self.lock();
        let one = &mut work.placement.engines[engine];
        if !matches!(one.state, State::Unproven | State::Serving(_)) {
            return;
        }
        one.beside.push(serial);
        let first = one.beside[0];
        work.placement.set_state(engine, State::Serving(first), Instant::now());
        weights.clone_into(&mut work.weights[engine]);
        drop(work);
        self.state_changed();
    }

    /// It does not any more.
    pub(super) fn leaves_beside(&self, engine: usize, serial: i64) {
        let mut work = self.lock();
        let one = &mut work.placement.engines[engine];
        let had = one.beside.len();
        one.beside.retain(|&other| other != serial);
        if one.beside.len() == had || !matches!(one.state, State::Serving(_)) {
            return;
        }
        let state = one
            .beside
            .first()
            .map_or(State::Unproven, |&other| State::Serving(other));
        work.placement.set_state(engine, state, Instant::now());
        drop(work);
        self.state_changed();
    }

    /// The versions that it serves at once; none if it has not answered since.
    pub(super) fn beside(&self, engine: usize) -> Vec<i64> {
        self.lock().placement.engines[engine].beside.clone()
    }

    fn set_vouched(&self, engine: usize, serials: Vec<i64>) {
        let mut work = self.lock();
        let one = &mut work.placement.engines[engine];
        if one.vouched == serials {
            return;
        }
        let state = match (one.state, serials.first()) {
            (State::Down, _) => State::Down,
            (_, Some(&serial)) => State::Serving(serial),
            (_, None) => State::Unproven,
        };
        one.vouched = serials;
        drop(work);
        self.set_state(engine, state, None);
    }

    /// Requests are routed to these versions from now on.
    pub(super) fn in_force(&self, serials: BTreeSet<i64>) {
        self.lock().in_force = Some(serials);
        self.remove_gone();
    }

    /// An engine gets weights of this name.
    pub(super) fn update_begins(&self, engine: usize, weights: &str) {
        self.lock().placement.engines[engine].updates += 1;
        self.set_state(engine, State::Changing, Some(weights));
    }

    /// The version that an engine is about to get.
    pub(super) fn promise(&self, engine: usize, serial: Option<i64>) {
        self.lock().placement.engines[engine].promised = serial;
    }

    /// Until then, other engines are tried before this one.
    pub(super) fn try_again_at(&self, engine: usize, at: Instant) {
        self.lock().placement.engines[engine].retry_at = Some(at);
    }

    /// Running sequences of an engine.
    pub(super) fn running(&self, engine: usize) -> usize {
        let work = self.lock();
        let engine = &work.placement.engines[engine];
        engine.production + engine.background
    }

    /// `weights`: the name of what it holds from now on, if that changes.
    pub(super) fn set_state(&self, engine: usize, state: State, weights: Option<&str>) {
        let mut work = self.lock();
        work.placement.set_state(engine, state, Instant::now());
        if let Some(weights) = weights {
            weights.clone_into(&mut work.weights[engine]);
        }
        drop(work);
        self.state_changed();
    }

    fn state_changed(&self) {
        let is_serving = |engine: &&EngineState| matches!(engine.state, State::Serving(_));
        let serving = self.placement(|placement| placement.engines.iter().filter(is_serving).count());
        metrics::gauge!("springtide_remote_engines_serving").set(serving as f64);
        self.shared.changed.notify_waiters();
        self.start_waiting();
    }

    /// Sends waiting requests to engines with free slots.
    fn start_waiting(&self) {
        let now = Instant::now();
        let mut work = self.lock();
        let Work {
            queue,
            placement,
            weights,
            running,
            lent,
            begun,
            ..
        } = &mut *work;
        let mut next = || {
            let engine_for = |Waiting { request, .. }: &Waiting| {
                let sequence = placement::Waiting {
                    serial: request.version.serial,
                    class: request.class,
                    session: request.session,
                };
                placement.pick(sequence, now)
            };
            let waiting = queue.take(running, |waiting| engine_for(waiting).is_some())?;
            let engine = engine_for(&waiting)?;
            *slots(placement, engine, waiting.request.class) += 1;
            running.add(&waiting.request.caller);
            let updates = Updates::new(self, engine, &placement.engines[engine]);
            *begun += 1;
            let taking = Arc::new(Taking {
                updates: Some(updates.clone()),
                ..Taking::default()
            });
            if waiting.request.class == TrafficClass::Background {
                let sequence = Lent {
                    engine,
                    taking: taking.clone(),
                    told: None,
                    may_be_taken: waiting.taken_back < TAKEN_BACK_MAX,
                };
                lent.insert(*begun, sequence);
            }
            let running = Running {
                id: *begun,
                engine,
                updates,
                taking,
            };
            Some((running, weights[engine].clone(), waiting))
        };
        while let Some((running, weights, waiting)) = next() {
            let pool = self.clone();
            tokio::spawn(async move { pool.run(running, &weights, waiting).await });
        }
        let all: usize = placement
            .engines
            .iter()
            .map(|one| one.production + one.background)
            .sum();
        metrics::gauge!("springtide_running_choices").set(all as f64);
        metrics::gauge!("springtide_queue_choices").set(queue.len() as f64);
        work.make_room();
    }

    /// Samples one sequence and frees its slot.
    async fn run(&self, running: Running, weights: &str, waiting: Waiting) {
        let Running {
            id,
            engine,
            updates,
            taking,
        } = running;
        let Waiting {
            request,
            failures,
            taken_back,
        } = waiting;
        let (caller, class, prompt) = (request.caller.clone(), request.class, request.prompt.len());
        let began = Instant::now();
        let _ = request.events.try_send(updates.started(weights.to_owned()));
        let crossing = (self.shared.in_flight == InFlight::Cross).then_some(&updates);
        let client = self.client(engine);
        let end = sequence::run(
            client,
            weights,
            request,
            self.shared.send_seeds,
            crossing,
            Some(&taking),
        )
        .await;
        {
            let mut work = self.lock();
            let slots = slots(&mut work.placement, engine, class);
            *slots = slots.saturating_sub(1);
            work.running.remove(&caller);
            let told = work.lent.remove(&id).and_then(|lent| lent.told);
            let totals = &mut work.totals[engine];
            let used = totals.of(caller.work());
            let (sampled, seconds) = (taking.sampled.load(Ordering::Relaxed), began.elapsed().as_secs_f64());
            used.sampled += sampled as u64;
            used.slot_seconds += seconds;
            used.engine_seconds += seconds / self.shared.slots as f64;
            match taken_back {
                0 => used.read += prompt as u64,
                _ => used.read_again += prompt as u64,
            }
            if let End::Lost(sampled) = &end {
                totals.throw_away(caller.work(), *sampled as u64);
            }
            if let Some(told) = told.filter(|_| matches!(end, End::TakenBack(_) | End::Lost(_))) {
                totals.taken_back += 1;
                totals.taken_back_after(told.elapsed());
            }
        }
        match end {
            End::Done | End::Lost(_) => {}
            End::TakenBack(request) => {
                let (priority, caller) = (request.priority, request.caller.clone());
                let waiting = Waiting {
                    request: *request,
                    failures,
                    taken_back: taken_back + 1,
                };
                self.lock().queue.put_back(class, priority, &caller, waiting);
            }
            End::Retry(request, error) => {
                self.eject(engine, &error);
                if failures + 1 < FAILURES_MAX {
                    self.queue_again(*request, failures + 1, taken_back);
                } else {
                    let failed = SampleEvent::Failed(format!("{error:#}"));
                    let _ = request.events.try_send(failed);
                }
            }
            End::Late(request) => match client.weights_name().await {
                // it works, and the next engine would take as long
                Ok(_) => {
                    let _ = request.events.try_send(SampleEvent::Failed(Error::Late.to_string()));
                }
                Err(error) => {
                    self.eject(engine, &error);
                    self.queue_again(*request, failures + 1, taken_back);
                }
            },
            End::OtherWeights(request) => {
                self.doubt(engine, weights);
                // no engine has failed
                self.queue_again(*request, failures, taken_back);
            }
            End::Failed(error) => self.eject(engine, &error),
        }
        self.start_waiting();
    }

    /// An engine that failed gets no traffic before it was probed again.
    fn eject(&self, engine: usize, error: &anyhow::Error) {
        let mut work = self.lock();
        // a drain that took too long cuts sequences off
        if !matches!(work.placement.engines[engine].state, State::Serving(_)) {
            return;
        }
        work.placement.set_state(engine, State::Down, Instant::now());
        drop(work);
        let error = format!("{error:#}");
        tracing::warn!(engine = self.client(engine).url(), error, "engine ejected");
        metrics::counter!("springtide_remote_ejections_total").increment(1);
        self.state_changed();
    }

    /// An engine that no longer holds the `weights` that were probed gets no traffic before it is known
    /// what it holds.
    fn doubt(&self, engine: usize, weights: &str) {
        let mut work = self.lock();
        // it may have been probed since
        if work.weights[engine] != weights || !matches!(work.placement.engines[engine].state, State::Serving(_)) {
            return;
        }
        work.placement.set_state(engine, State::Unproven, Instant::now());
        drop(work);
        tracing::info!(
            engine = self.client(engine).url(),
            weights,
            "engine has got other weights"
        );
        metrics::counter!("springtide_remote_other_weights_total").increment(1);
        self.state_changed();
    }

    fn queue_again(&self, request: SampleRequest, failures: u32, taken_back: u32) {
        let (class, priority, caller) = (request.class, request.priority, request.caller.clone());
        let events = request.events.clone();
        metrics::counter!("springtide_remote_retries_total").increment(1);
        let waiting = vec![Waiting {
            request,
            failures,
            taken_back,
        }];
        let displaced = match self.lock().queue.push(class, priority, &caller, waiting) {
            Ok(displaced) => displaced.into_iter().map(|waiting| waiting.request.events).collect(),
            Err(Full) => vec![events],
        };
        for events in displaced {
            let _ = events.try_send(SampleEvent::Displaced);
        }
    }
}

fn slots(placement: &mut Placement, engine: usize, class: TrafficClass) -> &mut usize {
    let engine = &mut placement.engines[engine];
    match class {
        TrafficClass::Production => &mut engine.production,
        TrafficClass::Background => &mut engine.background,
    }
}
