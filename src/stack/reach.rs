//! Places that another user can reach. Root runs Postgres and Kafka as [`SERVER_USER`], who cannot
//! enter a private home such as `/root`; then the files go below `/var/lib/springtide`.
//!
//! [`SERVER_USER`]: exec::SERVER_USER

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use nix::unistd::Uid;

use super::exec;
use crate::private;

const OPEN_DIR: &str = "/var/lib/springtide";

/// Returns `wanted`, or a folder elsewhere if the servers' user cannot reach it; always the same one
/// for the same `wanted`. Creates the parents, not the folder.
pub fn folder(wanted: &Path) -> anyhow::Result<PathBuf> {
    let parent = wanted.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    let parent = parent
        .canonicalize()
        .with_context(|| format!("resolve {}", parent.display()))?;
    let name = wanted.file_name().unwrap_or_default();
    let wanted = parent.join(name);
    if !Uid::effective().is_root() || open_to_all(&parent)? {
        return Ok(wanted);
    }
    let digest = blake3::hash(wanted.as_os_str().as_encoded_bytes()).to_hex();
    fs::create_dir_all(OPEN_DIR).with_context(|| format!("create {OPEN_DIR}"))?;
    fs::set_permissions(OPEN_DIR, Permissions::from_mode(0o755))
        .with_context(|| format!("open {OPEN_DIR} to all users"))?;
    Ok(Path::new(OPEN_DIR).join(format!("{}-{}", name.display(), &digest[..12])))
}

/// Returns the data folder of a server, at `wanted` or behind a link there. Only the user who runs
/// the server may enter it. Creates it if it does not exist. Takes over one that another user's
/// server has used.
pub fn data_folder(wanted: &Path) -> anyhow::Result<PathBuf> {
    let place = match wanted.canonicalize() {
        Ok(place) => take_over(wanted, place),
        Err(error) if error.kind() == ErrorKind::NotFound => create(wanted),
        Err(error) => Err(error).context("resolve it"),
    };
    place.with_context(|| format!("prepare the data folder {}", wanted.display()))
}

fn create(wanted: &Path) -> anyhow::Result<PathBuf> {
    let place = folder(wanted)?;
    let linked = place.file_name() != wanted.file_name();
    let place = if linked { new_name(place) } else { place };
    if wanted.is_symlink() {
        fs::remove_file(wanted).context("remove a broken link")?;
    }
    private::folder(&place, 0o700).context("create it")?;
    if let Some(user) = exec::server_user() {
        give(&place, user)?;
    }
    if linked {
        link(&place, wanted)?;
    }
    Ok(place)
}

fn take_over(wanted: &Path, place: PathBuf) -> anyhow::Result<PathBuf> {
    let Some(user) = exec::server_user() else {
        fs::set_permissions(&place, Permissions::from_mode(0o700)).context("close it to other users")?;
        return Ok(place);
    };
    let reachable = place.parent().map(open_to_all).transpose()?.unwrap_or(true);
    let place = if reachable { place } else { move_away(wanted, &place)? };
    let metadata = fs::metadata(&place).context("look at it")?;
    if metadata.uid() != user {
        give(&place, user)?;
    }
    fs::set_permissions(&place, Permissions::from_mode(0o700)).context("close it to other users")?;
    Ok(place)
}

/// Moves a folder to where the servers' user can reach it, and leaves a link.
fn move_away(wanted: &Path, old: &Path) -> anyhow::Result<PathBuf> {
    let place = new_name(folder(wanted)?);
    // `mv` also moves to another file system. It removes the old folder last.
    let mut mv = Command::new("mv");
    mv.args(["--no-target-directory", "--"]).arg(old).arg(&place);
    exec::output(&mut mv, "the program mv").context("move it to where the server can reach it")?;
    if wanted.is_symlink() {
        fs::remove_file(wanted).context("remove the old link")?;
    }
    link(&place, wanted)?;
    Ok(place)
}

/// A new name each time: whoever removed an earlier link wanted its state gone.
fn new_name(place: PathBuf) -> PathBuf {
    let mut name = place.into_os_string();
    name.push(OsStr::new(&format!("-{}", uuid::Uuid::now_v7().simple())));
    name.into()
}

fn link(place: &Path, wanted: &Path) -> anyhow::Result<()> {
    symlink(place, wanted).context("link it")?;
    tracing::info!(folder = %wanted.display(), place = %place.display(), "this server keeps its data in another place, which it can reach without root");
    Ok(())
}

/// Changes the owner of a file or folder and of everything in it. The folder itself comes last, so
/// that an interrupted change is seen. Follows no links.
pub fn give(path: &Path, user: u32) -> anyhow::Result<()> {
    let metadata = fs::symlink_metadata(path).with_context(|| format!("look at {}", path.display()))?;
    if metadata.is_dir() {
        for entry in fs::read_dir(path).with_context(|| format!("list {}", path.display()))? {
            give(&entry.context("list a data folder")?.path(), user)?;
        }
    }
    lchown(path, Some(user), Some(user)).with_context(|| format!("change the owner of {}", path.display()))
}

/// Whether every folder down to `path` can be entered by any user.
fn open_to_all(path: &Path) -> anyhow::Result<bool> {
    for folder in path.ancestors() {
        let mode = fs::metadata(folder)
            .with_context(|| format!("read permissions of {}", folder.display()))?
            .permissions()
            .mode();
        if mode & 0o001 == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_private_parent_is_noticed() {
        let temp = tempfile::tempdir().unwrap();
        let inner = temp.path().join("inner");
        fs::create_dir(&inner).unwrap();
        set_mode(&inner, 0o711);
        set_mode(temp.path(), 0o700);
        assert!(!open_to_all(&inner).unwrap());
        set_mode(temp.path(), 0o755);
        let above = temp.path().parent().unwrap(); // may itself be private
        assert_eq!(open_to_all(&inner).unwrap(), open_to_all(above).unwrap());
        assert!(open_to_all(Path::new("/")).unwrap());
    }

    #[test]
    fn the_data_folder_of_an_earlier_version_is_taken_over() {
        let temp = tempfile::tempdir().unwrap();
        set_mode(temp.path(), 0o711);
        let wanted = temp.path().join("kafka");
        fs::create_dir_all(wanted.join("log")).unwrap();
        fs::write(wanted.join("log/segment"), "records").unwrap();
        set_mode(&wanted, 0o755);
        let place = data_folder(&wanted).unwrap();
        let owner = exec::server_user().unwrap_or(Uid::effective().as_raw());
        for path in [place.clone(), place.join("log"), place.join("log/segment")] {
            assert_eq!(fs::metadata(&path).unwrap().uid(), owner, "{}", path.display());
        }
        assert_eq!(fs::metadata(&place).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(data_folder(&wanted).unwrap(), place);
    }

    #[test]
    fn data_in_a_private_home_is_moved_to_where_the_server_can_reach_it() {
        if exec::server_user().is_none() {
            return println!("not run: only root runs the servers as another user");
        }
        let temp = tempfile::tempdir().unwrap();
        set_mode(temp.path(), 0o700);
        let wanted = temp.path().join("kafka");
        fs::create_dir(&wanted).unwrap();
        fs::write(wanted.join("segment"), "records").unwrap();
        let place = data_folder(&wanted).unwrap();
        assert!(place.starts_with(OPEN_DIR) && wanted.is_symlink());
        assert_eq!(fs::read_to_string(wanted.join("segment")).unwrap(), "records");
        assert_eq!(data_folder(&wanted).unwrap(), place);
        fs::remove_dir_all(place).unwrap();
    }
}
