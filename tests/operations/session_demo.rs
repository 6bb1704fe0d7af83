//! `springtide demo --surface session` at a small size, with the configuration that `make
//! bench NAME=session` uses: sessions flow from the users to the trainer as whole trajectories.

use std::fs;
use std::time::Duration;

use serde_json::Value;
use sqlx::{Connection, PgConnection};

use crate::up::Place;
use fixture::eventually;

const LIMIT: Duration = Duration::from_secs(300);
/// Of the shared configuration; a place has its own of these.
const OF_PLACE: [&str; 3] = ["state_dir", "policy.base", "stack.cache"];

#[tokio::test(flavor = "multi_thread")]
async fn sessions_of_simulated_users_close_and_are_trained_on_as_a_whole() {
    let place = Place::new();
    let lines = include_str!("../../demo/session.toml").lines();
    let shared = lines.filter(|line| !OF_PLACE.iter().any(|key| line.starts_with(key)));
    let file = place.dir.path().join("springtide.toml");
    let config = fs::read_to_string(&file).unwrap() + &shared.collect::<Vec<_>>().join("\n");
    fs::write(&file, config).unwrap();
    let replay = ["--surface", "session", "--minutes", "0.25", "--rate", "4"];
    let more = ["--start-sessions", "30", "--turn-signals"];
    let mut command = place.command(&[&["up", "--demo", "--"][..], &replay, &more].concat());
    command.env("SPRINGTIDE__TRAINER__REALTIME__COHORT_SIZE", "4");
    command.env("SPRINGTIDE__TRAINER__REALTIME__CREDIT", "turn");
    let mut up = place.start_command(command);
    up.says(&["the demo is over"], LIMIT).await;

    let report: Value = serde_json::from_slice(&fs::read(place.state("session.json")).unwrap()).unwrap();
    assert!(report["start"]["success"]["mean"].as_f64().is_some(), "{report}");
    let mut sessions = 0;
    for arm in ["learner", "champion", "base"] {
        let of_arm = report["whole"]["arms"][arm]["sessions"].as_i64().unwrap();
        assert!(of_arm > 2, "{arm}: {report}");
        sessions += of_arm;
    }
    assert_eq!(report["ledger"]["balanced"], true, "{}", report["ledger"]);
    let episodes = &report["episodes"];
    assert!(episodes["episodes"].as_i64().unwrap() >= sessions, "{episodes}");
    assert_eq!(episodes["closed"], episodes["episodes"], "{episodes}");
    assert_eq!(episodes["divided"], 0);
    assert!(episodes["turns"].as_i64() > episodes["episodes"].as_i64());
    // Users who say nothing or write a message have no verdict.
    assert!(episodes["censored"].as_i64() > Some(0), "{episodes}");
    assert!(report["conclusion"].as_str().is_some_and(|text| !text.is_empty()));

    // The stack goes on. Sessions of several turns are trained on in one step, also by their turns'
    // own rewards.
    let mut connection = PgConnection::connect(&place.database_url()).await.unwrap();
    eventually("a session is trained on", LIMIT, async || {
        let trained: Option<(i64, i64)> = sqlx::query_as(
            "select count(distinct d.step), count(t.turn_reward) \
             from trajectory t join disposition d on d.generation_id = t.generation_id and d.kind = 'trained' \
             where t.episode_turns > 1 group by t.episode_id having count(*) = min(t.episode_turns) limit 1",
        )
        .fetch_optional(&mut connection)
        .await
        .unwrap();
        trained.inspect(|(steps, rewards)| assert!(*steps == 1 && *rewards > 1))
    })
    .await;
}
