//! The proxy in front of an engine that fails in ways in which a real one cannot be made to fail: it
//! restarts at once, or fails its probe while answers run.

use super::*;
use crate::engine::{Config, LoadedVersion};
use crate::remote::tests::{Fake, Faults, version};
use crate::remote::{Options, Server, Updater};
use artifact::checkpoint::Checkpoint;
use serde_json::{Value, json};
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

const LIMIT: u64 = 100_000;
const REQUESTS_MAX: usize = 3;

/// A follower's proxy and updater in front of one engine. The follower itself is not there: tests say
/// when it updates.
struct Front {
    fake: Fake,
    pool: Pool,
    updater: Option<Updater>,
    address: SocketAddr,
}

impl Front {
    async fn new(in_flight: InFlight) -> Front {
        Front::of(Fake::start().await, in_flight).await
    }

    async fn of(fake: Fake, in_flight: InFlight) -> Front {
        let options = Options {
            vllm: vec![Server {
                url: fake.url.clone(),
                ..Server::default()
            }],
            in_flight,
            ..Options::default()
        };
        let config = Config {
            queue_choices_max: 1,
            queue_wait_max: Duration::ZERO,
            prompt_tokens_per_pass_max: 0,
            slots_reserved_for_production: 0,
            parked_max: Duration::from_secs(600),
        };
        let pool = Pool::new(&options, 1, config).unwrap();
        let mut connections = Connections::new(Kind::Vllm.label_path(), &fake.url, None).unwrap();
        connections.connect_timeout = Duration::from_secs(2);
        let proxy = Proxy {
            pool: pool.clone(),
            connections,
            in_flight,
            wait_max: Duration::from_secs(60),
            body_bytes_max: LIMIT,
            permits: Arc::new(Semaphore::new(REQUESTS_MAX)),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = router(Kind::Vllm, &Arc::new(proxy));
        tokio::spawn(async move { axum::serve(listener, router).await });
        let updater = Updater::new(pool.clone(), options).unwrap();
        Front {
            fake,
            pool,
            updater: Some(updater),
            address,
        }
    }

    /// As the follower, once.
    async fn update(&mut self, (version, checkpoint): &(Arc<LoadedVersion>, Arc<Checkpoint>)) -> anyhow::Result<()> {
        let updater = self.updater.as_mut().unwrap();
        updater.change(ENGINE, version, checkpoint).await.map(drop)
    }

    /// The same, while the test goes on. The updater comes back.
    fn update_beside(&mut self, serial: i64) -> tokio::task::JoinHandle<(Updater, anyhow::Result<()>)> {
        let mut updater = self.updater.take().unwrap();
        tokio::spawn(async move {
            let (version, checkpoint) = version(serial);
            let updated = updater.change(ENGINE, &version, &checkpoint).await.map(drop);
            (updater, updated)
        })
    }

    async fn ask(&self, max_tokens: usize) -> reqwest::Response {
        let url = format!("http://{}/inference/v1/generate", self.address);
        let body = json!({"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": max_tokens, "temperature": 1.0}});
        reqwest::Client::new().post(url).json(&body).send().await.unwrap()
    }

    /// The answer to a request that is written as it is.
    async fn raw(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }
}

/// The events of a piece of an answer.
fn tokens(piece: &[u8]) -> usize {
    let text = String::from_utf8_lossy(piece);
    let events = text.lines().filter_map(|line| line.strip_prefix("data: {"));
    events.count()
}

async fn until(what: impl Fn() -> bool) {
    while !what() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_routes_that_sample_or_read_are_passed_on() {
    let mut front = Front::new(InFlight::Drain).await;
    front.update(&version(1)).await.unwrap();
    let pauses = front.fake.held().pauses.len();
    let controls = [
        "/pause",
        "/resume",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/collective_rpc",
        "/v1/completions/../../pause",
        "/inference/v1/generate/%2e%2e/%2e%2e/%2e%2e/pause",
        "//pause",
        "/weight_info/../pause?mode=abort",
        "http://127.0.0.1/pause",
        "/inference/v1/generate%00/pause",
    ];
    for path in controls {
        for method in ["GET", "POST", "PUT"] {
            let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            let answer = front.raw(&head).await;
            let status: u16 = answer.split(' ').nth(1).unwrap().parse().unwrap();
            assert!([400, 404, 405].contains(&status), "{method} {path}: {answer}");
        }
    }
    assert_eq!(front.fake.held().pauses.len(), pauses);
    // a reading route answers what the engine answers
    let url = format!("http://{}/weight_info", front.address);
    let info: Value = reqwest::get(url).await.unwrap().json().await.unwrap();
    assert_eq!(info["weight_version"], front.fake.held().name);
    // the caller's query stays here
    let url = format!("http://{}/v1/models?redirect=/pause", front.address);
    assert_eq!(reqwest::get(url).await.unwrap().status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_passes_before_the_probe_and_a_restarted_engine_gets_nothing() {
    let mut front = Front::new(InFlight::Drain).await;
    let refused = front.ask(2).await;
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["retry-after"]),
        (503, &"1".parse().unwrap())
    );
    assert_eq!(front.fake.held().sampled, 0);
    let first = version(1);
    front.update(&first).await.unwrap();
    assert_eq!(front.ask(2).await.status(), 200);
    // longer than connections are kept: those of a dead process would be dead
    tokio::time::sleep(Duration::from_millis(2100)).await;
    front.fake.restart();
    let sampled = front.fake.held().sampled;
    for _ in 0..3 {
        assert_eq!(front.ask(2).await.status(), 503);
    }
    assert_eq!(front.fake.held().sampled, sampled);
    assert_eq!(front.pool.serves(ENGINE), None);
    front.update(&first).await.unwrap();
    assert_eq!(front.ask(2).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_names_the_version_takes_an_empty_patch_and_a_probe() {
    let mut front = Front::new(InFlight::Drain).await;
    let first = version(1);
    front.update(&first).await.unwrap();
    assert_eq!(front.fake.updates(), ["all"]);
    // another follower, as after kill -9
    let mut again = Front::of(front.fake.clone(), InFlight::Drain).await;
    assert_eq!(again.ask(2).await.status(), 503);
    again.update(&first).await.unwrap();
    assert_eq!(again.fake.updates(), ["patch"]);
    assert_eq!(again.ask(2).await.status(), 200);
    // the name is right and the weights are not: an update was broken off
    let name = front.fake.held().name.clone();
    front.fake.restart();
    front.fake.held().name = name;
    let mut third = Front::of(front.fake.clone(), InFlight::Drain).await;
    third.update(&first).await.unwrap();
    assert_eq!(third.fake.updates(), ["all"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_passed_on_at_once_and_a_caller_who_leaves_ends_the_request() {
    let mut front = Front::new(InFlight::Drain).await;
    front.update(&version(1)).await.unwrap();
    front.fake.set(Faults {
        waits_after: Some(2),
        ..Faults::default()
    });
    let mut answer = front.ask(40).await;
    let mut received = 0;
    while received < 2 {
        received += tokens(&answer.chunk().await.unwrap().unwrap());
    }
    assert_eq!((front.fake.held().running, front.pool.in_flight(ENGINE)), (1, 1));
    drop(answer);
    until(|| front.fake.held().running == 0 && front.pool.in_flight(ENGINE) == 0).await;
    // and it is no failure of the engine
    assert_eq!(front.pool.serves(ENGINE), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn by_default_an_update_waits_for_answers_and_refuses_new_requests() {
    let mut front = Front::new(InFlight::Drain).await;
    front.update(&version(1)).await.unwrap();
    front.fake.set(Faults {
        waits_after: Some(2),
        ..Faults::default()
    });
    let answer = front.ask(4).await;
    let updating = front.update_beside(2);
    until(|| front.pool.serves(ENGINE).is_none()).await;
    assert_eq!(front.ask(1).await.status(), 503);
    assert_eq!(front.fake.updates(), ["all"]);
    front.fake.set(Faults::default());
    let text = answer.bytes().await.unwrap();
    assert_eq!(tokens(&text), 4);
    assert!(String::from_utf8_lossy(&text).contains("springtide-1-"));
    updating.await.unwrap().1.unwrap();
    assert_eq!(front.fake.updates(), ["patch"]);
    assert_eq!(front.ask(1).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_expects_other_weights_is_turned_away_before_the_engine() {
    for in_flight in [InFlight::Drain, InFlight::Cross] {
        let mut front = Front::new(in_flight).await;
        let url = format!("http://{}/inference/v1/generate", front.address);
        let ask = async |expected: &str| {
            let body = json!({"token_ids": [1], "sampling_params": {"max_tokens": 2, "temperature": 1.0}});
            let request = reqwest::Client::new().post(&url).header(EXPECT_WEIGHTS, expected);
            request.json(&body).send().await.unwrap().status().as_u16()
        };
        front.update(&version(1)).await.unwrap();
        let first = front.fake.held().name.clone();
        assert_eq!(ask(&first).await, 200);
        front.update(&version(2)).await.unwrap();
        let second = front.fake.held().name.clone();
        let sampled = front.fake.held().sampled;
        assert_eq!((ask(&first).await, ask("").await), (409, 409));
        assert_eq!(front.fake.held().sampled, sampled);
        // it is no fault of the engine
        assert_eq!(front.pool.serves(ENGINE), Some(2));
        assert_eq!(front.pool.in_flight(ENGINE), 0);
        assert_eq!(ask(&second).await, 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn crossing_requests_are_kept_and_new_ones_wait_for_the_probe() {
    let mut front = Front::new(InFlight::Cross).await;
    front.update(&version(1)).await.unwrap();
    front.fake.set(Faults {
        waits_after: Some(2),
        ..Faults::default()
    });
    let answer = front.ask(4).await;
    // its probe stalls, too
    let updating = front.update_beside(2);
    until(|| front.pool.serves(ENGINE).is_none()).await;
    let waiting = tokio::spawn({
        let url = format!("http://{}/v1/models", front.address);
        async move { reqwest::get(url).await.unwrap().status() }
    });
    until(|| front.fake.held().running > 1).await;
    assert!(!waiting.is_finished());
    front.fake.set(Faults::default());
    updating.await.unwrap().1.unwrap();
    assert_eq!(waiting.await.unwrap(), 200);
    assert_eq!(tokens(&answer.bytes().await.unwrap()), 4);
    // all weights first, which nothing may cross
    let pauses = front.fake.held().pauses.clone();
    assert_eq!(pauses, ["mode=abort&clear_cache=true", "mode=keep&clear_cache=true"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_across_an_update_that_fails_its_probe_is_cut() {
    let mut front = Front::new(InFlight::Cross).await;
    front.update(&version(1)).await.unwrap();
    front.fake.set(Faults {
        waits_after: Some(2),
        ignores_patches: true,
        ignores_all: true,
        ..Faults::default()
    });
    let mut answer = front.ask(40).await;
    let mut received = 0;
    while received < 2 {
        received += tokens(&answer.chunk().await.unwrap().unwrap());
    }
    // the probes' answers stall too, so the update goes on only after this
    let updating = front.update_beside(2);
    until(|| front.fake.held().running > 1).await;
    front.fake.set(Faults {
        ignores_patches: true,
        ignores_all: true,
        ..Faults::default()
    });
    let (_, updated) = updating.await.unwrap();
    assert!(updated.is_err());
    assert_eq!(front.pool.serves(ENGINE), None);
    let mut rest = 0;
    let cut = loop {
        match answer.chunk().await {
            Ok(Some(piece)) => rest += tokens(&piece),
            Ok(None) => break false,
            Err(_) => break true,
        }
    };
    // what was sampled after the pause never arrives
    assert!(cut && rest == 0, "{rest}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_too_large_is_refused_and_not_the_engines_fault() {
    let mut front = Front::new(InFlight::Drain).await;
    front.update(&version(1)).await.unwrap();
    let url = format!("http://{}/inference/v1/generate", front.address);
    let client = reqwest::Client::new();
    let sampled = front.fake.held().sampled;
    let body = vec![b' '; LIMIT as usize + 1];
    let declared = client.post(&url).body(body.clone()).send().await.unwrap();
    assert_eq!(declared.status(), 413);
    let pieces = body.chunks(1000).map(|piece| Ok::<_, io::Error>(piece.to_vec()));
    let pieces = || reqwest::Body::wrap_stream(futures::stream::iter(pieces.clone().collect::<Vec<_>>()));
    let undeclared = client.post(&url).header("content-type", "application/json");
    let undeclared = undeclared.body(pieces()).send().await;
    // or the connection breaks, because the body is not read to its end
    assert!(undeclared.is_err() || undeclared.is_ok_and(|answer| answer.status() == 413));
    // the engine reads no such body: it answers at once, and closes
    let unread = client.post(&url).body(pieces()).send().await;
    assert!(unread.is_err() || unread.is_ok_and(|answer| [413, 415, 503].contains(&answer.status().as_u16())));
    assert_eq!(front.fake.held().sampled, sampled);
    assert_eq!(front.pool.serves(ENGINE), Some(1));
    assert_eq!(front.ask(1).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_engine_that_answers_late_stays_in_traffic() {
    let mut front = Front::new(InFlight::Drain).await;
    front.update(&version(1)).await.unwrap();
    front.fake.set(Faults {
        silent: true,
        ..Faults::default()
    });
    let refused = front.ask(1).await;
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["retry-after"]),
        (503, &"1".parse().unwrap())
    );
    assert_eq!((front.pool.serves(ENGINE), front.pool.in_flight(ENGINE)), (Some(1), 0));
    front.fake.set(Faults::default());
    // without another probe
    while front.ask(1).await.status() != 200 {}
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_takes_no_connections_is_out_of_traffic() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("engine.sock");
    let mut front = Front::of(Fake::start_on_socket(&socket), InFlight::Drain).await;
    front.update(&version(1)).await.unwrap();
    std::fs::remove_file(&socket).unwrap();
    assert_eq!(front.ask(1).await.status(), 503);
    assert_eq!(front.pool.serves(ENGINE), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn more_requests_than_allowed_get_503_and_the_engine_stays_in_traffic() {
    let mut front = Front::new(InFlight::Drain).await;
    front.update(&version(1)).await.unwrap();
    front.fake.set(Faults {
        waits_after: Some(1),
        ..Faults::default()
    });
    let mut running = Vec::new();
    for _ in 0..REQUESTS_MAX {
        running.push(front.ask(2).await);
    }
    let refused = front.ask(2).await;
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["retry-after"]),
        (503, &"1".parse().unwrap())
    );
    assert_eq!(front.fake.held().running, REQUESTS_MAX);
    // it can still be asked what it holds
    let url = format!("http://{}/weight_info", front.address);
    assert_eq!(reqwest::get(url).await.unwrap().status(), 200);
    assert_eq!(front.pool.serves(ENGINE), Some(1));
    // one that leaves makes room, and so does one that ends
    drop(running.pop());
    until(|| front.pool.in_flight(ENGINE) < REQUESTS_MAX).await;
    running.push(front.ask(2).await);
    assert_eq!(running[REQUESTS_MAX - 1].status(), 200);
    front.fake.set(Faults::default());
    for answer in running {
        assert_eq!(tokens(&answer.bytes().await.unwrap()), 2);
    }
    until(|| front.pool.in_flight(ENGINE) == 0).await;
    assert_eq!(front.ask(1).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_on_a_socket_has_no_port() {
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::start_on_socket(&folder.path().join("engine.sock"));
    let mut front = Front::of(fake, InFlight::Drain).await;
    front.update(&version(1)).await.unwrap();
    front.update(&version(2)).await.unwrap();
    let answer = front.ask(3).await;
    assert_eq!(tokens(&answer.bytes().await.unwrap()), 3);
    assert_eq!(front.fake.updates(), ["all", "patch"]);
}
