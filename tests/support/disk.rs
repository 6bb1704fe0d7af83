//! An in-memory file system of a few MiB that a test may fill. Mounting needs root; without root,
//! tests that need it print that and do nothing.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

pub struct Disk {
    /// `Option`, so that the disk is unmounted before its folder is removed.
    dir: Option<TempDir>,
    path: PathBuf,
}

impl Disk {
    /// `None`: the user may not mount.
    pub fn mount(mib: u32) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::fs::create_dir(&path).unwrap();
        // the test stack's Postgres runs as another user, who needs access
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(dir.path(), open).unwrap();
        let mounted = run("mount", &["-t", "tmpfs", "-o", &format!("size={mib}m"), "tmpfs"], &path);
        if let Err(error) = mounted {
            eprintln!("not run, because a small file system cannot be mounted here (that needs root): {error}");
            return None;
        }
        let dir = Some(dir);
        Some(Self { dir, path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn resize(&self, mib: u32) {
        run("mount", &["-o", &format!("remount,size={mib}m")], &self.path).unwrap();
    }

    /// Uses up all free space, in a file of its own; returns its path.
    pub fn fill(&self) -> PathBuf {
        use std::io::Write;
        let path = self.path.join("ballast");
        let mut file = std::fs::File::options().create(true).append(true).open(&path).unwrap();
        for size in [1 << 16, 1 << 12, 1] {
            while file.write_all(&vec![0xB; size]).is_ok() {}
        }
        path
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // lazily, because processes may still use it
        if let Err(error) = run("umount", &["--lazy"], &self.path) {
            eprintln!("{} stays mounted: {error}", self.path.display());
            std::mem::forget(self.dir.take());
        }
    }
}

fn run(program: &str, args: &[&str], path: &Path) -> Result<(), String> {
    let output = Command::new(program).args(args).arg(path).output();
    let output = output.map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
}
