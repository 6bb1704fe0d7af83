//! Files through which engines read new weights.
//!
//! ```text
//! PATCH_DIR/                  0750, ours alone to write
//! PATCH_DIR/weights-<random>/ 0750, of one process; removed when it ends
//!   lock                      held by that process: free if it was killed
//!   0-7.folder/               all weights for engine 0
//! ```
//!
//! The default `PATCH_DIR` is in `/dev/shm`, where every user of the machine may create names. So a
//! folder that somebody else made, or may write to, is refused. An engine may run as another user: its
//! group may read.

use anyhow::{Context, bail, ensure};
use artifact::checkpoint::Checkpoint;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::unistd::Uid;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use uuid::Uuid;

/// Begins the names of the folders of processes. Nothing else is ever removed.
const PREFIX: &str = "weights-";
const LOCK: &str = "lock";
const FOLDER_MODE: u32 = 0o750;
const FILE_MODE: u32 = 0o640;

/// This process's folder. Dropping it removes the folder.
pub struct Files {
    dir: PathBuf,
    _lock: Flock<File>,
    /// Places so far. Each is another one: a change that was broken off may still write to its own.
    places: AtomicU64,
}

impl Files {
    /// Makes the folder, and removes those of killed processes. Fails if somebody else can write to
    /// `patch_dir`.
    pub fn open(patch_dir: &Path) -> anyhow::Result<Files> {
        ensure!(
            patch_dir.is_absolute(),
            "the patch_dir is {}; give an absolute path",
            patch_dir.display()
        );
        protect(patch_dir)?;
        sweep(patch_dir);
        let dir = patch_dir.join(format!("{PREFIX}{}", Uuid::new_v4().simple()));
        let lock = lock_new(&dir).with_context(|| format!("create {}", dir.display()))?;
        Ok(Files {
            dir,
            _lock: lock,
            places: AtomicU64::new(0),
        })
    }

    /// A new place for an engine's weights.
    pub fn weights_of(&self, engine: usize) -> WeightFiles {
        let place = self.places.fetch_add(1, Ordering::Relaxed);
        WeightFiles {
            folder: self.dir.join(format!("{engine}-{place}.folder")),
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// A folder for one engine, which may be there. Dropping it removes it.
#[derive(Debug)]
pub struct WeightFiles {
    pub folder: PathBuf,
}

impl WeightFiles {
    /// Writes a Hugging Face folder. Its group may read it.
    pub fn write_folder(&self, checkpoint: &Checkpoint) -> anyhow::Result<()> {
        checkpoint.write_dir(&self.folder)?;
        let opened = fs::read_dir(&self.folder).and_then(|entries| {
            for entry in entries {
                fs::set_permissions(entry?.path(), Permissions::from_mode(FILE_MODE))?;
            }
            fs::set_permissions(&self.folder, Permissions::from_mode(FOLDER_MODE))
        });
        opened.with_context(|| format!("set permissions in {}", self.folder.display()))
    }
}

impl Drop for WeightFiles {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Creates the folder, or checks that only this user can write to the one that is there.
fn protect(dir: &Path) -> anyhow::Result<()> {
    let shown = dir.display();
    let create = || {
        let parents = dir.parent().map_or(Ok(()), fs::create_dir_all);
        parents.and_then(|()| DirBuilder::new().mode(FOLDER_MODE).create(dir))
    };
    let is_new = match create() {
        Ok(()) => true,
        Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
        Err(error) => return Err(error).with_context(|| format!("create the patch_dir {shown}")),
    };
    // through the open folder: the name may be changed meanwhile
    let mut options = File::options();
    options.read(true);
    options.custom_flags((OFlag::O_NOFOLLOW | OFlag::O_DIRECTORY).bits());
    let folder = match options.open(dir) {
        Ok(folder) => folder,
        Err(error) if fs::symlink_metadata(dir).is_ok_and(|found| !found.is_dir()) => {
            bail!("the patch_dir {shown} is a link or a file ({error}); remove it, or name another folder")
        }
        Err(error) => return Err(error).with_context(|| format!("open the patch_dir {shown}")),
    };
    let found = folder.metadata().with_context(|| format!("look at {shown}"))?;
    let user = Uid::effective().as_raw();
    ensure!(
        found.uid() == user,
        "the patch_dir {shown} belongs to the user {}, and this process is {user}; name another folder, or have its \
         owner remove it",
        found.uid()
    );
    if is_new {
        // the umask may have taken the group's rights
        let opened = folder.set_permissions(Permissions::from_mode(FOLDER_MODE));
        return opened.with_context(|| format!("set permissions of {shown}"));
    }
    ensure!(
        found.mode() & 0o022 == 0,
        "others may write to the patch_dir {shown} (mode {:o}); run `chmod go-w {shown}`, or name another folder",
        found.mode() & 0o7777
    );
    Ok(())
}

/// A new file, which is no link.
fn create(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create_new(true).mode(FILE_MODE);
    options.custom_flags(OFlag::O_NOFOLLOW.bits());
    let file = options.open(path)?;
    file.set_permissions(Permissions::from_mode(FILE_MODE))?;
    Ok(file)
}

/// Makes a process's folder and locks it. The lock gets its name when it is held, so no sweep finds it
/// free.
fn lock_new(dir: &Path) -> anyhow::Result<Flock<File>> {
    DirBuilder::new().mode(FOLDER_MODE).create(dir)?;
    fs::set_permissions(dir, Permissions::from_mode(FOLDER_MODE))?;
    let draft = dir.join("lock.new");
    let file = create(&draft)?;
    // a lock needs only the right to read, and engines are not to take it
    file.set_permissions(Permissions::from_mode(0o600))?;
    let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno)?;
    fs::rename(&draft, dir.join(LOCK))?;
    Ok(lock)
}

/// Removes the folders that killed processes have left.
fn sweep(patch_dir: &Path) {
    let entries = fs::read_dir(patch_dir).into_iter().flatten();
    for entry in entries.filter_map(Result::ok) {
        let is_ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let Some(_lock) = is_ours.then(|| lock_left(&entry.path())).flatten() else {
            continue;
        };
        let dir = entry.path();
        match fs::remove_dir_all(&dir) {
            Ok(()) => tracing::info!(dir = %dir.display(), "removed weights that a killed process left"),
            Err(error) => tracing::warn!(dir = %dir.display(), %error, "old weights are not removed"),
        }
    }
}

/// The lock of a process that has ended. `None`: it runs, or this is no folder of ours.
fn lock_left(dir: &Path) -> Option<Flock<File>> {
    let folder = fs::symlink_metadata(dir).ok()?;
    if !folder.is_dir() {
        return None;
    }
    let mut options = File::options();
    options.read(true).custom_flags(OFlag::O_NOFOLLOW.bits());
    let lock = options.open(dir.join(LOCK)).ok()?;
    Flock::lock(lock, FlockArg::LockExclusiveNonblock).ok()
}

#[cfg(test)]
mod tests;
