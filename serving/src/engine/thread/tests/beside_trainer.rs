//! A replica on a trainer's machine: rollouts run only while the trainer says that it computes nothing.

use super::*;
use crate::engine::load::Load;
use crate::tide::{Options, Tide};
use axum::Router;
use axum::extract::State;
use axum::routing::get;
use std::net::SocketAddr;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const ROLLOUTS: u32 = 12;
const TOKENS: usize = 100;

/// The trainer's address, which says what the test wants.
struct Trainer {
    address: SocketAddr,
    computes: watch::Sender<bool>,
    stop: CancellationToken,
    server: JoinHandle<anyhow::Result<()>>,
}

impl Trainer {
    async fn start(address: SocketAddr, computes: bool) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let computes = watch::Sender::new(computes);
        let answer = |State(computes): State<watch::Sender<bool>>| async move {
            axum::Json(json!({"computing": *computes.borrow(), "since": "2026-11-02T09:00:00Z"}))
        };
        let router = Router::new()
            .route("/computing", get(answer))
            .with_state(computes.clone());
        let stop = CancellationToken::new();
        let server = tokio::spawn(edge::server::run(listener.into(), router, stop.clone()));
        Trainer {
            address,
            computes,
            stop,
            server,
        }
    }

    async fn stop(self) {
        self.stop.cancel();
        self.server.await.unwrap().unwrap();
    }
}

fn takes_nothing(load: &Load) -> bool {
    load.background == 0 && load.parked > 0
}

fn goes_on(load: &Load) -> bool {
    load.background > 0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollouts_run_only_while_the_trainer_says_that_it_waits_and_none_is_lost() {
    let handle = engine(64);
    let v = version(1);
    handle.install(v.clone(), backend(4, 10)).await.unwrap();
    let trainer = Trainer::start(([127, 0, 0, 1], 0).into(), false).await;
    let address = trainer.address;
    let tide = Tide {
        options: Options {
            beside_trainer: Some(format!("http://{address}/")),
            ..Options::default()
        },
        policy: "demo".into(),
        replica: "beside".into(),
        slots: 4,
        floor: 1,
        engine: Arc::new(handle.clone()),
        client: reqwest::Client::new(),
        control: None,
    };
    let shutdown = CancellationToken::new();
    let lending = tokio::spawn(tide.run(shutdown.clone()));
    let mut rollouts = Vec::new();
    for prompt in 0..ROLLOUTS {
        let (mut rollout, events) = request(&v, &[prompt], TOKENS);
        rollout.class = TrafficClass::Background;
        rollout.caller = Caller::new("default", None).working_on(Work::Rollout(None));
        handle.submit(vec![rollout]).unwrap();
        rollouts.push(events);
    }
    until(&handle, goes_on).await;

    trainer.computes.send_replace(true);
    until(&handle, takes_nothing).await;
    let sampled: Vec<usize> = rollouts.iter().map(mpsc::Receiver::len).collect();
    // production has its rights
    let (user, events) = request(&v, &[29], 20);
    handle.submit(vec![user]).unwrap();
    assert_eq!(finish(events).await.0, continuation(&[29], 20));
    let after: Vec<usize> = rollouts.iter().map(mpsc::Receiver::len).collect();
    assert_eq!(after, sampled, "the trainer computes");

    trainer.computes.send_replace(false);
    until(&handle, goes_on).await;
    // it may compute although it does not answer
    trainer.stop().await;
    until(&handle, takes_nothing).await;
    let trainer = Trainer::start(address, true).await;
    let sampled: Vec<usize> = rollouts.iter().map(mpsc::Receiver::len).collect();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let after: Vec<usize> = rollouts.iter().map(mpsc::Receiver::len).collect();
    assert_eq!(after, sampled, "it computes again");

    trainer.computes.send_replace(false);
    for (prompt, events) in (0..).zip(rollouts) {
        assert_eq!(finish(events).await.0, continuation(&[prompt], TOKENS));
    }
    shutdown.cancel();
    lending.await.unwrap();
    trainer.stop().await;
}
