//! A disk cache of objects. Each object is downloaded once, several parts at a time. Every part is
//! verified before it is used, and can be read while others are still missing. An interrupted
//! download continues where it stopped, also after a restart. Processes may share the folder: one
//! downloads an object and the others wait for it.
//!
//! ```text
//! <digest>            a complete object
//! <digest>.parts      the hashes of its parts, if it has several (see `artifact::parts`)
//! <digest>.arriving   a partial object, locked by the process that downloads it
//! ```
//! The folder holds at most `bytes_max` bytes. The least recently used objects are deleted first.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use tokio::sync::watch;

use super::keys::object_key;
use super::{Error, Store, blocking, download};
use artifact::digest::Digest;
use artifact::manifest::ObjectRef;
use artifact::memory::{Buffer, put_next};
use artifact::parts::Parts;

/// How often a process checks whether another one has downloaded an object.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
const PARTIAL: &str = ".arriving";
const PART_LIST: &str = ".parts";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Disk space in bytes.
    pub bytes_max: u64,
    /// Parts of one object that are downloaded at once.
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
    /// Objects that this process uses.
    open: Mutex<HashMap<Digest, Weak<CachedObject>>>,
    /// Held while files are deleted to make room, until the space is taken.
    eviction: Mutex<()>,
}

/// An object that is complete or being downloaded.
#[derive(Debug)]
pub struct CachedObject {
    parts: Parts,
    /// Another one if a file of this name replaced it before it was locked.
    file: RwLock<File>,
    /// Whether nothing was ever written to the partial file.
    is_new: bool,
    /// Where the complete object is.
    path: PathBuf,
    state: watch::Sender<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Whether each part is on disk.
    present: Vec<bool>,
    failed: Option<String>,
}

impl Cache {
    /// Opens the folder, and creates it if it is missing.
    pub fn open(folder: &Path, limits: Limits) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let shared = Shared {
            folder: folder.to_owned(),
            limits,
            open: Mutex::default(),
            eviction: Mutex::default(),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// The size of an object that is complete in the cache.
    pub fn size_of(&self, digest: &Digest) -> Option<u64> {
        let file = self.shared.path(digest, "").metadata().ok()?;
        Some(file.len())
    }

    /// How much it holds at most.
    pub fn bytes_max(&self) -> u64 {
        self.shared.limits.bytes_max
    }

    /// Opens an object, and starts to download what is missing from `store`.
    pub async fn object(&self, store: &Store, policy: &str, object: &ObjectRef) -> Result<Arc<CachedObject>, Error> {
        if let Some(open) = self.shared.find_open(&object.digest) {
            return Ok(open);
        }
        let parts = self.shared.parts(store, policy, object).await?;
        let shared = self.shared.clone();
        let opened = blocking(move || shared.open_file(parts)).await?;
        let (opened, complete) = opened.map_err(|error| download_error(object, error.to_string()))?;
        let (cached, is_first) = self.shared.register(opened);
        if is_first && !complete {
            let download = Download {
                shared: self.shared.clone(),
                store: store.clone(),
                policy: policy.to_owned(),
                cached: cached.clone(),
            };
            tokio::spawn(download.run());
        }
        Ok(cached)
    }

    /// Reads a whole object.
    pub(super) async fn read(&self, store: &Store, policy: &str, object: &ObjectRef) -> Result<Bytes, Error> {
        let cached = self.object(store, policy, object).await?;
        let mut bytes = Buffer::at_rest(usize::try_from(object.size_bytes).unwrap_or_default());
        let mut rest = &mut bytes[..];
        for index in 0..cached.parts.count() {
            put_next(&mut rest, &cached.part(index).await?);
        }
        Ok(Bytes::from_owner(bytes))
    }
}

impl Shared {
    fn lock_open(&self) -> MutexGuard<'_, HashMap<Digest, Weak<CachedObject>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find_open(&self, digest: &Digest) -> Option<Arc<CachedObject>> {
        let mut open = self.lock_open();
        let cached = open.get(digest)?.upgrade();
        let usable = cached.filter(|cached| cached.state.borrow().failed.is_none());
        if usable.is_none() {
            open.remove(digest);
        }
        usable
    }

    /// Returns the open object and true, or false with the one that another task has opened
    /// meanwhile.
    fn register(&self, cached: CachedObject) -> (Arc<CachedObject>, bool) {
        let digest = cached.object().digest;
        if let Some(other) = self.find_open(&digest) {
            return (other, false);
        }
        let cached = Arc::new(cached);
        let mut open = self.lock_open();
        open.retain(|_, cached| cached.strong_count() > 0);
        open.insert(digest, Arc::downgrade(&cached));
        (cached, true)
    }

    /// The hashes of the object's parts, from disk if they are valid there, otherwise from the
    /// store.
    async fn parts(&self, store: &Store, policy: &str, object: &ObjectRef) -> Result<Parts, Error> {
        if let Some(parts) = Parts::single(*object) {
            return Ok(parts);
        }
        let path = self.path(&object.digest, PART_LIST);
        let local = std::fs::read(&path).ok();
        if let Some(parts) = local.and_then(|bytes| Parts::from_bytes(*object, &bytes).ok()) {
            return Ok(parts);
        }
        let parts = store.get_parts(policy, object).await?;
        artifact::atomic::replace(&path, &[&parts.to_bytes()])
            .map_err(|error| download_error(object, error.to_string()))?;
        Ok(parts)
    }

    /// Opens an object's file; true if it is complete. Deletes a complete file of the wrong size.
    fn open_file(&self, parts: Parts) -> io::Result<(CachedObject, bool)> {
        let object = parts.object();
        let path = self.path(&object.digest, "");
        let complete = match File::open(&path) {
            Ok(file) if file.metadata()?.len() == object.size_bytes => {
                // The time of last use, for eviction.
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
        let is_complete = complete.is_some();
        let (file, is_new) = match complete {
            Some(file) => (file, false),
            None => self.open_partial(&object)?,
        };
        let present = vec![is_complete; usize::try_from(parts.count()).map_err(io::Error::other)?];
        let state = watch::Sender::new(State { present, failed: None });
        let cached = CachedObject {
            parts,
            file: RwLock::new(file),
            is_new,
            path,
            state,
        };
        Ok((cached, is_complete))
    }

    /// Opens an object's partial file, locks it if no other process has, and takes the space that
    /// the whole object needs; true if the file is new.
    fn open_partial(&self, object: &ObjectRef) -> io::Result<(File, bool)> {
        let _one_at_a_time = self.eviction.lock().unwrap_or_else(PoisonError::into_inner);
        // Also among processes, where the file system can lock a folder.
        let folder = File::open(&self.folder)?;
        let _ = folder.lock();
        self.make_room(object)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(self.path(&object.digest, PARTIAL))?;
        match file.try_lock() {
            Err(TryLockError::Error(error)) => return Err(error),
            Ok(()) | Err(TryLockError::WouldBlock) => {}
        }
        let is_new = file.metadata()?.len() == 0;
        if is_new {
            file.set_len(object.size_bytes)?;
        }
        Ok((file, is_new))
    }

    /// Deletes the least recently used files that nobody uses until the object fits.
    fn make_room(&self, object: &ObjectRef) -> io::Result<()> {
        let open = self.lock_open();
        let in_use = open.iter().filter(|(_, cached)| cached.strong_count() > 0);
        let in_use: Vec<String> = in_use.map(|(digest, _)| digest.to_string()).collect();
        drop(open);
        let own = object.digest.to_string();
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(&own) {
                continue;
            }
            match entry.metadata() {
                Ok(metadata) => files.push((metadata.modified()?, metadata.len(), name)),
                // Another process deleted it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        files.sort();
        let mut used: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        let fits = |used: u64| used.saturating_add(object.size_bytes) <= self.limits.bytes_max;
        for (_, bytes, name) in files {
            if fits(used) {
                break;
            }
            let path = self.folder.join(&name);
            let digest = name.split('.').next().unwrap_or_default();
            if in_use.iter().any(|one| one == digest) {
                continue;
            }
            // Locked until it is deleted, so nobody starts to download into it.
            let partial = name.ends_with(PARTIAL).then(|| File::open(&path).ok()).flatten();
            if matches!(
                partial.as_ref().map(File::try_lock),
                Some(Err(TryLockError::WouldBlock))
            ) {
                continue;
            }
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => used -= bytes,
            }
        }
        if fits(used) {
            return Ok(());
        }
        let (size, max) = (object.size_bytes, self.limits.bytes_max);
        let reason = format!("{size} bytes do not fit beside {used} that are in use; the folder may hold {max}");
        Err(io::Error::new(io::ErrorKind::QuotaExceeded, reason))
    }

    /// True if another process has downloaded the object, which is open then; its parts are
    /// verified when they are read. False if this process may download it, none if another one is
    /// doing so.
    fn take_over(&self, cached: &CachedObject) -> io::Result<Option<bool>> {
        let object = cached.object();
        let partial = self.path(&object.digest, PARTIAL);
        let is_locked = match cached.file().try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => false,
            Err(TryLockError::Error(error)) => return Err(error),
        };
        let is_partial = is_at(&cached.file(), &partial)?;
        match File::open(&cached.path) {
            Ok(complete) => {
                if is_locked && is_partial {
                    // We opened it after the other process had renamed its own.
                    std::fs::remove_file(&partial)?;
                }
                cached.replace_file(complete);
                return Ok(Some(true));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        if is_locked && !is_partial {
            // It was deleted to make room before we locked it.
            cached.replace_file(self.open_partial(&object)?.0);
            return Ok(None);
        }
        Ok(is_locked.then_some(false))
    }

    fn path(&self, digest: &Digest, suffix: &str) -> PathBuf {
        self.folder.join(format!("{digest}{suffix}"))
    }
}

/// Whether `path` leads to this file. Another process may have renamed, deleted or replaced it.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let at_path = match path.metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        metadata => metadata?,
    };
    let own = file.metadata()?;
    Ok((own.dev(), own.ino()) == (at_path.dev(), at_path.ino()))
}

impl CachedObject {
    pub fn object(&self) -> ObjectRef {
        self.parts.object()
    }

    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    fn file(&self) -> RwLockReadGuard<'_, File> {
        self.file.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn replace_file(&self, file: File) {
        *self.file.write().unwrap_or_else(PoisonError::into_inner) = file;
    }

    /// Waits for a part and returns its verified bytes.
    pub async fn part(self: &Arc<Self>, index: u64) -> Result<Bytes, Error> {
        let at = usize::try_from(index).unwrap_or(usize::MAX);
        let mut state = self.state.subscribe();
        let settled = state
            .wait_for(|state| state.failed.is_some() || state.present.get(at).copied().unwrap_or(true))
            .await;
        if let Some(reason) = settled.ok().and_then(|state| state.failed.clone()) {
            return Err(download_error(&self.object(), reason));
        }
        let cached = self.clone();
        let reason = match blocking(move || cached.read(index)).await? {
            Ok(Some(bytes)) => return Ok(bytes),
            Ok(None) => {
                // The next reader downloads it again.
                if is_at(&self.file(), &self.path).unwrap_or_default() {
                    let _ = std::fs::remove_file(&self.path);
                }
                let reason = "it was damaged on this machine's disk".to_owned();
                self.fail(reason.clone());
                reason
            }
            Err(error) => error.to_string(),
        };
        Err(download_error(&self.object(), reason))
    }

    /// Reads a part from disk; none if it is not there or does not verify.
    fn read(&self, index: u64) -> io::Result<Option<Bytes>> {
        let range = self.parts.range(index);
        let mut bytes = vec![0; (range.end - range.start) as usize];
        match self.file().read_exact_at(&mut bytes, range.start) {
            Ok(()) => Ok(self.parts.check(index, &bytes).then(|| bytes.into())),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn set_present(&self, index: u64) {
        self.state.send_modify(|state| {
            let index = usize::try_from(index).unwrap_or(usize::MAX);
            if let Some(present) = state.present.get_mut(index) {
                *present = true;
            }
        });
    }

    fn fail(&self, reason: String) {
        self.state.send_modify(|state| state.failed = Some(reason));
    }
}

/// The download of one object.
struct Download {
    shared: Arc<Shared>,
    store: Store,
    policy: String,
    cached: Arc<CachedObject>,
}

impl Download {
    async fn run(self) {
        if let Err(reason) = self.complete().await {
            let digest = self.cached.object().digest;
            tracing::warn!(object = %digest.short(), reason, "an object was not downloaded");
            self.cached.fail(reason);
        }
    }

    async fn complete(&self) -> Result<(), String> {
        if self.wait_for_lock().await? {
            return Ok(());
        }
        let missing = self.missing_parts().await?;
        let key = object_key(&self.policy, &self.cached.object().digest).map_err(|error| error.to_string())?;
        stream::iter(missing)
            .map(|index| self.download_part(&key, index))
            .buffer_unordered(self.shared.limits.streams.max(1))
            .try_collect::<()>()
            .await?;
        let (cached, shared) = (self.cached.clone(), self.shared.clone());
        on_disk(move || {
            cached.file().sync_all()?;
            std::fs::rename(shared.path(&cached.object().digest, PARTIAL), &cached.path)?;
            File::open(&shared.folder)?.sync_all()
        })
        .await
    }

    /// Waits until this process may download the object. True if another one has done so.
    async fn wait_for_lock(&self) -> Result<bool, String> {
        loop {
            let (cached, shared) = (self.cached.clone(), self.shared.clone());
            if let Some(done) = on_disk(move || shared.take_over(&cached)).await? {
                if done {
                    let parts = 0..self.cached.parts.count();
                    parts.for_each(|index| self.cached.set_present(index));
                }
                return Ok(done);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// The parts that an earlier download has not written.
    async fn missing_parts(&self) -> Result<Vec<u64>, String> {
        let cached = self.cached.clone();
        on_disk(move || {
            let size_bytes = cached.object().size_bytes;
            let has_size = cached.file().metadata()?.len() == size_bytes;
            if !has_size {
                cached.file().set_len(0)?;
                cached.file().set_len(size_bytes)?;
            }
            let resumed = has_size && !cached.is_new;
            let mut missing = Vec::new();
            for index in 0..cached.parts.count() {
                if resumed && cached.read(index)?.is_some() {
                    cached.set_present(index);
                } else {
                    missing.push(index);
                }
            }
            Ok(missing)
        })
        .await
    }

    async fn download_part(&self, key: &object_store::path::Path, index: u64) -> Result<(), String> {
        let named = |reason: String| format!("part {index}: {reason}");
        let range = self.cached.parts.range(index);
        let start = range.start;
        let verify = |bytes: &[u8]| self.cached.parts.check(index, bytes);
        let bytes = download::part(self.store.backend.as_ref(), key, range, verify)
            .await
            .map_err(|failure| named(failure.to_string()))?;
        let cached = self.cached.clone();
        on_disk(move || cached.file().write_all_at(&bytes, start))
            .await
            .map_err(named)?;
        self.cached.set_present(index);
        Ok(())
    }
}

async fn on_disk<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Result<T, String> {
    let done = blocking(work).await.map_err(|error| error.to_string())?;
    done.map_err(|error| error.to_string())
}

fn download_error(object: &ObjectRef, reason: String) -> Error {
    Error::Download {
        object: object.digest,
        reason,
    }
}

#[cfg(test)]
mod tests;
