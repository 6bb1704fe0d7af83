//! A store with signed versions and assignments, and a follower's process.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use artifact::assignment::{Assignment, Target};
use artifact::checkpoint::Checkpoint;
use artifact::delta;
use artifact::digest::Digest;
use artifact::manifest::{Manifest, Parent};
use artifact::sign::SigningKey;
use artifact::tensor::TensorData;
use artifact::threads::Threads;
use serde_json::json;
use store::{Store, Timestamp};
use time::OffsetDateTime;
use tokio::process::{Child, Command};

use super::LIMIT;
use fixture::serving::reference;
use fixture::{SPRINGTIDE, eventually, process};

const POLICY: &str = "demo";

pub struct World {
    folder: tempfile::TempDir,
    release: SigningKey,
    checkpoints: Vec<Checkpoint>,
    epoch: i64,
    /// What followers require of callers.
    pub caller_key: Option<String>,
}

impl World {
    /// Three versions of a small model.
    pub async fn new() -> Self {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/policy/model/tests/golden/qwen3");
        let base = Checkpoint::read_dir(Path::new(golden)).unwrap();
        Self::of((1..=3).map(|serial| varied(&base, serial)).collect()).await
    }

    /// A checkpoint, and deltas from each version to the next.
    pub async fn of(checkpoints: Vec<Checkpoint>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let keys = folder.path().join("state/keys");
        let trainer = SigningKey::load_or_create(&keys, "trainer").unwrap();
        let release = SigningKey::load_or_create(&keys, "release").unwrap();
        let world = Self {
            checkpoints,
            folder,
            release,
            epoch: 0,
            caller_key: None,
        };
        let store = world.store();
        let mut parent = None;
        for (serial, checkpoint) in (1..).zip(&world.checkpoints) {
            let mut manifest = Manifest {
                policy: POLICY.into(),
                version: serial,
                root: checkpoint.root(),
                parent,
                line: "realtime".into(),
                branch: 0,
                checkpoint: None,
                delta: None,
                tensor_bytes: checkpoint.tensor_bytes(),
                run: None,
                fence: 1,
                created_at: OffsetDateTime::now_utc(),
                quantized: vec![],
                delta_shards: vec![],
                reference: reference(checkpoint),
                adapts: None,
            };
            if serial == 1 {
                let bytes = checkpoint.to_bytes().unwrap();
                manifest.checkpoint = Some(store.put_object(POLICY, &bytes).await.unwrap());
            } else {
                let bytes = delta::encode(&world.checkpoint(serial - 1), checkpoint, &Threads::ONE).unwrap();
                manifest.delta = Some(store.put_object(POLICY, &bytes.into()).await.unwrap());
            }
            store.put_manifest(&manifest, &trainer).await.unwrap();
            parent = Some(Parent {
                version: serial,
                root: checkpoint.root(),
            });
        }
        world
    }

    fn store(&self) -> Store {
        Store::open(&format!("file://{}", self.folder.path().join("state/store").display())).unwrap()
    }

    pub fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    pub fn checkpoint(&self, serial: i64) -> Checkpoint {
        self.checkpoints[usize::try_from(serial - 1).unwrap()].clone()
    }

    pub fn root(&self, serial: i64) -> Digest {
        self.checkpoint(serial).root()
    }

    /// What the release loop does.
    pub async fn assign(&mut self, aliases: &[(&str, i64)]) {
        self.epoch += 1;
        let assignment = self.assignment(aliases);
        let store = self.store();
        assert!(store.put_assignment(&assignment, &self.release).await.unwrap());
        self.renew_timestamp().await;
    }

    /// What somebody does who can write to the store.
    pub async fn assign_as_stranger(&mut self, aliases: &[(&str, i64)]) {
        self.epoch += 1;
        let stranger = SigningKey::from_seed(&[9; 32]);
        self.store()
            .put_assignment(&self.assignment(aliases), &stranger)
            .await
            .unwrap();
        self.renew_timestamp().await;
    }

    async fn renew_timestamp(&self) {
        let timestamp = Timestamp {
            policy: POLICY.into(),
            epoch: self.epoch,
            revoked: [].into(),
            created_at: OffsetDateTime::now_utc(),
        };
        self.store().put_timestamp(&timestamp, &self.release).await.unwrap();
    }

    fn assignment(&self, aliases: &[(&str, i64)]) -> Assignment {
        let target = |serial: i64| Target {
            version: serial,
            root: self.root(serial),
        };
        Assignment {
            policy: POLICY.into(),
            epoch: self.epoch,
            aliases: aliases
                .iter()
                .map(|&(alias, serial)| (alias.to_owned(), target(serial)))
                .collect(),
            arms: vec![],
            cluster_arms: Default::default(),
            shadow: 0.0,
            salt: String::new(),
            created_at: OffsetDateTime::now_utc(),
        }
    }

    /// The folder that is in force in `dir`.
    pub fn folder(&self, dir: &str) -> PathBuf {
        Path::new(dir).join("current")
    }

    /// Waits until `dir` has this version in force, with its status.
    pub async fn in_force(&self, dir: &str, serial: i64) {
        eventually("the version is in force", LIMIT, async || {
            let status = std::fs::read(Path::new(dir).join("status.json")).ok()?;
            let status: serde_json::Value = serde_json::from_slice(&status).unwrap();
            (status["version"] == serial).then_some(())
        })
        .await;
        let root = Checkpoint::read_dir(&self.folder(dir)).unwrap().root();
        assert_eq!(root, self.root(serial));
    }
}

/// A version of a model: a few weights are others in each.
pub fn varied(base: &Checkpoint, serial: i64) -> Checkpoint {
    let mut checkpoint = base.clone();
    for tensor in checkpoint.tensors.values_mut() {
        let mut bytes = tensor.bytes.to_vec();
        let width = artifact::tensor::weight_bytes(tensor.dtype);
        for weight in bytes.chunks_exact_mut(width).step_by(31) {
            weight[width - 2] ^= (serial as u8) & 0x3f;
        }
        *tensor = TensorData::new(tensor.dtype, tensor.shape.clone(), bytes).unwrap();
    }
    checkpoint
}

/// A running `springtide follow`.
pub struct Follower {
    pub address: SocketAddr,
    process: Child,
    caller_key: Option<String>,
}

impl Follower {
    /// Returns as soon as it answers, which is before anything is in force.
    pub async fn start(world: &World, arguments: &[&str]) -> Self {
        let [port] = edge::bind::free_ports().unwrap();
        Self::start_at(world, SocketAddr::from(([127, 0, 0, 1], port)), arguments).await
    }

    pub async fn start_at(world: &World, address: SocketAddr, arguments: &[&str]) -> Self {
        let [nobody] = edge::bind::free_ports().unwrap();
        let folder = world.folder.path();
        let mut command = Command::new(&*SPRINGTIDE);
        command
            .arg("follow")
            .args(["--listen", &address.to_string()])
            .args(arguments)
            .current_dir(folder)
            .env("SPRINGTIDE__STATE_DIR", folder.join("state"))
            .env("SPRINGTIDE__CLIENT__CONTROL", format!("http://127.0.0.1:{nobody}"))
            .env("SPRINGTIDE__FOLLOW__API_KEY", "secret")
            .env("SPRINGTIDE__FOLLOW__ENGINE_API_KEY", "of-the-engine")
            .env("SPRINGTIDE__FOLLOW__BACK_OFF_MS_MAX", "500");
        if let Some(key) = &world.caller_key {
            command.env("SPRINGTIDE__FOLLOW__CALLER_KEY", key);
        }
        Self {
            address,
            process: process::start_unready(command, address, &folder.join("follow.log")).await,
            caller_key: world.caller_key.clone(),
        }
    }

    /// kill -9.
    pub async fn kill(mut self) {
        self.process.kill().await.unwrap();
    }

    /// Waits until the version is in force and passes.
    pub async fn serves(&self, serial: i64, limit: Duration) {
        eventually("the version is served", limit, async || {
            let view: serde_json::Value = self.get("/v1/follow").await.json().await.unwrap();
            (view["version"] == serial && view["ready"] == true).then_some(())
        })
        .await;
    }

    pub async fn get(&self, path: &str) -> reqwest::Response {
        let request = reqwest::Client::new().get(format!("http://{}{path}", self.address));
        self.send(request).await
    }

    pub async fn post(&self, path: &str) -> reqwest::Response {
        let request = reqwest::Client::new().post(format!("http://{}{path}", self.address));
        let body = json!({"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2, "temperature": 1.0}});
        self.send(request.json(&body)).await
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> reqwest::Response {
        let request = match &self.caller_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        };
        request.send().await.unwrap()
    }

    /// The status of a request that samples.
    pub async fn sample(&self) -> u16 {
        self.post("/inference/v1/generate").await.status().as_u16()
    }

    /// The sum of a metric over its labels.
    pub async fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").await.text().await.unwrap();
        let values = text.lines().filter_map(|line| {
            let (key, value) = line.rsplit_once(' ')?;
            let of = key.split('{').next()?;
            (of == name).then(|| value.parse::<f64>().unwrap())
        });
        values.sum()
    }
}
