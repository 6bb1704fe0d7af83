//! Atomic file writes: write a temporary file beside the destination, fsync it, rename it, and
//! fsync the folder so that the name survives a power cut.
//!
//! There are no locks. If two writers use one name, the last [`replace`] or the first
//! [`create_private`] wins.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Replaces the file at `path` with the concatenation of `parts`.
pub fn replace(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    replace_by(path, |_, file| parts.iter().try_for_each(|part| file.write_all(part)))
}

/// Replaces the file at `path` with what `write` writes. It gets the temporary file and its path.
pub fn replace_by(path: &Path, write: impl FnOnce(&Path, &mut File) -> io::Result<()>) -> io::Result<()> {
    let temporary = stage(path, write, 0o644)?;
    fs::rename(&temporary, path).inspect_err(|_| discard(&temporary))?;
    flush_folder(path)
}

/// Creates a file that only its owner can read. Error of kind `AlreadyExists` if `path` exists.
pub fn create_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = stage(path, |_, file| file.write_all(bytes), 0o600)?;
    // unlike a rename, a hard link does not replace an existing file
    let linked = fs::hard_link(&temporary, path);
    discard(&temporary);
    linked?;
    flush_folder(path)
}

fn stage(path: &Path, write: impl FnOnce(&Path, &mut File) -> io::Result<()>, mode: u32) -> io::Result<PathBuf> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))?;
    let temporary = path.with_file_name(format!(
        ".{}.{}.{}.tmp",
        name.to_string_lossy(),
        std::process::id(),
        COUNTER.fetch_add(1, Ordering::Relaxed)
    ));
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, mode);
    #[cfg(not(unix))]
    let _ = mode;
    let mut file = options.open(&temporary)?;
    let written = write(&temporary, &mut file).and_then(|()| file.sync_all());
    written.inspect_err(|_| discard(&temporary))?;
    Ok(temporary)
}

fn discard(temporary: &Path) {
    if let Err(error) = fs::remove_file(temporary) {
        tracing::debug!(path = %temporary.display(), %error, "cannot delete a temporary file");
    }
}

fn flush_folder(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) if folder.as_os_str().is_empty() => File::open(".")?.sync_all(),
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_file_has_the_new_bytes_and_leaves_no_temporary() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        replace(&path, &[b"one"]).unwrap();
        replace(&path, &[b"tw", b"o"]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_private_file_is_created_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        create_private(&path, b"one").unwrap();
        let error = create_private(&path, b"two").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }
}
