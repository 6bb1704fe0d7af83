//! Random requests of two tenants to every route of every role, with the ids of each other's objects.
//! Everything that a tenant logs, trains, releases or reports holds a text of its own, the canary. No
//! answer to the other tenant may contain it, and no request of it may succeed at the other's policy.
//!
//! A plain test run sends a few thousand requests, `make fuzz NAME=tenants N=100000 SEED=1` as many as
//! asked for. The seed decides the requests, but not in which order answers come.

mod world;

use std::collections::BTreeMap;
use std::time::Instant;

use edge::auth::Scope;
use futures::{StreamExt, stream};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use reqwest::{Client, Method};
use serde_json::{Value, json};
use uuid::Uuid;

use fixture::Stack;
use fixture::ingest::{count, generation};
use world::{CALLER_KEY, SOON, Side, Target, World};

const REQUESTS: usize = 3_000;
const AT_ONCE: usize = 12;

fn number(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// What a request is made from: the objects of both tenants, and what anybody may know.
struct Pool<'a> {
    sides: &'a [Side],
}

impl Pool<'_> {
    fn id(&self, random: &mut StdRng) -> String {
        match random.random_ratio(1, 8) {
            true => Uuid::now_v7().to_string(),
            false => {
                let side = self.sides.choose(random).unwrap();
                side.ids.choose(random).unwrap().clone()
            }
        }
    }

    fn word(&self, random: &mut StdRng) -> String {
        let side = self.sides.choose(random).unwrap();
        let words = [
            side.tenant,
            side.policy,
            "production",
            "rollout",
            "queued",
            "failed",
            "grpo",
            "old",
            "champion",
            "1",
            "200",
            "2020-01-01T00:00:00Z",
            "true",
            "%",
            "' or true --",
        ];
        match random.random_ratio(1, 3) {
            true => self.id(random),
            false => (*words.choose(random).unwrap()).to_owned(),
        }
    }

    fn query(&self, path: &str, random: &mut StdRng) -> Vec<(&'static str, String)> {
        let names: &[&str] = match path {
            "/v1/ledger" => &["tenant", "policy", "purpose", "since"],
            "/v1/runs" => &["limit", "after", "status", "kind"],
            "/v1/versions" => &["line", "limit", "after"],
            "/v1/datasets" => &["name", "limit", "after"],
            "/v1/releases" => &["alias", "limit"],
            "/v1/swaps" => &["replica", "limit"],
            "/v1/tide" => &["hours"],
            "/v1/ledger/cost" => &["days", "run"],
            "/v1/store" => {
                let side = self.sides.choose(random).unwrap();
                let below = ["", "object/", "version/", "private/"].choose(random).unwrap();
                return vec![("prefix", format!("policy/{}/{below}", side.policy))];
            }
            path if path.starts_with("/v1/runs/") => &["limit", "after"],
            _ if random.random_ratio(1, 4) => return vec![("dryrun", "true".to_owned())],
            _ => return Vec::new(),
        };
        let count = random.random_range(0..=2);
        (0..count)
            .map(|_| (*names.choose(random).unwrap(), self.word(random)))
            .collect()
    }

    /// A body that the route may accept, about objects of either tenant.
    fn body(&self, path: &str, random: &mut StdRng) -> Value {
        let id = self.id(random);
        let policy = self.sides.choose(random).unwrap().policy;
        let feedback = json!({"generation_id": id, "metric_name": "accept", "value": true});
        let mut logged = generation();
        if random.random() {
            logged.id = id.parse().unwrap_or(logged.id);
        }
        if let Ok(id) = self.id(random).parse() {
            (logged.parent_id, logged.episode_id) = (Some(id), id);
        }
        match path {
            "/v1/completions" | "/v1/chat/completions" => {
                let mut body = json!({
                    "model": format!("{policy}{}", ["", "@champion", "@old", "@1", "@1002"].choose(random).unwrap()),
                    "max_tokens": 2, "user": self.word(random), "session_id": id, "return_token_ids": true,
                    "logprobs": 1, "stream": random.random::<bool>(),
                    "metadata": {"purpose": "rollout", "run_id": self.id(random), "task_id": self.word(random)},
                });
                match path {
                    "/v1/completions" => body["prompt"] = json!([5, 6, 7]),
                    _ => body["messages"] = json!([{"role": "user", "content": "hello"}]),
                }
                body
            }
            "/v1/feedback" => match random.random_ratio(1, 4) {
                true => json!({"episode_id": id, "metric_name": "accept", "value": true, "id": self.id(random)}),
                false => feedback,
            },
            "/v1/generations" => serde_json::to_value(&logged).unwrap(),
            "/v1/events" => json!({
                "specversion": "1.0", "source": "app", "id": id, "time": "2026-11-21T10:00:00Z",
                "type": "springtide.feedback.v1",
                "data": {"feedback_id": self.id(random), "generation_id": id, "metric_name": "accept", "value": true},
            }),
            "/v1/events:batch" => json!([
                {"source": "app", "id": id, "time": "2026-11-21T10:00:00Z", "generation": logged},
                {"source": "app", "id": self.id(random), "time": "2026-11-21T10:00:00Z",
                 "retraction": {"retraction_id": Uuid::now_v7(), "feedback_id": id}},
            ]),
            "/v1/retractions" => json!({"feedback_id": id}),
            "/v1/episode-ends" => json!({"episode_id": id}),
            "/v1/runs" => json!({"kind": "grpo", "policy": policy, "base_version": 1001,
                                 "tasks": [{"prompt": "a", "answer": "b"}]}),
            "/v1/datasets" => json!({"name": policy, "query": {"tenants": [self.word(random)]}}),
            "/v1/releases" => {
                let kind = *["promote", "pin", "rollback"].choose(random).unwrap();
                let alias = *["champion", "old"].choose(random).unwrap();
                let version = *[1, 1001, 1002, 1003].choose(random).unwrap();
                json!({"kind": kind, "alias": alias, "version": version, "reason": "x"})
            }
            "/v1/replicas/{id}" => json!({"cluster": "c", "policy": policy, "address": "http://thief", "epoch": 1,
                                          "resident": [], "ready": true}),
            "/v1/swaps" => json!({"replica": id, "policy": policy, "version": 1, "epoch": 1, "fetch_ms": 1.0,
                                  "verify_ms": 1.0, "stage_ms": 1.0, "pause_ms": 1.0}),
            "/v1/tide/{id}" => json!({"policy": policy, "process": Uuid::now_v7(), "history_days": 1, "minutes": [],
                                      "uses": [{"engine": 0, "day": "2026-11-21", "work": "rollout", "run": null,
                                                "sampled": 1, "read": 1, "read_again": 0, "thrown_away": 0,
                                                "slot_seconds": 1.0, "engine_seconds": 1.0}]}),
            _ => json!({}),
        }
    }

    /// Replaces or removes a member, or adds one.
    fn spoil(&self, body: &mut Value, random: &mut StdRng) {
        let Some(members) = body.as_object_mut() else { return };
        let names: Vec<String> = members.keys().cloned().collect();
        let name = names.choose(random).cloned().unwrap_or_else(|| self.word(random));
        match random.random_range(0..4) {
            0 => drop(members.remove(&name)),
            1 => drop(members.insert(name, json!(self.word(random)))),
            2 => drop(members.insert(name, json!([null, random.random::<i64>()]))),
            _ => drop(members.insert(self.word(random), json!({"id": self.id(random)}))),
        }
    }
}

/// One request, and who sends it.
struct Shot {
    role: &'static str,
    method: Method,
    path: String,
    url: String,
    query: Vec<(&'static str, String)>,
    body: Option<(&'static str, Vec<u8>)>,
    idempotency_key: bool,
    key: Option<String>,
    /// Whose key: index of the side. `None`: no key, or an unknown one.
    sender: Option<usize>,
    owner: Option<&'static str>,
    open: bool,
}

impl Shot {
    fn random(targets: &[Target], sides: &[Side], random: &mut StdRng) -> Self {
        let target = targets.choose(random).unwrap();
        let route = target.routes.choose(random).unwrap();
        let pool = Pool { sides };
        let sender = random.random_range(0..sides.len());
        let side = &sides[sender];
        let (mut key, mut known) = (Some(side.keys.choose(random).unwrap().clone()), true);
        match random.random_range(0..10) {
            0 => (key, known) = (None, false),
            1 => {}
            _ if matches!(target.role, "relay" | "collector") && sender == 0 => key = Some(CALLER_KEY.to_owned()),
            2..=5 => key = side.keys.last().cloned(),
            _ => key = Some(side.key_with(route.scope.unwrap_or(Scope::Read)).to_owned()),
        }
        let payload = random.random::<[u8; 16]>().to_vec();
        let digest = match random.random() {
            true => blake3::hash(&payload).to_hex().to_string(),
            false => pool.id(random),
        };
        let mut path = route.path.clone();
        for (part, value) in [
            ("{id}", pool.id(random)),
            ("{serial}", random.random_range(1000..1004).to_string()),
            ("{name}", side.policy.to_owned()),
            ("{version}", random.random_range(0..3).to_string()),
            ("{digest}", digest),
            (
                "{key}",
                format!(
                    "policy/{}/{}",
                    side.policy,
                    pool.word(random).replace(['%', '\'', ' '], "x")
                ),
            ),
        ] {
            path = path.replace(part, &value);
        }
        let body = (route.method != Method::GET).then(|| match &*route.path {
            "/v1/payloads/{digest}" => ("application/octet-stream", payload),
            route => {
                let mut body = pool.body(route, random);
                if random.random_ratio(1, 5) {
                    pool.spoil(&mut body, random);
                }
                let content_type = match route {
                    "/v1/events" => "application/cloudevents+json",
                    _ => "application/json",
                };
                (content_type, body.to_string().into_bytes())
            }
        });
        Shot {
            role: target.role,
            url: format!("{}{path}", target.base),
            query: pool.query(&route.path, random),
            idempotency_key: random.random_ratio(1, 4),
            method: route.method.clone(),
            path: route.path.clone(),
            sender: known.then_some(sender),
            owner: target.owner,
            open: route.scope.is_none(),
            body,
            key,
        }
    }

    /// Sends it. Returns the status, and the whole answer with its headers.
    async fn fire(&self, client: &Client) -> (u16, Vec<u8>) {
        let mut request = client.request(self.method.clone(), &self.url).query(&self.query);
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        if self.idempotency_key {
            // What the other tenant has used, too.
            request = request.header("idempotency-key", "order of alpha");
        }
        if let Some((content_type, body)) = &self.body {
            request = request.header("content-type", *content_type).body(body.clone());
        }
        let answer = request
            .send()
            .await
            .unwrap_or_else(|error| panic!("{} {}: {error}", self.method, self.url));
        let status = answer.status().as_u16();
        let mut seen = format!("{:?}", answer.headers()).into_bytes();
        seen.extend(answer.bytes().await.unwrap());
        (status, seen)
    }

    /// Whether a key of another tenant did what only the owner of the policy may.
    fn trespasses(&self, sides: &[Side], status: u16) -> bool {
        let free = self.open || self.path == "/v1/ledger" || self.path.ends_with("/origin");
        let sender = self.sender.map(|sender| sides[sender].tenant);
        self.owner.is_some() && !free && sender != self.owner && (200..300).contains(&status)
    }
}

fn contains(answer: &[u8], canary: &str) -> bool {
    answer.windows(canary.len()).any(|window| window == canary.as_bytes())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_answer_to_one_tenant_holds_what_only_the_other_may_see() {
    let (requests, seed) = (
        number("SPRINGTIDE_FUZZ_REQUESTS", REQUESTS),
        number("SPRINGTIDE_FUZZ_SEED", 1),
    );
    let stack = Stack::start("fuzz_tenants").await;
    let world = World::start(&stack).await;
    world.see_own_canaries().await;
    let (targets, sides) = (&world.targets, &world.sides);
    let mut random = StdRng::seed_from_u64(seed as u64);
    let client = Client::builder().timeout(SOON).build().unwrap();
    let started = Instant::now();
    let shots = std::iter::repeat_with(|| Shot::random(targets, sides, &mut random)).take(requests);
    let answers = stream::iter(shots).map(|shot| {
        let client = client.clone();
        async move {
            let (status, answer) = shot.fire(&client).await;
            (shot, status, answer)
        }
    });
    let mut answers = answers.buffer_unordered(AT_ONCE);
    let (mut faults, mut statuses) = (Vec::new(), BTreeMap::<(&str, u16), usize>::new());
    let mut own = 0;
    // (role, route) → requests that succeeded
    let mut succeeded = BTreeMap::<(&str, String), usize>::new();
    while let Some((shot, status, answer)) = answers.next().await {
        *statuses.entry((shot.role, status)).or_default() += 1;
        let route = (shot.role, format!("{} {}", shot.method, shot.path));
        *succeeded.entry(route).or_default() += usize::from((200..300).contains(&status));
        for (at, side) in sides.iter().enumerate() {
            if !contains(&answer, &side.canary) {
                continue;
            }
            if shot.sender == Some(at) {
                own += 1;
            } else {
                let sender = shot.sender.map(|sender| sides[sender].tenant);
                faults.push(format!(
                    "{} {} to {sender:?}: a text of {}",
                    shot.method, shot.url, side.tenant
                ));
            }
        }
        if status == 500 {
            faults.push(format!("{} {}: 500", shot.method, shot.url));
        }
        if shot.trespasses(sides, status) {
            faults.push(format!("{} {} of another tenant: {status}", shot.method, shot.url));
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{requests} requests in {seconds:.1} s, seed {seed}: {} faults, {own} answers with the caller's own texts; \
         {statuses:?}",
        faults.len()
    );
    let never: Vec<_> = succeeded
        .iter()
        .filter(|(_, count)| **count == 0)
        .map(|(route, _)| route)
        .collect();
    println!("routes that answered nobody with success: {never:?}");
    faults.truncate(20);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    // about 1 in 100 do, so that finding none of another's says something
    assert!(
        own > requests / 300,
        "{own} answers of {requests} held what the fuzz looks for"
    );
    for (role, status) in [("serve", 200), ("ingest", 200), ("control", 200), ("control", 403)] {
        assert!(
            statuses.contains_key(&(role, status)),
            "{role} never answered {status}: {statuses:?}"
        );
    }
    // Nobody changed anything of the other's policy.
    for (what, query) in [
        (
            "releases",
            "select count(*) from audit a join policy p on starts_with(a.subject, p.name || '@')
             where a.action like 'release.%' and a.tenant <> p.tenant_id",
        ),
        (
            "runs",
            "select count(*) from audit a join run r on r.id::text = a.subject join policy p on p.name = r.policy
             where a.action like 'run.%' and a.tenant <> p.tenant_id",
        ),
        (
            "replicas",
            "select count(*) from replica r join api_key k on coalesce(k.lineage, k.id) = r.owner
             join policy p on p.name = r.policy where k.tenant_id <> p.tenant_id",
        ),
    ] {
        assert_eq!(count(&stack.pool, query).await, 0, "{what}");
    }
    world.ingest.stop().await;
}
