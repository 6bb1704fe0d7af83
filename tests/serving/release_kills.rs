//! Two release loops are killed at random while canaries are proposed, compared, promoted and taken back.
//! Each canary ends as its evidence says, each decision is made once, and the audit explains every move.
//!
//! A loop is killed by dropping its task, with its connections: whatever it has not committed is gone, as
//! if its process had died. `make chaos NAME=release` runs it longer: `SPRINGTIDE_RELEASE_KILLS`, `_SEED`. The
//! figures are also in `target/chaos/release.json`.

use crate::release_canary::World;
use fixture::serving::{releases_with, wait_for};
use fixture::{Stack, eventually, write_figures};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use release::Options;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const LOOPS: usize = 2;
const PAUSE: Duration = Duration::from_millis(500);
const SOON: Duration = Duration::from_secs(120);
const USERS: i32 = 60;

#[derive(Debug, Default, Serialize)]
struct Report {
    seed: u64,
    seconds: f64,
    /// By the state of the canary at that moment.
    kills: BTreeMap<String, u64>,
    canaries: u64,
    promoted: u64,
    rolled_back: u64,
}

struct Loops {
    world: World,
    running: Vec<JoinHandle<anyhow::Result<()>>>,
    options: Options,
    rng: StdRng,
    report: Report,
}

impl Loops {
    fn start(&self) -> JoinHandle<anyhow::Result<()>> {
        let releases = releases_with(&self.world.stack, self.options.clone());
        tokio::spawn(release::run(releases, CancellationToken::new()))
    }

    async fn state(&self, id: &str) -> String {
        let canary = self.world.get(&format!("/v1/canaries/{id}")).await;
        canary["state"].as_str().unwrap().to_owned()
    }

    /// Kills loops until the canary is in one of the states.
    async fn until(&mut self, id: &str, states: &[&str]) -> String {
        let began = Instant::now();
        loop {
            let state = self.state(id).await;
            if states.contains(&&*state) {
                return state;
            }
            assert!(began.elapsed() < SOON, "the canary stays {state}: {states:?} expected");
            tokio::time::sleep(PAUSE.mul_f64(2.0 * self.rng.random::<f64>())).await;
            self.kill(id).await;
        }
    }

    async fn kill(&mut self, id: &str) {
        let state = self.state(id).await;
        let nth = self.rng.random_range(0..LOOPS);
        self.running[nth].abort();
        self.running[nth] = self.start();
        *self.report.kills.entry(state).or_default() += 1;
    }

    /// A canary of version 2 whose users reward it with `mean`, where `champion`'s give 0.5.
    async fn canary(&mut self, mean: f64) -> String {
        let steps =
            json!([{"setWeight": 50}, {"pause": {"duration": "1s"}}, {"analysis": {"successCondition": "better"}}]);
        let id = self.world.propose(2, steps).await;
        self.until(&id, &["canary"]).await;
        self.kill(&id).await;
        self.world.answers_of_both(USERS, 0.5, mean).await;
        self.report.canaries += 1;
        id
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn canaries_end_as_their_evidence_says_while_both_release_loops_are_killed() {
    let parameter = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let kills = parameter("SPRINGTIDE_RELEASE_KILLS").unwrap_or(12);
    let seed = parameter("SPRINGTIDE_RELEASE_SEED").unwrap_or_else(|| rand::random::<u32>().into());
    println!("SPRINGTIDE_RELEASE_SEED={seed}");
    let options: Options = serde_json::from_value(json!({"champion": "canary"})).unwrap();
    let world = World::start_with(Stack::start("release_kills").await, options.clone()).await;
    let mut loops = Loops {
        world,
        running: vec![],
        options,
        rng: StdRng::seed_from_u64(seed),
        report: Report {
            seed,
            ..Report::default()
        },
    };
    loops.running = (0..LOOPS).map(|_| loops.start()).collect();
    let began = Instant::now();
    while loops.report.kills.values().sum::<u64>() < kills {
        let worse = loops.canary(0.2).await;
        assert_eq!(loops.until(&worse, &["rolled_back", "champion"]).await, "rolled_back");
        loops.report.rolled_back += 1;
        judge(&loops.world, "good").await;

        let better = loops.canary(0.8).await;
        assert_eq!(loops.until(&better, &["rolled_back", "champion"]).await, "champion");
        loops.report.promoted += 1;
        loops.kill(&better).await;
        let (status, canary) = loops.world.decide(&better, "rollback").await;
        assert_eq!((status, &canary["state"]), (200, &json!("rolled_back")), "{canary}");
        loops.kill(&better).await;
        judge(&loops.world, "good").await;
    }
    loops.report.seconds = began.elapsed().as_secs_f64();
    println!("{}", serde_json::to_string_pretty(&loops.report).unwrap());
    write_figures("release.json", &loops.report);

    // the loops go on, and replicas follow
    let Loops { world, running, .. } = loops;
    wait_for(&world.replica.url, "demo@champion", 1).await;
    let broken: Vec<String> = sqlx::query_scalar(
        "select format('%s: %s after %s', canary_id, from_state, before)
         from (select canary_id, from_state, lag(to_state) over (partition by canary_id order by id) as before
               from canary_transition) t
         where before is not null and before <> from_state",
    )
    .fetch_all(&world.stack.pool)
    .await
    .unwrap();
    assert_eq!(broken, Vec::<String>::new(), "each decision follows the one before it");
    let under_way: i64 =
        sqlx::query_scalar("select count(*) from canary where state not in ('rolled_back', 'retired')")
            .fetch_one(&world.stack.pool)
            .await
            .unwrap();
    assert_eq!(under_way, 0);
    running.iter().for_each(JoinHandle::abort);
    eventually("the loops have ended", SOON, async || {
        running.iter().all(JoinHandle::is_finished).then_some(())
    })
    .await;
    world.end().await;
}

async fn judge(world: &World, verdict: &str) {
    let body = json!({"version": 2, "verdict": verdict, "reason": "the next one"});
    let (status, judged): (u16, Value) = world.post("/v1/judgments", &body).await;
    assert_eq!(status, 201, "{judged}");
}
