//! A trainer outside: it leases cohorts over HTTP, makes weights of its own, and commits them. Over 500 lines, because every
//! test needs the same trainer.

use super::context::refer;
use super::experts::{logged, mixture};
use super::offline::{control, control_beside, create_as, ended, fleet, get, ingest, offline, post, request};
use super::uses::{dataset, insert};
use super::world::{Running, Sampled, World};
use artifact::checkpoint::Checkpoint;
use artifact::manifest::Parent;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use event_log::payload::EXPERTS;
use fixture::eventually;
use model::lora::{self, Adapter};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::RowAccessor;
use runs::door::TrainedBy;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const SOON: Duration = Duration::from_secs(60);

/// A lease, as its holder has it.
pub struct Leased {
    control: String,
    cohort: Value,
}

/// A world whose realtime run is trained outside.
pub struct Door {
    pub world: World,
    control: String,
    run: String,
    pub running: Running,
}

impl Door {
    /// With a full cohort, which is leased with this token.
    pub async fn leased(name: &str, token: &str) -> (Self, Leased) {
        let world = World::start(name).await;
        world.follow(1, world.base, 0).await;
        world.insert_all(&world.sample(world.base, 8).await, "champion").await;
        let control = control(&world).await;
        let running = world.run(outside(&world));
        let run = realtime_run(&control).await;
        let leased = lease(&control, &run, token, 20).await.unwrap();
        let door = Door {
            world,
            control,
            run,
            running,
        };
        (door, leased)
    }

    pub async fn lease(&self, token: &str) -> Leased {
        lease(&self.control, &self.run, token, 20).await.unwrap()
    }
}

/// The realtime run of a world, trained outside.
fn outside(world: &World) -> runs::Options {
    let mut options = world.options();
    options.realtime.trainer = TrainedBy::External;
    options
}

async fn realtime_run(control: &str) -> String {
    let run = eventually("there is a realtime run", SOON, async || {
        let runs = get(format!("{control}/v1/runs?kind=realtime")).await;
        let run = &runs["data"][0];
        (run["status"] == "running").then(|| run["id"].as_str().unwrap().to_owned())
    });
    run.await
}

/// Asks for a cohort. `None`: there is none now, or somebody else holds it.
async fn lease(control: &str, run: &str, token: &str, wait_seconds: u32) -> Option<Leased> {
    let url = format!("{control}/v1/runs/{run}/cohorts");
    let body = json!({"client_token": token, "wait_seconds": wait_seconds});
    let response = reqwest::Client::new().post(url).json(&body).send().await.unwrap();
    match response.status().as_u16() {
        204 => None,
        201 => Some(Leased {
            control: control.to_owned(),
            cohort: response.json().await.unwrap(),
        }),
        status => panic!("{status}: {}", response.text().await.unwrap()),
    }
}

fn digest(bytes: &[u8]) -> String {
    format!("sha-256=:{}:", BASE64.encode(Sha256::digest(bytes)))
}

/// A row of samples, as far as the tests look.
#[derive(Debug)]
struct Row {
    generation: Uuid,
    user: String,
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    advantage: f64,
    bundle: i64,
    experts: Option<Vec<u8>>,
}

impl Leased {
    fn url(&self, path: &str) -> String {
        format!(
            "{}/v1/cohorts/{}{path}",
            self.control,
            self.cohort["id"].as_str().unwrap()
        )
    }

    fn fence(&self) -> i64 {
        self.cohort["fence"].as_i64().unwrap()
    }

    async fn samples(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for part in 0.. {
            let response = reqwest::get(self.url(&format!("/samples/{part}?fence={}", self.fence())))
                .await
                .unwrap();
            if response.status() == 404 {
                break;
            }
            assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
            let said = response.headers()["content-digest"].to_str().unwrap().to_owned();
            let bytes = response.bytes().await.unwrap();
            assert_eq!(said, digest(&bytes));
            let reader = SerializedFileReader::new(bytes).unwrap();
            for row in reader.get_row_iter(None).unwrap() {
                let row = row.unwrap();
                let at = |name: &str| row.get_column_iter().position(|(column, _)| column == name).unwrap();
                let ids = |name: &str| -> Vec<u32> {
                    let list = row.get_list(at(name)).unwrap();
                    use parquet::record::ListAccessor;
                    (0..list.len())
                        .map(|n| list.get_int(n).unwrap().cast_unsigned())
                        .collect()
                };
                rows.push(Row {
                    generation: Uuid::from_slice(row.get_bytes(at("generation_id")).unwrap().data()).unwrap(),
                    user: row.get_string(at("user")).unwrap().clone(),
                    prompt: ids("prompt_ids"),
                    tokens: ids("token_ids"),
                    advantage: row.get_double(at("advantage")).unwrap(),
                    bundle: row.get_long(at("bundle")).unwrap(),
                    experts: row.get_bytes(at("experts")).ok().map(|bytes| bytes.data().to_vec()),
                });
            }
        }
        rows
    }

    /// The weights of two ranks: each has a half of the rows of every matrix.
    pub async fn upload(&self, weights: &Checkpoint) -> BTreeMap<String, usize> {
        let mut sizes = BTreeMap::new();
        for (rank, bytes) in shards(weights).into_iter().enumerate() {
            let name = format!("shard-{:05}-model-00001-of-00001.safetensors", rank + 1);
            self.put(&name, &bytes).await;
            sizes.insert(name, bytes.len());
        }
        sizes
    }

    async fn put(&self, name: &str, bytes: &Bytes) {
        let url = self.url(&format!("/files/{name}/0?fence={}", self.fence()));
        let request = reqwest::Client::new().put(url).header("content-digest", digest(bytes));
        let response = request.body(bytes.clone()).send().await.unwrap();
        assert_eq!(response.status(), 204, "{}", response.text().await.unwrap());
    }

    pub async fn commit(&self, token: &str, files: &BTreeMap<String, usize>, dropped: &Value) -> (u16, Value) {
        self.commit_of(token, files, dropped, None).await
    }

    async fn commit_of(
        &self,
        token: &str,
        files: &BTreeMap<String, usize>,
        dropped: &Value,
        adapter: Option<&Value>,
    ) -> (u16, Value) {
        let body = json!({
            "fence": self.fence(), "client_token": token, "parent_root": self.cohort["parent_root"], "files": files,
            "adapter": adapter, "dropped": dropped, "metrics": {"loss": 0.5, "own": 7.0}, "state": {"at": token},
        });
        post(self.url("/commit"), &body).await
    }

    /// Commits what PEFT would have saved.
    async fn commit_adapter(&self, token: &str, adapter: &Adapter) -> (u16, Value) {
        let folder = tempfile::tempdir().unwrap();
        adapter.write_dir(folder.path()).unwrap();
        let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
        let (file, bytes) = (
            "adapter_model.safetensors",
            Bytes::from(read("adapter_model.safetensors")),
        );
        self.put(file, &bytes).await;
        let config = serde_json::from_slice(&read("adapter_config.json")).unwrap();
        let files = BTreeMap::from([(file.to_owned(), bytes.len())]);
        self.commit_of(token, &files, &json!({}), Some(&config)).await
    }

    /// A commit is refused, and this is why.
    async fn refused(&self, token: &str, files: &BTreeMap<String, usize>, dropped: &Value, why: &str) {
        let (status, refused) = self.commit(token, files, dropped).await;
        assert_eq!(status, 422, "{refused}");
        assert!(refused["detail"].as_str().unwrap().contains(why), "{why}: {refused}");
    }
}

/// The tensors as torch's distributed checkpoint writes them on two ranks.
fn shards(weights: &Checkpoint) -> [Bytes; 2] {
    [0, 1].map(|rank| {
        let mut offsets = serde_json::Map::new();
        let mut views: Vec<(String, TensorView<'_>)> = Vec::new();
        for (name, tensor) in &weights.tensors {
            let rows = tensor.shape[0];
            let (from, to) = (rows * rank / 2, rows * (rank + 1) / 2);
            let row = tensor.bytes.len() / rows;
            let mut shape = tensor.shape.clone();
            shape[0] = to - from;
            let mut at = vec![0; shape.len()];
            at[0] = from;
            offsets.insert(name.clone(), json!({"saved_offsets": at}));
            let view = TensorView::new(tensor.dtype, shape, &tensor.bytes[from * row..to * row]).unwrap();
            views.push((name.clone(), view));
        }
        let metadata = HashMap::from([("DCP_SHARDING_INFO".to_owned(), Value::from(offsets).to_string())]);
        safetensors::serialize(views, Some(metadata)).unwrap().into()
    })
}

/// Weights that differ from these in the last bit of some bf16 or f32 values.
pub fn trained(parent: &Checkpoint) -> Checkpoint {
    let mut weights = parent.clone();
    for tensor in weights.tensors.values_mut() {
        let mut bytes = tensor.bytes.to_vec();
        bytes.iter_mut().step_by(16).for_each(|byte| *byte ^= 1);
        tensor.bytes = Bytes::from(bytes).into();
    }
    weights
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cohort_is_leased_trained_outside_and_committed_once() {
    let world = World::start("door").await;
    world.follow(1, world.base, 0).await;
    let cohort = world.sample(world.base, 8).await;
    world.insert_all(&cohort, "champion").await;
    let control = control(&world).await;
    let running = world.run(outside(&world));
    let run = realtime_run(&control).await;
    let leased = lease(&control, &run, "a", 20).await.unwrap();
    let again = lease(&control, &run, "a", 0).await.unwrap();
    assert_eq!(
        (&again.cohort["id"], again.fence()),
        (&leased.cohort["id"], leased.fence()),
        "the same token, the same lease"
    );
    assert!(lease(&control, &run, "b", 0).await.is_none(), "one trainer at a time");
    assert_eq!(
        (
            &leased.cohort["step"],
            &leased.cohort["parent"],
            &leased.cohort["parent_root"]
        ),
        (&json!(1), &json!(world.base), &json!(world.root(world.base).await))
    );

    let rows = leased.samples().await;
    assert_eq!(rows.len(), 8);
    for row in &rows {
        let logged: &Sampled = cohort.iter().find(|one| one.id == row.generation).unwrap();
        assert_eq!((&row.prompt, &row.tokens), (&logged.prompt, &logged.tokens));
        assert_eq!(Some(row.advantage), logged.reward, "no baseline: the reward itself");
        assert!(row.user.len() == 16 && row.user != logged.user, "a pseudonym");
    }
    let bundles: std::collections::BTreeSet<i64> = rows.iter().map(|row| row.bundle).collect();
    assert_eq!(bundles.len(), 8);

    let weights = trained(&*world.materialize(world.base).await);
    let files = leased.upload(&weights).await;
    let left_out = json!({rows[0].generation.to_string(): "too_long"});
    let (status, committed) = leased.commit("commit-1", &files, &left_out).await;
    assert_eq!(status, 200, "{committed}");
    let version = committed["version"].as_i64().unwrap();
    assert_eq!(
        (world.line().await.0, committed["root"].as_str().unwrap()),
        (version, &*world.root(version).await)
    );
    assert_eq!(*world.materialize(version).await, weights, "bit for bit");
    let (status, repeated) = leased.commit("commit-1", &files, &left_out).await;
    assert_eq!(
        (status, &repeated["version"]),
        (200, &json!(version)),
        "the same answer"
    );
    let (status, other) = leased.commit("commit-2", &files, &left_out).await;
    assert_eq!(status, 409, "{other}");

    let mut kinds = BTreeMap::new();
    for one in world.dispositions().await {
        assert!(one.kind != "trained" || one.step == Some(1));
        *kinds.entry(one.code.unwrap_or(one.kind)).or_insert(0) += 1;
    }
    assert_eq!(kinds, BTreeMap::from([("too_long".into(), 1), ("trained".into(), 7)]));
    let metrics = world.metrics(1).await;
    assert_eq!(
        (
            &metrics["loss"],
            &metrics["outside"]["metrics"]["own"],
            &metrics["trajectories"]
        ),
        (&json!(0.5), &json!(7.0), &json!(8))
    );
    assert!(metrics["kl"].as_f64().unwrap() > 0.0 && metrics["changed_weights"].as_u64().unwrap() > 0);

    // the next cohort is sampled by the version, and knows what its trainer has said
    world.insert_all(&world.sample(version, 8).await, "champion").await;
    let next = lease(&control, &run, "b", 20).await.unwrap();
    assert_eq!(
        (
            &next.cohort["step"],
            &next.cohort["parent"],
            &next.cohort["trainer_state"]
        ),
        (&json!(2), &json!(version), &json!({"at": "commit-1"}))
    );
    let parts: i64 = sqlx::query_scalar("select count(*) from cohort_part where cohort_id = $1")
        .bind(Uuid::parse_str(leased.cohort["id"].as_str().unwrap()).unwrap())
        .fetch_one(&world.stack.pool)
        .await
        .unwrap();
    assert_eq!(parts, 0, "its files are deleted");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_that_a_trainer_outside_commits_is_a_version_of_its_factors() {
    let (door, mut leased) = Door::leased("door_adapter", "a").await;
    let Door {
        world,
        control,
        run,
        running,
    } = door;
    let base = world.materialize(world.base).await;
    let adapter = |r: usize, b: f32| {
        let config = lora::Config {
            r,
            target_modules: lora::Targets::Names(vec!["q_proj".into()]),
            ..lora::Config::default()
        };
        let mut adapter = Adapter::fresh(config, &base, 1).unwrap();
        adapter.pairs.values_mut().for_each(|pair| pair.b.fill(b));
        adapter
    };
    let mut elsewhere = adapter(2, 1e-3);
    let (_, pair) = elsewhere.pairs.pop_first().unwrap();
    elsewhere.pairs.insert("model.layers.9.self_attn.q_proj".into(), pair);
    for (n, (wrong, why)) in [
        (elsewhere, "no matrix of this name"),
        (adapter(2, f32::INFINITY), "not finite"),
        (adapter(2, 1e3), "above guards.change_max"),
    ]
    .into_iter()
    .enumerate()
    {
        forget_refusals(&world).await;
        let (status, refused) = leased.commit_adapter(&format!("wrong-{n}"), &wrong).await;
        assert_eq!(status, 422, "{refused}");
        assert!(refused["detail"].as_str().unwrap().contains(why), "{why}: {refused}");
    }
    // of the base; then another one of the same base; then one of another rank
    let of_base = Some(Parent {
        version: world.base,
        root: base.root(),
    });
    for (step, (r, b)) in [(2, 1e-4), (2, 2e-4), (4, 1e-4)].into_iter().enumerate() {
        let adapter = adapter(r, b);
        let (status, committed) = leased.commit_adapter(&format!("step-{step}"), &adapter).await;
        assert_eq!(status, 200, "{committed}");
        let version = committed["version"].as_i64().unwrap();
        let manifest = world.manifest(version).await;
        assert_eq!((manifest.adapts, manifest.delta.is_some()), (of_base, step > 0));
        assert!(manifest.tensor_bytes < base.tensor_bytes() / 5 && manifest.reference.is_some());
        let published = Adapter::of_version(&*world.materialize(version).await).unwrap();
        assert_eq!(published, Some(adapter));
        world.follow(2 + step as i64, version, 0).await;
        world.insert_all(&world.sample(version, 8).await, "champion").await;
        leased = lease(&control, &run, &format!("lease-{step}"), 20).await.unwrap();
        assert_eq!(leased.cohort["parent"], json!(version));
    }
    assert!(world.metrics(3).await["kl"].as_f64().unwrap() > 0.0);
    // and all weights, made from the merged ones
    let parent = world.materialize(leased.cohort["parent"].as_i64().unwrap()).await;
    let weights = trained(&lora::merged(&parent).unwrap());
    let files = leased.upload(&weights).await;
    let (status, committed) = leased.commit("all", &files, &json!({})).await;
    assert_eq!(status, 200, "{committed}");
    let version = committed["version"].as_i64().unwrap();
    assert_eq!(world.manifest(version).await.adapts, None);
    assert_eq!(*world.materialize(version).await, weights);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_another_has_taken_over_commits_nothing() {
    let (door, orphan) = Door::leased("door_fence", "job/0").await;
    let Door {
        world,
        control,
        run,
        running,
    } = door;
    let weights = trained(&*world.materialize(world.base).await);
    let files = orphan.upload(&weights).await;
    // the same job, started again
    let body = json!({"client_token": "job/1", "replaces": "job/0"});
    let (status, taken) = post(format!("{control}/v1/runs/{run}/cohorts"), &body).await;
    assert_eq!(
        (status, taken["fence"].as_i64()),
        (201, Some(orphan.fence() + 1)),
        "{taken}"
    );
    for (status, refused) in [
        orphan.commit("late", &files, &json!({})).await,
        post(orphan.url("/renew"), &json!({"fence": orphan.fence()})).await,
        post(orphan.url("/abort"), &json!({"fence": orphan.fence()})).await,
    ] {
        assert_eq!(status, 409, "{refused}");
        assert!(
            refused["detail"].as_str().unwrap().contains("another began"),
            "{refused}"
        );
    }
    // what was given up goes to whoever asks, and what expires
    let given_up = json!({"fence": orphan.fence() + 1, "reason": "test"});
    let (status, _) = post(orphan.url("/abort"), &given_up).await;
    assert_eq!(status, 200);
    let (status, refused) = post(orphan.url("/renew"), &given_up).await;
    assert!(status == 400 || status == 409, "{refused}");
    let expire = "update cohort set expires_at = now() where state = 'full'";
    sqlx::query(expire).execute(&world.stack.pool).await.unwrap();
    let last = lease(&control, &run, "other", 20).await.unwrap();
    assert_eq!(last.fence(), orphan.fence() + 3);
    let (status, refused) = last.commit("x", &files, &json!({})).await;
    assert_eq!(status, 422, "uploads of another lease count for nothing: {refused}");
    let files = last.upload(&weights).await;
    let (status, committed) = last.commit("y", &files, &json!({})).await;
    assert_eq!(status, 200, "{committed}");
    assert_eq!((world.steps().await, world.ledger("trained").await), (1, 8));
    running.stop().await;
}

/// Three of them drop the cohort.
pub async fn forget_refusals(world: &World) {
    let forget = sqlx::query("update cohort set refusals = 0");
    forget.execute(&world.stack.pool).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_that_cannot_be_published_are_refused_and_the_lease_goes_on() {
    let (door, leased) = Door::leased("door_refused", "a").await;
    let Door { world, running, .. } = door;
    let parent = world.materialize(world.base).await;
    let name = parent.tensors.keys().next().unwrap().clone();
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut weights = trained(&parent);
        let tensor = weights.tensors.get_mut(&name).unwrap();
        let mut bytes = tensor.bytes.to_vec();
        change(&mut bytes);
        tensor.bytes = Bytes::from(bytes).into();
        weights
    };
    let width = parent.tensors[&name].bytes.len() / parent.tensors[&name].shape.iter().product::<usize>();
    for (n, (weights, why)) in [
        (Checkpoint::clone(&parent), "are those of their parent"),
        (
            changed(&|bytes| bytes[..width].fill(0xff)),
            "values that are not finite",
        ),
        (
            changed(&|bytes| {
                bytes
                    .iter_mut()
                    .skip(width - 1)
                    .step_by(width)
                    .for_each(|byte| *byte = 0x44);
            }),
            "above guards.change_max",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        forget_refusals(&world).await;
        let files = leased.upload(&weights).await;
        leased.refused(&format!("bad-{n}"), &files, &json!({}), why).await;
    }
    let files = leased.upload(&trained(&parent)).await;
    let mut one = files.clone();
    one.pop_last();
    let unknown = json!({Uuid::now_v7().to_string(): "too_long"});
    for (token, files, dropped, why) in [
        ("c", &one, &json!({}), "each rank uploads its own"),
        ("d", &files, &unknown, "is not of this cohort"),
    ] {
        forget_refusals(&world).await;
        leased.refused(token, files, dropped, why).await;
    }
    let mut body = json!({"fence": leased.fence(), "client_token": "e", "parent_root": "00", "files": files});
    let (status, refused) = post(leased.url("/commit"), &body).await;
    assert_eq!(status, 400, "{refused}");
    body["parent_root"] = leased.cohort["parent_root"].clone();
    let (status, committed) = post(leased.url("/commit"), &body).await;
    assert_eq!(status, 200, "{committed}");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trainer_outside_keeps_its_cohort_while_train_starts_again_and_loses_it_with_the_line() {
    let (door, leased) = Door::leased("door_restart", "a").await;
    let Door {
        world,
        control,
        run,
        running,
    } = door;
    running.stop().await;
    // uploads and the commit need no `train`
    let files = leased.upload(&trained(&*world.materialize(world.base).await)).await;
    let body = json!({"fence": leased.fence(), "client_token": "c", "parent_root": leased.cohort["parent_root"],
                      "files": files, "wait_seconds": 0});
    let (status, waiting) = post(leased.url("/commit"), &body).await;
    assert_eq!((status, &waiting["state"]), (202, &json!("submitted")), "{waiting}");
    let running = world.run(outside(&world));
    let version = world.head_after(world.base).await;
    let (status, committed) = post(leased.url("/commit"), &body).await;
    assert_eq!((status, &committed["version"]), (200, &json!(version)), "{committed}");

    world.insert_all(&world.sample(version, 8).await, "champion").await;
    let lost = lease(&control, &run, "b", 20).await.unwrap();
    // a release takes the line back to the base
    world.follow(2, world.base, 1).await;
    eventually("the cohort is dropped", SOON, async || {
        let cohort = get(lost.url("")).await;
        (cohort["state"] == "dropped").then_some(())
    })
    .await;
    let (status, refused) = lost.commit("d", &files, &json!({})).await;
    assert_eq!(status, 409, "{refused}");
    assert!(
        refused["detail"].as_str().unwrap().contains("went back to the queue"),
        "{refused}"
    );
    assert_eq!((world.steps().await, world.ledger("trained").await), (1, 8));
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_cohort_is_handed_out_while_it_fills() {
    let world = World::start("door_open").await;
    world.follow(1, world.base, 0).await;
    world.insert_all(&world.sample(world.base, 3).await, "champion").await;
    let control = control(&world).await;
    let mut options = outside(&world);
    options.realtime.cohort_tokens = Some(30); // six answers of five tokens
    let running = world.run(options);
    let run = realtime_run(&control).await;
    assert!(lease(&control, &run, "a", 0).await.is_none(), "it is not full");
    let body = json!({"client_token": "a", "open": true});
    let (status, cohort) = post(format!("{control}/v1/runs/{run}/cohorts"), &body).await;
    assert_eq!((status, &cohort["state"]), (201, &json!("filling")), "{cohort}");
    let leased = Leased {
        control: control.clone(),
        cohort,
    };
    eventually("the first are handed out", SOON, async || {
        (get(leased.url("")).await["trajectories"] == 3).then_some(())
    })
    .await;
    let (status, refused) = leased
        .commit("c", &BTreeMap::from([("a.safetensors".into(), 8)]), &json!({}))
        .await;
    assert!(
        status == 409 && refused["detail"].as_str().unwrap().contains("still filling"),
        "{refused}"
    );
    world.insert_all(&world.sample(world.base, 3).await, "champion").await;
    eventually("it is full", SOON, async || {
        (get(leased.url("")).await["state"] == "full").then_some(())
    })
    .await;
    assert_eq!(leased.samples().await.len(), 6);
    running.stop().await;
}

/// Commits every cohort of a run until it has ended. Returns the bundles of each step, with their advantages.
async fn train_outside(world: &World, control: &str, run: &str) -> Vec<BTreeMap<i64, Vec<f64>>> {
    let mut steps = Vec::new();
    loop {
        let body = json!({"client_token": Uuid::now_v7(), "wait_seconds": 5});
        let url = format!("{control}/v1/runs/{run}/cohorts");
        let response = reqwest::Client::new().post(url).json(&body).send().await.unwrap();
        match response.status().as_u16() {
            204 => continue,
            409 => return steps,
            _ => {}
        }
        let leased = Leased {
            control: control.to_owned(),
            cohort: response.json().await.unwrap(),
        };
        let mut bundles: BTreeMap<i64, Vec<f64>> = BTreeMap::new();
        for row in leased.samples().await {
            bundles.entry(row.bundle).or_default().push(row.advantage);
        }
        steps.push(bundles);
        let parent = world.materialize(leased.cohort["parent"].as_i64().unwrap()).await;
        let files = leased.upload(&trained(&parent)).await;
        let (status, committed) = leased.commit(&Uuid::now_v7().to_string(), &files, &json!({})).await;
        assert_eq!(status, 200, "{committed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grpo_run_hands_out_whole_groups() {
    let world = World::start("door_grpo").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, super::fleet::Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control_beside(&world, &serve_url).await;
    let mut body = request();
    body["trainer"] = json!("external");
    let (created, run) = create_as(&control, &body).await;
    let running = world.run_against(offline(&world), &serve_url);
    let steps = train_outside(&world, &control, created["id"].as_str().unwrap()).await;
    let ended = ended(&run).await;
    assert_eq!(
        (&ended["status"], &ended["steps_done"]),
        (&json!("succeeded"), &json!(2)),
        "{ended}"
    );
    assert_eq!(steps.len(), 2);
    for groups in &steps {
        for advantages in groups.values() {
            assert_eq!(advantages.len(), 16, "a whole group");
            assert!(advantages.iter().sum::<f64>().abs() < 1e-9, "compared with each other");
        }
    }
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_over_a_dataset_hand_out_what_their_losses_compare() {
    let world = World::start("door_dataset").await;
    world.follow(1, world.base, 0).await;
    let mut sampled = world.sample(world.base, 8).await;
    // pairs by prompt
    for (n, one) in sampled.iter_mut().enumerate() {
        one.prompt = vec![1, 2, 3 + n as u32 / 2];
        one.reward = Some(if n % 2 == 0 { 0.75 } else { -0.25 });
    }
    insert(&world, &sampled).await;
    let control = control(&world).await;
    dataset(&control, "all", json!({})).await;
    let running = world.run(offline(&world));
    let run = |kind: &'static str, more: Value| {
        let mut body = json!({"kind": kind, "dataset": "all@1", "base_version": world.base, "trainer": "external",
                              "steps": 1, "batch_size": 4});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    for (body, bundles, signs) in [
        (run("sft", json!({})), 4, vec![1.0]),
        (run("dpo", json!({})), 4, vec![1.0, -1.0]),
        (
            run("kto", json!({"threshold": 2.0, "undesirable_weight": 0.5})),
            4,
            vec![-0.5],
        ),
    ] {
        let (created, url) = create_as(&control, &body).await;
        let steps = train_outside(&world, &control, created["id"].as_str().unwrap()).await;
        let ended = ended(&url).await;
        assert_eq!(ended["status"], "succeeded", "{ended}");
        assert_eq!((steps.len(), steps[0].len()), (1, bundles), "{body}");
        for advantages in steps[0].values() {
            let mut sorted = advantages.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            assert_eq!(sorted, signs, "{body}");
        }
    }
    let refused = run("sft", json!({"lora": {"r": 4}}));
    let (status, problem) = post(format!("{control}/v1/runs"), &refused).await;
    assert_eq!(status, 400, "{problem}");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launched_trainer_is_started_again_and_ends_with_its_run() {
    let world = World::start("door_launcher").await;
    world.follow(1, world.base, 0).await;
    world.insert_all(&world.sample(world.base, 8).await, "champion").await;
    let control = control(&world).await;
    let script = "echo started for $SPRINGTIDE_RUN; test -n \"$SPRINGTIDE_API_KEY\"; sleep 0.2; exit 3";
    let mut options = outside(&world);
    options.realtime.trainer = TrainedBy::Launcher("job".into());
    options.launcher = vec![runs::options::Launcher {
        name: "job".into(),
        command: ["sh", "-c", script].map(str::to_owned).into(),
        restarts_max: 1,
        api_key: Some("spring_secret".into()),
    }];
    options.check().unwrap();
    let running = world.run(options.clone());
    let paused = world.paused().await;
    assert!(paused.contains("ended 2 times in a row"), "{paused}");
    let ends: Vec<String> = world
        .events()
        .await
        .into_iter()
        .filter(|event| event.contains("exit status: 3"))
        .collect();
    assert_eq!(ends.len(), 2, "{ends:?}");
    let run: Uuid = sqlx::query_scalar("select id from run")
        .fetch_one(&world.stack.pool)
        .await
        .unwrap();
    let log = std::fs::read_to_string(world.stack.dir.path().join(format!("train/launchers/{run}.log"))).unwrap();
    assert_eq!(log, format!("started for {run}\n").repeat(2));
    running.stop().await;

    // one that goes on is ended when the run pauses
    let pid = world.stack.dir.path().join("pid");
    options.launcher[0].command[2] = format!("echo $$ > {}; exec sleep 600", pid.display());
    let running = world.run(options);
    let (status, _) = post(format!("{control}/v1/runs/{run}/resume"), &json!({})).await;
    assert_eq!(status, 200);
    let pid = eventually("it is started", SOON, async || {
        let text = std::fs::read_to_string(&pid).ok()?;
        text.trim().parse::<i32>().ok()
    })
    .await;
    let (status, _) = post(format!("{control}/v1/runs/{run}/pause"), &json!({})).await;
    assert_eq!(status, 200);
    eventually("it has ended", SOON, async || {
        (!std::path::Path::new(&format!("/proc/{pid}/stat")).exists()).then_some(())
    })
    .await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trainer_drops_a_cohort_and_what_is_refused_three_times_is_dropped_too() {
    let world = World::start("door_dropped").await;
    world.follow(1, world.base, 0).await;
    let control = control(&world).await;
    let running = world.run(outside(&world));
    let run = realtime_run(&control).await;
    world.insert_all(&world.sample(world.base, 8).await, "champion").await;
    let leased = lease(&control, &run, "a", 20).await.unwrap();
    let body = json!({"fence": leased.fence(), "client_token": "none", "parent_root": leased.cohort["parent_root"],
                      "dropped_all": "too_old"});
    let (status, dropped) = post(leased.url("/commit"), &body).await;
    assert_eq!(
        (status, &dropped["state"], &dropped["version"]),
        (200, &json!("dropped"), &Value::Null),
        "{dropped}"
    );
    let (status, _) = post(leased.url("/commit"), &body).await;
    assert_eq!(status, 200, "the same answer");

    world.insert_all(&world.sample(world.base, 8).await, "champion").await;
    let leased = lease(&control, &run, "a", 20).await.unwrap();
    assert_eq!(leased.cohort["step"], 1);
    let parent = world.materialize(world.base).await;
    let files = leased.upload(&parent).await;
    for n in 0..3 {
        let (status, refused) = leased.commit(&format!("same-{n}"), &files, &json!({})).await;
        assert_eq!(status, if n < 2 { 422 } else { 409 }, "{refused}");
    }
    world.insert_all(&world.sample(world.base, 8).await, "champion").await;
    let leased = lease(&control, &run, "a", 20).await.unwrap();
    let files = leased.upload(&trained(&parent)).await;
    let (status, committed) = leased.commit("good", &files, &json!({})).await;
    assert_eq!(status, 200, "{committed}");
    let decided = world.decided_by("arm").await;
    let of = |code: &str| decided[&("champion".to_owned(), code.to_owned())];
    assert_eq!((of("too_old"), of("outside_refused"), of("trained")), (8, 8, 8));
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cohort_goes_back_when_its_run_ends_or_train_computes_its_steps_again() {
    let (door, leased) = Door::leased("door_gone", "a").await;
    let Door {
        world,
        control,
        run,
        running,
    } = door;
    let files = leased.upload(&trained(&*world.materialize(world.base).await)).await;
    running.stop().await;
    // submitted, and then the process `train` computes the step itself
    let body = json!({"fence": leased.fence(), "client_token": "c", "parent_root": leased.cohort["parent_root"],
                      "files": files, "wait_seconds": 0});
    assert_eq!(post(leased.url("/commit"), &body).await.0, 202);
    let running = world.run(world.options());
    let version = world.head_after(world.base).await;
    let (status, refused) = post(leased.url("/commit"), &body).await;
    assert_eq!(status, 409, "{refused}");
    running.stop().await;

    let running = world.run(outside(&world));
    world.insert_all(&world.sample(version, 8).await, "champion").await;
    let leased = lease(&control, &run, "b", 20).await.unwrap();
    sqlx::query("update run set status = 'failed', finished_at = now()")
        .execute(&world.stack.pool)
        .await
        .unwrap();
    assert_eq!(get(leased.url("")).await["state"], "dropped");
    let (status, refused) = post(leased.url("/renew"), &json!({"fence": leased.fence()})).await;
    assert!(
        status == 409 && refused["detail"].as_str().unwrap().contains("the run is failed"),
        "{refused}"
    );
    let (status, refused) = post(
        format!("{control}/v1/runs/{run}/cohorts"),
        &json!({"client_token": "d"}),
    )
    .await;
    assert_eq!(status, 409, "{refused}");
    running.stop().await;
    assert_eq!((world.steps().await, world.ledger("trained").await), (1, 8));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_revoked_sampler_signed_is_not_committed() {
    let (door, leased) = Door::leased("door_revoked", "a").await;
    let Door { world, running, .. } = door;
    let files = leased.upload(&trained(&*world.materialize(world.base).await)).await;
    edge::sampler::revoke(
        &world.stack.pool,
        super::world::sampler_key("r").id(),
        super::world::TEST,
        "stolen",
    )
    .await
    .unwrap();
    let (status, refused) = leased.commit("c", &files, &json!({})).await;
    assert_eq!(status, 409, "{refused}");
    assert!(
        refused["detail"].as_str().unwrap().contains("has been revoked"),
        "{refused}"
    );
    assert_eq!((world.steps().await, world.ledger("trained").await), (0, 0));
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn logged_experts_are_handed_out() {
    let world = World::start_with("door_experts", &mixture()).await;
    world.follow(1, world.base, 0).await;
    let mut given = BTreeMap::new();
    for (seed, one) in world.sample(world.base, 8).await.into_iter().enumerate() {
        world.insert_open(&one, "champion").await;
        let experts = (seed > 0).then(|| logged(one.prompt.len() + one.tokens.len() - 1, seed));
        let bytes = experts.map(|experts| experts.encode().unwrap());
        if let Some(bytes) = &bytes {
            let payload = world.payloads().put("default", bytes.clone().into(), EXPERTS).await;
            refer(&world.stack.pool, one.id, "experts", &payload.unwrap()).await;
        }
        given.insert(one.id, bytes);
        world.close(&one, one.reward.unwrap()).await;
    }
    let control = control(&world).await;
    let running = world.run(outside(&world));
    let leased = lease(&control, &realtime_run(&control).await, "a", 20).await.unwrap();
    let handed_out = leased
        .samples()
        .await
        .into_iter()
        .map(|row| (row.generation, row.experts));
    assert_eq!(handed_out.collect::<BTreeMap<_, _>>(), given);
    running.stop().await;
}
