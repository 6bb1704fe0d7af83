//! What one caller's flood takes from others: nothing. Each test counts the answers of a caller that
//! floods a running role, and of an honest one beside it. Over 500 lines, because every kind of flood
//! is here.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use axum::Router;
use edge::audit::Actor;
use edge::auth::key::{self, Created, Grant, NewKey};
use edge::auth::{Auth, AuthOptions, LimitOptions, Scope, Scopes};
use futures::future::join_all;
use reqwest::{Client, RequestBuilder};
use serde_json::{Value, json};
use serving::ServeOptions;
use serving::serve::Replica;
use sqlx::Executor;
use store::Store;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::{CancellationToken, DropGuard};
use uuid::Uuid;

use fixture::control::Control;
use fixture::ingest::{Service, options};
use fixture::serving::{Publisher, releases, replica};
use fixture::{Stack, eventually, succeed};

const SOON: Duration = Duration::from_secs(90);
const TEST: Actor<'_> = Actor {
    key: None,
    name: "tests/quotas",
};

fn required(limits: LimitOptions) -> AuthOptions {
    AuthOptions {
        required: true,
        limits,
        oidc: None,
    }
}

async fn make(stack: &Stack, tenant: &str, scopes: &[Scope], requests_per_second: u32) -> Created {
    let key = NewKey {
        tenant,
        grant: Grant::Scopes(Scopes::of(scopes)),
        label: "a test",
        expires_at: None,
        replica: None,
        requests_per_second: NonZeroU32::new(requests_per_second),
    };
    key::create(&stack.pool, &key, TEST, "").await.unwrap()
}

/// An answer: its status, and of a 429 which limit it names.
type Answer = (u16, Option<String>);

async fn send(request: RequestBuilder) -> Answer {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let header = |name| {
        response
            .headers()
            .get(name)
            .map(|value| value.to_str().unwrap().to_owned())
    };
    let (retry_after, content_type) = (header("retry-after"), header("content-type"));
    let body: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap_or_default();
    if status != 429 {
        return (status, None);
    }
    assert!(retry_after.unwrap().parse::<u32>().unwrap() > 0);
    assert_eq!(content_type.as_deref(), Some("application/problem+json"));
    assert_eq!(body["type"], "/problems/too-many-requests");
    (status, body["limit"].as_str().map(str::to_owned))
}

fn count(answers: impl IntoIterator<Item = Answer>) -> BTreeMap<Answer, usize> {
    let mut counts = BTreeMap::new();
    for answer in answers {
        *counts.entry(answer).or_default() += 1;
    }
    counts
}

fn limited(limit: &str) -> Answer {
    (429, Some(limit.to_owned()))
}

fn feedback(client: &Client, service: &Service, key: &str) -> RequestBuilder {
    let body = json!({"id": Uuid::now_v7(), "generation_id": Uuid::now_v7(), "metric_name": "accept", "value": true});
    let url = format!("http://{}/v1/feedback", service.address);
    client.post(url).bearer_auth(key).json(&body)
}

/// Waits until key and log are known, which may take seconds where everything has just started.
async fn works(client: &Client, service: &Service, key: &str) {
    eventually("an event is accepted", SOON, async || {
        (send(feedback(client, service, key)).await == (200, None)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_beyond_its_rate_gets_429_and_other_keys_get_answers_on_every_role() {
    const FLOOD: usize = 200;
    let stack = Stack::start("rates").await;
    let ingest = Service::start_behind(&stack, options(), required(LimitOptions::default())).await;
    let variables = [
        ("SPRINGTIDE__AUTH__REQUIRED", "true"),
        ("SPRINGTIDE__SERVE__API_KEY", "unused"),
        ("SPRINGTIDE__TRAINER__API_KEY", "unused"),
    ];
    let process = Control::start(&stack, &variables).await;
    let control = format!("http://127.0.0.1:{}", process.port);
    let (serve, _serve) = serve(&stack, ServeOptions::default()).await;
    let scopes = [Scope::Feedback, Scope::Completions, Scope::Read];
    let flooding = make(&stack, "default", &scopes, 1).await;
    let honest = make(&stack, "default", &scopes, 0).await.secret;
    let client = Client::new();
    works(&client, &ingest, &honest).await;
    let unknown = format!("{control}/v1/generations/{}/origin", Uuid::now_v7());
    let models = format!("{serve}/v1/models");
    for (role, expected) in [("ingest", 200), ("control", 404), ("serve", 200)] {
        let request = |key: &str| match role {
            "ingest" => feedback(&client, &ingest, key),
            "control" => client.get(&unknown).bearer_auth(key),
            _ => client.get(&models).bearer_auth(key),
        };
        let flood = join_all((0..FLOOD).map(|_| send(request(&flooding.secret))));
        let honestly = async {
            let mut answers = Vec::new();
            for _ in 0..50 {
                answers.push(send(request(&honest)).await);
            }
            answers
        };
        let (flood, honestly) = tokio::join!(flood, honestly);
        assert_eq!(count(honestly), [((expected, None), 50)].into(), "{role}");
        let flood = count(flood);
        let (answered, refused) = (flood[&(expected, None)], flood[&limited("key_rate")]);
        assert_eq!(answered + refused, FLOOD, "{role}: {flood:?}");
        assert!(answered >= 5, "{role}: the burst: {flood:?}");
    }
    let metrics = client.get(format!("{control}/metrics")).send().await.unwrap();
    let metrics = metrics.text().await.unwrap();
    let counts =
        |line: &str| line.contains("springtide_requests_limited_total{") && line.contains(r#"limit="key_rate""#);
    assert!(metrics.lines().any(counts), "{metrics}");

    // a higher limit counts without a restart, and is in the list and the audit
    let raise = [
        "key",
        "limit",
        &flooding.id.to_string(),
        "--requests-per-second",
        "100000",
        "--reason",
        "grew",
    ];
    succeed(&mut stack.springtide(&raise));
    let listed: Value = serde_json::from_str(&succeed(&mut stack.springtide(&["key", "list", "--json"]))).unwrap();
    let listed = listed
        .as_array()
        .unwrap()
        .iter()
        .find(|key| key["id"] == json!(flooding.id));
    assert_eq!(listed.unwrap()["requests_per_second"], 100_000);
    let rows: Value = serde_json::from_str(&succeed(&mut stack.springtide(&["audit", "list", "--json"]))).unwrap();
    assert_eq!(
        (&rows[0]["action"], &rows[0]["reason"]),
        (&json!("key.limit"), &json!("grew"))
    );
    eventually("the limit is raised", SOON, async || {
        let answers = join_all((0..50).map(|_| send(feedback(&client, &ingest, &flooding.secret)))).await;
        (count(answers) == [((200, None), 50)].into()).then_some(())
    })
    .await;
    ingest.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_keys_of_one_tenant_share_its_rate_and_another_tenant_has_its_own() {
    let stack = Stack::start("tenant_rate").await;
    let limits = LimitOptions {
        tenant_requests_per_second: 10,
        ..LimitOptions::default()
    };
    let ingest = Service::start_behind(&stack, options(), required(limits)).await;
    let client = Client::new();
    let mut keys = Vec::new();
    for _ in 0..8 {
        keys.push(
            make(&stack, "crowd", &[Scope::Feedback, Scope::Generations], 0)
                .await
                .secret,
        );
    }
    let other = make(&stack, "other", &[Scope::Feedback, Scope::Generations], 0)
        .await
        .secret;
    works(&client, &ingest, &other).await;
    let flood = join_all(
        keys.iter()
            .cycle()
            .take(800)
            .map(|key| send(feedback(&client, &ingest, key))),
    );
    let honestly = async {
        let mut answers = Vec::new();
        for _ in 0..50 {
            answers.push(send(feedback(&client, &ingest, &other)).await);
        }
        answers
    };
    let (flood, honestly) = tokio::join!(flood, honestly);
    assert_eq!(count(honestly), [((200, None), 50)].into());
    let flood = count(flood);
    assert_eq!(flood[&(200, None)] + flood[&limited("tenant_rate")], 800, "{flood:?}");
    ingest.stop().await;
}

/// Slow bodies of one key would otherwise take all connections.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_with_many_open_requests_gets_429_until_one_ends() {
    const OPEN_MAX: u32 = 4;
    let stack = Stack::start("open_requests").await;
    let limits = LimitOptions {
        key_open_requests_max: OPEN_MAX,
        ..LimitOptions::default()
    };
    let patient = ingest::Options {
        request_read_seconds_max: 600.0,
        ..options()
    };
    let ingest = Service::start_behind(&stack, patient, required(limits)).await;
    let scopes = [Scope::Feedback, Scope::Generations];
    let slow = make(&stack, "default", &scopes, 0).await.secret;
    let honest = make(&stack, "default", &scopes, 0).await.secret;
    let client = Client::new();
    works(&client, &ingest, &slow).await;
    let mut bodies = Vec::new();
    for _ in 0..OPEN_MAX {
        let mut stream = TcpStream::connect(ingest.address).await.unwrap();
        let head = format!(
            "POST /v1/feedback HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {slow}\r\ncontent-type: application/json\r\n\
             content-length: 100\r\nexpect: 100-continue\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // said when the request has been admitted and its body is read
        let mut continued = [0; 12];
        stream.read_exact(&mut continued).await.unwrap();
        assert_eq!(&continued, b"HTTP/1.1 100");
        bodies.push(stream);
    }
    // answered without the log
    let invalid = || {
        let url = format!("http://{}/v1/feedback", ingest.address);
        send(client.post(url).bearer_auth(&slow).json(&json!({})))
    };
    for _ in 0..20 {
        assert_eq!(send(feedback(&client, &ingest, &honest)).await, (200, None));
        assert_eq!(invalid().await, limited("key_open_requests"));
    }
    bodies.pop();
    eventually("one has ended", SOON, async || {
        (invalid().await == (400, None)).then_some(())
    })
    .await;
    ingest.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_with_a_rate_refuses_what_exceeds_it() {
    let folder = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1/store?prefix=policy/demo", listener.local_addr().unwrap());
    let store = Store::open(&format!("file://{}", folder.path().join("store").display())).unwrap();
    let stop = CancellationToken::new();
    let _stop = stop.clone().drop_guard();
    let cache = folder.path().join("cache");
    tokio::spawn(async move {
        let options = serving::relay::Options {
            caller_key: Some("spring_caller".to_owned()),
            requests_per_second_max: 1,
            ..Default::default()
        };
        serving::relay::run(&options, &cache, store, listener.into(), Router::new(), stop).await
    });
    let client = Client::new();
    let ask = || send(client.get(&url).bearer_auth("spring_caller"));
    let answers = count(join_all((0..100).map(|_| ask())).await);
    assert_eq!(
        answers[&(200, None)] + answers[&limited("tenant_rate")],
        100,
        "{answers:?}"
    );
    assert!(answers[&(200, None)] >= 5, "{answers:?}");
}

/// A replica that needs keys.
async fn serve(stack: &Stack, options: ServeOptions) -> (String, DropGuard) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let replica = Replica {
        options: ServeOptions {
            state_dir: stack.dir.path().join("serve"),
            poll_interval_ms: 100,
            ..options
        },
        auth: Auth::new(required(LimitOptions::default()), stack.pool_of("serve")),
        ..replica(stack)
    };
    let stop = CancellationToken::new();
    tokio::spawn(replica.run(listener.into(), stop.clone()));
    (url, stop.drop_guard())
}

fn completion(client: &Client, url: &str, key: &str, choices: usize, priority: i32) -> RequestBuilder {
    let body = json!({"model": "demo@champion", "prompt": [5, 6, 7], "max_tokens": 40, "n": choices,
                      "priority": priority, "metadata": {"consent": false}});
    let url = format!("{url}/v1/completions");
    client.post(url).bearer_auth(key).json(&body)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_fills_the_queue_takes_no_place_from_another_key() {
    let stack = Stack::start("queue_shares").await;
    let mut publisher = Publisher::new(&stack);
    publisher.publish(1, None, 0).await;
    releases(&stack).round().await.unwrap();
    let options = ServeOptions {
        slots: 2,
        slots_reserved_for_production: 0,
        queue_choices_max: 8,
        choices_max: 4,
        ..ServeOptions::default()
    };
    let (url, _serve) = serve(&stack, options).await;
    let flooding = make(&stack, "default", &[Scope::Completions], 0).await.secret;
    let honest = make(&stack, "default", &[Scope::Completions], 0).await.secret;
    let of_another_tenant = make(&stack, "other", &[Scope::Completions], 0).await.secret;
    let first = make(&stack, "default", &[Scope::Completions, Scope::Priority], 0)
        .await
        .secret;
    let client = Client::new();
    eventually("the version serves", SOON, async || {
        (send(completion(&client, &url, &honest, 1, 0)).await.0 == 200).then_some(())
    })
    .await;

    // going first needs the scope
    assert_eq!(send(completion(&client, &url, &flooding, 1, -1)).await.0, 403);
    assert_eq!(send(completion(&client, &url, &flooding, 1, 5)).await.0, 200);
    assert_eq!(send(completion(&client, &url, &first, 1, -1)).await.0, 200);

    let stop = CancellationToken::new();
    let flood: Vec<_> = (0..16)
        .map(|index| {
            let (client, url, key, stop) = (client.clone(), url.clone(), flooding.clone(), stop.clone());
            tokio::spawn(async move {
                let mut answers = Vec::new();
                while !stop.is_cancelled() {
                    answers.push(send(completion(&client, &url, &key, 1 + index % 4, 0)).await.0);
                }
                answers
            })
        })
        .collect();
    for _ in 0..30 {
        for key in [&honest, &of_another_tenant] {
            assert_eq!(send(completion(&client, &url, key, 1, 0)).await, (200, None));
        }
    }
    stop.cancel();
    let mut statuses: BTreeMap<u16, usize> = BTreeMap::new();
    for answers in join_all(flood).await {
        for status in answers.unwrap() {
            *statuses.entry(status).or_default() += 1;
        }
    }
    assert!(
        statuses.keys().all(|status| [200, 429].contains(status)),
        "{statuses:?}"
    );
    assert!(statuses[&429] > 0, "there was no flood: {statuses:?}");
    assert!(statuses[&200] > 0, "it gets its share: {statuses:?}");
}

/// Starts a completion whose body has `bytes`, and does not send the body. Returns once the server
/// has answered: with `100 Continue`, or with its refusal.
async fn begin(url: &str, key: &str, bytes: usize) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(url.strip_prefix("http://").unwrap()).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n\
         content-length: {bytes}\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![0; 4096];
    let length = stream.read(&mut answer).await.unwrap();
    answer.truncate(length);
    (stream, String::from_utf8(answer).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_fills_the_memory_for_bodies_with_slow_ones_gets_429_and_other_keys_are_answered() {
    const MIB: usize = 1 << 20;
    let stack = Stack::start("body_bytes").await;
    let options = ServeOptions {
        in_flight_bytes_max: edge::routes::in_flight_bytes_min(),
        ..ServeOptions::default()
    };
    let (url, _serve) = serve(&stack, options).await;
    let slow = make(&stack, "default", &[Scope::Completions], 0).await.secret;
    let honest = make(&stack, "default", &[Scope::Completions], 0).await.secret;
    let client = Client::new();
    // no version is published
    let unready = (503, None);
    eventually("it answers", SOON, async || {
        (send(completion(&client, &url, &honest, 1, 0)).await == unready).then_some(())
    })
    .await;
    let (held, answer) = begin(&url, &slow, MIB + MIB / 2).await;
    assert!(answer.starts_with("HTTP/1.1 100"), "{answer}");
    // refused by its length alone
    let (mut refused, mut answer) = begin(&url, &slow, MIB).await;
    refused.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 429"), "{answer}");
    assert!(answer.contains("in_flight_bytes"), "{answer}");
    for _ in 0..20 {
        assert_eq!(send(completion(&client, &url, &honest, 1, 0)).await, unready);
    }
    drop(held);
    eventually("the bytes are free again", SOON, async || {
        let large = json!({"model": "demo@champion", "prompt": "x".repeat(MIB)});
        let request = client
            .post(format!("{url}/v1/completions"))
            .bearer_auth(&slow)
            .json(&large);
        let answer = request.send().await.ok()?;
        (answer.status() == 503).then_some(())
    })
    .await;
}

/// The number of a gauge at `/metrics`.
async fn gauge(control: &str, name: &str) -> f64 {
    let text = reqwest::get(format!("{control}/metrics"))
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")));
    line.unwrap().rsplit_once(' ').unwrap().1.parse().unwrap()
}

/// Postgres finishes a query whose caller has left, so leaving early gains nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_has_two_ledger_queries_at_a_time_also_if_it_leaves_and_others_wait_their_turn() {
    let stack = Stack::start("ledger_turns").await;
    let variables = [
        ("SPRINGTIDE__AUTH__REQUIRED", "true"),
        ("SPRINGTIDE__SERVE__API_KEY", "unused"),
        ("SPRINGTIDE__TRAINER__API_KEY", "unused"),
    ];
    let process = Control::start(&stack, &variables).await;
    let control = format!("http://127.0.0.1:{}", process.port);
    let flooding = make(&stack, "default", &[Scope::Read], 0).await.secret;
    let honest = make(&stack, "default", &[Scope::Read], 0).await.secret;
    let ledger = |key: &str| Client::new().get(format!("{control}/v1/ledger")).bearer_auth(key);
    assert_eq!(send(ledger(&flooding)).await, (200, None));

    let mut slow = edge::database::begin(&stack.pool).await.unwrap();
    slow.execute("lock table generation in access exclusive mode")
        .await
        .unwrap();
    let connections = async |expected: f64| {
        eventually("the connections of callers that left are closed", SOON, async || {
            (gauge(&control, "springtide_http_connections").await <= expected).then_some(())
        })
        .await;
    };
    // that of the question itself
    connections(1.0).await;
    let running: Vec<_> = (0..2).map(|_| tokio::spawn(send(ledger(&flooding)))).collect();
    eventually("two queries of the key run", SOON, async || {
        let waiting = "select count(*) from pg_stat_activity
                       where datname = current_database() and wait_event_type = 'Lock'";
        let waiting: i64 = sqlx::query_scalar(waiting).fetch_one(&stack.pool).await.unwrap();
        (waiting == 2).then_some(())
    })
    .await;
    assert_eq!(send(ledger(&flooding)).await, limited("costly_route"));
    let waiting = tokio::spawn(send(ledger(&honest)));
    for one in running {
        one.abort();
    }
    // the honest key's is left
    connections(2.0).await;
    for _ in 0..20 {
        let answer = tokio::time::timeout(SOON, send(ledger(&flooding))).await;
        assert_eq!(answer.unwrap(), limited("costly_route"));
    }
    assert!(!waiting.is_finished());
    slow.rollback().await.unwrap();
    assert_eq!(waiting.await.unwrap(), (200, None));
    eventually("the key has turns again", SOON, async || {
        (send(ledger(&flooding)).await == (200, None)).then_some(())
    })
    .await;
}
