//! A replica that is killed at any moment of a sync serves one complete version or another. While
//! versions are published, `springtide serve` is killed and restarted, and every answer is compared
//! with the version that it names. `make chaos NAME=delta` runs it longer (`SPRINGTIDE_SYNC_KILLS`).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use model::exact::{ExactModel, KvCache};
use model::random_checkpoint;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use runs::publish::{External, import_checkpoint, publish_external};
use serde_json::{Value, json};
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

use crate::sync::{LINE, POLICY, publisher};
use fixture::serving::{releases, tiny};
use fixture::{SPRINGTIDE, Stack, eventually, process};

const PROMPT: [u32; 3] = [5, 6, 7];
const TOKENS: usize = 6;
const DEADLINE: Duration = Duration::from_secs(60);

/// A version and its greedy answer.
#[derive(Debug, Clone, PartialEq)]
struct Answer {
    root: Digest,
    tokens: Vec<u32>,
}

fn greedy_answer(checkpoint: &Checkpoint) -> Answer {
    let model = ExactModel::from_checkpoint(checkpoint).unwrap();
    let mut cache = KvCache::new(&model, 1, PROMPT.len() + TOKENS);
    let mut logits = model.prefill(&mut cache, 0, &PROMPT).unwrap();
    let mut tokens = vec![];
    while tokens.len() < TOKENS {
        let best = (0..logits.len())
            .max_by(|&a, &b| logits[a].total_cmp(&logits[b]))
            .unwrap() as u32;
        tokens.push(best);
        logits = model.decode(&mut cache, &[best]).unwrap().swap_remove(0);
    }
    Answer {
        root: checkpoint.root(),
        tokens,
    }
}

async fn start(stack: &Stack, address: SocketAddr) -> Child {
    let mut command = Command::new(&*SPRINGTIDE);
    command
        .arg("serve")
        .current_dir(stack.dir.path())
        .env("SPRINGTIDE__STATE_DIR", stack.dir.path().join("replica"))
        .env("SPRINGTIDE__LISTEN__SERVE", address.to_string())
        .env("SPRINGTIDE__POLICY__NAME", POLICY)
        .env("SPRINGTIDE__POLICY__STORE", &stack.store_url)
        .env("SPRINGTIDE__POLICY__KEYS", &stack.keys_dir)
        .env("SPRINGTIDE__POSTGRES__URL", &stack.database_url)
        .env("SPRINGTIDE__POSTGRES__URLS__SERVE", stack.url_of("serve"))
        .envs(stack.kafka_environment())
        .env("SPRINGTIDE__TELEMETRY__FILTER", "warn");
    process::start(command, address, &stack.dir.path().join("serve.log")).await
}

/// The version that answered, and its answer. `None`: no answer yet.
async fn complete(client: &reqwest::Client, address: SocketAddr) -> Option<(i64, Answer)> {
    let body = json!({"model": "demo@champion", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0,
        "return_token_ids": true});
    let request = client.post(format!("http://{address}/v1/completions")).json(&body);
    let answer: Value = request.send().await.ok()?.json().await.ok()?;
    let choice = &answer["choices"][0];
    let tokens = choice["token_ids"]
        .as_array()?
        .iter()
        .map(|id| id.as_u64().unwrap() as u32);
    let root = choice["root"].as_str()?.parse().unwrap();
    let tokens = tokens.collect();
    Some((choice["version"].as_i64()?, Answer { root, tokens }))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_is_killed_at_any_moment_serves_complete_versions() {
    let kills = std::env::var("SPRINGTIDE_SYNC_KILLS").map_or(4, |text| text.parse::<u64>().unwrap());
    let stack = Stack::start("kills").await;
    let publisher = publisher(&stack, 1);
    let stop = CancellationToken::new();
    let released = tokio::spawn(release::run(releases(&stack), stop.clone()));
    let first = Arc::new(random_checkpoint(&tiny(), 0));
    let mut head = import_checkpoint(&publisher, first.clone(), LINE).await.unwrap();
    let mut versions = BTreeMap::from([(head, greedy_answer(&first))]);

    let [port] = edge::bind::free_ports().unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut replica = start(&stack, address).await;
    let (done, unanswered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let probing = tokio::spawn({
        let (done, unanswered) = (done.clone(), unanswered.clone());
        async move {
            let client = reqwest::Client::new();
            let mut answers = vec![];
            while !done.load(Ordering::Relaxed) {
                match complete(&client, address).await {
                    Some(answer) => answers.push(answer),
                    None => {
                        unanswered.fetch_add(1, Ordering::Relaxed);
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                }
            }
            answers
        }
    });
    let mut random = StdRng::seed_from_u64(7);
    for kill in 1..=kills {
        let checkpoint = random_checkpoint(&tiny(), kill);
        let expected = greedy_answer(&checkpoint);
        let external = External {
            line: LINE.into(),
            parent: head,
            weights: runs::publish::Weights::All(checkpoint),
            // a checkpoint now and then, so that a restarted replica needs few deltas
            with_checkpoint: kill % 10 == 0,
            reference: None,
        };
        head = publish_external(&publisher, external).await.unwrap().manifest.version;
        versions.insert(head, expected);
        tokio::time::sleep(Duration::from_millis(random.random_range(0..250))).await;
        replica.kill().await.unwrap();
        replica = start(&stack, address).await;
    }
    let client = reqwest::Client::new();
    eventually("the replica serves the newest version", DEADLINE, async || {
        let (version, _) = complete(&client, address).await?;
        (version == head).then_some(())
    })
    .await;
    done.store(true, Ordering::Relaxed);
    let answers = probing.await.unwrap();
    for (version, answer) in &answers {
        assert_eq!(versions.get(version), Some(answer), "version {version}");
    }
    let served: std::collections::BTreeSet<i64> = answers.iter().map(|(version, _)| *version).collect();
    println!(
        "{kills} kills, {} versions published, {} of them seen; {} answers, 0 wrong; {} requests without an answer",
        versions.len(),
        served.len(),
        answers.len(),
        unanswered.load(Ordering::Relaxed)
    );
    replica.kill().await.unwrap();
    stop.cancel();
    released.await.unwrap().unwrap();
}
