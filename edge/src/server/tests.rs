use super::*;

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::routing::{get, post};
use futures::future::join_all;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::sync::oneshot;
use tokio_util::sync::DropGuard;

#[tokio::test]
async fn a_panicking_handler_returns_a_500_problem() {
    async fn handler() -> &'static str {
        panic!("on purpose")
    }
    let router = Router::new()
        .route("/", get(handler))
        .layer(CatchPanicLayer::custom(on_panic));
    let request = Request::builder().uri("/").body(Body::empty()).unwrap();
    let response = router.oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(response.headers()["content-type"], "application/problem+json");
}

const SHORT: Duration = Duration::from_millis(300);

fn limits(connections_max: usize) -> Limits {
    Limits {
        connections_max,
        head: SHORT,
        body: SHORT,
        write: SHORT,
        idle: SHORT,
        ..Limits::default()
    }
}

struct Server {
    address: SocketAddr,
    connections: Connections,
    _stop: DropGuard,
}

impl Server {
    async fn start(limits: Limits, router: Router) -> Self {
        Self::listen(limits, router, |listener| listener).await
    }

    async fn listen(limits: Limits, router: Router, set: impl FnOnce(Listener) -> Listener) -> Self {
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        let stop = CancellationToken::new();
        let listener = set(Listener::from(tcp).limits(limits));
        let connections = Connections::new(limits.connections_max);
        tokio::spawn(run_with(listener, router, stop.clone(), connections.clone()));
        Self {
            address,
            connections,
            _stop: stop.drop_guard(),
        }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends `request` on a new connection and reads to its end.
    async fn ask(&self, request: &str) -> String {
        let mut stream = self.connect().await;
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        // A reset after the answer is an end, too.
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8(answer).unwrap()
    }

    async fn ask_honestly(&self) {
        let request = "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello";
        let answer = self.ask(request).await;
        assert!(
            answer.starts_with("HTTP/1.1 200") && answer.ends_with("hello"),
            "{answer}"
        );
    }
}

fn echo() -> Router {
    Router::new().route("/", post(|body: Bytes| async move { body }))
}

#[tokio::test]
async fn an_open_request_finishes_after_a_shutdown() {
    let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = tcp.local_addr().unwrap();
    let shutdown = CancellationToken::new();
    let stop = shutdown.clone();
    let router = Router::new().route(
        "/",
        get(move || async move {
            stop.cancel();
            tokio::time::sleep(Duration::from_millis(100)).await;
            "done"
        }),
    );
    let idle = TcpStream::connect(address).await.unwrap();
    let server = tokio::spawn(run(tcp.into(), router, shutdown));
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.ends_with("done"), "{answer}");
    // The connection without a request does not hold it up.
    server.await.unwrap().unwrap();
    drop(idle);
}

#[tokio::test]
async fn a_server_that_stops_says_so_and_answers_until_nobody_sends_it_requests_any_more() {
    let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = tcp.local_addr().unwrap();
    let limits = Limits {
        unready: Duration::from_millis(800),
        ..Limits::default()
    };
    let ok = || async { "answered" };
    let router = Router::new().route("/", get(ok)).route("/health", get(ok));
    let stop = CancellationToken::new();
    let served = tokio::spawn(run(Listener::from(tcp).limits(limits), router, stop.clone()));
    let ask = async |path: &str| {
        let mut client = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        client.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        answer
    };
    assert!(ask("/health").await.starts_with("HTTP/1.1 200"));
    stop.cancel();
    assert!(ask("/health").await.starts_with("HTTP/1.1 503"));
    assert!(ask("/").await.ends_with("answered"));
    served.await.unwrap().unwrap();
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_header_that_has_arrived_is_in_time_although_the_process_was_too_busy_to_read_it() {
    let server = Server::start(limits(100), echo()).await;
    let mut streams = Vec::new();
    for _ in 0..20 {
        streams.push(server.connect().await);
    }
    while server.connections.taken() < streams.len() {
        tokio::task::yield_now().await;
    }
    for stream in &mut streams {
        let request = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello";
        stream.write_all(request).await.unwrap();
    }
    // The only thread: nothing is read meanwhile.
    std::thread::sleep(2 * SHORT);
    for mut stream in streams {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

/// Sends `start`, then a byte whenever it may, until the server has closed the connection.
async fn drip(address: SocketAddr, start: &'static [u8]) {
    let Ok(mut stream) = TcpStream::connect(address).await else {
        return;
    };
    if stream.write_all(start).await.is_err() {
        return;
    }
    let (mut read, mut write) = stream.into_split();
    let dripping = async {
        while write.write_all(b"x").await.is_ok() {
            tokio::time::sleep(SHORT / 4).await;
        }
    };
    let closed = async {
        let mut answer = Vec::new();
        let _ = read.read_to_end(&mut answer).await;
    };
    tokio::join!(dripping, closed);
}

fn allow_files() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard.min(65_536), hard).unwrap();
}

const SLOW: usize = 2_000;
const SLOW_HEADER: &[u8] = b"POST / HTTP/1.1\r\nhost: x\r\nx-slow: ";
const SLOW_BODY: &[u8] = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_headers_and_bodies_are_cut_while_honest_requests_go_on() {
    allow_files();
    let server = Server::start(limits(4096), echo()).await;
    let slow = (0..SLOW).map(|n| [SLOW_HEADER, SLOW_BODY][n % 2]);
    let mut slow: Vec<_> = slow.map(|start| tokio::spawn(drip(server.address, start))).collect();
    while !slow.is_empty() {
        server.ask_honestly().await;
        slow.retain(|attacker| !attacker.is_finished());
    }
    while server.connections.taken() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_listener_closes_whoever_sends_no_request() {
    allow_files();
    // Nobody is cut for being slow: only the cap can help.
    let patient = Limits {
        connections_max: 64,
        ..Limits::default()
    };
    let server = Server::start(patient, echo()).await;
    let mut slow: Vec<_> = (0..SLOW)
        .map(|_| tokio::spawn(drip(server.address, SLOW_HEADER)))
        .collect();
    // The last ones keep their place until somebody wants it.
    while slow.len() > patient.connections_max {
        server.ask_honestly().await;
        assert!(server.connections.taken() <= patient.connections_max);
        slow.retain(|attacker| !attacker.is_finished());
    }
    for attacker in slow {
        attacker.abort();
    }
}

const HOUR: Duration = Duration::from_secs(3600);

/// A frame of HTTP/2 (RFC 9113).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let head = [&length[1..], &[kind, flags], &stream.to_be_bytes()].concat();
    [&head[..], payload].concat()
}

const HEADERS: u8 = 1;

/// `GET /` on a stream.
fn http2_get(stream: u32) -> Vec<u8> {
    // The method, scheme and path of HPACK's static table, and an authority `x`.
    frame(HEADERS, 0b101, stream, b"\x82\x86\x84\x41\x01x")
}

/// A connection whose client has asked for `/` and takes no byte of any body.
async fn stalled_http2(server: &Server) -> TcpStream {
    let no_window = frame(4, 0, 0, &[0, 4, 0, 0, 0, 0]);
    let mut stream = server.connect().await;
    let start = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &no_window, &http2_get(1)].concat();
    stream.write_all(&start).await.unwrap();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.unwrap();
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; length.try_into().unwrap()];
        stream.read_exact(&mut payload).await.unwrap();
        if head[3] == HEADERS {
            return stream;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_listener_closes_whoever_takes_no_response() {
    let limits = patient(16);
    let router = echo().route("/", get(|| async { "an answer" }));
    let server = Server::start(limits, router).await;
    let mut stalled = Vec::new();
    for _ in 0..limits.connections_max {
        stalled.push(stalled_http2(&server).await);
    }
    assert_eq!(server.connections.taken(), limits.connections_max);
    let honest = join_all((0..4).map(|_| server.ask_honestly()));
    let answered = tokio::time::timeout(Duration::from_secs(60), honest).await;
    answered.expect("connections whose client takes nothing keep others out");
}

/// Nobody is cut for being slow: only the cap can help.
fn patient(connections_max: usize) -> Limits {
    Limits {
        connections_max,
        head: HOUR,
        body: HOUR,
        write: HOUR,
        idle: HOUR,
        ..Limits::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_listener_closes_whoever_sends_no_body() {
    let limits = patient(16);
    let server = Server::start(limits, echo()).await;
    let mut stalled = Vec::new();
    for index in 0..limits.connections_max {
        let mut stream = server.connect().await;
        let http2 = [
            &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..],
            &frame(4, 0, 0, &[]),
            // `POST /`, whose body is to come
            &frame(HEADERS, 0b100, 1, b"\x83\x86\x84\x41\x01x"),
        ];
        let start = [SLOW_BODY.to_vec(), http2.concat()];
        stream.write_all(&start[index % 2]).await.unwrap();
        stalled.push(stream);
    }
    while server.connections.taken() < limits.connections_max {
        tokio::task::yield_now().await;
    }
    let honest = join_all((0..4).map(|_| server.ask_honestly()));
    let answered = tokio::time::timeout(Duration::from_secs(60), honest).await;
    answered.expect("connections whose client sends no body keep others out");
}

#[tokio::test]
async fn a_new_connection_is_not_closed_before_it_can_speak() {
    let connections = Connections::new(1);
    // Again if this machine was too slow to ask in time.
    let slot = loop {
        let opened = Instant::now();
        let slot = connections.room().await;
        connections.evict();
        let evicted = tokio::time::timeout(Duration::ZERO, slot.connection.evicted()).await;
        if opened.elapsed() < connection::SPEAKS_WITHIN {
            assert!(evicted.is_err());
            break slot;
        }
    };
    // Nor does it keep others out if it says nothing.
    let next = tokio::spawn({
        let connections = connections.clone();
        async move { connections.room().await }
    });
    slot.connection.evicted().await;
    assert!(slot.connection.waiting_since().is_some());
    drop(slot);
    next.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_takes_one_byte_now_and_then_is_cut_whatever_else_it_asks() {
    let router = Router::new().route("/", get(|| async { vec![b'x'; 64 << 10] }));
    let server = Server::start(limits(8), router).await;
    let (mut read, mut write) = stalled_http2(&server).await.into_split();
    let closed = async {
        let mut frames = Vec::new();
        let _ = read.read_to_end(&mut frames).await;
    };
    let asking = async {
        for request in 1..=60 {
            let one_byte = frame(8, 0, 1, &[0, 0, 0, 1]);
            let both = [one_byte, http2_get(1 + 2 * request)].concat();
            if write.write_all(&both).await.is_err() {
                return;
            }
            tokio::time::sleep(SHORT / 2).await;
        }
        panic!("60 further requests did not get the connection closed");
    };
    tokio::select! {
        () = closed => {}
        () = asking => {}
    }
    while server.connections.taken() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_large_answer_is_not_cut_while_the_client_takes_it() {
    const ANSWER: usize = 16 << 20;
    let second = Duration::from_secs(1);
    let slow = Limits {
        write: second,
        idle: second,
        ..limits(8)
    };
    // One frame: hyper has it at once, and the client much later.
    let router = Router::new().route("/", get(|| async { vec![b'x'; ANSWER] }));
    let server = Server::start(slow, router).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(64 << 10).unwrap();
    let mut stream = socket.connect(server.address).await.unwrap();
    let request = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let (mut taken, mut part) = (0, vec![0; 512 << 10]);
    while let Ok(bytes @ 1..) = stream.read_exact(&mut part).await {
        taken += bytes;
        tokio::time::sleep(second / 10).await;
    }
    assert!(taken >= ANSWER - part.len(), "cut after {taken} bytes");
}

#[tokio::test]
async fn a_slow_body_gets_408() {
    let server = Server::start(limits(8), echo()).await;
    let answer = server
        .ask("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhel")
        .await;
    assert!(
        answer.starts_with("HTTP/1.1 408") && answer.contains("/problems/too-slow"),
        "{answer}"
    );
}

#[tokio::test]
async fn a_connection_without_a_further_request_is_closed() {
    let server = Server::start(limits(8), echo()).await;
    let answer = server
        .ask("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello")
        .await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn a_slow_answer_is_not_cut() {
    let slow = || async {
        let parts = futures::stream::unfold(0, |n| async move {
            tokio::time::sleep(SHORT / 2).await;
            (n < 8).then(|| (Ok::<_, Infallible>(format!("{n} ")), n + 1))
        });
        Body::from_stream(parts)
    };
    let server = Server::start(limits(8), Router::new().route("/", get(slow))).await;
    let answer = server
        .ask("GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .await;
    assert!(answer.contains("7 "), "{answer}");
}

#[tokio::test]
async fn a_client_that_takes_no_answer_is_cut() {
    struct Dropped(Option<oneshot::Sender<()>>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            let _ = self.0.take().unwrap().send(());
        }
    }
    let (dropped, cut) = oneshot::channel();
    let dropped = Arc::new(std::sync::Mutex::new(Some(dropped)));
    let endless = move || async move {
        let guard = Dropped(dropped.lock().unwrap().take());
        let parts = futures::stream::repeat_with(move || {
            let _ = &guard;
            Ok::<_, Infallible>(vec![b'x'; 64 << 10])
        });
        Body::from_stream(parts)
    };
    let server = Server::start(limits(8), Router::new().route("/", get(endless))).await;
    let mut stream = server.connect().await;
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    cut.await.unwrap();
}

#[tokio::test]
async fn other_sites_pages_get_403_from_a_role_without_keys() {
    let server = Server::listen(limits(8), echo(), |listener| listener.only_for(Hosts::default())).await;
    let ask = async |headers: &str| {
        let request = format!("POST / HTTP/1.1\r\n{headers}content-length: 2\r\nconnection: close\r\n\r\n{{}}");
        let answer = server.ask(&request).await;
        answer[9..12].to_owned()
    };
    assert_eq!(ask("host: 127.0.0.1:8000\r\n").await, "200");
    assert_eq!(ask("host: evil.example:8000\r\n").await, "403");
    assert_eq!(ask("host: localhost\r\norigin: https://evil.example\r\n").await, "403");
    assert_eq!(ask("host: localhost\r\nsec-fetch-site: cross-site\r\n").await, "403");
    assert_eq!(ask("").await, "400");
}
