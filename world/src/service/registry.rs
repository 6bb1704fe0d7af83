//! The worlds in use, by id, and when each ends.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use edge::problem::Problem;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::provider::{Error, World};
use crate::{Command, Output};

/// Cheap to clone; clones share the worlds.
#[derive(Clone)]
pub(super) struct Registry(Arc<Mutex<HashMap<Uuid, Entry>>>);

#[derive(Clone)]
struct Entry {
    /// `None` once it has ended.
    world: Arc<tokio::sync::Mutex<Option<Box<dyn World>>>>,
    /// Ends the program that runs in it, and then the world.
    end: CancellationToken,
}

impl Registry {
    pub(super) fn new() -> Self {
        Self(Arc::default())
    }

    /// Takes a world, and ends it after `ttl`. Needs a runtime.
    pub(super) fn add(&self, world: Box<dyn World>, ttl: Duration) -> Uuid {
        let id = Uuid::now_v7();
        let entry = Entry {
            world: Arc::new(tokio::sync::Mutex::new(Some(world))),
            end: CancellationToken::new(),
        };
        self.entries().insert(id, entry.clone());
        let registry = self.clone();
        tokio::spawn(async move {
            if tokio::time::timeout(ttl, entry.end.cancelled()).await.is_err() {
                tracing::info!(%id, "a world reached its time to live");
                entry.end.cancel();
            }
            registry.entries().remove(&id);
            let world = entry.world.lock().await.take();
            destroy(world).await;
        });
        id
    }

    /// Runs a command in a world, also if its caller leaves.
    pub(super) async fn run(&self, id: Uuid, command: Command) -> Result<Result<Output, Error>, Problem> {
        let Entry { world, end } = self.find(id)?;
        let Ok(mut world) = world.try_lock_owned() else {
            return Err(Problem::conflict(format!(
                "a program runs in the world {id}: wait for its end"
            )));
        };
        let running = tokio::spawn(async move {
            let Some(running) = world.as_mut() else {
                return Err(Error::Lost("it has ended".to_owned()));
            };
            let result = tokio::select! {
                result = running.run(&command) => result,
                () = end.cancelled() => Err(Error::Lost("it ended while a program ran in it".to_owned())),
            };
            if matches!(result, Err(Error::Lost(_))) {
                destroy(world.take()).await;
                end.cancel();
            }
            result
        });
        running.await.map_err(Problem::internal)
    }

    /// Ends a world. Returns when it is gone.
    pub(super) async fn end(&self, id: Uuid) -> Result<(), Problem> {
        let entry = self.find(id)?;
        entry.end.cancel();
        let world = entry.world.lock().await.take();
        destroy(world).await;
        self.entries().remove(&id);
        Ok(())
    }

    pub(super) fn end_all(&self) {
        for entry in self.entries().values() {
            entry.end.cancel();
        }
    }

    fn find(&self, id: Uuid) -> Result<Entry, Problem> {
        let found = self.entries().get(&id).cloned();
        found.ok_or_else(|| Problem::not_found(format!("there is no world {id}: it never was, or has ended")))
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<Uuid, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn destroy(world: Option<Box<dyn World>>) {
    if let Some(world) = world
        && let Err(error) = world.destroy().await
    {
        tracing::warn!(%error, "a world was not ended in order");
    }
}
