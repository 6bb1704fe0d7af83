//! Keeps versions as Hugging Face folders, for engines that read folders.
//!
//! ```text
//! DIR/v17-4be1c02d9a35/   one folder per version, with the marker of `springtide policy pull`
//! DIR/current             symbolic link to the folder in force, replaced atomically
//! DIR/status.json         what is in force since when (docs/FORMAT.md)
//! DIR/.tried              there from before the command until its version is in force
//! ```
//!
//! A folder gets its name only after it was read back from the disk with the right content hash. If
//! there is a command, the link moves after it has succeeded. While `.tried` is there, an engine may
//! hold another version than the link says, so the command runs also for the version of the link.
//! Folders and files may be read by whom the permissions of `DIR` name.

use super::command::Command;
use anyhow::{Context, ensure};
use artifact::atomic;
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use artifact::folder::Marker;
use artifact::patch;
use artifact::quant::Spec;
use serde::{Deserialize, Serialize};
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use time::OffsetDateTime;

const CURRENT: &str = "current";
const STATUS: &str = "status.json";
const FORMAT: &str = "springtide-follow-1";
/// The names of the folders whose commands have begun and whose versions are not in force yet.
const TRIED: &str = ".tried";
/// Begins the names of what is not complete yet.
const UNFINISHED: &str = ".unfinished-";

/// A version that is to be in force, or its copy.
#[derive(Debug, Clone)]
pub struct Version {
    pub serial: i64,
    /// Content hash of `checkpoint`.
    pub root: Digest,
    pub checkpoint: Arc<Checkpoint>,
}

impl Version {
    pub fn new(serial: i64, checkpoint: &Arc<Checkpoint>) -> Self {
        Version {
            serial,
            root: checkpoint.root(),
            checkpoint: checkpoint.clone(),
        }
    }
}

/// The folders of one policy's alias.
#[derive(Debug, Clone)]
pub struct Folders {
    pub dir: PathBuf,
    pub policy: String,
    pub alias: String,
    /// How many versions stay on the disk, the one in force included; at least 1.
    pub keep: usize,
    /// The spec, if the folders are copies.
    pub quantized: Option<Spec>,
    /// Has an engine take a version, before it is in force.
    pub command: Option<Command>,
}

/// The content of `status.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Status {
    format: String,
    policy: String,
    alias: String,
    version: i64,
    root: Digest,
    /// Name of the folder in force.
    folder: String,
    /// When it came in force.
    #[serde(with = "time::serde::rfc3339")]
    since: OffsetDateTime,
    /// Names of all folders that are kept, the last one in force first.
    kept: Vec<String>,
}

impl Folders {
    /// Makes the folder, and removes what an earlier process left unfinished. Call it before anything
    /// else.
    pub fn open(&self) -> anyhow::Result<()> {
        let dir = &self.dir;
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
        for name in names(dir)? {
            if name.starts_with(UNFINISHED) {
                remove(&dir.join(&name)).with_context(|| format!("remove {name} of {}", dir.display()))?;
            }
        }
        let current = dir.join(CURRENT);
        ensure!(
            current.is_symlink() || !current.exists(),
            "{} is not a link that `springtide follow` has made: move it away, or name another folder",
            current.display()
        );
        Ok(())
    }

    /// Versions on the disk that a delta may start from: the one in force, and `wanted`, which an
    /// earlier try may have written; without those that are `known` already. Their content hashes are
    /// not checked yet.
    pub fn bases(&self, wanted: i64, root: Digest, known: &[i64]) -> Vec<(i64, Arc<Checkpoint>)> {
        let mut folders = vec![self.dir.join(name_of(wanted, root))];
        folders.extend(self.current().map(|name| self.dir.join(name)));
        let mut bases: Vec<(i64, Arc<Checkpoint>)> = Vec::new();
        for folder in folders {
            let Ok(Some(marker)) = Marker::read(&folder) else {
                continue;
            };
            let mut others = bases.iter().map(|(serial, _)| serial).chain(known);
            // no delta starts from a copy
            if marker.quantized.is_some()
                || marker.policy != self.policy
                || others.any(|serial| *serial == marker.version)
            {
                continue;
            }
            match Checkpoint::map_dir(&folder) {
                Ok(checkpoint) => bases.push((marker.version, Arc::new(checkpoint))),
                Err(error) => tracing::warn!(folder = %folder.display(), %error, "not used as a base"),
            }
        }
        bases
    }

    /// Puts a version in force: its folder, the command, the link, the status. `before`: the version in
    /// force, for the command's patch. Nothing changes if it is in force already. Returns the folder, mapped.
    pub async fn put_in_force(&self, version: &Version, before: Option<&Version>) -> anyhow::Result<Arc<Checkpoint>> {
        let name = name_of(version.serial, version.root);
        let (this, wanted) = (self.clone(), version.clone());
        let written = tokio::task::spawn_blocking(move || this.write(&wanted));
        let mapped = written.await.context("the writing thread")??;
        let tried = self.tried();
        if tried.is_some() || self.current().as_ref() != Some(&name) {
            if let Some(command) = &self.command {
                let mut tried = tried.unwrap_or_default();
                // an engine that has this version already takes the patch again; no patch fits another one
                let before = before.filter(|_| tried.iter().all(|tried| *tried == name));
                if !tried.contains(&name) {
                    tried.push(name.clone());
                }
                let marker = self.dir.join(TRIED);
                let written = atomic::replace(&marker, &[tried.join("\n").as_bytes()]);
                written.with_context(|| format!("write {}", marker.display()))?;
                self.run(command, version, before).await?;
            }
            self.switch(&name)
                .with_context(|| format!("point {CURRENT} to {name}"))?;
        }
        self.record(version, name)?;
        if self.command.is_some() {
            remove(&self.dir.join(TRIED)).with_context(|| format!("remove {TRIED} of {}", self.dir.display()))?;
        }
        Ok(Arc::new(mapped))
    }

    /// Whether a version is in force, and no try of another one has changed that since. Does not read
    /// the folder itself.
    pub fn is_in_force(&self, serial: i64, root: Digest) -> bool {
        let name = name_of(serial, root);
        let recorded = read_status(&self.dir.join(STATUS)).ok().flatten();
        self.tried().is_none()
            && self.current().as_ref() == Some(&name)
            && recorded.is_some_and(|status| status.folder == name)
    }

    /// The names of the folders whose commands have begun since a version was in force: the engine may
    /// hold each of them. `None`: there are none.
    fn tried(&self) -> Option<Vec<String>> {
        self.command.as_ref()?;
        match fs::read_to_string(self.dir.join(TRIED)) {
            Ok(names) => Some(names.lines().map(str::to_owned).collect()),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            // no folder has this name, so nothing fits
            Err(_) => Some(vec![String::new()]),
        }
    }

    /// Writes the version's folder, unless it is there and intact.
    fn write(&self, version: &Version) -> anyhow::Result<Checkpoint> {
        let name = name_of(version.serial, version.root);
        let folder = self.dir.join(&name);
        if folder.exists() {
            if let Some(mapped) = intact(&folder, version.root) {
                return Ok(mapped);
            }
            tracing::warn!(folder = %folder.display(), "the folder is damaged and is written again");
            remove(&folder).with_context(|| format!("remove {}", folder.display()))?;
        }
        // a command that fails leaves its version's folder, which would add up
        let status = read_status(&self.dir.join(STATUS))?;
        self.prune(&status.map(|status| status.kept).unwrap_or_default())?;
        let fresh = self.dir.join(format!("{UNFINISHED}{name}"));
        remove(&fresh).with_context(|| format!("remove {}", fresh.display()))?;
        let written = version.checkpoint.write_dir(&fresh);
        written.with_context(|| format!("write {}", fresh.display()))?;
        let marker = Marker {
            policy: self.policy.clone(),
            version: version.serial,
            root: version.root,
            quantized: self.quantized.map(Into::into),
        };
        marker.write(&fresh).context("write the marker")?;
        self.open_to_readers(&fresh).context("set permissions")?;
        let mapped = intact(&fresh, version.root).with_context(|| {
            let (folder, serial) = (fresh.display(), version.serial);
            format!("{folder} does not read back as version {serial}: check the disk")
        })?;
        fs::rename(&fresh, &folder).with_context(|| format!("name {}", folder.display()))?;
        flush(&self.dir).with_context(|| format!("flush {}", self.dir.display()))?;
        Ok(mapped)
    }

    /// As many users may read the folder as may read `dir`.
    fn open_to_readers(&self, folder: &Path) -> io::Result<()> {
        let mode = fs::metadata(&self.dir)?.permissions().mode();
        for entry in fs::read_dir(folder)? {
            fs::set_permissions(entry?.path(), Permissions::from_mode(mode & 0o644 | 0o600))?;
        }
        fs::set_permissions(folder, Permissions::from_mode(mode & 0o755 | 0o700))
    }

    async fn run(&self, command: &Command, version: &Version, before: Option<&Version>) -> anyhow::Result<()> {
        let folder = self.dir.join(name_of(version.serial, version.root));
        let mut variables = vec![
            ("SPRINGTIDE_FOLDER", folder.into_os_string()),
            ("SPRINGTIDE_VERSION", version.serial.to_string().into()),
            ("SPRINGTIDE_ROOT", version.root.to_string().into()),
        ];
        let patch = self.dir.join(format!("{UNFINISHED}patch.safetensors"));
        if let Some(before) = before {
            let (old, new, path) = (before.checkpoint.clone(), version.checkpoint.clone(), patch.clone());
            let written = tokio::task::spawn_blocking(move || -> anyhow::Result<()> {
                let made = patch::between(&old, &new)?;
                fs::write(&path, &made.file).with_context(|| format!("write {}", path.display()))
            });
            match written.await.context("the patch's thread")? {
                Ok(()) => {
                    variables.push(("SPRINGTIDE_PATCH", patch.clone().into_os_string()));
                    variables.push(("SPRINGTIDE_PATCH_FROM", before.root.to_string().into()));
                }
                // the command has the folder
                Err(error) => tracing::warn!(error = format!("{error:#}"), "the command gets no patch"),
            }
        }
        let ran = command.run(&variables).await;
        let _ = fs::remove_file(&patch);
        ran.with_context(|| format!("version {} is not in force", version.serial))
    }

    /// Replaces the link.
    fn switch(&self, name: &str) -> io::Result<()> {
        let fresh = self.dir.join(format!("{UNFINISHED}{CURRENT}"));
        remove(&fresh)?;
        symlink(name, &fresh)?;
        fs::rename(&fresh, self.dir.join(CURRENT))?;
        flush(&self.dir)
    }

    /// The name of the folder that the link points to.
    fn current(&self) -> Option<String> {
        let target = fs::read_link(self.dir.join(CURRENT)).ok()?;
        target.to_str().map(str::to_owned)
    }

    /// Writes the status and removes the folders that are not kept.
    fn record(&self, version: &Version, folder: String) -> anyhow::Result<()> {
        let path = self.dir.join(STATUS);
        let old = read_status(&path)?;
        if old.as_ref().is_some_and(|old| old.folder == folder) {
            return Ok(());
        }
        let mut kept = vec![folder.clone()];
        let earlier = old.into_iter().flat_map(|old| old.kept);
        kept.extend(earlier.filter(|name| *name != folder && self.dir.join(name).is_dir()));
        kept.truncate(self.keep.max(1));
        let status = Status {
            format: FORMAT.into(),
            policy: self.policy.clone(),
            alias: self.alias.clone(),
            version: version.serial,
            root: version.root,
            folder,
            since: OffsetDateTime::now_utc(),
            kept,
        };
        let text = serde_json::to_vec_pretty(&status).context("write the status")?;
        atomic::replace(&path, &[&text]).with_context(|| format!("write {}", path.display()))?;
        let mode = fs::metadata(&self.dir)
            .context("read permissions")?
            .permissions()
            .mode();
        fs::set_permissions(&path, Permissions::from_mode(mode & 0o644 | 0o600)).context("set permissions")?;
        self.prune(&status.kept)
    }

    /// Removes the folders that are neither kept nor in force.
    fn prune(&self, kept: &[String]) -> anyhow::Result<()> {
        let current = self.current();
        for name in names(&self.dir)? {
            if self.is_ours(&name) && !kept.contains(&name) && current.as_ref() != Some(&name) {
                // it is tried again with the next version
                if let Err(error) = remove(&self.dir.join(&name)) {
                    tracing::warn!(folder = name, %error, "an old version is not removed");
                }
            }
        }
        Ok(())
    }

    /// Whether this follower has written the folder. Nothing else is ever removed.
    fn is_ours(&self, name: &str) -> bool {
        let marker = Marker::read(&self.dir.join(name)).ok().flatten();
        marker.is_some_and(|marker| marker.policy == self.policy && name_of(marker.version, marker.root) == name)
    }
}

fn name_of(serial: i64, root: Digest) -> String {
    format!("v{serial}-{}", root.short())
}

fn read_status(path: &Path) -> anyhow::Result<Option<Status>> {
    match fs::read(path) {
        Ok(bytes) => match serde_json::from_slice::<Status>(&bytes) {
            Ok(status) if status.format == FORMAT => Ok(Some(status)),
            // the link says what is in force
            _ => Ok(None),
        },
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
    }
}

/// The folder, mapped, if it has this content.
fn intact(folder: &Path, root: Digest) -> Option<Checkpoint> {
    let mapped = Checkpoint::map_dir(folder).ok()?;
    (mapped.root() == root).then_some(mapped)
}

fn names(dir: &Path) -> anyhow::Result<Vec<String>> {
    let entries = fs::read_dir(dir).with_context(|| format!("read {}", dir.display()))?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    names
        .collect::<io::Result<_>>()
        .with_context(|| format!("read {}", dir.display()))
}

/// Removes a file, a link or a folder, if it is there.
fn remove(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn flush(dir: &Path) -> io::Result<()> {
    fs::File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests;
