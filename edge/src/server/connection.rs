//! The open connections of a listener: how many there may be, what each is doing, and until when it
//! may go on.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::Limits;

/// How often a full listener looks for a connection that it may close.
const ROOM_POLL: Duration = Duration::from_millis(20);
/// A client that takes nothing of its response for this long may lose its connection to others.
/// Long enough for a response that is on its way, and short, so that many such clients cannot leave
/// only new connections to be closed.
const STALLED_AFTER: Duration = Duration::from_millis(250);
/// A client must take a response at this rate, on average. Otherwise one byte now and then would
/// keep a connection open for ever.
const TAKEN_BYTES_PER_SECOND_MIN: f64 = 1024.0;
/// The same for a request's body.
const SENT_BYTES_PER_SECOND_MIN: f64 = 1024.0;
/// A connection without a request is not closed for others before this. Its header may have arrived
/// and not be read yet.
pub(super) const SPEAKS_WITHIN: Duration = Duration::from_millis(50);

/// At most so many at a time. When all are taken, the one that has waited longest for its client is
/// closed. If all wait for this process, the next client waits.
#[derive(Clone)]
pub(super) struct Connections {
    #[cfg(test)]
    max: usize,
    permits: Arc<Semaphore>,
    open: Arc<Mutex<Open>>,
}

#[derive(Default)]
struct Open {
    next: u64,
    connections: BTreeMap<u64, Arc<Connection>>,
}

/// One connection's place. Dropping it gives the place to others.
pub(super) struct Slot {
    pub(super) connection: Arc<Connection>,
    id: u64,
    open: Arc<Mutex<Open>>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Connections {
    pub(super) fn new(max: usize) -> Self {
        let max = max.min(Semaphore::MAX_PERMITS);
        Self {
            #[cfg(test)]
            max,
            permits: Arc::new(Semaphore::new(max)),
            open: Arc::default(),
        }
    }

    /// Waits for a place, and makes one if it can.
    pub(super) async fn room(&self) -> Slot {
        let permit = loop {
            let permit = self.permits.clone().acquire_owned();
            tokio::select! {
                biased;
                // never closed
                permit = permit => break permit.ok(),
                () = self.evict_and_wait() => {}
            }
        };
        let mut open = lock(&self.open);
        let id = open.next;
        open.next += 1;
        let connection = Arc::new(Connection::new());
        open.connections.insert(id, connection.clone());
        metrics::gauge!("springtide_http_connections").increment(1);
        Slot {
            connection,
            id,
            open: self.open.clone(),
            _permit: permit,
        }
    }

    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        self.max - self.permits.available_permits()
    }

    async fn evict_and_wait(&self) {
        self.evict();
        tokio::time::sleep(ROOM_POLL).await;
    }

    /// Closes the connection that has waited longest for its client, if any waits.
    pub(super) fn evict(&self) {
        let mut open = lock(&self.open);
        let waiting = open.connections.iter().filter_map(|(id, connection)| {
            let since = connection.waiting_since()?;
            Some((since, *id))
        });
        if let Some((_, id)) = waiting.min()
            && let Some(connection) = open.connections.remove(&id)
        {
            connection.evict.notify_one();
        }
    }
}

impl Slot {
    /// Its client has gone on, so it stays among the connections that may be closed later.
    pub(super) fn keep(&self) {
        lock(&self.open).connections.insert(self.id, self.connection.clone());
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.open).connections.remove(&self.id);
        metrics::gauge!("springtide_http_connections").decrement(1);
    }
}

/// What one connection is doing.
pub(super) struct Connection {
    state: Mutex<State>,
    evict: Notify,
}

struct State {
    /// Requests whose response is not sent completely.
    requests: usize,
    /// Those of them that wait for this process, not for the client.
    ours: usize,
    /// Those of them that wait for the client to send more of the body.
    receiving: usize,
    /// Whether a header is awaited or has begun. Not used for HTTP/2, where other frames arrive
    /// between requests.
    head: bool,
    http2: bool,
    /// Since when the connection waits for its client. A client that takes bytes moves this towards
    /// now, at [`TAKEN_BYTES_PER_SECOND_MIN`], and so does one that sends a body. Other requests of the client do not move it, so they
    /// cannot hide a response that it does not take.
    since: Instant,
}

impl State {
    /// Requests that wait for the client.
    fn waiting(&self) -> usize {
        self.requests - self.ours
    }

    /// The client has sent or taken so much.
    fn moved(&mut self, bytes: usize, per_second_min: f64) {
        let worth = Duration::from_secs_f64(bytes as f64 / per_second_min);
        self.since = Instant::now().min(self.since + worth);
    }
}

impl Connection {
    fn new() -> Self {
        Self {
            state: Mutex::new(State {
                requests: 0,
                ours: 0,
                receiving: 0,
                head: true,
                http2: false,
                since: Instant::now(),
            }),
            evict: Notify::new(),
        }
    }

    /// A request's header is complete.
    pub(super) fn begin(self: &Arc<Self>, http2: bool) -> InFlight {
        let mut state = lock(&self.state);
        state.requests += 1;
        state.ours += 1;
        state.head = false;
        state.http2 = http2;
        InFlight(Arc::new(Exchange {
            connection: self.clone(),
            turn: Mutex::new(Turn::Ours),
        }))
    }

    /// When to close it, and the reason, unless it waits for this process.
    pub(super) fn deadline(&self, limits: &Limits) -> Option<(Instant, &'static str)> {
        let state = lock(&self.state);
        let (limit, why) = match (state.ours, state.waiting() - state.receiving) {
            (1.., _) => return None,
            (0, 1..) => (limits.write, "slow_reader"),
            // a body has a limit of its own
            (0, 0) if state.receiving > 0 => return None,
            (0, 0) if state.head => (limits.head, "slow_header"),
            (0, 0) => (limits.idle, "idle"),
        };
        Some((state.since + limit, why))
    }

    pub(super) async fn evicted(&self) {
        self.evict.notified().await;
    }

    /// Since when it waits for its client. `None` if it waits for this process, or if the client is
    /// about to send a header, or is sending a body or taking a response.
    pub(super) fn waiting_since(&self) -> Option<Instant> {
        let state = lock(&self.state);
        let patience = match state.requests {
            0 => SPEAKS_WITHIN,
            1.. => STALLED_AFTER,
        };
        let waits = state.ours == 0 && state.since.elapsed() >= patience;
        waits.then_some(state.since)
    }

    fn taken(&self, bytes: usize) {
        let mut state = lock(&self.state);
        if !state.head {
            state.moved(bytes, TAKEN_BYTES_PER_SECOND_MIN);
        }
    }

    fn received(&self, bytes: usize) {
        let mut state = lock(&self.state);
        if state.receiving > 0 {
            state.moved(bytes, SENT_BYTES_PER_SECOND_MIN);
        }
        if state.requests == 0 && !state.head && !state.http2 {
            state.head = true;
            state.since = Instant::now();
        }
    }
}

/// Who must go on with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Ours,
    /// The client must send more of the body.
    Sends,
    /// The client must take more of the response.
    Takes,
    Over,
}

/// A request and its response.
struct Exchange {
    connection: Arc<Connection>,
    turn: Mutex<Turn>,
}

impl Exchange {
    /// Gives the turn to `next`, if `holds` says that its present holder may.
    fn pass(&self, next: Turn, holds: impl FnOnce(Turn) -> bool) {
        let mut turn = lock(&self.turn);
        if *turn == next || *turn == Turn::Over || !holds(*turn) {
            return;
        }
        let mut state = lock(&self.connection.state);
        let before = std::mem::replace(&mut *turn, next);
        if before == Turn::Ours && state.waiting() == 0 {
            state.since = Instant::now();
        }
        match before {
            Turn::Ours => state.ours -= 1,
            Turn::Sends => state.receiving -= 1,
            Turn::Takes | Turn::Over => {}
        }
        match next {
            Turn::Ours => state.ours += 1,
            Turn::Sends => state.receiving += 1,
            Turn::Takes => {}
            Turn::Over => {
                state.requests -= 1;
                if state.waiting() == 0 {
                    state.since = Instant::now();
                }
            }
        }
    }
}

/// A request whose response is not sent yet.
pub(super) struct InFlight(Arc<Exchange>);

impl InFlight {
    /// Says whether the client must take more of the response now, or this process make more of it.
    pub(super) fn client_takes(&self, takes: bool) {
        self.0.pass(if takes { Turn::Takes } else { Turn::Ours }, |_| true);
    }

    /// For the request's body.
    pub(super) fn receiving(&self) -> Receiving {
        Receiving(self.0.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.pass(Turn::Over, |_| true);
    }
}

/// A request's body, which may outlive the response.
pub(super) struct Receiving(Arc<Exchange>);

impl Receiving {
    /// Says whether the handler waits for more of the body.
    pub(super) fn client_sends(&self, sends: bool) {
        match sends {
            true => self.0.pass(Turn::Sends, |turn| turn == Turn::Ours),
            false => self.0.pass(Turn::Ours, |turn| turn == Turn::Sends),
        }
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        self.client_sends(false);
    }
}

/// A stream that tells its [`Connection`] what arrives and what the client takes.
pub(super) struct Watched<S> {
    stream: S,
    connection: Arc<Connection>,
}

impl<S> Watched<S> {
    pub(super) fn new(stream: S, connection: Arc<Connection>) -> Self {
        Self { stream, connection }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        let received = buffer.filled().len() - before;
        if received > 0 {
            self.connection.received(received);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, bytes))?;
        self.connection.taken(written);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, parts))?;
        self.connection.taken(written);
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
