//! Two policies that avoid being scored, in the tables as the sink writes them: what is scored looks
//! better, and the run gets an alarm. A policy that stays as it is raises none.

// The same simulated sessions as those of `make bench NAME=monitors`.
#[path = "../../../serving/release/evidence/benches/monitors/sessions.rs"]
mod sessions;

use super::offline::{control, get};
use super::world::World;
use rand::{SeedableRng, rngs::StdRng};
use runs::monitors::Monitors;
use runs::options::Realtime;
use sessions::{HONEST_VERSIONS, Hack, Session, session, share};
use std::time::Duration;
use uuid::Uuid;

/// Sessions of the learning arm with each version; an arm that stays as it is has half as many.
const SESSIONS: usize = 200;
const VERSIONS: u32 = HONEST_VERSIONS + 8;

fn options() -> Realtime {
    let mut options = Realtime {
        answer_seconds_max: 0.0,
        ..Realtime::default()
    };
    options.alarms.reference_answers = 500;
    options.alarms.answers_per_false_alarm = 10_000.0;
    options
}

async fn world(name: &str) -> World {
    let world = World::start(name).await;
    let arms = r#"insert into experiment (policy, epoch, salt, arms, source, actor, reason)
                values ('demo', 1, '', '[{"alias": "learner", "weight": 2}, {"alias": "base", "weight": 1}]',
                        'configuration', 'test', '')"#;
    sqlx::query(arms).execute(&world.stack.pool).await.unwrap();
    let surface = serde_json::json!({"name": "agent", "trajectory": "episode", "metric": "accept"});
    world.define(&surface).await;
    world
}

async fn poll(world: &World, options: &Realtime) {
    // ids of this millisecond are not taken yet
    tokio::time::sleep(Duration::from_millis(5)).await;
    let monitors = Monitors {
        pool: world.stack.pool_of("train"),
        policy: "demo",
        options,
    };
    monitors.poll().await.unwrap();
}

/// Closed sessions of two turns each, in this order, with what their users said.
async fn insert(world: &World, version: i64, sessions: &[(&str, Session)]) {
    let pool = &world.stack.pool;
    let episodes: Vec<Uuid> = sessions.iter().map(|_| Uuid::now_v7()).collect();
    // the two turns of one session after the other
    let turns: Vec<[Uuid; 2]> = sessions.iter().map(|_| [Uuid::now_v7(), Uuid::now_v7()]).collect();
    let (firsts, lasts): (Vec<Uuid>, Vec<Uuid>) = turns.iter().map(|[first, last]| (*first, *last)).unzip();
    let arms: Vec<&str> = sessions.iter().map(|(arm, _)| *arm).collect();
    let column = |of: fn(&Session) -> f64| -> Vec<f64> { sessions.iter().map(|(_, session)| of(session)).collect() };
    let flags = |of: fn(&Session) -> bool| -> Vec<bool> { sessions.iter().map(|(_, session)| of(session)).collect() };
    let rewards: Vec<Option<f64>> = sessions.iter().map(|(_, session)| session.reward).collect();
    sqlx::query(
        "with session as (
             select * from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::text[], $5::float8[], $6::float8[], $7::float8[],
                                  $9::float8[])
                           as s (episode, first, last, arm, tokens, entropy, reward, repetition)
         ),
         turn as (
             select s.*, t.id, t.turn, greatest(s.tokens::int / 4, 4) as length
             from session s cross join lateral (values (s.first, 0), (s.last, 1)) t (id, turn)
         ),
         generated as (
             insert into generation
                 (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, surface,
                  episode_id, turn, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p,
                  finish_reason, declined, sampled_at, proven)
             select t.id, 'default', 'demo', $8, $8, '[]', '', 'realtime', 'r', 'production', 'agent',
                    t.episode, t.turn, 'u' || right(t.episode::text, 1), t.arm, 0.5, '{1}',
                    -- the share of 4-grams that repeat earlier ones is that of the session
                    array(select nth % (round((1 - t.repetition) * (t.length - 3))::int + 1) from generate_series(1, t.length) nth),
                    array_fill((-t.entropy)::real, array[t.length]), 1, 1,
                    'stop', false, now(), true
             from turn t
         )
         insert into trajectory (generation_id, surface, reward_definition, reward, censor_code, signal, episode_id, episode_turns)
         select t.id, 'agent', 1, t.reward, case when t.reward is null then 'no_feedback' end,
                case when t.reward is not null then 'accept' end, t.episode, 2
         from turn t",
    )
    .bind(&episodes)
    .bind(&firsts)
    .bind(&lasts)
    .bind(&arms)
    .bind(column(|session| session.tokens))
    .bind(column(|session| session.entropy))
    .bind(&rewards)
    .bind(version)
    .bind(column(|session| session.repetition))
    .execute(pool)
    .await
    .unwrap();
    sqlx::query(
        "with session as (
             select * from unnest($1::uuid[], $2::uuid[], $3::bool[], $4::bool[], $5::bool[], $6::bool[])
                           as s (episode, last, unanswered, accepted, edited, tool_failed)
         )
         insert into feedback (id, tenant_id, episode_id, generation_id, metric_name, value_bool, value_text, given_at)
         select uuidv7(), 'default', episode, null, 'accept', accepted, null, now() from session where not unanswered
         union all
         select uuidv7(), 'default', null, last, 'demonstration', null, 'better', now() from session where edited
         union all
         select uuidv7(), 'default', null, last, 'tool_failed', true, null, now() from session where tool_failed",
    )
    .bind(&episodes)
    .bind(&lasts)
    .bind(flags(|session| session.unanswered))
    .bind(flags(|session| session.accepted))
    .bind(flags(|session| session.edited))
    .bind(flags(|session| session.tool_failed))
    .execute(pool)
    .await
    .unwrap();
}

/// All versions of a policy. Returns the version after which the first alarm began.
async fn play(world: &World, hack: Hack) -> Option<u32> {
    let mut rng = StdRng::seed_from_u64(5);
    let mut first = None;
    for version in 0..VERSIONS {
        let mut sessions = Vec::new();
        for number in 0..SESSIONS {
            sessions.push(("learner", session(&mut rng, hack, share(version))));
            if number % 2 == 0 {
                sessions.push(("base", session(&mut rng, Hack::None, 0.0)));
            }
        }
        insert(world, i64::from(version), &sessions).await;
        poll(world, &options()).await;
        if first.is_none() && !world.events().await.is_empty() {
            first = Some(version);
        }
    }
    first
}

/// Of what is scored.
async fn mean_reward(world: &World, version: u32) -> f64 {
    let sql = "select avg(t.reward) from trajectory t join generation g on g.id = t.generation_id
               where g.version = $1 and g.arm = 'learner'";
    let query = sqlx::query_scalar(sql).bind(i64::from(version));
    query.fetch_one(&world.stack.pool).await.unwrap()
}

async fn caught(name: &str, hack: Hack) {
    let world = world(name).await;
    let (run, _claim) = world.claimed_run().await;
    let first = play(&world, hack).await;
    assert!(
        first.is_some_and(|version| version >= HONEST_VERSIONS),
        "{first:?}: {:?}",
        world.events().await
    );
    let (before, after) = (mean_reward(&world, 0).await, mean_reward(&world, VERSIONS - 1).await);
    assert!(after > before + 0.05, "{before} → {after}");
    let events = world.events().await;
    let unscored = events.iter().find(|event| {
        event.starts_with(
            "learner's answers on `agent` have changed: the share of shown answers without a reward is about",
        )
    });
    assert!(unscored.is_some(), "{events:?}");
    // as the other alarms of the run
    let shown = get(format!("{}/v1/runs/{run}", control(&world).await)).await;
    assert!(shown["alarm"].as_str().unwrap().contains("have changed"), "{shown}");
    let data: serde_json::Value = sqlx::query_scalar(
        "select data from run_event where run_id = $1 and data ->> 'alarm' = 'unscored of agent' order by id limit 1",
    )
    .bind(run)
    .fetch_one(&world.stack.pool)
    .await
    .unwrap();
    assert_eq!(
        (&data["state"], &data["figure"]),
        (&"began".into(), &"unscored".into()),
        "{data}"
    );
    assert!(data["recent"].as_f64() > data["others"].as_f64(), "{data}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_whose_tool_calls_break_and_are_never_scored_raises_an_alarm() {
    caught("monitors_broken", Hack::BrokenCall).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_asks_where_it_should_edit_raises_an_alarm() {
    caught("monitors_question", Hack::Question).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_stays_as_it_is_raises_none_and_its_figures_are_stored() {
    let world = world("monitors_same").await;
    let (run, _claim) = world.claimed_run().await;
    assert_eq!(play(&world, Hack::None).await, None, "{:?}", world.events().await);
    let figures: serde_json::Value =
        sqlx::query_scalar("select figures from monitor where run_id = $1 and surface = 'agent'")
            .bind(run)
            .fetch_one(&world.stack.pool)
            .await
            .unwrap();
    let recent = |name: &str| {
        let mut figures = figures.as_array().unwrap().iter();
        let figure = figures.find(|figure| figure["figure"] == name).unwrap();
        let levels = &figure["levels"];
        (levels["recent"].as_f64().unwrap(), levels["others"].as_f64().unwrap())
    };
    for (name, near, by) in [
        ("shown", 1.0, 1e-6),
        ("unscored", 0.25, 0.15),
        ("accepted", 0.36, 0.2),
        ("edited", 0.04, 0.06),
        ("length", 60.0, 15.0),
        ("repetition", 0.1, 0.03),
        ("entropy", 0.5, 0.1),
    ] {
        let (recent, others) = recent(name);
        assert!(
            (recent - near).abs() <= by && (others - near).abs() <= by,
            "{name}: {recent}, {others}: {figures}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn trajectories_are_taken_in_the_order_of_their_answers_once_all_before_have_closed() {
    let world = world("monitors_order").await;
    let (run, _claim) = world.claimed_run().await;
    let mut rng = StdRng::seed_from_u64(9);
    let sessions: Vec<(&str, Session)> = (0..450)
        .map(|_| ("learner", session(&mut rng, Hack::None, 0.0)))
        .collect();
    insert(&world, 1, &sessions[..300]).await;
    // the 100th session is still open
    let open: Uuid = sqlx::query_scalar(
        "with waiting as (select generation_id, episode_id from trajectory order by generation_id offset 198 limit 2),
              gone as (delete from trajectory t using waiting w where t.generation_id = w.generation_id)
         insert into open_generation (generation_id, surface, closes_at, proven, episode_id)
         select generation_id, 'agent', now() + interval '1 hour', true, episode_id from waiting returning episode_id",
    )
    .fetch_one(&world.stack.pool)
    .await
    .unwrap();
    let taken = async || -> i64 {
        poll(&world, &options()).await;
        sqlx::query_scalar(
            "select count(distinct t.episode_id) from trajectory t, monitor m where m.run_id = $1 and t.generation_id <= m.last_id",
        )
        .bind(run)
        .fetch_one(&world.stack.pool)
        .await
        .unwrap()
    };
    assert_eq!(taken().await, 99);
    sqlx::query("delete from open_generation where episode_id = $1")
        .bind(open)
        .execute(&world.stack.pool)
        .await
        .unwrap();
    assert_eq!(taken().await, 299);
    insert(&world, 1, &sessions[300..]).await;
    assert_eq!(taken().await, 449);
}
