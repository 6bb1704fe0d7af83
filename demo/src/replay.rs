//! The loop of both demos: at each arrival a user begins a pause or a session. Open loop: a slow
//! server delays only the users who wait for it. One loop does all the counting.

use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};

use crate::{
    arrivals::{Arrival, Arrivals},
    progress::{Ended, Progress},
    terminal::{Key, View},
};

/// Completions that are waited for at one time.
pub const COMPLETIONS_IN_FLIGHT_MAX: usize = 64;

/// Has users begin to the end of the arrivals or to the first Ctrl-C, and waits for what is open. The
/// second Ctrl-C leaves it.
///
/// At most `open_max` are open at one time. One that is due beyond that, or that does not `begin`, is
/// shed and counted.
pub async fn replay<T: Send + 'static, F: Future<Output = Ended<T>> + Send + 'static>(
    mut arrivals: Arrivals,
    open_max: usize,
    view: &mut impl View<T>,
    mut begin: impl FnMut(Arrival) -> Option<F>,
) -> Progress<T> {
    let mut open = JoinSet::<Ended<T>>::new();
    let mut progress = Progress::default();
    let mut tick = interval(view.period());
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tick.tick().await;

    let start = Instant::now();
    let mut next = arrivals.next();
    while next.is_some() || !open.is_empty() {
        let due = start + next.map_or_else(Default::default, |arrival| arrival.at);
        tokio::select! {
            () = sleep_until(due), if next.is_some() => {
                let Some(arrival) = next else { continue };
                next = arrivals.next();
                let counts = &mut progress.counts;
                counts.due += 1;
                counts.arrival_lateness_ms_max = counts.arrival_lateness_ms_max.max(due.elapsed().as_millis() as u64);
                let has_room = open.len() < open_max;
                match has_room.then(|| begin(arrival)).flatten() {
                    Some(begun) => drop(open.spawn(begun)),
                    None => counts.shed += 1,
                }
            }
            Some(ended) = open.join_next(), if !open.is_empty() => match ended {
                Ok(ended) => progress.add(ended),
                Err(error) => {
                    tracing::error!(%error, "a simulated user failed");
                    progress.counts.count_error("demo: task failed".to_owned());
                }
            },
            _ = tick.tick() => view.show(start.elapsed(), &progress),
            key = view.key() => {
                if key == Key::End {
                    if progress.interrupted {
                        break;
                    }
                    (next, progress.interrupted) = (None, true);
                }
                view.show(start.elapsed(), &progress);
            }
            interrupt = tokio::signal::ctrl_c() => {
                if progress.interrupted || interrupt.is_err() {
                    break;
                }
                (next, progress.interrupted) = (None, true);
                view.say("nothing more begins; waiting for what is open (Ctrl-C again: do not wait)");
            }
        }
    }
    view.show(start.elapsed(), &progress);
    progress
}
