//! Starts bwrap with exactly the descriptors that it is to have, from a thread that outlives it.

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::libc;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::time::Duration;
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
                let _ = request.reply.send(request.command.spawn().map(Process));
            }
        })?;
        Ok(Spawner(sender))
    }

    pub(super) async fn spawn(&self, command: Command) -> io::Result<Process> {
        let (reply, child) = oneshot::channel();
        let gone = || io::Error::other("the thread that starts sandboxes has ended");
        let runtime = Handle::current();
        let request = Request {
            command,
            runtime,
            reply,
        };
        self.0.send(request).map_err(|_| gone())?;
        child.await.map_err(|_| gone())?
    }
}

/// bwrap. Its child is the first process of the sandbox: where that ends, the kernel ends all others.
#[derive(Debug)]
pub(super) struct Process(Child);

impl Process {
    pub(super) fn child(&mut self) -> &mut Child {
        &mut self.0
    }

    fn kill(&self) {
        // bwrap's child is in its process group until it has asked the kernel to end with bwrap.
        let group = self.0.id().and_then(|pid| i32::try_from(pid).ok());
        if let Some(group) = group {
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL); // it may have ended
        }
    }

    /// Kills it if it has not ended. Where the kernel holds it for longer, tokio waits in the background.
    pub(super) async fn end(&mut self, patience: Duration) {
        self.kill();
        let _ = tokio::time::timeout(patience, self.0.wait()).await;
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
