//! What a person sees during a run: a view that fills the terminal, or a line every few seconds if
//! there is no terminal. Both show the same facts.

mod line;
mod screen;
mod view;

use std::{future::pending, time::Duration};

use sqlx::PgPool;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

pub use self::line::{clock, problems};
use self::screen::Screen;
use crate::{
    Console, POLL_EVERY,
    progress::{Progress, Run},
    queries::{self, Live, Scope},
    stage::Stage,
    stats::Outcome,
};

const LINE_EVERY: Duration = Duration::from_secs(3);
const VIEW_EVERY: Duration = Duration::from_secs(1);

/// Input from the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    End,
    Redraw,
}

/// What a person sees of a run.
pub trait View<T> {
    /// How often to call [`View::show`].
    fn period(&self) -> Duration;

    fn show(&mut self, elapsed: Duration, progress: &Progress<T>);

    /// Prints a line, unless the view has the terminal.
    fn say(&self, line: &str) {
        eprintln!("{line}");
    }

    /// Waits for a key. Without a screen it waits forever, because Ctrl-C is a signal then.
    fn key(&mut self) -> impl Future<Output = Key> + Send {
        pending()
    }
}

/// The view of pauses.
pub struct Display {
    console: Console,
    run: Run,
    live: watch::Receiver<Live>,
    _poller: AbortOnDropHandle<()>,
    /// `None`: plain lines.
    screen: Option<Screen>,
}

impl Display {
    /// Takes the terminal, if there is one, until it is dropped.
    pub fn new(stage: &Stage, run: Run) -> Self {
        let console = stage.settings.console;
        let screen = (console.has_screen)()
            .then(|| Screen::take(console))
            .and_then(|screen| {
                screen
                    .inspect_err(|error| tracing::warn!(%error, "the terminal cannot be used; plain lines instead"))
                    .ok()
            });
        let (live, poller) = poll_live(stage.pool.clone(), stage.scope.clone());
        Self {
            console,
            run,
            live,
            _poller: poller,
            screen,
        }
    }
}

impl View<Outcome> for Display {
    fn period(&self) -> Duration {
        if self.screen.is_some() { VIEW_EVERY } else { LINE_EVERY }
    }

    fn show(&mut self, elapsed: Duration, progress: &Progress<Outcome>) {
        let live = &self.live.borrow_and_update();
        let Some(screen) = &mut self.screen else {
            return eprintln!("{}", line::line(elapsed, progress, live, self.run.tau));
        };
        let scene = view::Scene {
            run: self.run,
            elapsed,
            progress,
            live,
            log: (self.console.newest_log_lines)(view::LOG_LINES_MAX),
        };
        if let Err(error) = screen.draw(|frame| view::draw(frame, &scene)) {
            tracing::warn!(%error, "the view could not be drawn; plain lines instead");
            self.screen = None;
        }
    }

    fn say(&self, line: &str) {
        if self.screen.is_none() {
            eprintln!("{line}");
        }
    }

    async fn key(&mut self) -> Key {
        match &mut self.screen {
            Some(screen) => screen.key().await,
            None => pending().await,
        }
    }
}

/// Reads the tables in the background, so that a slow query delays no arrival.
fn poll_live(pool: PgPool, scope: Scope) -> (watch::Receiver<Live>, AbortOnDropHandle<()>) {
    let (sender, receiver) = watch::channel(Live::default());
    let task = tokio::spawn(async move {
        loop {
            match queries::live(&pool, &scope).await {
                Ok(live) => drop(sender.send_replace(live)),
                Err(error) => tracing::debug!(%error, "the tables cannot be read now"),
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    });
    (receiver, AbortOnDropHandle::new(task))
}
