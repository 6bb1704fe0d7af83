use std::net::SocketAddr;
use std::sync::Arc;

use axum::routing::post;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::*;
use crate::auth::{Auth, Role};
use crate::server;

const BODY_BYTES_MAX: usize = 64 * 1024;

/// A running role whose handler answers when it gets a permit, with the length of the body.
struct Server {
    address: SocketAddr,
    intake: Intake,
    answers: Arc<Semaphore>,
    _stop: DropGuard,
}

impl Server {
    async fn start(in_flight_bytes_max: usize) -> Self {
        let intake = Intake::new(in_flight_bytes_max, 0.5, BODY_BYTES_MAX);
        let answers = Arc::new(Semaphore::new(0));
        let turn = answers.clone();
        let handler = async move |body: Bytes| {
            turn.acquire().await.unwrap().forget();
            body.len().to_string()
        };
        let router = intake.clone().guard(Router::new().route("/", post(handler)));
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        let stop = CancellationToken::new();
        let router = Auth::fixed(None).protect(router);
        tokio::spawn(server::run(tcp.into(), router, stop.clone()));
        Self {
            address,
            intake,
            answers,
            _stop: stop.drop_guard(),
        }
    }

    /// Starts a request whose body has `bytes`, of which it sends `sent`.
    async fn begin(&self, bytes: usize, sent: usize) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let head = format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {bytes}\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&vec![b'x'; sent]).await.unwrap();
        stream
    }

    async fn holds(&self, bytes: usize) {
        while self.intake.held_bytes() != bytes {
            tokio::task::yield_now().await;
        }
    }
}

async fn answer(mut stream: TcpStream) -> String {
    let mut answer = Vec::new();
    // A reset after the answer is an end, too.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn bodies_beyond_the_bytes_in_flight_get_429_whoever_sends_them_and_memory_is_given_back() {
    const ROOM: usize = 4;
    const EACH: usize = BODY_BYTES_MAX + REQUEST_BYTES;
    let server = Server::start(2 * ROOM * EACH).await;
    // one that has arrived waits for its answer; the others are slow
    let mut open = vec![server.begin(BODY_BYTES_MAX, BODY_BYTES_MAX).await];
    for sent in [0, 1, BODY_BYTES_MAX - 1] {
        open.push(server.begin(BODY_BYTES_MAX, sent).await);
    }
    assert_eq!(open.len(), ROOM);
    server.holds(ROOM * EACH).await;
    for bytes in [1, BODY_BYTES_MAX] {
        let refused = answer(server.begin(bytes, 0).await).await.to_lowercase();
        assert!(refused.starts_with("http/1.1 429"), "{refused}");
        assert!(
            refused.contains("retry-after: 1") && refused.contains("in_flight_bytes"),
            "{refused}"
        );
    }
    server.holds(ROOM * EACH).await;

    // a client that leaves gives its bytes back, and so does an answer
    open.pop();
    server.holds((ROOM - 1) * EACH).await;
    server.answers.add_permits(2);
    let answered = answer(open.remove(0)).await;
    assert!(answered.starts_with("HTTP/1.1 200"), "{answered}");
    let answered = answer(server.begin(BODY_BYTES_MAX, BODY_BYTES_MAX).await).await;
    assert!(answered.ends_with(&BODY_BYTES_MAX.to_string()), "{answered}");
    server.holds((ROOM - 2) * EACH).await;
}

#[tokio::test]
async fn a_body_without_a_declared_length_counts_as_it_arrives() {
    let server = Server::start(2 * BODY_BYTES_MAX).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let chunk = format!("{:x}\r\n{}\r\n", 1000, "x".repeat(1000));
    let head = "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n";
    stream.write_all(format!("{head}{chunk}").as_bytes()).await.unwrap();
    server.holds(REQUEST_BYTES + 1000).await;
    for _ in 0..65 {
        // It is refused in the midst, so the last ones may find a closed connection.
        let _ = stream.write_all(chunk.as_bytes()).await;
    }
    let refused = answer(stream).await;
    assert!(refused.starts_with("HTTP/1.1 429"), "{refused}");
    server.holds(0).await;
}

#[tokio::test]
async fn a_tenant_beyond_its_share_gets_429_while_another_is_served() {
    let intake = Intake::new(4 * BODY_BYTES_MAX, 0.5, BODY_BYTES_MAX);
    let greedy = intake.budget.reserve("greedy", None, 2 * BODY_BYTES_MAX).unwrap();
    let send = async |tenant| {
        let router = Router::new().route("/", post(async |body: Bytes| body.len().to_string()));
        let request = Request::post("/").extension(Principal::with_role(tenant, Role::Serving, ""));
        let request = request.body(Body::from(vec![b'x'; 1024])).unwrap();
        tower::ServiceExt::oneshot(intake.clone().guard(router), request)
            .await
            .unwrap()
    };
    let refused = send("greedy").await;
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["retry-after"], "1");
    assert_eq!(send("modest").await.status(), 200);
    drop(greedy);
    assert_eq!(send("greedy").await.status(), 200);
}

#[tokio::test]
async fn what_an_answer_may_hold_is_charged_until_it_is_sent() {
    let intake = Intake::new(4 * BODY_BYTES_MAX, 0.5, BODY_BYTES_MAX);
    let charging = async |held: Held, body: Bytes| {
        let bytes = std::str::from_utf8(&body).unwrap().trim().parse().unwrap();
        held.charge(bytes, "ask for less").map(|()| "charged")
    };
    let router = intake.clone().guard(Router::new().route("/", post(charging)));
    let send = async |bytes: usize| {
        let request = Request::post("/").extension(Principal::with_role("one", Role::Serving, ""));
        let request = request.body(Body::from(bytes.to_string())).unwrap();
        tower::ServiceExt::oneshot(router.clone(), request).await.unwrap()
    };
    let first = send(BODY_BYTES_MAX).await;
    assert_eq!(first.status(), 200);
    assert_eq!(intake.held_bytes(), BODY_BYTES_MAX + REQUEST_BYTES + 5);
    assert_eq!(send(0).await.status(), 200);
    assert_eq!(send(BODY_BYTES_MAX).await.status(), 429, "its part is taken");
    let never = send(2 * BODY_BYTES_MAX).await;
    assert_eq!(never.status(), 400, "{never:?}");
    drop((first, never));
    assert_eq!(intake.held_bytes(), 0);
    assert_eq!(send(BODY_BYTES_MAX).await.status(), 200);
}
