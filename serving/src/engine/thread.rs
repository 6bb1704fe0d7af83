//! The engine's thread and the handle that others hold. The loop owns every batch; what crosses threads is an inbox behind
//! one lock: the queue, and versions that come and go.

use super::batch::Batch;
use super::model::Model;
use super::queue::{Pushed, Queue};
use super::{Class, Event, Installed, Refused, Request, Version};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// How often an idle engine looks whether a version is held by nobody else.
const IDLE_LOOK: Duration = Duration::from_millis(50);

/// Limits of the engine.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    pub queue_choices_max: usize,
    pub prefills_per_step_max: usize,
    /// Slots of each version that background sequences leave alone.
    pub slots_reserved_for_production: usize,
}

struct Install {
    resident: Resident,
    done: oneshot::Sender<Duration>,
}

struct Resident {
    batch: Batch,
    /// Where the model goes when the version leaves.
    left: oneshot::Sender<Box<dyn Model>>,
}

struct Inbox {
    queue: Queue<Request>,
    installs: Vec<Install>,
    stopping: bool,
}

struct Shared {
    inbox: Mutex<Inbox>,
    arrived: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        // the inbox is whole after every statement, so a panic elsewhere leaves nothing half-done
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the rest of the process holds of the engine.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

impl Handle {
    /// Queues the choices of one request, all or none; they are of one class. Displaced background choices are told so.
    pub fn submit(&self, requests: Vec<Request>) -> Result<(), Refused> {
        let mut inbox = self.shared.lock();
        if inbox.stopping {
            return Err(Refused::Stopped);
        }
        let room = requests.first().map_or(0, |request| inbox.queue.room(request.class));
        if room < requests.len() {
            return Err(Refused::Full {
                waiting: inbox.queue.len(),
            });
        }
        for request in requests {
            let (class, priority) = (request.class, request.priority);
            match inbox.queue.push(class, priority, request) {
                Pushed::Queued => {}
                Pushed::Displaced(other) | Pushed::Full(other) => {
                    let _ = other.events.try_send(Event::Displaced);
                }
            }
        }
        metrics::gauge!("springtide_queue_choices").set(inbox.queue.len() as f64);
        drop(inbox);
        self.shared.arrived.notify_one();
        Ok(())
    }

    /// Makes a staged version answer, between two decode steps. It leaves when nobody but the engine holds its `Arc`, and a
    /// `Weak` of it that can still be upgraded brings it back to stay. The engine's death is the only error.
    pub async fn install(&self, version: Arc<Version>, model: Box<dyn Model>) -> Result<Installed, Refused> {
        let (done, told) = oneshot::channel();
        let (left, leaving) = oneshot::channel();
        let resident = Resident {
            batch: Batch::new(version, model),
            left,
        };
        {
            let mut inbox = self.shared.lock();
            if inbox.stopping {
                return Err(Refused::Stopped);
            }
            inbox.installs.push(Install { resident, done });
        }
        self.shared.arrived.notify_one();
        let pause = told.await.map_err(|_| Refused::Stopped)?;
        Ok(Installed { pause, left: leaving })
    }

    /// Asks the thread to end; what runs is cut off.
    pub fn stop(&self) {
        self.shared.lock().stopping = true;
        self.shared.arrived.notify_one();
    }
}

/// The running thread.
pub struct Thread {
    pub handle: Handle,
    /// Resolves when the thread has ended, for whatever reason.
    pub ended: oneshot::Receiver<()>,
}

/// Starts the engine's thread, with no version resident.
pub fn spawn(config: Config) -> std::io::Result<Thread> {
    let shared = Arc::new(Shared {
        inbox: Mutex::new(Inbox {
            queue: Queue::new(config.queue_choices_max),
            installs: Vec::new(),
            stopping: false,
        }),
        arrived: Condvar::new(),
    });
    let (alive, ended) = oneshot::channel::<()>();
    let engine = Engine {
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

struct Engine {
    config: Config,
    shared: Arc<Shared>,
    residents: BTreeMap<i64, Resident>,
}

/// Also on a panic: nobody waits for an engine that is gone.
impl Drop for Engine {
    fn drop(&mut self) {
        let mut inbox = self.shared.lock();
        inbox.stopping = true;
        inbox.installs.clear();
        inbox.queue.drain().for_each(drop);
    }
}

impl Engine {
    fn run(mut self) {
        while let Some((installs, admitted)) = self.next_work() {
            for install in installs {
                self.install(install);
            }
            for request in admitted {
                // `next_work` counted a free slot of this batch for it
                if let Some(resident) = self.residents.get_mut(&request.version.serial) {
                    resident.batch.admit(request);
                }
            }
            for resident in self.residents.values_mut() {
                resident.batch.step();
            }
            self.let_go();
        }
    }

    /// Waits until there is something to do, or for [`IDLE_LOOK`]. None: the engine is to stop.
    fn next_work(&self) -> Option<(Vec<Install>, Vec<Request>)> {
        let mut inbox = self.shared.lock();
        let running: usize = self.residents.values().map(|r| r.batch.running()).sum();
        let mut admitted = self.admit_from(&mut inbox.queue);
        if running == 0 && admitted.is_empty() && inbox.installs.is_empty() && !inbox.stopping {
            (inbox, _) = self
                .shared
                .arrived
                .wait_timeout(inbox, IDLE_LOOK)
                .unwrap_or_else(PoisonError::into_inner);
            admitted = self.admit_from(&mut inbox.queue);
        }
        if inbox.stopping {
            return None;
        }
        let installs = std::mem::take(&mut inbox.installs);
        metrics::gauge!("springtide_queue_choices").set(inbox.queue.len() as f64);
        metrics::gauge!("springtide_running_choices").set((running + admitted.len()) as f64);
        Some((installs, admitted))
    }

    /// Takes what fits now, in order. Sequences whose caller is gone leave the queue on the way.
    fn admit_from(&self, queue: &mut Queue<Request>) -> Vec<Request> {
        let mut free: BTreeMap<i64, usize> = self
            .residents
            .iter()
            .map(|(&serial, resident)| (serial, resident.batch.free()))
            .collect();
        let mut admitted = Vec::new();
        while admitted.len() < self.config.prefills_per_step_max {
            let next = queue.take(|request| {
                let reserved = match request.class {
                    Class::Production => 0,
                    Class::Background => self.config.slots_reserved_for_production,
                };
                let fits = free.get(&request.version.serial).is_some_and(|&slots| slots > reserved);
                fits || request.events.is_closed()
            });
            let Some(request) = next else { break };
            if request.events.is_closed() {
                metrics::counter!("springtide_choices_cancelled_total").increment(1);
                continue;
            }
            if let Some(slots) = free.get_mut(&request.version.serial) {
                *slots -= 1;
            }
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

    /// Gives back the versions that only this thread still holds.
    fn let_go(&mut self) {
        let idle: Vec<i64> = self
            .residents
            .iter()
            .filter(|(_, r)| r.batch.running() == 0 && Arc::strong_count(&r.batch.version) == 1)
            .map(|(&serial, _)| serial)
            .collect();
        for serial in idle {
            let Some(Resident { batch, left }) = self.residents.remove(&serial) else {
                continue;
            };
            match batch.into_model() {
                Ok(model) => drop(left.send(model)),
                // somebody took hold of it in between
                Err(batch) => {
                    self.residents.insert(serial, Resident { batch, left });
                }
            }
            metrics::gauge!("springtide_resident_versions").set(self.residents.len() as f64);
        }
    }
}

#[cfg(test)]
mod tests;
