//! A network namespace, held by a thread that runs inside it. Processes it starts and sockets it
//! opens belong to the namespace.

use std::io;
use std::sync::mpsc;

use nix::sched::{CloneFlags, unshare};

type Job = Box<dyn FnOnce() + Send>;

/// Vanishes after it is dropped, once nothing runs in it.
pub struct Namespace {
    jobs: mpsc::Sender<Job>,
}

impl Namespace {
    /// An empty namespace, without loopback. Needs root.
    pub fn new() -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let (entered, answer) = mpsc::channel();
        std::thread::Builder::new()
            .name("namespace".to_owned())
            .spawn(move || {
                let inside = unshare(CloneFlags::CLONE_NEWNET);
                let is_inside = inside.is_ok();
                // fails only if the caller is gone
                let _ = entered.send(inside);
                if is_inside {
                    for job in queue {
                        job();
                    }
                }
            })?;
        answer.recv().map_err(io::Error::other)??;
        Ok(Self { jobs })
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
