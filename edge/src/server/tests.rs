use super::*;

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::routing::{get, post};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
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
