//! Who looks at which live page.
//!
//! What is shown is read and rendered by one task per page and audience, however many look; it ends
//! when nobody does. A stream ends after a while, and the browser opens it again, so a revoked key does
//! not see on (`stream`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use edge::Problem;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::page::viewer::Audience;
use crate::page::watched::Watched;

/// Open streams of all viewers.
const STREAMS_MAX: usize = 128;
/// Of them, those of one key, or of all without one.
const STREAMS_PER_KEY_MAX: usize = 32;

/// What is sent: regions by id, as a JSON object; or what is wrong.
pub type Latest = Option<Result<Arc<str>, Arc<str>>>;
type Topics = HashMap<(Watched, Audience), watch::Sender<Latest>>;

/// Who looks at what.
#[derive(Debug)]
pub struct Live {
    topics: Arc<Mutex<Topics>>,
    streams: Arc<Semaphore>,
    /// By key. Without entries that nobody uses.
    streams_of: Arc<Mutex<HashMap<Option<Uuid>, usize>>>,
    shutdown: CancellationToken,
}

impl Live {
    pub fn new(shutdown: CancellationToken) -> Self {
        Self {
            topics: Arc::default(),
            streams: Arc::new(Semaphore::new(STREAMS_MAX)),
            streams_of: Arc::default(),
            shutdown,
        }
    }

    /// Ends all streams.
    pub fn shutdown(&self) -> CancellationToken {
        self.shutdown.clone()
    }

    /// A place for one more stream.
    pub fn enter(&self, key: Option<Uuid>) -> Result<Place, Problem> {
        let full = |count: usize, whose: &str| {
            Problem::unavailable(
                format_args!("{count} pages{whose} are live already: this one works without, reload it"),
                30,
            )
        };
        let any = self.streams.clone().try_acquire_owned();
        let any = any.map_err(|_| full(STREAMS_MAX, ""))?;
        let mut streams_of = lock(&self.streams_of);
        let own = streams_of.entry(key).or_default();
        if *own >= STREAMS_PER_KEY_MAX {
            return Err(full(STREAMS_PER_KEY_MAX, " of this key"));
        }
        *own += 1;
        Ok(Place {
            _any: any,
            key,
            streams_of: self.streams_of.clone(),
        })
    }

    /// Follows a topic, whose task begins if nobody has followed it so far.
    pub fn follow<F>(
        &self,
        key: (Watched, Audience),
        every: Duration,
        mut look: impl FnMut() -> F + Send + 'static,
    ) -> watch::Receiver<Latest>
    where
        F: Future<Output = Result<Arc<str>, Arc<str>>> + Send + 'static,
    {
        let mut topics = lock(&self.topics);
        if let Some(sender) = topics.get(&key) {
            let mut receiver = sender.subscribe();
            receiver.mark_changed(); // what is known already is sent at once
            return receiver;
        }
        let (sender, receiver) = watch::channel(None);
        topics.insert(key.clone(), sender);
        drop(topics);
        let (topics, shutdown) = (self.topics.clone(), self.shutdown.clone());
        tokio::spawn(async move {
            let _ending = Ending {
                topics: topics.clone(),
                key: key.clone(),
            };
            loop {
                let latest = look().await;
                {
                    let mut topics = lock(&topics);
                    let Some(sender) = topics.get(&key) else { return };
                    // under the lock, so that nobody follows a topic that ends
                    if sender.receiver_count() == 0 || shutdown.is_cancelled() {
                        topics.remove(&key);
                        return;
                    }
                    sender.send_if_modified(|before| {
                        let changed = before.as_ref() != Some(&latest);
                        if changed {
                            *before = Some(latest);
                        }
                        changed
                    });
                }
                tokio::select! {
                    () = tokio::time::sleep(every) => {}
                    () = shutdown.cancelled() => {}
                }
            }
        });
        receiver
    }
}

/// Of an open stream. Free when it is dropped.
#[derive(Debug)]
pub struct Place {
    _any: OwnedSemaphorePermit,
    key: Option<Uuid>,
    streams_of: Arc<Mutex<HashMap<Option<Uuid>, usize>>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut streams_of = lock(&self.streams_of);
        if let Some(own) = streams_of.get_mut(&self.key) {
            *own -= 1;
            if *own == 0 {
                streams_of.remove(&self.key);
            }
        }
    }
}

/// A topic whose task panics ends: else its followers would wait for ever.
struct Ending {
    topics: Arc<Mutex<Topics>>,
    key: (Watched, Audience),
}

impl Drop for Ending {
    fn drop(&mut self) {
        if std::thread::panicking() {
            lock(&self.topics).remove(&self.key);
        }
    }
}

fn lock<T>(map: &Mutex<T>) -> MutexGuard<'_, T> {
    // every statement leaves the map consistent
    map.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn key() -> (Watched, Audience) {
        (Watched::Now, Audience::with(true))
    }

    #[tokio::test]
    async fn viewers_share_one_look_and_it_ends_with_the_last_of_them() {
        let live = Live::new(CancellationToken::new());
        let looks = Arc::new(AtomicUsize::new(0));
        let look = || {
            let looks = looks.clone();
            move || {
                let nth = looks.fetch_add(1, Ordering::SeqCst);
                async move { Ok(nth.to_string().into()) }
            }
        };
        let every = Duration::from_millis(10);
        let mut first = live.follow(key(), every, look());
        let mut second = live.follow(key(), every, look());
        for _ in 0..5 {
            first.changed().await.unwrap();
            second.changed().await.unwrap();
            assert_eq!(*first.borrow_and_update(), *second.borrow_and_update());
        }
        assert_eq!(looks.load(Ordering::SeqCst), 5);
        drop((first, second));
        while !lock(&live.topics).is_empty() {
            tokio::time::sleep(every).await;
        }
        let after = looks.load(Ordering::SeqCst);
        tokio::time::sleep(10 * every).await;
        assert_eq!(looks.load(Ordering::SeqCst), after, "nobody looks, so nothing is read");
    }

    #[tokio::test]
    async fn what_has_not_changed_is_not_sent_again_and_a_shutdown_ends_all() {
        let stop = CancellationToken::new();
        let live = Live::new(stop.clone());
        let mut receiver = live.follow(key(), Duration::from_millis(5), || async { Ok("same".into()) });
        receiver.changed().await.unwrap();
        let again = tokio::time::timeout(Duration::from_millis(100), receiver.changed()).await;
        assert!(again.is_err(), "sent again");
        stop.cancel();
        assert!(receiver.changed().await.is_err(), "the task has ended");
    }

    #[test]
    fn streams_are_bounded() {
        let live = Live::new(CancellationToken::new());
        let key = |number: usize| Some(Uuid::from_u128(number as u128));
        let one: Vec<_> = (0..STREAMS_PER_KEY_MAX).map(|_| live.enter(key(0)).unwrap()).collect();
        assert_eq!(live.enter(key(0)).unwrap_err().status, 503);
        let others = STREAMS_PER_KEY_MAX..STREAMS_MAX;
        let others: Vec<_> = others.map(|number| live.enter(key(number)).unwrap()).collect();
        assert_eq!(live.enter(key(STREAMS_MAX)).unwrap_err().status, 503);
        drop(one);
        let again = live.enter(key(0)).unwrap();
        drop((others, again));
        assert!(lock(&live.streams_of).is_empty());
        assert_eq!(live.streams.available_permits(), STREAMS_MAX);
    }
}
