//! What a trajectory is used for: once by the realtime run, and any number of times by runs over
//! datasets. Datasets: what they select, keep, say is gone, and show to whom.

use super::offline::{control, get};
use super::world::{POLICY, Sampled, TEST, World};
use edge::audit::{self, rows::Trail};
use edge::auth::key::{self, Grant, NewKey};
use edge::auth::{Auth, AuthOptions, Scope, Scopes};
use edge::tenant;
use fixture::{eventually, succeed};
use runs::api::HarnessUrls;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::net::TcpListener;
use uuid::Uuid;

pub const SOON: Duration = Duration::from_secs(90);

pub async fn post(url: String, body: &Value) -> (u16, Value) {
    let response = reqwest::Client::new().post(url).json(body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

/// Inserts trajectories that closed a minute ago: younger ones are in no dataset yet.
pub async fn insert(world: &World, sampled: &[Sampled]) {
    world.insert_all(sampled, "champion").await;
    let ids: Vec<Uuid> = sampled.iter().map(|one| one.id).collect();
    sqlx::query("update trajectory set closed_at = closed_at - interval '1 minute' where generation_id = any ($1)")
        .bind(ids)
        .execute(&world.stack.pool)
        .await
        .unwrap();
}

pub async fn dataset(control: &str, name: &str, query: Value) -> Value {
    let (status, made) = post(format!("{control}/v1/datasets"), &json!({"name": name, "query": query})).await;
    assert_eq!(status, 201, "{made}");
    made
}

/// Creates a run and waits until it has succeeded.
pub async fn run(control: &str, body: Value) -> Value {
    let (status, created) = post(format!("{control}/v1/runs"), &body).await;
    assert_eq!(status, 201, "{created}");
    let url = format!("{control}/v1/runs/{}", created["id"].as_str().unwrap());
    let ended = eventually("the run ends", SOON, async || {
        let run = get(url.clone()).await;
        run["finished_at"].is_string().then_some(run)
    })
    .await;
    assert_eq!(ended["status"], "succeeded", "{ended}");
    ended
}

/// The kind and purpose of each use of a generation, in the order of the runs.
async fn uses(world: &World, generation: Uuid) -> Vec<(String, String)> {
    sqlx::query_as(
        "select r.kind, u.purpose from trajectory_use u join run r on r.id = u.run_id
         where u.generation_id = $1 order by r.created_at",
    )
    .bind(generation)
    .fetch_all(&world.stack.pool)
    .await
    .unwrap()
}

pub fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trajectory_has_one_disposition_and_a_use_for_each_run_that_used_it() {
    let world = World::start("uses").await;
    world.follow(1, world.base, 0).await;
    let cohort = world.sample(world.base, 8).await;
    insert(&world, &cohort).await;
    let mut options = world.options();
    options.offline.enabled = true;
    let running = world.run(options);
    world.head_after(world.base).await;
    let control = control(&world).await;

    let made = dataset(
        &control,
        "accepted",
        json!({"surfaces": ["completion"], "reward_min": 0.5}),
    )
    .await;
    let accepted: Vec<&Sampled> = cohort.iter().filter(|one| one.reward == Some(0.75)).collect();
    assert_eq!(
        (&made["version"], &made["generations"]),
        (&json!(1), &json!(accepted.len()))
    );
    let mut ids = blake3::Hasher::new();
    for one in &accepted {
        ids.update(one.id.as_bytes());
    }
    assert_eq!(made["digest"], ids.finalize().to_hex().to_string());

    let evaluate = json!({"kind": "evaluate", "dataset": "accepted@1", "base_version": world.base});
    let before = run(&control, evaluate.clone()).await;
    let again = run(&control, evaluate).await;
    assert_eq!(before["result"], again["result"]);
    // on-policy: the version computes what was logged, so every weight is exactly 1
    let measured = &before["result"];
    assert_eq!(measured["effective_sample_size"], accepted.len() as f64);
    assert_eq!(
        (&measured["reward_weighted"], &measured["reward_mean"]),
        (&json!(0.75), &json!(0.75))
    );
    run(&control, json!({"kind": "export", "dataset": "accepted@1"})).await;
    let sft = json!({"kind": "sft", "dataset": "accepted@1", "base_version": world.base, "steps": 3,
                     "batch_size": 2, "learning_rate": 1e-3});
    let sft = run(&control, sft).await;
    assert_eq!(sft["steps_done"], 3);

    let expected = [
        ("realtime", "trained"),
        ("evaluate", "evaluated"),
        ("evaluate", "evaluated"),
        ("export", "exported"),
    ];
    let mut trained_by_sft = 0;
    for one in &accepted {
        let uses = uses(&world, one.id).await;
        let uses: Vec<(&str, &str)> = uses
            .iter()
            .map(|(kind, purpose)| (kind.as_str(), purpose.as_str()))
            .collect();
        assert_eq!(uses[..4], expected, "{uses:?}");
        assert!(uses[4..].iter().all(|one| *one == ("sft", "trained")), "{uses:?}");
        trained_by_sft += uses.len() - 4;
        assert!(uses.len() >= 5, "each was in the first pass: {uses:?}");
    }
    // two batches make a pass over three; the third step is of the next pass
    assert!((4..=5).contains(&trained_by_sft), "{trained_by_sft}");
    let decided = world.dispositions().await;
    assert_eq!(decided.len(), 8);
    assert!(
        decided.iter().all(|one| one.kind == "trained" && one.step == Some(1)),
        "{decided:?}"
    );
    for one in cohort.iter().filter(|one| one.reward != Some(0.75)) {
        assert_eq!(
            uses(&world, one.id).await,
            [("realtime".to_owned(), "trained".to_owned())]
        );
    }

    // the exported tokens are those that were logged, to the bit
    let file = reqwest::get(format!("{control}/v1/datasets/accepted/1/export"))
        .await
        .unwrap();
    assert_eq!(file.headers()["content-type"], "application/jsonl");
    let lines = lines(&file.text().await.unwrap());
    assert_eq!(lines.len(), accepted.len());
    for (line, one) in lines.iter().zip(&accepted) {
        assert_eq!(line["generation_id"], one.id.to_string());
        assert_eq!(line["prompt_ids"], json!(one.prompt));
        assert_eq!(line["token_ids"], json!(one.tokens));
        let logprobs: Vec<f32> = serde_json::from_value(line["logprobs"].clone()).unwrap();
        assert_eq!(logprobs, one.logprobs);
        assert_eq!(line["reward"], 0.75);
    }

    // the supervised run has a line of its own, and says the accepted texts more often
    assert_eq!(world.line().await.1, 0);
    let head = sft["head"].as_i64().unwrap();
    let after = run(
        &control,
        json!({"kind": "evaluate", "dataset": "accepted@1", "base_version": head}),
    )
    .await;
    let logprob = |run: &Value| run["result"]["logprob_mean"].as_f64().unwrap();
    assert!(logprob(&after) > logprob(&before), "{after} {before}");
    let steps: Vec<(Value,)> = sqlx::query_as("select metrics from step where run_id = $1 order by step")
        .bind(sft["id"].as_str().unwrap().parse::<Uuid>().unwrap())
        .fetch_all(&world.stack.pool)
        .await
        .unwrap();
    assert_eq!(steps[0].0["notes"]["dataset"], "accepted@1");
    assert_eq!(steps[2].0["notes"]["pass"], 2);
    assert_eq!(steps[0].0["mismatch"]["difference_max"], 0.0);

    // retention deletes the oldest generation with everything about it, and the dataset says so
    let shown = get(format!("{control}/v1/datasets/accepted/1")).await;
    assert_eq!(
        (&shown["available"], &shown["complete"]),
        (&json!(accepted.len()), &json!(true))
    );
    let until = cohort.iter().map(|one| one.id).find(|id| *id > accepted[0].id).unwrap();
    for expire in [
        "delete from generation where id < $1",
        "delete from trajectory where generation_id < $1",
        "insert into generation_horizon (until_id) values ($1)",
    ] {
        sqlx::query(expire)
            .bind(until)
            .execute(&world.stack.pool)
            .await
            .unwrap();
    }
    let shown = get(format!("{control}/v1/datasets/accepted/1")).await;
    assert_eq!(
        (&shown["generations"], &shown["expired"]),
        (&json!(accepted.len()), &json!(1))
    );
    assert_eq!(
        (&shown["available"], &shown["withdrawn"]),
        (&json!(accepted.len() - 1), &json!(0))
    );
    assert_eq!(shown["complete"], false);
    eventually("its uses are forgotten with it", SOON, async || {
        uses(&world, accepted[0].id).await.is_empty().then_some(())
    })
    .await;
    let left = run(&control, json!({"kind": "export", "dataset": "accepted@1"})).await;
    assert_eq!(left["result"]["generations"], accepted.len() - 1);
    assert!(
        left["result"]["parts"].is_null(),
        "where it lies is not for clients: {left}"
    );

    // the same from the command line
    let cli = |args: &str| {
        let args: Vec<&str> = args.split(' ').collect();
        let mut command = world.stack.springtide(&args);
        tokio::task::block_in_place(|| succeed(command.env("SPRINGTIDE__CLIENT__CONTROL", &control)))
    };
    assert!(cli("dataset list").contains("accepted@1"));
    let shown = cli("dataset show accepted@1");
    assert!(
        shown.contains("2 (2 trajectories) are available; 1 were deleted by retention"),
        "{shown}"
    );
    cli("dataset export accepted@1 --format parquet --out accepted.parquet");
    let file = std::fs::read(world.stack.dir.path().join("accepted.parquet")).unwrap();
    assert!(file.starts_with(b"PAR1") && file.ends_with(b"PAR1"), "{}", file.len());
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_of_a_dataset_never_gets_more_generations() {
    let world = World::start("datasets").await;
    world.follow(1, world.base, 0).await;
    let mut first = world.sample(world.base, 6).await;
    for (at, one) in first.iter_mut().enumerate() {
        one.user = format!("user-{at}");
        one.surface = ["completion", "edit"][at % 2].to_owned();
    }
    insert(&world, &first).await;
    let control = control(&world).await;
    let all = dataset(&control, "all", json!({})).await;
    assert_eq!(all["generations"], 6);
    let limited = dataset(&control, "two", json!({"limit": 2})).await;
    assert_eq!(limited["generations"], 2);
    let edits = dataset(&control, "edits", json!({"surfaces": ["edit"], "arms": ["champion"]})).await;
    assert_eq!(edits["generations"], 3);
    let split = |rest: bool| json!({"split": {"salt": "s", "share": 0.5, "rest": rest}});
    let (share, rest) = (
        dataset(&control, "share", split(false)).await,
        dataset(&control, "share", split(true)).await,
    );
    assert_eq!((&share["version"], &rest["version"]), (&json!(1), &json!(2)));
    let count = |made: &Value| made["generations"].as_i64().unwrap();
    assert_eq!(count(&share) + count(&rest), 6);

    // later trajectories are in new versions only, also where there was room below the limit
    insert(&world, &world.sample(world.base, 3).await).await;
    let gone = "with gone as (delete from generation where id = $1) delete from trajectory where generation_id = $1";
    sqlx::query(gone)
        .bind(first[0].id)
        .execute(&world.stack.pool)
        .await
        .unwrap();
    for (name, available) in [("all", 5), ("two", 1), ("edits", 3)] {
        let shown = get(format!("{control}/v1/datasets/{name}/1")).await;
        assert_eq!(shown["available"], available, "{shown}");
        assert_eq!(shown["complete"], available == 3, "{shown}");
    }
    assert_eq!(dataset(&control, "all", json!({})).await["generations"], 8);
    let list = get(format!("{control}/v1/datasets?limit=2")).await;
    let names = |list: &Value| -> Vec<String> {
        let data = list["data"].as_array().unwrap().iter();
        data.map(|one| format!("{}@{}", one["name"].as_str().unwrap(), one["version"]))
            .collect()
    };
    assert_eq!(
        (names(&list), &list["has_more"]),
        (vec!["all@2".into(), "all@1".into()], &json!(true))
    );
    let next = get(format!("{control}/v1/datasets?limit=2&after=all@1")).await;
    assert_eq!(names(&next), ["edits@1", "share@2"]);

    // the audit knows each version as it was made
    let mut connection = world.stack.pool.acquire().await.unwrap();
    for faults in [0, 1] {
        let rows = runs::dataset::store::audited(&mut connection).await.unwrap();
        let trail = Trail::read(&mut connection, "dataset").await.unwrap();
        assert_eq!(rows.len(), 6);
        assert_eq!(audit::rows::compare("dataset", &rows, &trail).len(), faults);
        let forged = "update dataset set query = query || '{\"limit\": 9}' where name = 'two'";
        sqlx::query(forged).execute(&mut *connection).await.unwrap();
    }

    // what cannot be meant is refused
    let datasets = format!("{control}/v1/datasets");
    for (body, status) in [
        (json!({"name": "Bad name"}), 400),
        (json!({"name": "x", "query": {"surface": ["edit"]}}), 400), // a field that does not exist
        (
            json!({"name": "x", "query": {"split": {"salt": "", "share": 0.5}}}),
            400,
        ),
        (json!({"name": "x", "query": {"surfaces": ["nowhere"]}}), 409),
    ] {
        let (found, problem) = post(datasets.clone(), &body).await;
        assert_eq!(found, status, "{body}: {problem}");
    }
    assert_eq!(get(format!("{datasets}/none/1")).await["status"], 404);
    assert_eq!(
        get(format!("{datasets}/all/1/export")).await["status"],
        404,
        "not exported yet"
    );
    for (kind, name, status) in [("sft", "none@1", 404), ("dpo", "all@1", 400), ("kto", "all@1", 400)] {
        let body = json!({"kind": kind, "dataset": name});
        let (found, problem) = post(format!("{control}/v1/runs"), &body).await;
        assert_eq!(found, status, "{body}: {problem}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_split_is_by_user_and_the_same_everywhere() {
    let world = World::start("splits").await;
    let places: Vec<(String, bool, bool, bool)> = sqlx::query_as(
        "select u, user_in_split('{\"salt\": \"a\", \"share\": 0.3}', 't', u),
                user_in_split('{\"salt\": \"a\", \"share\": 0.3, \"rest\": true}', 't', u),
                user_in_split('{\"salt\": \"b\", \"share\": 0.3}', 't', u)
         from (select 'user-' || n as u from generate_series(1, 2000) n) users",
    )
    .fetch_all(&world.stack.pool)
    .await
    .unwrap();
    let share = places.iter().filter(|place| place.1).count();
    // 2,000 draws of 0.3: the standard deviation is 20.5
    assert!((500..700).contains(&share), "{share}");
    assert!(places.iter().all(|place| place.1 != place.2));
    let other_salt = places.iter().filter(|place| place.1 && place.3).count();
    assert!((100..260).contains(&other_salt), "{other_salt} of both salts");
    // the SHA-256 of `1:a1:tuser-1` begins with b7954e74: 0.7172
    for (share, expected) in [(0.7171, false), (0.7173, true)] {
        let split = json!({"salt": "a", "share": share});
        let found: bool = sqlx::query_scalar("select user_in_split($1, 't', 'user-1')")
            .bind(split)
            .fetch_one(&world.stack.pool)
            .await
            .unwrap();
        assert_eq!(found, expected, "{share}");
    }
}

/// Serves the control API with keys. Returns the base URL.
async fn control_with_keys(world: &World) -> String {
    let pool = world.stack.pool_of("control");
    let required = AuthOptions {
        required: true,
        ..AuthOptions::default()
    };
    let auth = Auth::new(required, pool.clone());
    let harness_urls = HarnessUrls {
        anywhere: "http://127.0.0.1:8000".to_owned(),
        clusters: BTreeMap::new(),
    };
    let (exports, store) = (world.payloads().exports(), world.publisher.store.clone());
    let routes = runs::api::routes(pool, POLICY, Some(exports), store, harness_urls);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, routes.protected_by(&auth, "control")).await });
    format!("http://{address}")
}

async fn key(world: &World, tenant: &str, scopes: &[Scope]) -> String {
    let new = NewKey {
        tenant,
        grant: Grant::Scopes(Scopes::of(scopes)),
        label: tenant,
        expires_at: None,
        replica: None,
        requests_per_second: None,
    };
    key::create(&world.stack.pool, &new, TEST, "").await.unwrap().secret
}

/// A request with a key. Returns the status and the body.
async fn ask(key: &str, url: String, body: Option<&Value>) -> (u16, String) {
    let client = reqwest::Client::new();
    let request = match body {
        Some(body) => client.post(url).json(body),
        None => client.get(url),
    };
    let answer = request.bearer_auth(key).send().await.unwrap();
    (answer.status().as_u16(), answer.text().await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn consent_and_tenant_decide_who_gets_what_of_a_dataset() {
    let world = World::start("dataset_tenants").await;
    world.follow(1, world.base, 0).await;
    tenant::consent(&world.stack.pool, POLICY, "guest", TEST, "")
        .await
        .unwrap();
    let own = world.sample(world.base, 3).await;
    let mut guests = world.sample(world.base, 2).await;
    guests.iter_mut().for_each(|one| one.tenant = "guest".into());
    let mut strangers = world.sample(world.base, 2).await;
    strangers.iter_mut().for_each(|one| one.tenant = "stranger".into());
    for sampled in [&own, &guests, &strangers] {
        insert(&world, sampled).await;
    }
    let control = control_with_keys(&world).await;
    let research = [Scope::Read, Scope::Research];
    let owner = key(&world, "default", &research).await;
    let admin = key(&world, "elsewhere", &[Scope::Admin]).await;

    let datasets = format!("{control}/v1/datasets");
    let (status, made) = ask(&owner, datasets.clone(), Some(&json!({"name": "all"}))).await;
    assert_eq!(status, 201, "{made}");
    let made: Value = serde_json::from_str(&made).unwrap();
    assert_eq!(made["generations"], 5, "who does not consent is in none: {made}");
    assert_eq!(made["query"]["tenants"], json!(["default", "guest"]));
    tenant::consent(&world.stack.pool, POLICY, "stranger", TEST, "")
        .await
        .unwrap();
    let one = format!("{datasets}/all/1");
    let show = async || -> Value { serde_json::from_str(&ask(&owner, one.clone(), None).await.1).unwrap() };
    assert_eq!(show().await["available"], 5, "a later consent adds nothing");

    let mut options = world.options();
    options.realtime.enabled = false;
    options.offline.enabled = true;
    let running = world.run(options);
    let export = json!({"kind": "export", "dataset": "all@1"});
    let ended = async |key: &str| {
        let (status, created) = ask(key, format!("{control}/v1/runs"), Some(&export)).await;
        assert_eq!(status, 201, "{created}");
        let created: Value = serde_json::from_str(&created).unwrap();
        let url = format!("{control}/v1/runs/{}", created["id"].as_str().unwrap());
        eventually("the export ends", SOON, async || {
            let run: Value = serde_json::from_str(&ask(key, url.clone(), None).await.1).unwrap();
            run["finished_at"].is_string().then_some(run)
        })
        .await
    };
    let file = format!("{one}/export");
    let tenants = |text: &str| {
        let mut counts = BTreeMap::new();
        for line in lines(text) {
            *counts.entry(line["tenant"].as_str().unwrap().to_owned()).or_insert(0) += 1;
        }
        counts
    };
    // an administrator's export has all tenants, and the owner's key does not get it
    assert_eq!(ended(&admin).await["status"], "succeeded");
    let (status, all) = ask(&admin, file.clone(), None).await;
    assert_eq!(
        (status, tenants(&all)),
        (200, [("default".into(), 3), ("guest".into(), 2)].into())
    );
    assert_eq!(ask(&owner, file.clone(), None).await.0, 404);
    assert_eq!(ended(&owner).await["status"], "succeeded");
    let (status, ours) = ask(&owner, file.clone(), None).await;
    assert_eq!((status, tenants(&ours)), (200, [("default".into(), 3)].into()));
    let (_, again) = ask(&admin, file.clone(), None).await;
    assert_eq!(again, all, "an administrator does not get the owner's newer one");

    // a withdrawal: what is left of the dataset, and no file with the tenant's rows
    ended(&admin).await;
    tenant::withdraw(&world.stack.pool, POLICY, "guest", TEST, "")
        .await
        .unwrap();
    let shown = show().await;
    assert_eq!(
        (&shown["available"], &shown["withdrawn"]),
        (&json!(3), &json!(2)),
        "{shown}"
    );
    assert_eq!(shown["complete"], false);
    assert_eq!(ask(&admin, file.clone(), None).await.0, 409);
    assert_eq!(ask(&owner, file.clone(), None).await.0, 200, "it never had the guest's");
    ended(&admin).await;
    let (status, left) = ask(&admin, file.clone(), None).await;
    assert_eq!((status, tenants(&left)), (200, [("default".into(), 3)].into()));
    running.stop().await;

    // a dataset of another tenant's key is not shown
    let (status, _) = ask(&admin, datasets.clone(), Some(&json!({"name": "admins"}))).await;
    assert_eq!(status, 201);
    assert_eq!(ask(&owner, format!("{datasets}/admins/1"), None).await.0, 404);
    let list: Value = serde_json::from_str(&ask(&owner, datasets, None).await.1).unwrap();
    assert_eq!(list["data"].as_array().unwrap().len(), 1);
}
