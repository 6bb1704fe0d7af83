//! The engine's thread, and the handle that other threads hold.
//!
//! The thread owns every batch. Other threads reach it through an inbox behind one lock: the
//! request queue and the versions to install.

use super::backend::Backend;
use super::batch::Batch;
use super::caller::Tally;
use super::load::{Limit, Load, Totals};
use super::queue::{Full, Queue};
use super::{Engine, Installation, LoadedVersion, SampleEvent, SampleRequest, SubmitError, TrafficClass};
use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// How often an idle engine checks for versions that can retire.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Constrained sequences that run at once; others wait in the queue. Their masks are computed one
/// after another on the engine's thread, and every sequence waits for them. Users do
/// not wait for background sequences, so there may be twice as many.
const CONSTRAINED_MAX: usize = 8;

/// Limits of the engine.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    pub queue_choices_max: usize,
    /// Production requests that have waited longer for a slot get [`SampleEvent::Expired`].
    pub queue_wait_max: Duration,
    /// Tokens of prompts that one pass reads.
    pub prompt_tokens_per_pass_max: usize,
    /// Slots of each version that background sequences never use.
    pub slots_reserved_for_production: usize,
    /// Background sequences that could not continue for longer get [`SampleEvent::Displaced`]. Until then
    /// they keep their version loaded.
    pub parked_max: Duration,
}

/// A version to install.
struct Install {
    resident: Resident,
    done: oneshot::Sender<Duration>,
}

/// An installed version.
struct Resident {
    batch: Batch,
    /// Receives the backend when the version retires.
    retired: oneshot::Sender<Box<dyn Backend>>,
}

struct Inbox {
    queue: Queue<SampleRequest>,
    installs: Vec<Install>,
    limit: Limit,
    /// Since when fewer slots are lent than before.
    lowered: Option<Instant>,
    stopping: bool,
}

struct Shared {
    inbox: Mutex<Inbox>,
    load: Mutex<Load>,
    arrived: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        // the inbox is consistent after every statement, so a panic elsewhere does no harm
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn load(&self) -> MutexGuard<'_, Load> {
        self.load.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

impl Engine for Handle {
    fn submit(&self, requests: Vec<SampleRequest>) -> Result<(), SubmitError> {
        let Some(first) = requests.first() else {
            return Ok(());
        };
        let (caller, class, priority) = (first.caller.clone(), first.class, first.priority);
        let mut inbox = self.shared.lock();
        if inbox.stopping {
            return Err(SubmitError::Stopped);
        }
        let displaced = inbox.queue.push(class, priority, &caller, requests);
        let waiting = inbox.queue.len();
        metrics::gauge!("springtide_queue_choices").set(waiting as f64);
        drop(inbox);
        let displaced = displaced.map_err(|Full| SubmitError::Full { waiting })?;
        for request in displaced {
            metrics::counter!("springtide_choices_displaced_total").increment(1);
            let _ = request.events.try_send(SampleEvent::Displaced);
        }
        self.shared.arrived.notify_one();
        Ok(())
    }

    fn unavailable(&self, _: &LoadedVersion) -> Option<BoxFuture<'static, ()>> {
        None
    }

    fn stop(&self) {
        self.shared.lock().stopping = true;
        self.shared.arrived.notify_one();
    }

    fn loads(&self) -> Vec<Load> {
        let mut load = self.shared.load().clone();
        let inbox = self.shared.lock();
        load.production_waiting = inbox.queue.waiting(TrafficClass::Production);
        load.background_waiting = inbox.queue.waiting(TrafficClass::Background) + load.parked;
        vec![load]
    }

    fn lend(&self, limits: &[Limit]) {
        let Some(&limit) = limits.first() else { return };
        let mut inbox = self.shared.lock();
        if limit.slots < inbox.limit.slots {
            inbox.lowered.get_or_insert_with(Instant::now);
        }
        inbox.limit = limit;
        drop(inbox);
        self.shared.arrived.notify_one();
    }
}

impl Handle {
    /// Installs a staged version between two passes; requests for it are answered from then
    /// on. It retires once nobody but the engine holds its `Arc`. Until then, upgrading a `Weak` of
    /// it keeps it installed. Fails only if the engine has stopped.
    pub async fn install(
        &self,
        version: Arc<LoadedVersion>,
        backend: Box<dyn Backend>,
    ) -> Result<Installation, SubmitError> {
        let (done, installed) = oneshot::channel();
        let (retired, retirement) = oneshot::channel();
        {
            let mut inbox = self.shared.lock();
            if inbox.stopping {
                return Err(SubmitError::Stopped);
            }
            let batch = Batch::new(version, backend);
            inbox.installs.push(Install {
                resident: Resident { batch, retired },
                done,
            });
        }
        self.shared.arrived.notify_one();
        Ok(Installation {
            pause: installed.await.map_err(|_| SubmitError::Stopped)?,
            retired: retirement,
        })
    }
}

/// The running thread.
pub struct Thread {
    pub handle: Handle,
    /// Resolves when the thread has ended, for whatever reason.
    pub ended: oneshot::Receiver<()>,
}

/// Starts the engine's thread without any version.
pub fn spawn(config: Config) -> std::io::Result<Thread> {
    let shared = Arc::new(Shared {
        inbox: Mutex::new(Inbox {
            queue: Queue::new(config.queue_choices_max),
            installs: Vec::new(),
            limit: Limit::default(),
            lowered: None,
            stopping: false,
        }),
        load: Mutex::default(),
        arrived: Condvar::new(),
    });
    let (alive, ended) = oneshot::channel::<()>();
    let engine = Worker {
        config,
        shared: shared.clone(),
        residents: BTreeMap::new(),
    };
    std::thread::Builder::new().name("engine".into()).spawn(move || {
        let _alive = alive;
        engine.run();
    })?;
    Ok(Thread {
        handle: Handle { shared },
        ended,
    })
}

/// What the thread does next.
struct Work {
    installs: Vec<Install>,
    admitted: Vec<SampleRequest>,
    /// Slots that background sequences may have.
    lent: usize,
    /// Set once after fewer are lent: since when.
    lowered: Option<Instant>,
}

struct Worker {
    config: Config,
    shared: Arc<Shared>,
    /// By serial.
    residents: BTreeMap<i64, Resident>,
}

/// Also runs on a panic, so that no caller waits for a dead engine.
impl Drop for Worker {
    fn drop(&mut self) {
        let mut inbox = self.shared.lock();
        inbox.stopping = true;
        inbox.installs.clear();
        inbox.queue.drain().for_each(drop);
    }
}

impl Worker {
    fn run(mut self) {
        let mut totals = Totals::default();
        while let Some(work) = self.next_work() {
            for install in work.installs {
                self.install(install);
            }
            let mut taken_back = 0;
            for request in work.admitted {
                // `next_work` found a free slot in this batch
                if let Some(resident) = self.residents.get_mut(&request.version.serial) {
                    let (parked, submitted) = (resident.batch.parked(), request.submitted);
                    resident.batch.admit(request);
                    if resident.batch.parked() > parked {
                        taken_back += 1;
                        totals.taken_back_after(submitted.elapsed());
                    }
                }
            }
            taken_back += self.take_back(work.lent);
            if let Some(lowered) = work.lowered {
                totals.taken_back_after(lowered.elapsed());
            }
            totals.taken_back += taken_back;
            let mut left = work.lent.saturating_sub(self.in_slots(TrafficClass::Background));
            for resident in self.residents.values_mut() {
                left -= resident.batch.resume(self.config.slots_reserved_for_production, left);
                for sequence in resident.batch.remove_parked(self.config.parked_max) {
                    totals.throw_away(sequence.request.caller.work(), sequence.sampled() as u64);
                    sequence.give_up();
                }
            }
            for resident in self.residents.values_mut() {
                let began = Instant::now();
                let parts = resident.batch.advance(self.config.prompt_tokens_per_pass_max);
                totals.count(&parts, began.elapsed());
            }
            self.retire();
            self.report(&totals);
        }
    }

    fn in_slots(&self, class: TrafficClass) -> usize {
        let residents = self.residents.values();
        residents.map(|resident| resident.batch.in_slots(class)).sum()
    }

    fn parked(&self) -> usize {
        self.residents.values().map(|resident| resident.batch.parked()).sum()
    }

    /// Parks background sequences until no more than `lent` run. Returns how many it parked.
    fn take_back(&mut self, lent: usize) -> u64 {
        let over = self.in_slots(TrafficClass::Background).saturating_sub(lent);
        for _ in 0..over {
            let batches = self.residents.values_mut().map(|resident| &mut resident.batch);
            let least = batches.filter_map(|batch| Some((batch.least_progress()?, batch)));
            if let Some((_, batch)) = least.min_by_key(|(progress, _)| *progress) {
                batch.park_one();
            }
        }
        over as u64
    }

    fn report(&self, totals: &Totals) {
        let mut load = self.shared.load();
        load.serves = !self.residents.is_empty();
        load.production = self.in_slots(TrafficClass::Production);
        load.background = self.in_slots(TrafficClass::Background);
        load.parked = self.parked();
        load.totals.clone_from(totals);
    }

    /// Waits for work, at most [`IDLE_CHECK_INTERVAL`]. `None`: stop.
    fn next_work(&self) -> Option<Work> {
        let mut inbox = self.shared.lock();
        let running = self.in_slots(TrafficClass::Production) + self.in_slots(TrafficClass::Background);
        // parked sequences may continue, unless nothing is lent
        let continues = |inbox: &Inbox| self.parked() > 0 && inbox.limit.slots > 0;
        let lent = inbox.limit.slots;
        let mut admitted = self.admit_from(&mut inbox.queue, lent);
        let is_idle = running == 0 && admitted.is_empty() && !continues(&inbox);
        if is_idle && inbox.installs.is_empty() && !inbox.stopping {
            (inbox, _) = self
                .shared
                .arrived
                .wait_timeout(inbox, IDLE_CHECK_INTERVAL)
                .unwrap_or_else(PoisonError::into_inner);
            let lent = inbox.limit.slots;
            admitted = self.admit_from(&mut inbox.queue, lent);
        }
        if inbox.stopping {
            return None;
        }
        let installs = std::mem::take(&mut inbox.installs);
        metrics::gauge!("springtide_queue_choices").set(inbox.queue.len() as f64);
        metrics::gauge!("springtide_running_choices").set((running + admitted.len()) as f64);
        Some(Work {
            installs,
            admitted,
            lent: inbox.limit.slots,
            lowered: inbox.lowered.take(),
        })
    }

    /// Takes the requests that fit now, in order, and drops those whose callers are gone or have
    /// waited too long. `lent`: slots that background sequences may have, those that continue included.
    fn admit_from(&self, queue: &mut Queue<SampleRequest>, lent: usize) -> Vec<SampleRequest> {
        if queue.len() == 0 {
            return Vec::new();
        }
        let expired = |request: &SampleRequest| {
            request.class == TrafficClass::Production && request.submitted.elapsed() > self.config.queue_wait_max
        };
        for request in queue.remove_if(|request| request.events.is_closed() || expired(request)) {
            let reason = match request.events.try_send(SampleEvent::Expired) {
                Ok(()) => "springtide_choices_expired_total",
                Err(_) => "springtide_choices_cancelled_total",
            };
            metrics::counter!(reason).increment(1);
        }
        let mut running = Tally::default();
        for caller in self.residents.values().flat_map(|resident| resident.batch.callers()) {
            running.add(caller);
        }
        let reserved = self.config.slots_reserved_for_production;
        let mut rooms: BTreeMap<(i64, TrafficClass), usize> = BTreeMap::new();
        for (&serial, resident) in &self.residents {
            for class in [TrafficClass::Production, TrafficClass::Background] {
                rooms.insert((serial, class), resident.batch.room(class, reserved));
            }
        }
        let mut constrained = [TrafficClass::Production, TrafficClass::Background].map(|class| {
            let batches = self.residents.values().map(|resident| &resident.batch);
            (class, batches.map(|batch| batch.constrained(class)).sum::<usize>())
        });
        let mut background_left = lent.saturating_sub(self.in_slots(TrafficClass::Background) + self.parked());
        let mut admitted = Vec::new();
        while let Some(request) = queue.take(&running, |request| {
            let room = rooms.get(&(request.version.serial, request.class));
            let is_full = |(class, running)| class == request.class && running >= CONSTRAINED_MAX;
            room.is_some_and(|&room| room > 0)
                && (request.class == TrafficClass::Production || background_left > 0)
                && !(request.constraint.is_some() && constrained.into_iter().any(is_full))
        }) {
            let taken_from: &[TrafficClass] = match request.class {
                TrafficClass::Production => &[TrafficClass::Production, TrafficClass::Background],
                // its slot can still go to a production request
                TrafficClass::Background => &[TrafficClass::Background],
            };
            for &class in taken_from {
                if let Some(room) = rooms.get_mut(&(request.version.serial, class)) {
                    *room = room.saturating_sub(1);
                }
            }
            if request.class == TrafficClass::Background {
                background_left -= 1;
            }
            if request.constraint.is_some() {
                let counts = constrained.iter_mut().filter(|(class, _)| taken_from.contains(class));
                counts.for_each(|(_, running)| *running += 1);
            }
            running.add(&request.caller);
            admitted.push(request);
        }
        admitted
    }

    fn install(&mut self, install: Install) {
        let started = Instant::now();
        let serial = install.resident.batch.version.serial;
        self.residents.insert(serial, install.resident);
        let pause = started.elapsed();
        metrics::histogram!("springtide_swap_pause_seconds").record(pause.as_secs_f64());
        metrics::gauge!("springtide_resident_versions").set(self.residents.len() as f64);
        let _ = install.done.send(pause);
    }

    /// Hands out the backends of versions that only this thread still holds.
    fn retire(&mut self) {
        let idle =
            |resident: &Resident| resident.batch.sequences() == 0 && Arc::strong_count(&resident.batch.version) == 1;
        let idle: Vec<_> = self.residents.extract_if(.., |_, resident| idle(resident)).collect();
        for (serial, Resident { batch, retired }) in idle {
            match batch.into_backend() {
                Ok(backend) => drop(retired.send(backend)),
                // somebody upgraded a `Weak` in between
                Err(batch) => drop(self.residents.insert(serial, Resident { batch, retired })),
            }
            metrics::gauge!("springtide_resident_versions").set(self.residents.len() as f64);
        }
    }
}

#[cfg(test)]
mod tests;
