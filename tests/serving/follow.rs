//! `springtide follow` as a process: signed assignments in a store, and folders, a command or an
//! engine that follow them. It is killed and started again in the middle of updates.

mod engine;
mod real;
mod world;

use std::time::Duration;

use artifact::checkpoint::Checkpoint;
use serde_json::{Value, json};
use world::{Follower, World};

use engine::Engine;
use fixture::eventually;

const LIMIT: Duration = Duration::from_secs(120);

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_follows_its_alias_by_deltas_back_and_forth_and_over_a_kill() {
    let mut world = World::new().await;
    let dir = world.path("weights");
    world.assign(&[("champion", 1)]).await;
    let follower = Follower::start(&world, &["--engine", "folder", "--dir", &dir]).await;
    world.in_force(&dir, 1).await;
    let first = follower.metric("springtide_followed_bytes_total").await;
    world.assign(&[("champion", 2), ("base", 1)]).await;
    world.in_force(&dir, 2).await;
    let delta = follower.metric("springtide_followed_bytes_total").await - first;
    assert!(delta > 0.0 && delta < first / 2.0, "{first} and {delta} bytes");
    let status: Value = follower.get("/v1/follow").await.json().await.unwrap();
    let expected = json!({"policy": "demo", "alias": "champion", "engine": "folder", "epoch": 2, "version": 2,
        "root": world.root(2).to_string(), "ready": true, "in_flight": null});
    assert_eq!(status, expected);

    // kill -9; the next process starts from what is on the disk
    follower.kill().await;
    world.assign(&[("champion", 3)]).await;
    let follower = Follower::start(&world, &["--engine", "folder", "--dir", &dir]).await;
    world.in_force(&dir, 3).await;
    assert!(follower.metric("springtide_followed_bytes_total").await < first / 2.0);
    // a rollback to what is still there fetches nothing
    let fetched = follower.metric("springtide_followed_bytes_total").await;
    world.assign(&[("champion", 2)]).await;
    world.in_force(&dir, 2).await;
    assert_eq!(follower.metric("springtide_followed_bytes_total").await, fetched);

    // what nobody trusted has signed changes nothing, and is an alarm
    world.assign_as_stranger(&[("champion", 1)]).await;
    eventually("the alarm", LIMIT, async || {
        (follower.metric("springtide_follow_failing").await == 1.0).then_some(())
    })
    .await;
    assert_eq!(Checkpoint::read_dir(&world.folder(&dir)).unwrap().root(), world.root(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_is_in_force_once_its_command_has_succeeded() {
    let mut world = World::new().await;
    let dir = world.path("weights");
    let log = world.path("log");
    // takes a version only while the file `ready` is there
    let line = format!(
        r#"echo "$SPRINGTIDE_VERSION $SPRINGTIDE_ROOT $(basename "$SPRINGTIDE_FOLDER") ${{SPRINGTIDE_PATCH:+patch}} $SPRINGTIDE__FOLLOW__API_KEY" >> {log}; test -f {}"#,
        world.path("ready")
    );
    std::fs::write(world.path("ready"), "").unwrap();
    world.assign(&[("champion", 1)]).await;
    let arguments = ["--engine", "command", "--dir", &dir, "--command", &line];
    let follower = Follower::start(&world, &arguments).await;
    world.in_force(&dir, 1).await;
    std::fs::remove_file(world.path("ready")).unwrap();
    world.assign(&[("champion", 2)]).await;
    eventually("two tries", LIMIT, async || {
        let tried = follower.metric("springtide_follow_command_failures_total").await;
        (tried >= 2.0).then_some(())
    })
    .await;
    assert_eq!(Checkpoint::read_dir(&world.folder(&dir)).unwrap().root(), world.root(1));
    assert_eq!(follower.metric("springtide_follow_failing").await, 1.0);
    std::fs::write(world.path("ready"), "").unwrap();
    world.in_force(&dir, 2).await;
    let ran = std::fs::read_to_string(&log).unwrap();
    let ran: Vec<&str> = ran.lines().map(str::trim_end).collect();
    let line_of = |serial: i64, patch: &str| {
        let (root, short) = (world.root(serial), world.root(serial).short());
        format!("{serial} {root} v{serial}-{short}{patch}")
    };
    // API keys are not in its environment
    assert_eq!(ran[0], line_of(1, ""));
    assert!(
        ran.len() >= 4 && ran[1..].iter().all(|ran| *ran == line_of(2, " patch")),
        "{ran:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_killed_in_the_middle_of_an_update_passes_nothing_before_the_probe() {
    let mut world = World::new().await;
    let engine = Engine::start(&world.checkpoint(1)).await;
    world.assign(&[("champion", 1)]).await;
    let arguments = ["--engine", "vllm", "--engine-url", &engine.url];
    let follower = Follower::start(&world, &arguments).await;
    eventually("the engine answers", LIMIT, async || {
        (follower.sample().await == 200).then_some(())
    })
    .await;
    assert_eq!(engine.holds().root(), world.root(1));
    assert_eq!(follower.post("/pause").await.status(), 404);

    // the engine stops in the middle of the next update
    engine.stall_updates(true);
    world.assign(&[("champion", 2)]).await;
    eventually("the update begins", LIMIT, async || engine.is_updating().then_some(())).await;
    assert_eq!(follower.sample().await, 503);
    follower.kill().await;
    engine.break_weights();
    engine.stall_updates(false);

    let sampled = engine.sampled();
    let follower = Follower::start(&world, &arguments).await;
    // before its first success nothing passes, and after it only what is proven
    eventually("the engine answers again", LIMIT, async || {
        let status = follower.sample().await;
        if status == 200 {
            assert_eq!(engine.holds().root(), world.root(2));
            return Some(());
        }
        assert_eq!(status, 503);
        None
    })
    .await;
    assert!(engine.sampled() > sampled);

    // killed while nothing changes: the engine still holds the version, and takes no folder again
    follower.kill().await;
    let folders = engine.loads();
    let follower = Follower::start(&world, &arguments).await;
    eventually("the engine answers at once", LIMIT, async || {
        (follower.sample().await == 200).then_some(())
    })
    .await;
    assert_eq!(engine.loads(), folders);
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_need_the_followers_key_and_never_send_it_to_the_engine() {
    let mut world = World::new().await;
    let engine = Engine::start(&world.checkpoint(1)).await;
    world.assign(&[("champion", 1)]).await;
    world.caller_key = Some("spring_caller".into());
    let follower = Follower::start(&world, &["--engine", "vllm", "--engine-url", &engine.url]).await;
    eventually("the engine answers", LIMIT, async || {
        (follower.sample().await == 200).then_some(())
    })
    .await;
    for path in ["/weight_info", "/v1/models", "/v1/follow"] {
        let url = format!("http://{}{path}", follower.address);
        assert_eq!(reqwest::get(url).await.unwrap().status(), 401, "{path}");
        assert_eq!(follower.get(path).await.status(), 200, "{path}");
    }
    let keys = engine.keys();
    assert!(
        !keys.is_empty() && keys.iter().all(|key| key == "Bearer of-the-engine"),
        "{keys:?}"
    );
}
