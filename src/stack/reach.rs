//! Places that another user can reach. Root runs Postgres as `nobody`, who cannot enter a private
//! home such as `/root`; then the files go below `/var/lib/springtide`.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use nix::unistd::Uid;

const OPEN_DIR: &str = "/var/lib/springtide";

/// Returns `wanted`, or a folder elsewhere if `nobody` cannot reach it; always the same one for the
/// same `wanted`. Creates the parents, not the folder.
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

    #[test]
    fn a_private_parent_is_noticed() {
        let temp = tempfile::tempdir().unwrap();
        let inner = temp.path().join("inner");
        fs::create_dir(&inner).unwrap();
        fs::set_permissions(&inner, Permissions::from_mode(0o711)).unwrap();
        fs::set_permissions(temp.path(), Permissions::from_mode(0o700)).unwrap();
        assert!(!open_to_all(&inner).unwrap());
        fs::set_permissions(temp.path(), Permissions::from_mode(0o755)).unwrap();
        let above = temp.path().parent().unwrap(); // may itself be private
        assert_eq!(open_to_all(&inner).unwrap(), open_to_all(above).unwrap());
        assert!(open_to_all(Path::new("/")).unwrap());
    }
}
