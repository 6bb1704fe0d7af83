//! The realtime run against a real database, log and store: trajectories become versions.
//! Trajectories are inserted as the sink would write them, sampled by the model that is trained.

mod alias;
mod bounds;
mod caps;
mod consent;
mod context;
mod datasets;
mod demonstrations;
mod door;
mod engines;
mod environment;
mod episode_bounds;
mod episodes;
mod erasure;
mod experts;
mod fleet;
mod frozen_log;
mod gate;
mod grammar;
mod judges;
mod kept;
mod long_session;
mod lora;
mod monitors;
mod offline;
mod poison;
mod preferences;
mod provenance;
mod sampling;
mod show_rate;
mod theft;
mod uses;
pub mod world;

use fixture::eventually;
use runs::publish::Error;
use runs::settings::Loss;
use sqlx::Row;
use std::time::Duration;
use world::{DECLINE, Sampled, World};

const SOON: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_cohort_is_trained_on_once_and_published_as_what_the_store_holds() {
    let world = World::start("cohort").await;
    world.follow(1, world.base, 0).await;
    let cohort = world.sample(world.base, 8).await;
    world.insert_all(&cohort, "champion").await;
    world.insert_all(&world.sample(world.base, 3).await, "base").await;
    let greedy = Sampled {
        temperature: 0.0,
        ..world.sample(world.base, 1).await.remove(0)
    };
    world.insert(&greedy, "champion").await;
    let odd = Sampled {
        tokens: vec![5_000],
        logprobs: vec![-1.0],
        ..greedy.clone().renewed()
    };
    world
        .insert(
            &Sampled {
                temperature: 1.0,
                ..odd
            },
            "champion",
        )
        .await;
    let unanswered = Sampled {
        reward: None,
        ..greedy.renewed()
    };
    world.insert(&unanswered, "champion").await;

    let running = world.run(world.options());
    let version = world.head_after(world.base).await;
    let decided = || world.dispositions();
    eventually("everything is decided", SOON, async || {
        (decided().await.len() == 13).then_some(())
    })
    .await;
    running.stop().await;

    let dispositions = world.dispositions().await;
    let count = |kind: &str, code: Option<&str>| {
        dispositions
            .iter()
            .filter(|d| d.kind == kind && d.code.as_deref() == code)
            .count()
    };
    assert_eq!(count("trained", None), 8);
    assert_eq!(count("held_out", Some("other_arm")), 3);
    assert_eq!(count("dropped", Some("greedy")), 1);
    assert_eq!(count("dropped", Some("token_outside_vocabulary")), 1);
    for sampled in &cohort {
        assert!(dispositions.iter().any(|d| d.id == sampled.id && d.step == Some(1)));
    }
    let checkpoint = world.materialize(version).await;
    assert_eq!(checkpoint.root().to_string(), world.root(version).await);
    assert_ne!(checkpoint.root().to_string(), world.root(world.base).await);
    let metrics = world.metrics(1).await;
    let parity = metrics["mismatch"]["difference_max"].as_f64().unwrap();
    assert!(parity <= 1e-5, "sampler and trainer differ by {parity}");
    assert_eq!(metrics["notes"]["set_aside"]["other_arm"], 3);
    // two of the eight were sampled without the decline token and recomputed the same way
    assert_eq!(metrics["explored"], 2);
    assert_eq!(world.ledger("censored").await, 1);

    // another process finds no work and trains on nothing twice
    let running = world.run(world.options());
    world.settled().await;
    running.stop().await;
    assert_eq!(world.line().await, (version, 0));
    assert_eq!(world.dispositions().await.len(), 13);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_generation_holds_the_cohort_back() {
    let world = World::start("horizon").await;
    world.follow(1, world.base, 0).await;
    let early = world.sample(world.base, 4).await;
    world.insert_all(&early, "champion").await;
    let waiting = world.sample(world.base, 1).await.remove(0);
    world.insert_open(&waiting, "champion").await;
    let late = world.sample(world.base, 4).await;
    world.insert_all(&late, "champion").await;
    let running = world.run(world.options());
    world.settled().await;
    assert_eq!(
        world.line().await,
        (world.base, 0),
        "only four are older than the one that waits"
    );
    world.close(&waiting, 0.75).await;
    world.head_after(world.base).await;
    running.stop().await;
    let mut decided = world.dispositions().await;
    decided.retain(|d| d.kind == "trained");
    let trained: Vec<_> = decided.into_iter().map(|d| d.id).collect();
    assert!(trained.contains(&waiting.id) && early.iter().all(|s| trained.contains(&s.id)));
    assert_eq!(trained.len(), 8);
    assert!(!trained.contains(&late[3].id), "the cohort is the eight oldest");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trajectory_that_has_joined_a_cohort_stays_in_it() {
    let world = World::start("joined").await;
    world.follow(1, world.base, 0).await;
    let early = world.sample(world.base, 4).await;
    let late = world.sample(world.base, 5).await;
    let running = world.run(world.options());
    world.insert_all(&late, "champion").await;
    world.settled().await; // accumulated by now
    assert_eq!(world.steps().await, 0);
    world.insert_all(&early, "champion").await;
    world.head_after(world.base).await;
    running.stop().await;
    let mut decided = world.dispositions().await;
    decided.retain(|d| d.kind == "trained");
    let trained: Vec<_> = decided.into_iter().map(|d| d.id).collect();
    assert_eq!(trained.len(), 8);
    assert!(late.iter().chain(&early[..3]).all(|s| trained.contains(&s.id)));
    let timings = &world.metrics(1).await["timings"];
    for phase in [
        "wait",
        "collect",
        "compute_tail",
        "guard",
        "checkpoint",
        "encode",
        "upload",
    ] {
        assert!(timings[phase].as_f64().is_some_and(|s| s >= 0.0), "{phase}: {timings}");
    }
    assert!(
        timings["collect"].as_f64() > Some(0.1),
        "the cohort filled for longer: {timings}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn trajectories_accumulated_before_a_pause_are_accumulated_again() {
    let world = World::start("afresh").await;
    world.follow(1, world.base, 0).await;
    let cohort = world.sample(world.base, 8).await;
    let running = world.run(world.options());
    world.insert_all(&cohort[..5], "champion").await;
    world.settled().await;
    world.pin(2, world.base).await;
    world.paused().await;
    assert!(world.dispositions().await.is_empty(), "nothing was decided");
    world.follow(3, world.base, 0).await;
    world.insert_all(&cohort[5..], "champion").await;
    world.head_after(world.base).await;
    running.stop().await;
    let metrics = world.metrics(1).await;
    assert_eq!(
        (&metrics["sequences"], &metrics["mismatch"]["tokens"]),
        (&8.into(), &40.into())
    );
    let dispositions = world.dispositions().await;
    assert!(dispositions.len() == 8 && dispositions.iter().all(|d| d.kind == "trained"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_executor_cannot_commit() {
    let world = World::start("zombie").await;
    let cohort = world.sample(world.base, 4).await;
    world.insert_all(&cohort, "champion").await;
    let (run, zombie) = world.claimed_run().await;
    let prepared = world.prepare(&zombie, run, &cohort).await;
    let successor = runs::claim::Claim::take(&world.stack.pool, run).await.unwrap().unwrap();
    assert!(successor.fence > zombie.fence);
    let refused = world.publisher.commit(&zombie, &prepared).await;
    assert!(matches!(refused, Err(Error::Fenced(_))), "{refused:?}");
    assert_eq!(world.line().await, (world.base, 0));
    assert!(world.dispositions().await.is_empty());
    // the successor can commit the same step, once
    world.publisher.commit(&successor, &prepared).await.unwrap();
    assert!(world.publisher.commit(&successor, &prepared).await.is_err());
    assert_eq!(world.dispositions().await.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generation_with_a_disposition_stops_the_whole_commit() {
    let world = World::start("twice").await;
    let cohort = world.sample(world.base, 4).await;
    world.insert_all(&cohort, "champion").await;
    let (run, claim) = world.claimed_run().await;
    let prepared = world.prepare(&claim, run, &cohort).await;
    sqlx::query("insert into disposition (generation_id, kind, code) values ($1, 'dropped', 'stale')")
        .bind(cohort[2].id)
        .execute(&world.stack.pool)
        .await
        .unwrap();
    let refused = world.publisher.commit(&claim, &prepared).await;
    assert!(matches!(refused, Err(Error::AlreadyDecided)), "{refused:?}");
    assert_eq!(world.line().await, (world.base, 0));
    assert_eq!(world.dispositions().await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_prepared_before_a_crash_is_committed_by_the_next_process() {
    let world = World::start("adopt").await;
    world.follow(1, world.base, 0).await;
    let cohort = world.sample(world.base, 8).await;
    world.insert_all(&cohort, "champion").await;
    let (run, claim) = world.claimed_run().await;
    let prepared = world.prepare(&claim, run, &cohort).await;
    drop(prepared.record);

    let running = world.run(world.options());
    let version = world.head_after(world.base).await;
    world.settled().await;
    running.stop().await;
    assert_eq!(
        version, prepared.manifest.version,
        "the prepared version, not a new one"
    );
    assert_eq!(world.dispositions().await.len(), 8);
    assert_eq!(world.steps().await, 1);
    assert_eq!(
        world.materialize(version).await.root().to_string(),
        world.root(version).await
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollback_re_bases_the_line_and_drops_samples_of_the_abandoned_version() {
    let world = World::start("rollback").await;
    world.follow(1, world.base, 0).await;
    world.insert_all(&world.sample(world.base, 8).await, "champion").await;
    let running = world.run(world.options());
    let second = world.head_after(world.base).await;
    let left = world.sample(second, 5).await;

    world.follow(2, world.base, 1).await;
    eventually("the line is re-based", SOON, async || {
        (world.line().await == (world.base, 1)).then_some(())
    })
    .await;
    world.insert_all(&left, "champion").await;
    world.insert_all(&world.sample(world.base, 8).await, "champion").await;
    let third = world.head_after(world.base).await;
    running.stop().await;

    let row = sqlx::query("select parent, branch, step from version where serial = $1")
        .bind(third)
        .fetch_one(&world.stack.pool)
        .await
        .unwrap();
    assert_eq!(
        (row.get::<i64, _>("parent"), row.get::<i32, _>("branch")),
        (world.base, 1)
    );
    assert_eq!(row.get::<i64, _>("step"), 2);
    let dispositions = world.dispositions().await;
    let stale = dispositions
        .iter()
        .filter(|d| d.code.as_deref() == Some("stale"))
        .count();
    assert_eq!((stale, dispositions.len()), (5, 21));
    assert!(world.events().await.iter().any(|e| e.contains("re-based")));
    // the abandoned version is unchanged and can be released again
    assert_eq!(
        world.materialize(second).await.root().to_string(),
        world.root(second).await
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn generations_of_older_versions_are_trained_on_up_to_the_bound() {
    let world = World::start("older").await;
    world.follow(1, world.base, 0).await;
    let mut options = world.options();
    options.realtime.staleness_max = 1;
    let [first, late, too_late] = [8, 8, 5].map(|count| world.sample(world.base, count));
    let (first, late, too_late) = (first.await, late.await, too_late.await);
    world.insert_all(&first, "champion").await;
    let running = world.run(options);
    let second = world.head_after(world.base).await;
    world.insert_all(&late, "champion").await;
    world.head_after(second).await;
    world.insert_all(&too_late, "champion").await;
    world.settled().await;
    running.stop().await;

    let dispositions = world.dispositions().await;
    let count = |kind: &str, code: Option<&str>, step: Option<i64>| {
        let alike = dispositions
            .iter()
            .filter(|d| d.kind == kind && d.code.as_deref() == code && d.step == step);
        alike.count()
    };
    assert_eq!(count("trained", None, Some(1)), 8);
    assert_eq!(count("trained", None, Some(2)), 8, "one step behind the head");
    assert_eq!(count("dropped", Some("stale"), None), 5, "two steps behind it");
    assert_eq!(dispositions.len(), 21);
    let metrics = world.metrics(2).await;
    assert_eq!(metrics["mismatch"]["tokens"], 0, "nothing is of the head");
    assert!(metrics["stale"]["tokens"].as_u64() > Some(0));
    assert_eq!(world.events().await, [""; 0], "nothing was quarantined");
}

#[tokio::test(flavor = "multi_thread")]
async fn greedy_answers_of_another_arm_are_trained_on_by_a_loss_that_learns_from_them() {
    let world = World::start("greedy").await;
    world.follow(1, world.base, 0).await;
    let mut options = world.options();
    let four_texts = |drawn: Vec<Sampled>| {
        let texts = drawn.into_iter().filter(|one| !one.tokens.contains(&DECLINE));
        texts.take(4).collect::<Vec<_>>()
    };
    let sampled = four_texts(world.sample(world.base, 16).await);
    let greedy = four_texts(world.sample_at(0.0, world.base, 16).await);
    // nobody's verdict: held back by a bar, on a surface that pays for declining
    let held_back = Sampled {
        tokens: vec![DECLINE],
        logprobs: vec![-1.0],
        suppressed: false,
        ..sampled[0].clone().renewed()
    };
    world.insert(&held_back, "champion").await;
    world.insert_all(&greedy, "learner").await;
    world.insert_all(&world.sample(world.base, 3).await, "base").await;
    world.insert_all(&sampled, "champion").await;
    options.realtime.step.loss = Loss::Verdicts { weight_max: 20.0 };
    options.realtime.other_arms = vec!["learner".into()];
    let running = world.run(options);
    world.head_after(world.base).await;
    world.settled().await;
    running.stop().await;

    let trained =
        "select g.arm || ' ' || g.temperature, count(*) from disposition d join generation g on g.id = d.generation_id
                   where d.kind = 'trained' group by 1 order by 1";
    let trained: Vec<(String, i64)> = sqlx::query_as(trained).fetch_all(&world.stack.pool).await.unwrap();
    assert_eq!(trained, [("champion 1".to_owned(), 4), ("learner 0".to_owned(), 4)]);
    let held_out = world
        .dispositions()
        .await
        .into_iter()
        .filter(|one| one.kind == "held_out");
    assert_eq!(held_out.count(), 3, "base is not learned from");
    let dropped = world
        .dispositions()
        .await
        .into_iter()
        .filter(|one| one.code.as_deref() == Some("declined"));
    assert_eq!(dropped.count(), 1, "a reward for declining is no verdict");
    // the log-probabilities of both are those that the trainer computes
    assert_eq!(world.events().await, [""; 0], "nothing was quarantined");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pinned_champion_pauses_the_run_until_it_follows_again() {
    let world = World::start("pin").await;
    world.pin(1, world.base).await;
    world.insert_all(&world.sample(world.base, 8).await, "champion").await;
    let running = world.run(world.options());
    let reason = world.paused().await;
    assert!(reason.starts_with("champion is pinned to version"));
    world.settled().await;
    assert!(world.dispositions().await.is_empty(), "nothing is decided meanwhile");
    world.follow(2, world.base, 0).await;
    world.head_after(world.base).await;
    running.stop().await;
    assert_eq!(world.dispositions().await.len(), 8);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_guard_publishes_nothing_and_records_the_reason() {
    let world = World::start("guard").await;
    world.follow(1, world.base, 0).await;
    world.insert_all(&world.sample(world.base, 8).await, "champion").await;
    let mut options = world.options();
    options.realtime.guards.kl_max = 1e-12;
    let running = world.run(options.clone());
    eventually("the first cohort is dropped", SOON, async || {
        (world.dispositions().await.len() == 8).then_some(())
    })
    .await;
    assert_eq!(world.status().await.unwrap().0, "running", "one cohort pauses nothing");
    // it counts after a restart, too
    running.stop().await;
    let running = world.run(options);
    world.insert_all(&world.sample(world.base, 16).await, "champion").await;
    let reason = world.paused().await;
    assert!(reason.contains("KL(old‖new)"), "{reason}");
    world.settled().await;
    running.stop().await;
    assert_eq!((world.line().await, world.steps().await), ((world.base, 0), 0));
    let dispositions = world.dispositions().await;
    assert_eq!(dispositions.len(), 24);
    assert!(dispositions.iter().all(|d| d.code.as_deref() == Some("guard_kl")));
    assert_eq!(world.status().await.unwrap().0, "paused", "it waits for a person");
}
