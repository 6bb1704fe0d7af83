//! Kills, each at a moment that matters, and what follows: the killed process is started again, and
//! the next kill waits until callers are answered.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bench::process::Process;
use bench::quantiles::Quantiles;
use bench::versions::Versions;
use bench::vllm::Vllm;
use bench::world::{Fleet, World, publish};
use clap::ValueEnum;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use runs::publish::Publisher;
use serde::Serialize;
use tokio::sync::{broadcast, oneshot};
use tokio::task::JoinHandle;

use crate::Phase;
use crate::callers::Callers;
use crate::tap::{Place, Step};

/// For a change, an answer or a restart.
const WAIT_MAX: Duration = Duration::from_secs(300);
/// It starts in half the time then; what is computed is the same model.
const ENGINE_ARGS: [&str; 1] = ["--enforce-eager"];
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// Between two kills.
const CALM_ANSWERS: usize = 16;
/// Kills come at a random moment up to this long after what they wait for.
const DELAY_MS_MAX: u64 = 150;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// The gateway, while it passes on streams.
    Gateway,
    /// The gateway, while it updates an engine itself.
    Updater,
    /// An engine, during its update.
    Engine,
    /// `springtide follow`, while it updates its engine. The gateway then reaches engines through
    /// followers alone.
    Follower,
}

pub struct Faults<'a> {
    world: &'a World,
    places: Vec<Place>,
    engines: Vec<EngineState>,
    /// One in front of each engine while they are killed.
    followers: Vec<Follower>,
    gateway: Process,
    vllm: Vllm,
    callers: Arc<Callers>,
    passed: broadcast::Sender<(usize, Step)>,
    random: StdRng,
    starts: Vec<Duration>,
}

struct Follower {
    process: Process,
    address: SocketAddr,
}

enum EngineState {
    Up(Process),
    Starting(JoinHandle<anyhow::Result<(Process, Duration)>>),
}

/// What the taps and the engines' starts say in the end.
pub struct EnginesSeen {
    pub starts: Vec<Duration>,
    pub steps: BTreeMap<Step, u64>,
    pub unproven_requests: u64,
}

impl<'a> Faults<'a> {
    /// Starts engines and gateway.
    pub async fn start(
        world: &'a World,
        places: Vec<Place>,
        vllm: Vllm,
        callers: Arc<Callers>,
        passed: broadcast::Sender<(usize, Step)>,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let mut engines = Vec::new();
        for (number, place) in places.iter().enumerate() {
            engines.push(EngineState::Starting(start_engine(world, &vllm, number, place.port)));
        }
        let mut starts = Vec::new();
        for engine in &mut engines {
            settle(engine, &mut starts).await?;
        }
        let addresses: Vec<_> = places.iter().map(|place| place.address).collect();
        Ok(Faults {
            gateway: world.gateway(Fleet::Engines(&addresses), &[]).await?,
            world,
            places,
            engines,
            followers: Vec::new(),
            vllm,
            callers,
            passed,
            random: StdRng::seed_from_u64(seed),
            starts,
        })
    }

    pub async fn wait_for_answer(&self) -> anyhow::Result<()> {
        let before = self.callers.whole();
        wait("an answer", || self.callers.whole() > before).await
    }

    /// Injects a kind of fault `kills` times.
    pub async fn inject(&mut self, fault: Fault, kills: usize) -> anyhow::Result<Phase> {
        let mut phase = Phase {
            fault: fault
                .to_possible_value()
                .map_or_else(String::new, |value| value.get_name().to_owned()),
            kills,
            ..Phase::default()
        };
        self.put_followers(fault == Fault::Follower).await?;
        let before = self.counters().await?;
        let mut next_answers = Vec::new();
        for _ in 0..kills {
            let engine = self.moment(fault).await?;
            phase.open_streams += self.callers.open();
            let step = engine.and_then(|engine| self.places[engine].tap.change_in_progress());
            let step = step.map_or_else(|| "serving".to_owned(), |step| format!("{step:?}").to_lowercase());
            *phase.killed_after.entry(step).or_default() += 1;
            let killed = Instant::now();
            match fault {
                Fault::Gateway | Fault::Updater => self.restart_gateway().await?,
                Fault::Engine => self.restart_engine(engine.context("an engine to kill")?)?,
                Fault::Follower => self.restart_follower(engine.context("an engine that changes")?).await?,
            }
            self.wait_for_answer()
                .await
                .with_context(|| format!("after a kill of {fault:?}"))?;
            next_answers.push(killed.elapsed());
            let calm = self.callers.whole() + CALM_ANSWERS;
            wait("answers after a kill", || self.callers.whole() > calm).await?;
        }
        for engine in &mut self.engines {
            settle(engine, &mut self.starts).await?;
        }
        if matches!(fault, Fault::Engine | Fault::Follower) {
            let after = self.counters().await?;
            let risen = after.into_iter().map(|(name, value)| {
                let risen = value - before.get(&name).unwrap_or(&0.0);
                (name, risen)
            });
            phase.gateway = risen.collect();
        }
        phase.next_answer_ms = Some(Quantiles::of(next_answers.into_iter())?);
        Ok(phase)
    }

    /// Waits for the right moment. Returns the engine whose change is going on.
    async fn moment(&mut self, fault: Fault) -> anyhow::Result<Option<usize>> {
        let delay = Duration::from_millis(self.random.random_range(0..DELAY_MS_MAX));
        if fault == Fault::Gateway {
            let callers = self.callers.clone();
            wait("open streams", || callers.open() >= 2).await?;
            tokio::time::sleep(delay).await;
            wait("open streams", || callers.open() >= 2).await?;
            return Ok(None);
        }
        if fault == Fault::Engine {
            self.wait_for_spare_engine().await?;
        }
        let awaited = [Step::Pause, Step::Start, Step::Patch][self.random.random_range(0..3)];
        let mut passed = self.passed.subscribe();
        let engine = tokio::time::timeout(WAIT_MAX, async {
            loop {
                match passed.recv().await {
                    Ok((engine, step)) if step == awaited && self.is_up(engine) => return Ok(engine),
                    Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => bail!("the taps are gone"),
                }
            }
        });
        let engine = engine
            .await
            .with_context(|| format!("no engine got {awaited:?} within {WAIT_MAX:?}"))??;
        tokio::time::sleep(delay).await;
        Ok(Some(engine))
    }

    /// Until at least two engines answer, so that one is left.
    async fn wait_for_spare_engine(&mut self) -> anyhow::Result<()> {
        loop {
            for engine in &mut self.engines {
                if matches!(engine, EngineState::Starting(task) if task.is_finished()) {
                    settle(engine, &mut self.starts).await?;
                }
            }
            let up = self
                .engines
                .iter()
                .filter(|engine| matches!(engine, EngineState::Up(_)))
                .count();
            if up >= 2 {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn is_up(&self, engine: usize) -> bool {
        matches!(self.engines[engine], EngineState::Up(_))
    }

    async fn restart_gateway(&mut self) -> anyhow::Result<()> {
        self.gateway.kill()?;
        self.start_gateway().await
    }

    async fn start_gateway(&mut self) -> anyhow::Result<()> {
        for place in &self.places {
            place.tap.forget_probe();
        }
        let followers: Vec<_> = self.followers.iter().map(|follower| follower.address).collect();
        let engines: Vec<_> = self.places.iter().map(|place| place.address).collect();
        let fleet = match followers.is_empty() {
            true => Fleet::Engines(&engines),
            false => Fleet::Followers(&followers),
        };
        self.gateway = self.world.gateway(fleet, &[]).await?;
        Ok(())
    }

    /// Puts followers between gateway and engines, or takes them away.
    async fn put_followers(&mut self, are_wanted: bool) -> anyhow::Result<()> {
        if are_wanted != self.followers.is_empty() {
            return Ok(());
        }
        // an engine has one updater at a time
        self.gateway.kill()?;
        for mut follower in self.followers.drain(..) {
            follower.process.kill()?;
        }
        if are_wanted {
            for (number, place) in self.places.iter().enumerate() {
                let [port] = edge::bind::free_ports()?;
                let address = SocketAddr::from(([127, 0, 0, 1], port));
                let process = self.world.follower(number, address, place.address).await?;
                self.followers.push(Follower { process, address });
            }
        }
        self.start_gateway().await?;
        self.wait_for_answer().await
    }

    async fn restart_follower(&mut self, engine: usize) -> anyhow::Result<()> {
        let follower = self.followers.get_mut(engine).context("a follower of this engine")?;
        follower.process.kill()?;
        let place = &self.places[engine];
        place.tap.forget_probe();
        follower.process = self.world.follower(engine, follower.address, place.address).await?;
        Ok(())
    }

    /// Kills it, and starts it again in the background.
    fn restart_engine(&mut self, engine: usize) -> anyhow::Result<()> {
        let EngineState::Up(process) = &mut self.engines[engine] else {
            bail!("the engine {engine} is not up");
        };
        process.kill()?;
        self.places[engine].tap.forget_probe();
        let port = self.places[engine].port;
        self.engines[engine] = EngineState::Starting(start_engine(self.world, &self.vllm, engine, port));
        Ok(())
    }

    /// The gateway's counters of remote engines.
    async fn counters(&self) -> anyhow::Result<BTreeMap<String, f64>> {
        let text = reqwest::get(format!("http://{}/metrics", self.world.address))
            .await?
            .text()
            .await?;
        let lines = text
            .lines()
            .filter(|line| line.starts_with("springtide_remote_") && line.contains("_total"));
        let values = lines.filter_map(|line| line.rsplit_once(' '));
        Ok(values
            .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
            .collect())
    }

    /// Kills everything.
    pub fn stop(mut self) -> anyhow::Result<EnginesSeen> {
        self.gateway.kill()?;
        for follower in &mut self.followers {
            follower.process.kill()?;
        }
        for engine in &mut self.engines {
            match engine {
                EngineState::Up(process) => process.kill()?,
                EngineState::Starting(task) => task.abort(),
            }
        }
        let mut steps = BTreeMap::new();
        let mut unproven_requests = 0;
        for place in &self.places {
            let seen = place.tap.seen();
            unproven_requests += seen.unproven_requests;
            for (step, count) in seen.steps {
                *steps.entry(step).or_default() += count;
            }
        }
        Ok(EnginesSeen {
            starts: self.starts,
            steps,
            unproven_requests,
        })
    }
}

fn start_engine(
    world: &World,
    vllm: &Vllm,
    number: usize,
    port: u16,
) -> JoinHandle<anyhow::Result<(Process, Duration)>> {
    let (vllm, log) = (vllm.clone(), world.log(&format!("vllm-{number}")));
    tokio::spawn(async move { vllm.start(port, &ENGINE_ARGS, &log).await })
}

/// Waits until it is up.
async fn settle(engine: &mut EngineState, starts: &mut Vec<Duration>) -> anyhow::Result<()> {
    if let EngineState::Starting(task) = engine {
        let (process, took) = task.await??;
        starts.push(took);
        *engine = EngineState::Up(process);
    }
    Ok(())
}

async fn wait(what: &str, mut ready: impl FnMut() -> bool) -> anyhow::Result<()> {
    let began = Instant::now();
    while !ready() {
        anyhow::ensure!(began.elapsed() < WAIT_MAX, "not within {WAIT_MAX:?}: {what}");
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
    Ok(())
}

/// Serials of versions and their numbers, and why publications failed.
type Published = (BTreeMap<i64, i64>, Vec<String>);

/// Publishes one version after the other.
pub struct Publishing {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Published>,
}

impl Publishing {
    pub fn start(
        publisher: Publisher,
        versions: Arc<Versions>,
        callers: Arc<Callers>,
        first: i64,
        every_ms: u64,
    ) -> Self {
        let (stop, mut stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            let (mut numbers, mut failed) = (BTreeMap::from([(first, 1)]), Vec::new());
            let mut head = first;
            for number in 2.. {
                let pause = tokio::time::sleep(Duration::from_millis(every_ms));
                tokio::select! {
                    () = pause => {}
                    _ = &mut stopped => break,
                }
                callers.publish(number);
                match publish(&publisher, &versions, number, Some(head)).await {
                    Ok(serial) => {
                        numbers.insert(serial, number);
                        head = serial;
                    }
                    Err(error) => failed.push(format!("{error:#}")),
                }
            }
            (numbers, failed)
        });
        Publishing { stop, task }
    }

    pub async fn stop(self) -> anyhow::Result<Published> {
        let _ = self.stop.send(());
        Ok(self.task.await?)
    }
}
