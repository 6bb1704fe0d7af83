//! A real vLLM on a Unix socket behind `springtide follow`: versions change under load, and the
//! follower is killed meanwhile. Our exact model scores every token with the weights that the answer
//! names. Run by `make check NAME=engines`; `SPRINGTIDE_VLLM` names the command of vLLM.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use artifact::checkpoint::Checkpoint;
use futures::StreamExt as _;
use model::exact::ExactModel;
use model::sampling::{self, Params, PreviousTokens};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tokio::process::Command;

use super::LIMIT;
use super::world::{Follower, World, varied};

const STREAMS: usize = 4;
const MAX_TOKENS: usize = 48;
const TEMPERATURE: f32 = 0.8;
/// Nats.
const ERROR_MAX: f32 = 1e-3;

fn parameter(name: &str, default: i64) -> i64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// A process and those that it has started.
struct Vllm(Pid);

impl Drop for Vllm {
    fn drop(&mut self) {
        let _ = killpg(self.0, Signal::SIGKILL);
    }
}

/// vLLM, which takes requests over a socket alone.
fn start_engine(world: &World) -> (Vllm, String) {
    let program = std::env::var("SPRINGTIDE_VLLM").unwrap(); // vLLM's command
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/demo/models/base");
    let socket = world.path("engine.sock");
    let log = std::fs::File::create(world.path("vllm.log")).unwrap();
    let mut command = Command::new(program);
    command
        .args(["serve", model, "--served-model-name", "demo", "--uds", &socket])
        .args([
            "--dtype",
            "float32",
            "--max-num-seqs",
            "16",
            "--max-num-batched-tokens",
            "4096",
        ])
        .args(["--enable-scale-out", "--logprobs-mode", "processed_logprobs"])
        .args(["--weight-transfer-config", r#"{"backend":"springtide"}"#])
        .env("VLLM_SERVER_DEV_MODE", "1")
        .env("VLLM_NO_USAGE_STATS", "1")
        .env("DO_NOT_TRACK", "1")
        .env("HF_HUB_OFFLINE", "1")
        .env("VLLM_CPU_KVCACHE_SPACE", "1")
        .env("OMP_NUM_THREADS", "1")
        .stdout(Stdio::from(log.try_clone().unwrap()))
        .stderr(Stdio::from(log))
        .process_group(0);
    let leader = command.spawn().unwrap().id().unwrap();
    (
        Vllm(Pid::from_raw(leader.try_into().unwrap())),
        format!("unix:{socket}"),
    )
}

/// One answer.
struct Answer {
    prompt: Vec<u32>,
    /// Id and log-probability.
    tokens: Vec<(u32, f32)>,
    /// Which weights sampled how many tokens, in order.
    spans: Vec<(String, usize)>,
    gap: Duration,
}

#[derive(Default)]
struct Load {
    stop: AtomicBool,
    answers: Mutex<Vec<Answer>>,
    refused: Mutex<usize>,
    failed: Mutex<Vec<String>>,
}

impl Load {
    async fn run(&self, address: std::net::SocketAddr, stream: u32) {
        let client = reqwest::Client::new();
        let mut count = stream;
        while !self.stop.load(Ordering::Relaxed) {
            count += STREAMS as u32;
            let prompt: Vec<u32> = (0..24).map(|place| (count * 131 + place * 17) % 1000).collect();
            match ask(&client, address, prompt).await {
                Ok(Some(answer)) => self.answers.lock().unwrap().push(answer),
                Ok(None) => {
                    *self.refused.lock().unwrap() += 1;
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(error) => {
                    self.failed.lock().unwrap().push(error);
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }
}

/// `None`: refused with 503.
async fn ask(
    client: &reqwest::Client,
    address: std::net::SocketAddr,
    prompt: Vec<u32>,
) -> Result<Option<Answer>, String> {
    let body = json!({"token_ids": prompt, "stream": true, "sampling_params": {"max_tokens": MAX_TOKENS,
        "temperature": TEMPERATURE, "logprobs": 0, "ignore_eos": true, "detokenize": false}});
    let url = format!("http://{address}/inference/v1/generate");
    let response = client.post(url).json(&body).send().await;
    let response = response.map_err(|error| format!("{error:?}"))?;
    match response.status().as_u16() {
        200 => {}
        503 => return Ok(None),
        status => return Err(format!("{status}: {}", response.text().await.unwrap_or_default())),
    }
    let mut answer = Answer {
        prompt,
        tokens: vec![],
        spans: vec![],
        gap: Duration::ZERO,
    };
    let (mut text, mut last) = (String::new(), Instant::now());
    let mut chunks = response.bytes_stream();
    while let Some(chunk) = chunks.next().await {
        text += &String::from_utf8_lossy(&chunk.map_err(|error| format!("{error:?}"))?);
        answer.gap = answer.gap.max(last.elapsed());
        last = Instant::now();
    }
    for data in text.lines().filter_map(|line| line.strip_prefix("data: {")) {
        let event: Value = serde_json::from_str(&format!("{{{data}")).map_err(|error| error.to_string())?;
        let choice = &event["choices"][0];
        for token in choice["logprobs"]["content"].as_array().into_iter().flatten() {
            let id = u32::try_from(token["token_id"].as_u64().unwrap()).unwrap();
            answer.tokens.push((id, token["logprob"].as_f64().unwrap() as f32));
        }
        for span in choice["weight_versions"].as_array().into_iter().flatten() {
            let tokens = span["end"].as_u64().unwrap() - span["start"].as_u64().unwrap();
            let name = span["version"].as_str().unwrap().to_owned();
            answer.spans.push((name, usize::try_from(tokens).unwrap()));
        }
        if choice["finish_reason"] == "abort" {
            return Err("aborted".into());
        }
    }
    let sampled: usize = answer.spans.iter().map(|(_, tokens)| tokens).sum();
    if answer.tokens.len() != MAX_TOKENS || sampled != MAX_TOKENS {
        return Err(format!("{} tokens, spans {:?}", answer.tokens.len(), answer.spans));
    }
    Ok(Some(answer))
}

/// Tokens whose log-probability is not that of the version that their span names; and the largest
/// difference.
fn wrong(answers: &[Answer], models: &BTreeMap<String, ExactModel>) -> (usize, usize, f32) {
    let params = Params {
        temperature: TEMPERATURE,
        ..Params::default()
    };
    let (mut tokens, mut wrong, mut largest) = (0, 0, 0.0_f32);
    for answer in answers {
        let ids = answer.prompt.iter().copied();
        let ids: Vec<u32> = ids.chain(answer.tokens.iter().map(|(id, _)| *id)).collect();
        let mut from = 0;
        for (name, count) in &answer.spans {
            let model = models.get(name).unwrap_or_else(|| panic!("unknown weights {name}"));
            let first = answer.prompt.len() - 1 + from;
            let rows: Vec<usize> = (first..first + count).collect();
            let pass = model.score(&[&ids], &rows, None).unwrap();
            for (logits, (id, logprob)) in pass.logits.rows().zip(&answer.tokens[from..from + count]) {
                let exact = sampling::log_prob_of(logits, &params, &PreviousTokens::default(), *id);
                let difference = (exact - logprob).abs();
                tokens += 1;
                largest = largest.max(difference);
                wrong += usize::from(difference.is_nan() || difference > ERROR_MAX);
            }
            from += count;
        }
    }
    (tokens, wrong, largest)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a real vLLM, named by SPRINGTIDE_VLLM"]
async fn a_real_vllm_serves_only_what_was_probed() {
    let updates = parameter("SPRINGTIDE_FOLLOW_UPDATES", 6);
    let kills = parameter("SPRINGTIDE_FOLLOW_KILLS", 2);
    let base = Checkpoint::read_dir(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/models/base"))).unwrap();
    let versions = 1 + 2 * updates + kills;
    let mut world = World::of((1..=versions).map(|serial| varied(&base, serial)).collect()).await;
    let (_engine, url) = start_engine(&world);
    let mut serial = 1;
    world.assign(&[("champion", serial)]).await;
    for in_flight in ["drain", "cross"] {
        let arguments = ["--engine", "vllm", "--engine-url", &url, "--in-flight", in_flight];
        let mut follower = Follower::start(&world, &arguments).await;
        follower.serves(serial, Duration::from_secs(400)).await;
        let load = Arc::new(Load::default());
        let streams: Vec<_> = (0..STREAMS)
            .map(|stream| {
                let (load, address) = (load.clone(), follower.address);
                tokio::spawn(async move { load.run(address, stream as u32).await })
            })
            .collect();
        let mut away = vec![];
        for _ in 0..updates {
            tokio::time::sleep(Duration::from_secs(1)).await;
            serial += 1;
            let started = Instant::now();
            world.assign(&[("champion", serial)]).await;
            follower.serves(serial, LIMIT).await;
            away.push(started.elapsed().as_millis());
        }
        let failed_before = load.failed.lock().unwrap().clone();
        let refused_before = *load.refused.lock().unwrap();
        if in_flight == "cross" {
            for _ in 0..kills {
                serial += 1;
                world.assign(&[("champion", serial)]).await;
                tokio::time::sleep(Duration::from_millis(150 + 200 * serial as u64 % 700)).await;
                let address = follower.address;
                follower.kill().await;
                follower = Follower::start_at(&world, address, &arguments).await;
                follower.serves(serial, LIMIT).await;
            }
        }
        load.stop.store(true, Ordering::Relaxed);
        for stream in streams {
            stream.await.unwrap();
        }
        let models = (1..=serial).map(|serial| {
            let name = format!("springtide-{serial}-{}", world.root(serial).short());
            (name, ExactModel::from_checkpoint(&world.checkpoint(serial)).unwrap())
        });
        let models: BTreeMap<String, ExactModel> = models.collect();
        let answers = std::mem::take(&mut *load.answers.lock().unwrap());
        let (tokens, wrong, largest) = wrong(&answers, &models);
        let crossed = answers.iter().filter(|answer| answer.spans.len() > 1).count();
        let gap = answers.iter().map(|answer| answer.gap).max().unwrap_or_default();
        println!(
            "{in_flight}: {} answers, {crossed} across versions, {tokens} tokens, {wrong} wrong, largest difference \
             {largest:e}, longest gap {gap:?}, refused {refused_before}, failed {} before kills and {} in all, updates took {away:?} ms",
            answers.len(),
            failed_before.len(),
            load.failed.lock().unwrap().len(),
        );
        assert_eq!((wrong, failed_before), (0, vec![]));
        assert!(in_flight == "drain" && crossed == 0 || in_flight == "cross" && crossed > 0);
        if in_flight == "cross" {
            assert_eq!(refused_before, 0);
        }
        follower.kill().await;
    }
}
