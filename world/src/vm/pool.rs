//! Forks of one snapshot, some of them ready before anybody asks.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;

use super::{Machine, Options, Snapshot};
use crate::provider::{Error, Provider, World};
use crate::{Command, Output};

/// After a fork that failed, before the next one is made ready.
const PAUSE: Duration = Duration::from_secs(1);

/// Makes worlds out of a snapshot. At most `worlds_max` machines exist at a time. `ready` of them wait
/// for a user; a burst beyond those is forked while it waits.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    refill: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    snapshot: Snapshot,
    ready_wanted: usize,
    worlds_max: usize,
    ready: Mutex<VecDeque<Slot>>,
    /// A place for each machine.
    room: Arc<Semaphore>,
    /// A place for each world in use. Whoever has one finds a machine, or room for it.
    users: Arc<Semaphore>,
    /// A fork that waited was taken.
    wanted: Notify,
    /// A fork is ready, or could not be made.
    arrived: Notify,
}

/// A machine, and its place among `worlds_max`.
#[derive(Debug)]
struct Slot {
    machine: Machine,
    // Dropped after the machine, in this order.
    _room: OwnedSemaphorePermit,
    _user: Option<OwnedSemaphorePermit>,
}

/// What a pool holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct State {
    /// Forks that wait for a user.
    pub ready: usize,
    /// Worlds in use.
    pub used: usize,
    pub worlds_max: usize,
}

impl Pool {
    /// Boots a machine, saves it in `folder` and begins to fork it. Needs a runtime.
    pub async fn start(options: Options, folder: &Path, ready: usize, worlds_max: usize) -> Result<Self, Error> {
        let shared = Arc::new(Shared {
            snapshot: Snapshot::make(options, folder).await?,
            ready_wanted: ready.min(worlds_max),
            worlds_max,
            ready: Mutex::default(),
            room: Arc::new(Semaphore::new(worlds_max)),
            users: Arc::new(Semaphore::new(worlds_max)),
            wanted: Notify::new(),
            arrived: Notify::new(),
        });
        let refill = tokio::spawn(shared.clone().refill());
        Ok(Self { shared, refill })
    }

    pub fn snapshot(&self) -> &Snapshot {
        &self.shared.snapshot
    }

    pub fn state(&self) -> State {
        let worlds_max = self.shared.worlds_max;
        State {
            ready: self.shared.waiting().len(),
            used: worlds_max - self.shared.users.available_permits(),
            worlds_max,
        }
    }

    /// The processes of the forks that wait.
    pub fn ready_pids(&self) -> Vec<u32> {
        self.shared.waiting().iter().map(|slot| slot.machine.pid()).collect()
    }

    async fn take(&self) -> Result<Slot, Error> {
        let Ok(user) = self.shared.users.clone().try_acquire_owned() else {
            return Err(Error::Full(format!(
                "all {} worlds are in use: end some, wait for one to end, or raise worlds_max",
                self.shared.worlds_max
            )));
        };
        let id = uuid::Uuid::now_v7().simple().to_string();
        loop {
            let waiting = self.shared.waiting().pop_front();
            if let Some(mut slot) = waiting {
                self.shared.wanted.notify_one();
                match slot.machine.begin(&id).await {
                    Ok(()) => {
                        return Ok(Slot {
                            _user: Some(user),
                            ..slot
                        });
                    }
                    Err(error) => tracing::warn!(%error, "a fork that waited is lost"),
                }
            } else if let Ok(room) = self.shared.room.clone().try_acquire_owned() {
                let mut machine = self.shared.snapshot.fork().await?;
                machine.begin(&id).await?;
                let _user = Some(user);
                return Ok(Slot {
                    machine,
                    _room: room,
                    _user,
                });
            } else {
                self.shared.arrived.notified().await;
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.refill.abort();
    }
}

impl Shared {
    fn waiting(&self) -> std::sync::MutexGuard<'_, VecDeque<Slot>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps forks ready, for as long as the pool lives.
    async fn refill(self: Arc<Self>) {
        loop {
            while self.waiting().len() < self.ready_wanted {
                let Ok(room) = self.room.clone().acquire_owned().await else {
                    return;
                };
                let forked = self.snapshot.fork().await;
                let failed = forked.is_err();
                match forked {
                    Ok(machine) => self.waiting().push_back(Slot {
                        machine,
                        _room: room,
                        _user: None,
                    }),
                    Err(error) => {
                        tracing::error!(%error, "no fork can be made ready");
                        drop(room);
                    }
                }
                self.arrived.notify_one();
                if failed {
                    tokio::time::sleep(PAUSE).await;
                }
            }
            self.wanted.notified().await;
        }
    }
}

#[async_trait]
impl Provider for Pool {
    async fn create(&self) -> Result<Box<dyn World>, Error> {
        Ok(Box::new(self.take().await?))
    }
}

#[async_trait]
impl World for Slot {
    async fn run(&mut self, command: &Command) -> Result<Output, Error> {
        self.machine.run(command).await
    }

    async fn destroy(self: Box<Self>) -> Result<(), Error> {
        let Slot { machine, _room, _user } = *self;
        Box::new(machine).destroy().await
    }
}
