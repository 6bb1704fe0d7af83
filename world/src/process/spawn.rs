//! Starts bwrap with exactly the descriptors that it is to have, from a thread that outlives it.

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::libc;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::time::Duration;
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// A thread that starts programs. Linux ends a program with `--die-with-parent` when the *thread* that
/// started it ends; threads of tokio come and go.
#[derive(Debug)]
pub(super) struct Spawner(mpsc::Sender<Request>);

#[derive(Debug)]
struct Request {
    command: Command,
    sandbox: File,
    status: pipe::Receiver,
    runtime: Handle,
    reply: oneshot::Sender<io::Result<Process>>,
}

impl Spawner {
    pub(super) fn start() -> io::Result<Spawner> {
        let (sender, requests) = mpsc::channel::<Request>();
        let thread = std::thread::Builder::new().name("sandbox".into());
        thread.spawn(move || {
            for mut request in requests {
                let _runtime = request.runtime.enter();
                request.command.process_group(0).kill_on_drop(true);
                // Where nobody waits any more, the process is dropped, which ends it.
                let _ = request.reply.send(request.command.spawn().map(|bwrap| Process {
                    bwrap,
                    sandbox: request.sandbox,
                    status: request.status,
                }));
            }
        })?;
        Ok(Spawner(sender))
    }

    /// `sandbox`: the file in which bwrap names its child. `status`: where it reports.
    pub(super) async fn spawn(&self, command: Command, sandbox: File, status: pipe::Receiver) -> io::Result<Process> {
        let (reply, child) = oneshot::channel();
        let gone = || io::Error::other("the thread that starts sandboxes has ended");
        let runtime = Handle::current();
        let request = Request {
            command,
            sandbox,
            status,
            runtime,
            reply,
        };
        self.0.send(request).map_err(|_| gone())?;
        child.await.map_err(|_| gone())?
    }
}

/// bwrap. Its child is the first process of the sandbox: where that ends, the kernel ends all others.
#[derive(Debug)]
pub(super) struct Process {
    bwrap: Child,
    sandbox: File,
    /// It must outlive bwrap: an end without a reader ends bwrap, and leaves a child that waits for it for ever.
    status: pipe::Receiver,
}

impl Process {
    pub(super) fn child(&mut self) -> &mut Child {
        &mut self.bwrap
    }

    /// The first process of the sandbox, once bwrap has named it. Before that it waits, in bwrap's process group.
    fn first(&self) -> Option<Pid> {
        #[derive(serde::Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Info {
            child_pid: i32,
        }
        let mut text = [0; 512];
        let length = self.sandbox.read_at(&mut text, 0).ok()?;
        let info: Info = serde_json::from_slice(&text[..length]).ok()?;
        Some(Pid::from_raw(info.child_pid))
    }

    fn kill(&mut self) {
        // Once bwrap has ended, another process may have a number that was its child's.
        let Ok(None) = self.bwrap.try_wait() else { return };
        // It leaves the process group a moment before it asks the kernel to end with bwrap.
        if let Some(first) = self.first() {
            let _ = kill(first, Signal::SIGKILL); // both may have ended
        }
        if let Some(group) = self.bwrap.id().and_then(|pid| i32::try_from(pid).ok()) {
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
        }
    }

    pub(super) fn status(&mut self) -> &mut pipe::Receiver {
        &mut self.status
    }

    /// Kills it if it has not ended. Where the kernel holds it for longer, tokio waits in the background.
    pub(super) async fn end(&mut self, patience: Duration) {
        self.kill();
        let _ = tokio::time::timeout(patience, self.bwrap.wait()).await;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Lets the program inherit `descriptors`, under their numbers, and none that this process has otherwise,
/// such as those which libraries in C opened without `O_CLOEXEC`.
#[expect(unsafe_code, reason = "std has no safe way to say what a program inherits")]
pub(super) fn inherit_only(command: &mut Command, descriptors: Vec<OwnedFd>) {
    let before_exec = move || {
        // SAFETY: marks descriptors for closing at exec; touches no memory.
        let marked = unsafe { libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int) };
        if marked != 0 {
            return Err(io::Error::last_os_error());
        }
        for descriptor in &descriptors {
            fcntl(descriptor, FcntlArg::F_SETFD(FdFlag::empty()))?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes system calls only: it takes no lock and no memory.
    unsafe { command.pre_exec(before_exec) };
}
