//! A network namespace, held by a thread that runs inside it. Processes it starts and sockets it
//! opens belong to the namespace.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc;

use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Pid, gettid};

type Job = Box<dyn FnOnce() + Send>;

/// Vanishes after it is dropped, once nothing runs in it.
pub struct Namespace {
    jobs: mpsc::Sender<Job>,
    thread: Pid,
}

impl Namespace {
    /// An empty namespace, without loopback. Needs root.
    pub fn new() -> io::Result<Self> {
        Self::entered(|| unshare(CloneFlags::CLONE_NEWNET))
    }

    /// The namespace of this process.
    pub fn current() -> io::Result<Self> {
        Self::entered(|| Ok(()))
    }

    fn entered(enter: impl FnOnce() -> nix::Result<()> + Send + 'static) -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let (entered, answer) = mpsc::channel();
        std::thread::Builder::new()
            .name("namespace".to_owned())
            .spawn(move || {
                let inside = enter();
                let is_inside = inside.is_ok();
                // fails only if the caller is gone
                let _ = entered.send(inside.map(|()| gettid()));
                if is_inside {
                    for job in queue {
                        job();
                    }
                }
            })?;
        let thread = answer.recv().map_err(io::Error::other)??;
        Ok(Self { jobs, thread })
    }

    /// For programs that enter it, such as `nsenter`. Valid until it vanishes.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/task/{}/ns/net", std::process::id(), self.thread).into()
    }

    /// Runs `work` inside, after earlier calls. Threads and processes that it starts are inside
    /// too. Processes that die with their parent thread die with the namespace.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        let (done, answer) = mpsc::channel();
        let job = Box::new(move || {
            let _ = done.send(work());
        });
        let sent = self.jobs.send(job).ok();
        sent.and_then(|()| answer.recv().ok())
            .ok_or_else(|| io::Error::other("work in a namespace panicked"))
    }
}
