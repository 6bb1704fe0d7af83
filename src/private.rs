//! Files that only one user of the machine may use: state, logs, secrets.
//!
//! Roles and supervisors keep prompts, and some libraries choose no mode for the files that they
//! create. So those processes set their umask, and every file and folder gets mode 0600 or 0700.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use anyhow::Context;
use nix::sys::stat::{Mode, umask};
use nix::unistd::Uid;
use rand::TryRngCore;

use crate::config::Config;

/// What a state folder may contain, apart from the servers' folders.
const STATE_FOLDERS: [&str; 7] = ["keys", "log", "objects", "payloads", "relay", "serve", "store"];

/// From here on this process and its children create files for their own user only.
pub fn set_umask() {
    umask(Mode::S_IRWXG | Mode::S_IRWXO);
}

/// Creates the state folder, and closes its folders to other users ([`close_state`]). When root runs Springtide,
/// others may pass through the state folder itself but not list it, because Postgres and Kafka, which
/// run as another user, have their folders there.
pub fn state_folder(config: &Config) -> anyhow::Result<()> {
    let state = &config.state_dir;
    let mode = if Uid::effective().is_root() { 0o711 } else { 0o700 };
    match folder(state, mode) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        created => created.with_context(|| format!("create {}", state.display()))?,
    }
    close_state(config)
}

/// Closes folders in the state folder that are open to other users, such as those of a restored copy.
pub fn close_state(config: &Config) -> anyhow::Result<()> {
    for name in STATE_FOLDERS {
        let folder = config.state_dir.join(name);
        close(&folder).with_context(|| format!("close {} to other users", folder.display()))?;
    }
    Ok(())
}

/// Creates a folder and its missing parents with exactly this mode, whatever the umask is.
pub fn folder(path: &Path, mode: u32) -> io::Result<()> {
    if let Some(parent) = path.parent()
        && !parent.as_os_str().is_empty()
        && !parent.exists()
    {
        folder(parent, mode)?;
    }
    DirBuilder::new().mode(mode).create(path)?;
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Takes away the access of others, if the folder exists and belongs to this user.
fn close(folder: &Path) -> io::Result<()> {
    let metadata = match fs::symlink_metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        metadata => metadata?,
    };
    let mode = metadata.permissions().mode();
    if !metadata.is_dir() || metadata.uid() != Uid::effective().as_raw() || mode & 0o077 == 0 {
        return Ok(());
    }
    match fs::set_permissions(folder, Permissions::from_mode(mode & 0o700)) {
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => Ok(()),
        closed => closed,
    }
}

/// Replaces a file by one that only `user` may use (default: this user). Follows no link at `path`.
pub fn replace(path: &Path, text: &str, user: Option<u32>) -> anyhow::Result<()> {
    let draft = draft(path);
    let write = || {
        let mut file = create(&draft)?;
        file.write_all(text.as_bytes())?;
        fchown(&file, user, user)?;
        fs::rename(&draft, path)
    };
    write()
        .inspect_err(|_| drop(fs::remove_file(&draft)))
        .with_context(|| format!("write {}", path.display()))
}

/// Creates a file for this user alone. Fails if there is anything at `path`, even a broken link.
pub fn create(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    let file = options.read(true).write(true).create_new(true).mode(0o600).open(path)?;
    file.set_permissions(Permissions::from_mode(0o600))?; // a umask such as 0o700 would remove our own access
    Ok(file)
}

/// A name beside `path` that nobody can guess.
fn draft(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().display().to_string();
    path.with_file_name(format!(".{name}-{}", uuid::Uuid::now_v7().simple()))
}

/// A new secret: 256 random bits, 64 hexadecimal digits.
pub fn secret() -> anyhow::Result<String> {
    let mut bytes = [0; 32];
    rand::rngs::OsRng
        .try_fill_bytes(&mut bytes)
        .context("draw random bytes")?;
    Ok(blake3::Hash::from(bytes).to_hex().to_string())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn state_that_others_could_read_is_closed() {
        let temp = tempfile::tempdir().unwrap();
        let config = Config {
            state_dir: temp.path().join("state"),
            ..Config::default()
        };
        state_folder(&config).unwrap();
        let expected = if Uid::effective().is_root() { 0o711 } else { 0o700 };
        assert_eq!(mode(&config.state_dir), expected);
        let payloads = config.state_dir.join("payloads");
        fs::create_dir(&payloads).unwrap();
        fs::set_permissions(&payloads, Permissions::from_mode(0o755)).unwrap();
        let elsewhere = temp.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        fs::set_permissions(&elsewhere, Permissions::from_mode(0o755)).unwrap();
        symlink(&elsewhere, config.state_dir.join("store")).unwrap();
        state_folder(&config).unwrap();
        assert_eq!(mode(&payloads), 0o700);
        assert_eq!(mode(&elsewhere), 0o755, "a linked folder may be another program's");
    }

    #[test]
    fn a_replaced_file_is_private_and_no_link_is_followed() {
        let temp = tempfile::tempdir().unwrap();
        let victim = temp.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        let path = temp.path().join("file");
        symlink(&victim, &path).unwrap();
        assert_eq!(create(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        replace(&path, "text", None).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
        assert_eq!(mode(&path), 0o600);
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 2);
    }

    #[test]
    fn secrets_differ() {
        let [one, two] = [secret().unwrap(), secret().unwrap()];
        assert!(one.len() == 64 && one != two);
    }
}
