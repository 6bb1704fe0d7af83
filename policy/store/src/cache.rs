//! Objects on this machine's disk. Each is fetched once, in parts, several at a time, by whoever asks first; every part is
//! verified before anybody sees it and can be read while the rest still arrives. What was broken off goes on where it was, after
//! a restart too. Processes may share the folder: the others wait for the one that fetches.
//!
//! ```text
//! <digest>            an object
//! <digest>.parts      the hashes of its parts, where it has several (see `artifact::parts`)
//! <digest>.arriving   its bytes as far as they are here, under a lock of the process that fetches it
//! ```
//! The folder holds at most `bytes_max`; what was used longest ago goes first.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use tokio::sync::watch;

use super::{Error, Store, blocking, download, object_key};
use artifact::digest::Digest;
use artifact::manifest::ObjectRef;
use artifact::memory;
use artifact::parts::Parts;

/// How often a process looks whether another one has fetched what it wants.
const LOOK: Duration = Duration::from_millis(50);
const ARRIVING: &str = ".arriving";
const LIST: &str = ".parts";

/// What a cache may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Disk, in bytes.
    pub bytes_max: u64,
    /// Parts of one object that are fetched at once.
    pub streams: usize,
}

/// A folder of objects. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Cache {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    limits: Limits,
    /// Those that somebody holds.
    arrivals: Mutex<HashMap<Digest, Weak<Arrival>>>,
    /// Held while room is made.
    making_room: Mutex<()>,
}

/// An object that is here or on its way.
#[derive(Debug)]
pub struct Arrival {
    parts: Parts,
    file: File,
    path: PathBuf,
    state: watch::Sender<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By part.
    here: Vec<bool>,
    failed: Option<String>,
}

impl Cache {
    /// Creates the folder where there is none.
    pub fn open(folder: &Path, limits: Limits) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let shared = Shared {
            folder: folder.to_owned(),
            limits,
            arrivals: Mutex::default(),
            making_room: Mutex::default(),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// The size of an object that is whole here.
    pub fn size_of(&self, digest: &Digest) -> Option<u64> {
        let path = self.shared.folder.join(digest.to_string());
        path.metadata().ok().map(|file| file.len())
    }

    /// The object, of which as much is here as had arrived; the rest is fetched from `store` from now on.
    pub async fn object(&self, store: &Store, policy: &str, object: &ObjectRef) -> Result<Arc<Arrival>, Error> {
        if let Some(arrival) = self.shared.arrival(&object.digest) {
            return Ok(arrival);
        }
        let parts = self.shared.parts(store, policy, object).await?;
        let shared = self.shared.clone();
        let opened = blocking(move || shared.open(parts)).await?;
        let (arrival, whole) = opened.map_err(|error| local(object, &error))?;
        let arrival = match self.shared.keep(arrival) {
            Kept::Ours(arrival) => arrival,
            Kept::Theirs(arrival) => return Ok(arrival),
        };
        if !whole {
            let fetch = Fetch {
                shared: self.shared.clone(),
                store: store.clone(),
                policy: policy.to_owned(),
                arrival: arrival.clone(),
            };
            tokio::spawn(fetch.run());
        }
        Ok(arrival)
    }

    /// All bytes of the object.
    pub(super) async fn whole(&self, store: &Store, policy: &str, object: &ObjectRef) -> Result<Bytes, Error> {
        let arrival = self.object(store, policy, object).await?;
        let mut bytes = memory::room(usize::try_from(object.size_bytes).unwrap_or_default());
        for index in 0..arrival.parts.count() {
            bytes.extend_from_slice(&arrival.part(index).await?);
        }
        Ok(bytes.into())
    }
}

enum Kept {
    Ours(Arc<Arrival>),
    /// Somebody was faster.
    Theirs(Arc<Arrival>),
}

impl Shared {
    fn arrival(&self, digest: &Digest) -> Option<Arc<Arrival>> {
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let arrival = arrivals.get(digest)?.upgrade();
        let usable = arrival.filter(|arrival| arrival.state.borrow().failed.is_none());
        if usable.is_none() {
            arrivals.remove(digest);
        }
        usable
    }

    fn keep(&self, arrival: Arrival) -> Kept {
        let digest = arrival.parts.object().digest;
        if let Some(theirs) = self.arrival(&digest) {
            return Kept::Theirs(theirs);
        }
        let arrival = Arc::new(arrival);
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        arrivals.retain(|_, arrival| arrival.strong_count() > 0);
        arrivals.insert(digest, Arc::downgrade(&arrival));
        Kept::Ours(arrival)
    }

    /// The list of the object's parts: the one that is here, if it is the object's, or else the store's.
    async fn parts(&self, store: &Store, policy: &str, object: &ObjectRef) -> Result<Parts, Error> {
        if let Some(parts) = Parts::single(*object) {
            return Ok(parts);
        }
        let path = self.path(&object.digest, LIST);
        let held = std::fs::read(&path).ok();
        if let Some(parts) = held.and_then(|bytes| Parts::from_bytes(*object, &bytes).ok()) {
            return Ok(parts);
        }
        let parts = store.get_parts(policy, object).await?;
        artifact::atomic::replace(&path, &[&parts.to_bytes()]).map_err(|error| local(object, &error))?;
        Ok(parts)
    }

    /// Opens what is here of an object, and whether that is all of it. A file of another size is none of it.
    fn open(&self, parts: Parts) -> io::Result<(Arrival, bool)> {
        let object = parts.object();
        let path = self.path(&object.digest, "");
        let whole = match File::open(&path) {
            Ok(file) if file.metadata()?.len() == object.size_bytes => {
                // For whoever makes room.
                file.set_modified(SystemTime::now())?;
                Some(file)
            }
            Ok(_) => {
                std::fs::remove_file(&path)?;
                None
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let is_whole = whole.is_some();
        let file = match whole {
            Some(file) => file,
            None => {
                self.make_room(&object)?;
                let mut options = OpenOptions::new();
                options.read(true).write(true).create(true).truncate(false);
                options.open(self.path(&object.digest, ARRIVING))?
            }
        };
        let here = vec![is_whole; usize::try_from(parts.count()).map_err(io::Error::other)?];
        let arrival = Arrival {
            parts,
            file,
            path,
            state: watch::Sender::new(State { here, failed: None }),
        };
        Ok((arrival, is_whole))
    }

    /// Removes what was used longest ago and nobody here holds, until the object fits.
    fn make_room(&self, object: &ObjectRef) -> io::Result<()> {
        let _one_at_a_time = self.making_room.lock().unwrap_or_else(PoisonError::into_inner);
        let arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let held = arrivals.iter().filter(|(_, arrival)| arrival.strong_count() > 0);
        let held: Vec<String> = held.map(|(digest, _)| digest.to_string()).collect();
        drop(arrivals);
        let own = object.digest.to_string();
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let metadata = match entry.metadata() {
                Ok(metadata) => metadata,
                // Another process makes room too.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            if name.starts_with(&own) {
                continue;
            }
            files.push((metadata.modified()?, metadata.len(), name));
        }
        files.sort();
        let mut taken: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, name) in files {
            if taken.saturating_add(object.size_bytes) <= self.limits.bytes_max {
                break;
            }
            let path = self.folder.join(&name);
            let digest = name.split('.').next().unwrap_or_default();
            if held.iter().any(|held| held == digest) || (name.ends_with(ARRIVING) && is_locked(&path)) {
                continue;
            }
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => taken -= bytes,
            }
        }
        if taken.saturating_add(object.size_bytes) > self.limits.bytes_max {
            return Err(io::Error::new(
                io::ErrorKind::QuotaExceeded,
                format!(
                    "{} bytes do not fit beside {taken} that are in use; the folder may hold {}",
                    object.size_bytes, self.limits.bytes_max
                ),
            ));
        }
        Ok(())
    }

    fn path(&self, digest: &Digest, suffix: &str) -> PathBuf {
        self.folder.join(format!("{digest}{suffix}"))
    }
}

fn is_locked(path: &Path) -> bool {
    match File::open(path) {
        Ok(file) => matches!(file.try_lock(), Err(TryLockError::WouldBlock)),
        Err(_) => false,
    }
}

impl Arrival {
    pub fn object(&self) -> ObjectRef {
        self.parts.object()
    }

    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// The bytes of a part, once they are here.
    pub async fn part(self: &Arc<Self>, index: u64) -> Result<Bytes, Error> {
        let place = usize::try_from(index).unwrap_or(usize::MAX);
        let mut state = self.state.subscribe();
        let settled = state
            .wait_for(|state| state.failed.is_some() || state.here.get(place).copied().unwrap_or(true))
            .await;
        if let Some(reason) = settled.ok().and_then(|state| state.failed.clone()) {
            return Err(failed(&self.object(), reason));
        }
        let arrival = self.clone();
        let read = blocking(move || arrival.read(index)).await?;
        match read {
            Ok(Some(bytes)) => Ok(bytes),
            Ok(None) => {
                // Fetched anew by whoever asks next.
                let _ = std::fs::remove_file(&self.path);
                let reason = "it was damaged on this machine's disk".to_owned();
                self.fail(reason.clone());
                Err(failed(&self.object(), reason))
            }
            Err(error) => Err(local(&self.object(), &error)),
        }
    }

    /// None where the disk does not hold what was written.
    fn read(&self, index: u64) -> io::Result<Option<Bytes>> {
        let range = self.parts.range(index);
        // At most a part.
        let mut bytes = vec![0; (range.end - range.start) as usize];
        match self.file.read_exact_at(&mut bytes, range.start) {
            Ok(()) => Ok(self.parts.check(index, &bytes).then(|| bytes.into())),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn arrived(&self, index: u64) {
        self.state.send_modify(|state| {
            if let Some(here) = usize::try_from(index).ok().and_then(|index| state.here.get_mut(index)) {
                *here = true;
            }
        });
    }

    fn fail(&self, reason: String) {
        self.state.send_modify(|state| state.failed = Some(reason));
    }
}

/// Brings an object.
struct Fetch {
    shared: Arc<Shared>,
    store: Store,
    policy: String,
    arrival: Arc<Arrival>,
}

impl Fetch {
    async fn run(self) {
        if let Err(reason) = self.bring().await {
            let digest = self.arrival.object().digest;
            tracing::warn!(object = %digest.short(), reason, "an object did not arrive");
            self.arrival.fail(reason);
        }
    }

    async fn bring(&self) -> Result<(), String> {
        if self.wait_for_lock().await? {
            return Ok(());
        }
        let missing = self.look_what_is_here().await?;
        let key = object_key(&self.policy, &self.arrival.object().digest).map_err(|error| error.to_string())?;
        stream::iter(missing)
            .map(|index| self.bring_part(&key, index))
            .buffer_unordered(self.shared.limits.streams.max(1))
            .try_collect::<()>()
            .await?;
        let (arrival, shared) = (self.arrival.clone(), self.shared.clone());
        let done = blocking(move || {
            arrival.file.sync_all()?;
            let from = shared.path(&arrival.object().digest, ARRIVING);
            std::fs::rename(from, &arrival.path)?;
            File::open(&shared.folder)?.sync_all()
        });
        done.await
            .map_err(|error| error.to_string())?
            .map_err(|error| error.to_string())
    }

    /// Until this process may fetch the object. True: another one has done it.
    async fn wait_for_lock(&self) -> Result<bool, String> {
        loop {
            match self.arrival.file.try_lock() {
                Ok(()) if !self.arrival.path.exists() => return Ok(false),
                Ok(()) | Err(TryLockError::WouldBlock) if self.arrival.path.exists() => {
                    // The file that was opened is the one that has its name now; what it holds is checked as it is read.
                    for index in 0..self.arrival.parts.count() {
                        self.arrival.arrived(index);
                    }
                    return Ok(true);
                }
                Ok(()) | Err(TryLockError::WouldBlock) => tokio::time::sleep(LOOK).await,
                Err(TryLockError::Error(error)) => return Err(error.to_string()),
            }
        }
    }

    /// The parts that are not here, of a file that may have been begun before.
    async fn look_what_is_here(&self) -> Result<Vec<u64>, String> {
        let arrival = self.arrival.clone();
        let look = blocking(move || {
            let size_bytes = arrival.object().size_bytes;
            let begun = arrival.file.metadata()?.len();
            if begun != size_bytes {
                arrival.file.set_len(0)?;
                arrival.file.set_len(size_bytes)?;
            }
            let mut missing = Vec::new();
            for index in 0..arrival.parts.count() {
                if begun == size_bytes && arrival.read(index)?.is_some() {
                    arrival.arrived(index);
                } else {
                    missing.push(index);
                }
            }
            Ok::<_, io::Error>(missing)
        });
        look.await
            .map_err(|error| error.to_string())?
            .map_err(|error| error.to_string())
    }

    async fn bring_part(&self, key: &object_store::path::Path, index: u64) -> Result<(), String> {
        let range = self.arrival.parts.range(index);
        let start = range.start;
        let good = |bytes: &[u8]| self.arrival.parts.check(index, bytes);
        let bytes = download::part(self.store.backend.as_ref(), key, range, good)
            .await
            .map_err(|failure| format!("part {index}: {failure}"))?;
        let arrival = self.arrival.clone();
        let written = blocking(move || arrival.file.write_all_at(&bytes, start)).await;
        written
            .map_err(|error| error.to_string())?
            .map_err(|error| format!("part {index}: {error}"))?;
        self.arrival.arrived(index);
        Ok(())
    }
}

fn failed(object: &ObjectRef, reason: String) -> Error {
    Error::Download {
        object: object.digest,
        reason,
    }
}

fn local(object: &ObjectRef, error: &io::Error) -> Error {
    failed(object, error.to_string())
}

#[cfg(test)]
mod tests;
