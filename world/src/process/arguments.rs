//! What bwrap is told: what a program in the sandbox sees, and its limits.

use super::Error;
use crate::{Command, Limits};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Component, Path};

/// In which a program starts, and where its files lie.
pub(super) const FOLDER: &str = "/tmp/work";
/// Files that a command may bring: each needs a descriptor until the sandbox is made.
pub(super) const FILES_MAX: usize = 128;
/// Descriptors of one process. Their number bounds what the kernel keeps in pipes and sockets.
const OPEN_FILES: u64 = 64;

/// The folders that can be written, each a file system in memory, with their sizes in bytes.
pub(super) fn folders(limits: &Limits) -> [(&'static str, u64); 2] {
    [
        ("/tmp", limits.memory_bytes.saturating_mul(2)),
        ("/dev/shm", (limits.memory_bytes / 4).max(1)),
    ]
}

/// The arguments of bwrap, and the descriptors that it inherits.
pub(super) struct Arguments {
    pub(super) words: Vec<String>,
    pub(super) descriptors: Vec<OwnedFd>,
    /// A file in memory in which bwrap names its child, before it lets the child run.
    pub(super) child: File,
}

pub(super) fn arguments(command: &Command, filter: &[u8], status: OwnedFd) -> Result<Arguments, Error> {
    check(command)?;
    let mut options = Options::default();
    options.add(&[
        "--unshare-user",
        "--disable-userns",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
    ]);
    options.add(&[
        "--unshare-uts",
        "--unshare-cgroup",
        "--hostname",
        "world",
        "--new-session",
        "--die-with-parent",
    ]);
    options.add(&["--cap-drop", "ALL", "--uid", "1000", "--gid", "1000"]);
    options.add(&[
        "--ro-bind",
        "/usr",
        "/usr",
        "--ro-bind-try",
        "/etc/ld.so.cache",
        "/etc/ld.so.cache",
    ]);
    options.add(&["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]);
    for folder in ["/bin", "/sbin", "/lib", "/lib32", "/lib64"] {
        match std::fs::read_link(folder) {
            Ok(target) => options.add(&["--symlink", &target.to_string_lossy(), folder]),
            Err(_) => options.add(&["--ro-bind-try", folder, folder]),
        }
    }
    let [(files, files_bytes), (shared, shared_bytes)] = folders(&command.limits);
    options.add(&[
        "--dev",
        "/dev",
        "--size",
        &shared_bytes.to_string(),
        "--tmpfs",
        shared,
        "--remount-ro",
        "/dev",
    ]);
    options.add(&["--size", &files_bytes.to_string(), "--tmpfs", files, "--dir", FOLDER]);
    for (path, content) in &command.files {
        let file = options.in_memory(content)?;
        options.add(&["--perms", "0644", "--file", &file, &format!("{FOLDER}/{path}")]);
    }
    options.add(&["--remount-ro", "/", "--chdir", FOLDER]);
    let filter = options.in_memory(filter)?;
    options.add(&["--seccomp", &filter]);
    options.add(&["--json-status-fd", &status.as_raw_fd().to_string()]);
    options.descriptors.push(status);
    let (child, number) = options.file(&[])?;
    options.add(&["--info-fd", &number]);

    // Options travel in a file, so that other users do not read names of files in the list of processes.
    let mut text = options.words.join("\0");
    text.push('\0');
    let from = options.in_memory(text.as_bytes())?;
    let mut words = vec!["--args".to_owned(), from, "--".to_owned()];
    words.extend(limited(&command.limits));
    words.extend(command.program.iter().cloned());
    Ok(Arguments {
        words,
        descriptors: options.descriptors,
        child,
    })
}

/// The limits of each process, which it cannot raise. They are set inside of the sandbox: the number of
/// processes is then that of its user namespace, not of the user outside.
fn limited(limits: &Limits) -> Vec<String> {
    // The sums over all processes end a program first; these hold between two readings of the sums.
    let seconds = limits.cpu.as_secs() + 2;
    let memory = limits.memory_bytes.saturating_mul(2);
    let processes = u64::from(limits.processes) + 1; // the first one is bwrap's
    let files = memory;
    vec![
        "/usr/bin/prlimit".into(),
        format!("--cpu={seconds}"),
        format!("--data={memory}"),
        format!("--nproc={processes}"),
        format!("--fsize={files}"),
        format!("--nofile={OPEN_FILES}"),
        "--core=0".into(),
        "--memlock=0".into(),
        "--".into(),
    ]
}

#[derive(Default)]
struct Options {
    words: Vec<String>,
    descriptors: Vec<OwnedFd>,
}

impl Options {
    fn add(&mut self, words: &[&str]) {
        self.words.extend(words.iter().map(|word| (*word).to_owned()));
    }

    /// A file in memory with this content. Returns its descriptor's number, which bwrap inherits.
    fn in_memory(&mut self, content: &[u8]) -> Result<String, Error> {
        self.file(content).map(|(_, number)| number)
    }

    /// The same, and the file.
    fn file(&mut self, content: &[u8]) -> Result<(File, String), Error> {
        let make = || -> std::io::Result<(File, File)> {
            let mut file = File::from(memfd_create("sandbox", MFdFlags::MFD_CLOEXEC)?);
            file.write_all(content)?;
            file.rewind()?;
            Ok((file.try_clone()?, file))
        };
        let (file, inherited) = make().map_err(|source| Error::Start {
            what: "make a file in memory",
            source,
        })?;
        let number = inherited.as_raw_fd().to_string();
        self.descriptors.push(inherited.into());
        Ok((file, number))
    }
}

/// Refuses a command that cannot be run as it is meant.
fn check(command: &Command) -> Result<(), Error> {
    let refused = |why: String| Err(Error::Command(why));
    match command.program.first() {
        None => return refused("it has no program".into()),
        Some(program) if program.is_empty() => return refused("its program has no name".into()),
        Some(_) => {}
    }
    if command.program.iter().any(|word| word.contains('\0')) {
        return refused("an argument holds a zero byte".into());
    }
    if command.files.len() > FILES_MAX {
        return refused(format!(
            "it brings {} files; {FILES_MAX} are allowed",
            command.files.len()
        ));
    }
    for path in command.files.keys() {
        let plain = |component| matches!(component, Component::Normal(_));
        let parts_match =
            Path::new(path).components().all(plain) && path.split('/').all(|part| !part.is_empty() && part != ".");
        if path.is_empty() || path.contains('\0') || !parts_match {
            return refused(format!("the file {path:?} needs a relative path without `.` and `..`"));
        }
        let folder = |ancestor: &&Path| ancestor.to_str().is_some_and(|name| command.files.contains_key(name));
        if let Some(file) = Path::new(path).ancestors().skip(1).find(folder) {
            return refused(format!("the file {path:?} lies in {file:?}, which is a file too"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_could_lie_elsewhere_are_refused() {
        for path in [
            "",
            "../x",
            "/etc/x",
            "a/../../x",
            "./x",
            "a//b",
            "a/",
            ".",
            "..",
            "a\0b",
        ] {
            let command = Command {
                program: vec!["true".into()],
                files: [(path.to_owned(), vec![])].into(),
                ..Command::default()
            };
            assert!(matches!(check(&command), Err(Error::Command(_))), "{path:?}");
        }
        let both = ["a", "a/b"].map(|path| (path.to_owned(), vec![]));
        let command = Command {
            program: vec!["true".into()],
            files: both.into(),
            ..Command::default()
        };
        assert!(check(&command).unwrap_err().to_string().contains("a file too"));
    }

    #[test]
    fn a_command_needs_a_program() {
        for program in [vec![], vec![String::new()], vec!["a".to_owned(), "b\0c".to_owned()]] {
            let command = Command {
                program,
                ..Command::default()
            };
            assert!(matches!(check(&command), Err(Error::Command(_))));
        }
    }
}
