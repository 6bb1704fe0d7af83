//! A network namespace: a thread that stays in it. What the thread starts begins there; what it opens belongs there.

use std::io;
use std::sync::mpsc;

use nix::sched::{CloneFlags, unshare};

type Job = Box<dyn FnOnce() + Send>;

/// Gone when it is dropped and nothing runs in it any more.
pub struct Namespace {
    jobs: mpsc::Sender<Job>,
}

impl Namespace {
    /// An empty one, without even loopback. Needs root.
    pub fn new() -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let (entered, answer) = mpsc::channel();
        std::thread::Builder::new()
            .name("namespace".to_owned())
            .spawn(move || {
                let inside = unshare(CloneFlags::CLONE_NEWNET);
                let is_inside = inside.is_ok();
                // Nobody listens where the caller is gone.
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

    /// Runs `work` inside, after what was asked for before. Threads and processes that it starts are inside too, and processes
    /// that end with the thread that started them end with the namespace.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        let (done, answer) = mpsc::channel();
        let job = Box::new(move || {
            let _ = done.send(work());
        });
        let sent = self.jobs.send(job).ok();
        sent.and_then(|()| answer.recv().ok())
            .ok_or_else(|| io::Error::other("something that ran in a namespace panicked"))
    }
}
