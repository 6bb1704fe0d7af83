//! The gate of a canary: its version and `champion`'s are evaluated on logged trajectories by the trainer
//! before any user gets it.

use super::offline::{control, offline};
use super::uses::{SOON, dataset, insert, post};
use super::world::{DECLINE, POLICY, Sampled, World, config};
use edge::auth::{OPEN_TENANT, Principal, Scope, Scopes};
use fixture::eventually;
use model::random_checkpoint;
use release::{ChampionBy, Evaluator, Learning, Options, ReleaseService};
use runs::api::control::cancel_run;
use runs::api::create::evaluate_version;
use runs::publish::import_checkpoint;
use serde_json::{Value, json};
use sqlx::PgPool;
use std::sync::Arc;
use store::Store;
use uuid::Uuid;

/// As the role `control` has it.
struct Evaluations(PgPool);

fn principal() -> Principal {
    Principal {
        tenant: OPEN_TENANT.to_owned(),
        scopes: Scopes::of(&[Scope::Research]),
        label: "control".to_owned(),
        key: None,
        replica: None,
        requests_per_second: None,
        is_person: false,
    }
}

#[async_trait::async_trait]
impl Evaluator for Evaluations {
    async fn start(&self, version: i64, dataset: &str) -> anyhow::Result<Result<Uuid, String>> {
        let started = evaluate_version(&self.0, POLICY, version, dataset, &principal()).await;
        Ok(started.map_err(|problem| problem.detail.unwrap_or_default()))
    }

    async fn cancel(&self, run: Uuid) -> anyhow::Result<()> {
        cancel_run(&self.0, POLICY, run, &principal()).await?;
        Ok(())
    }
}

/// Proposes a version. Returns the canary.
async fn propose(url: &str, version: i64, evaluation: &Value) -> Uuid {
    let strategy = json!({"evaluation": evaluation, "steps": [{"setWeight": 10}, {"pause": {}}]});
    let body = json!({"version": version, "strategy": strategy});
    let (status, made) = post(format!("{url}/v1/canaries"), &body).await;
    assert_eq!(status, 201, "{made}");
    made["id"].as_str().unwrap().parse().unwrap()
}

/// The status of each run that the canary's gate has started.
async fn evaluations(pool: &PgPool, canary: Uuid) -> Vec<String> {
    let started = "select r.status from canary c join run r on r.id = any (c.evaluations) where c.id = $1";
    sqlx::query_scalar(started).bind(canary).fetch_all(pool).await.unwrap()
}

/// Looks until the gate has decided about the canary. Returns the last transition.
async fn decided(releases: &ReleaseService, pool: &PgPool, id: Uuid) -> (String, String) {
    eventually("the gate decides", SOON, async || {
        releases.round().await.unwrap();
        let last: (String, String) =
            sqlx::query_as("select event, reason from canary_transition where canary_id = $1 order by id desc limit 1")
                .bind(id)
                .fetch_optional(pool)
                .await
                .unwrap()?;
        (last.0 != "approve").then_some(last)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_canary_waits_for_evaluations_on_logged_trajectories() {
    let world = World::start("canary_gate").await;
    let mut other = random_checkpoint(&config(), 12);
    let generation = json!({"springtide_decline_token_id": DECLINE});
    other
        .files
        .insert("generation_config.json".into(), generation.to_string().into());
    let other = import_checkpoint(&world.publisher, Arc::new(other), "other")
        .await
        .unwrap();
    let users = world.sample(world.base, 150).await;
    let users: Vec<Sampled> = (0..)
        .zip(users)
        .map(|(user, one)| Sampled {
            user: format!("user {user}"),
            ..one
        })
        .collect();
    insert(&world, &users).await;
    let runs = control(&world).await;
    dataset(&runs, "held", json!({})).await;

    let pool = world.stack.pool_of("control");
    let options = Options {
        champion: ChampionBy::Canary,
        ..Options::default()
    };
    let releases = ReleaseService::new(
        options,
        Learning::default(),
        POLICY,
        pool.clone(),
        Store::open(&world.stack.store_url).unwrap(),
        &world.stack.keys_dir,
        None,
    )
    .unwrap();
    releases.evaluate_with(Arc::new(Evaluations(pool.clone())));
    releases.round().await.unwrap();
    let control = fixture::serving::control(&world.stack, &releases).await;
    let running = world.run(offline(&world));

    let nowhere = propose(&control.url, other, &json!({"dataset": "none@1"})).await;
    let (event, reason) = decided(&releases, &pool, nowhere).await;
    assert_eq!(event, "refuse");
    assert!(reason.contains("could not evaluate version"), "{reason}");

    let tried = propose(&control.url, other, &json!({"dataset": "held@1"})).await;
    let (event, reason) = decided(&releases, &pool, tried).await;
    let own = format!("version {other} is estimated at");
    assert!(
        reason.contains(&own) && matches!(&*event, "prepare" | "refuse"),
        "{event}: {reason}"
    );
    let results: Vec<Value> =
        sqlx::query_scalar("select result from run where kind = 'evaluate' order by created_at, id")
            .fetch_all(&pool)
            .await
            .unwrap();
    let of_champion = &results[1];
    assert_eq!(of_champion["version"], world.base);
    // on its own trajectories every weight is 1
    let estimate = &of_champion["estimate"];
    let (reward, mean) = (
        estimate["reward"].as_f64().unwrap(),
        of_champion["reward_mean"].as_f64().unwrap(),
    );
    assert!(
        (reward - mean).abs() < 1e-9 && estimate["users"] == 150,
        "{of_champion}"
    );
    assert!(estimate["interval"][0].as_f64().unwrap() < reward, "{of_champion}");
    let robust = &estimate["doubly_robust"];
    let (robust, low) = (
        robust["reward"].as_f64().unwrap(),
        robust["interval"][0].as_f64().unwrap(),
    );
    // the model of the reward only moves it within its own error
    assert!(low < robust && (robust - mean).abs() < 0.1, "{of_champion}");

    // nobody evaluates from here on
    running.stop().await;
    let why = json!({"reason": "enough"});
    let abort = |canary: Uuid| post(format!("{}/v1/canaries/{canary}/abort", control.url), &why);
    if event == "prepare" {
        let (status, aborted) = abort(tried).await;
        assert_eq!(status, 200, "{aborted}");
    }
    let late = propose(&control.url, other, &json!({"dataset": "held@1", "timeout": "1s"})).await;
    let (event, reason) = decided(&releases, &pool, late).await;
    assert_eq!(event, "refuse");
    assert!(reason.contains("is still queued after 1 s"), "{reason}");
    assert_eq!(evaluations(&pool, late).await, ["cancelled", "cancelled"]);

    let left = propose(&control.url, other, &json!({"dataset": "held@1"})).await;
    eventually("its evaluations are queued", SOON, async || {
        releases.round().await.unwrap();
        (evaluations(&pool, left).await == ["queued", "queued"]).then_some(())
    })
    .await;
    let (status, aborted) = abort(left).await;
    assert_eq!(status, 200, "{aborted}");
    releases.round().await.unwrap();
    assert_eq!(evaluations(&pool, left).await, ["cancelled", "cancelled"]);
    assert_eq!(evaluations(&pool, tried).await, ["succeeded", "succeeded"]);
    control.stop().await;
}
