//! The arms of the experiment: changed by the API while users are served, drawn anew by a salt, and
//! kept when the configuration changes. `make bench NAME=arms` serves more users and prints the figures.

use artifact::assignment::Assignment;
use artifact::sign::TrustedKeys;
use fixture::ingest::Service;
use fixture::serving::{Publisher, Role, control, releases, releases_with, serve, wait_for};
use fixture::{Stack, eventually};
use release::{ArmOptions, Options as ReleaseOptions};
use reqwest::Client;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};
use store::Store;

const SOON: Duration = Duration::from_secs(90);
/// Users who are served in turn: SPRINGTIDE_ARMS_USERS.
static USERS: LazyLock<usize> = LazyLock::new(|| match std::env::var("SPRINGTIDE_ARMS_USERS") {
    Ok(users) => users.parse().unwrap(),
    Err(_) => 300,
});
const CALLERS: usize = 3;

fn user(n: usize) -> String {
    format!("user-{n}")
}

/// One request of a caller.
#[derive(Debug)]
struct Answer {
    user: usize,
    status: u16,
    arm: String,
    generation: String,
    sent: Instant,
    done: Instant,
}

/// Users in turn until `stop`. `passes` counts how often all users of a caller were served.
async fn call(url: String, caller: usize, passes: Arc<AtomicUsize>, stop: Arc<AtomicBool>) -> Vec<Answer> {
    let http = Client::new();
    let mut answers = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        for user_number in (caller..*USERS).step_by(CALLERS) {
            let body = json!({"model": "demo", "prompt": [5, 6, 7], "max_tokens": 1, "user": user(user_number)});
            let sent = Instant::now();
            let request = http.post(format!("{url}/v1/completions")).json(&body);
            let response = request.send().await.unwrap();
            let status = response.status().as_u16();
            let answer: Value = response.json().await.unwrap();
            let text = |field: &str| answer["choices"][0][field].as_str().unwrap_or_default().to_owned();
            answers.push(Answer {
                user: user_number,
                status,
                arm: text("arm"),
                generation: text("generation_id"),
                sent,
                done: Instant::now(),
            });
        }
        passes.fetch_add(1, Ordering::Relaxed);
    }
    answers
}

/// Waits until every user was served twice from now on.
async fn all_served(passes: &[Arc<AtomicUsize>]) {
    let before: Vec<usize> = passes.iter().map(|passes| passes.load(Ordering::Relaxed)).collect();
    let long = SOON.mul_f64((*USERS as f64 / 300.0).max(1.0));
    eventually("every user was served", long, async || {
        let mut since = passes.iter().zip(&before);
        // the pass that runs began before
        let all = since.all(|(now, before)| now.load(Ordering::Relaxed) >= before + 2);
        all.then_some(())
    })
    .await;
}

async fn newest(stack: &Stack) -> Assignment {
    let store = Store::open(&stack.store_url).unwrap();
    let keys = TrustedKeys::load(&stack.keys_dir).unwrap();
    store.latest_assignment("demo", 0, &keys).await.unwrap().unwrap()
}

async fn put(control: &Role, body: &Value) -> (u16, Value) {
    let request = Client::new().put(format!("{}/v1/experiment", control.url)).json(body);
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

async fn get(control: &Role) -> Value {
    let response = reqwest::get(format!("{}/v1/experiment", control.url)).await.unwrap();
    response.json().await.unwrap()
}

fn arms(arms: &[(&str, f64)]) -> Value {
    let arm = |(alias, weight): &(&str, f64)| json!({"alias": alias, "weight": weight});
    arms.iter().map(arm).collect()
}

/// Sum of (observed − expected)² / expected over the arms.
fn chi_square(observed: &BTreeMap<String, f64>, expected: &BTreeMap<String, f64>) -> f64 {
    expected
        .iter()
        .map(|(arm, expected)| (observed.get(arm).copied().unwrap_or(0.0) - expected).powi(2) / expected)
        .sum()
}

/// A change of the arms under load, and when it was asked for and in force.
struct Changed {
    document: Assignment,
    asked: Instant,
    in_force: Instant,
}

/// Asks for a change and waits until a user whom it moves is served by the new arm.
async fn change(stack: &Stack, control: &Role, replica: &Role, body: &Value) -> Changed {
    let before = newest(stack).await;
    let asked = Instant::now();
    let (status, answer) = put(control, body).await;
    assert_eq!(status, 200, "{answer}");
    let document = newest(stack).await;
    assert_eq!(answer["epoch"].as_i64(), Some(document.epoch));
    let moved = (0..)
        .map(|n| format!("moved-{n}"))
        .find(|user| before.arm_for(user).0 != document.arm_for(user).0)
        .unwrap();
    let expected = document.arm_for(&moved).0;
    let body = json!({"model": "demo", "prompt": [5], "max_tokens": 1, "user": moved});
    let url = format!("{}/v1/completions", replica.url);
    eventually("the new arms are in force", SOON, async || {
        let answer = Client::new().post(&url).json(&body).send().await.unwrap();
        let answer: Value = answer.json().await.unwrap();
        (answer["choices"][0]["arm"] == expected).then_some(())
    })
    .await;
    let in_force = Instant::now();
    println!(
        "in force after {:.3} s: {}",
        (in_force - asked).as_secs_f64(),
        answer["arms"]
    );
    Changed {
        document,
        asked,
        in_force,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn arms_change_under_load_without_a_failed_request_and_what_is_logged_stays_true() {
    let stack = Stack::start("arms").await;
    let ingest = Service::start(&stack).await;
    let mut publisher = Publisher::new(&stack);
    publisher.publish(1, None, 0).await;
    publisher.publish(2, Some(1), 0).await;
    let releases = releases(&stack);
    releases.round().await.unwrap();
    let control = control(&stack, &releases).await;
    let replica = serve(&stack, None, stack.dir.path().join("serve")).await;
    wait_for(&replica.url, "demo@learner", 2).await;
    wait_for(&replica.url, "demo@base", 1).await;
    let first = newest(&stack).await;
    assert_eq!((first.salt.as_str(), first.arms.len()), ("", 3));

    let stop = Arc::new(AtomicBool::new(false));
    let passes: Vec<Arc<AtomicUsize>> = (0..CALLERS).map(|_| Arc::default()).collect();
    let callers: Vec<_> = (passes.iter().enumerate())
        .map(|(caller, passes)| tokio::spawn(call(replica.url.clone(), caller, passes.clone(), stop.clone())))
        .collect();
    let began = Instant::now();
    all_served(&passes).await;
    let shares = [("learner", 0.2), ("champion", 0.7), ("base", 0.1)];
    let reweighed = json!({"arms": arms(&shares), "reason": "wider"});
    let reweighed = change(&stack, &control, &replica, &reweighed).await;
    all_served(&passes).await;
    let salted = json!({"arms": arms(&shares), "salt": "spring", "reason": "another draw"});
    let salted = change(&stack, &control, &replica, &salted).await;
    all_served(&passes).await;
    stop.store(true, Ordering::Relaxed);
    let mut answers = Vec::new();
    for caller in callers {
        answers.extend(caller.await.unwrap());
    }
    assert!(answers.iter().all(|answer| answer.status == 200), "a request failed");
    println!("{} requests, none failed", answers.len());

    // (document, when it was asked for, when it was certainly in force)
    let changes = [
        (&first, began, began),
        (&reweighed.document, reweighed.asked, reweighed.in_force),
        (&salted.document, salted.asked, salted.in_force),
    ];
    for answer in &answers {
        let possible = (0..changes.len()).filter(|&i| {
            let replaced = changes.get(i + 1).is_some_and(|(.., in_force)| answer.sent > *in_force);
            answer.done >= changes[i].1 && !replaced
        });
        let mut arms = possible.map(|i| changes[i].0.arm_for(&user(answer.user)).0);
        assert!(arms.any(|arm| arm == answer.arm), "{answer:?}");
    }
    let drawn_anew = (0..*USERS).filter(|&n| {
        let arm = |document: &Assignment| document.arm_for(&user(n)).0.to_owned();
        arm(&reweighed.document) != arm(&salted.document)
    });
    assert!(drawn_anew.count() > *USERS / 5, "another salt moves many users");

    check_logged(&stack, &answers, &changes).await;
    for (document, ..) in changes {
        let mut observed: BTreeMap<String, f64> = BTreeMap::new();
        for n in 0..100_000 {
            let (arm, _) = document.arm_for(&user(n));
            *observed.entry(arm.into()).or_default() += 1.0;
        }
        let expected = document
            .arms
            .iter()
            .map(|arm| (arm.alias.clone(), 100_000.0 * arm.weight));
        let chi_square = chi_square(&observed, &expected.collect());
        println!("epoch {}: chi-square of 100000 users {chi_square:.2}", document.epoch);
        // exceeded once in 1000 draws (2 degrees of freedom); the users are fixed
        assert!(chi_square < 13.8, "{observed:?}");
    }
    replica.stop().await;
    control.stop().await;
    ingest.stop().await;
}

/// What was logged of the answers: every one once, each with an arm and a probability of the same
/// assignment, and over the users of one assignment as many in each arm as their probabilities say.
async fn check_logged(stack: &Stack, answers: &[Answer], changes: &[(&Assignment, Instant, Instant)]) {
    let ids: Vec<uuid::Uuid> = answers
        .iter()
        .map(|answer| answer.generation.parse().unwrap())
        .collect();
    let rows: Vec<(uuid::Uuid, String, String, f32)> = eventually("every answer is stored", SOON, async || {
        let sql = "select id, user_key, arm, arm_probability from generation where id = any($1)";
        let rows = sqlx::query_as(sql).bind(&ids).fetch_all(&stack.pool).await.unwrap();
        (rows.len() == ids.len()).then_some(rows)
    })
    .await;
    let logged: BTreeMap<uuid::Uuid, &(uuid::Uuid, String, String, f32)> =
        rows.iter().map(|row| (row.0, row)).collect();
    for (_, user, arm, probability) in &rows {
        let is_of = |document: &Assignment| {
            let (expected, share) = document.arm_for(user);
            (expected, share as f32) == (arm.as_str(), *probability)
        };
        assert!(
            changes.iter().any(|(document, ..)| is_of(document)),
            "{user} {arm} {probability}"
        );
    }
    for (i, (document, _, in_force)) in changes.iter().enumerate() {
        let until = changes.get(i + 1).map(|(_, asked, _)| *asked);
        // one answer of each user that was certainly by this assignment
        let certain = (answers.iter().zip(&ids))
            .filter(|(answer, _)| answer.sent >= *in_force && until.is_none_or(|until| answer.done < until));
        let of_user: BTreeMap<usize, uuid::Uuid> = certain.map(|(answer, id)| (answer.user, *id)).collect();
        assert_eq!(
            of_user.len(),
            *USERS,
            "every user was served under epoch {}",
            document.epoch
        );
        let mut observed: BTreeMap<String, f64> = BTreeMap::new();
        let mut probabilities: BTreeMap<String, f64> = BTreeMap::new();
        for id in of_user.values() {
            let (_, _, arm, probability) = logged[id];
            *observed.entry(arm.clone()).or_default() += 1.0;
            probabilities.insert(arm.clone(), f64::from(*probability));
        }
        let total: f64 = probabilities.values().sum();
        assert!((total - 1.0).abs() < 1e-6, "{probabilities:?}");
        let expected = probabilities
            .into_iter()
            .map(|(arm, share)| (arm, *USERS as f64 * share));
        let chi_square = chi_square(&observed, &expected.collect());
        println!(
            "epoch {}: chi-square of {} logged users {chi_square:.2}",
            document.epoch, *USERS
        );
        assert!(chi_square < 13.8, "{observed:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_for_arms_are_audited_or_refused_with_advice() {
    let stack = Stack::start("arms_api").await;
    let mut publisher = Publisher::new(&stack);
    let releases = releases(&stack);
    let control = control(&stack, &releases).await;
    let none_yet = reqwest::get(format!("{}/v1/experiment", control.url)).await.unwrap();
    assert_eq!(none_yet.status(), 404);
    let wider = [("learner", 0.2), ("champion", 0.8)];
    let (status, problem) = put(&control, &json!({"arms": arms(&wider)})).await;
    assert_eq!(
        (
            status,
            problem["detail"].as_str().unwrap().contains("no version is assigned")
        ),
        (409, true)
    );

    publisher.publish(1, None, 0).await;
    releases.round().await.unwrap();
    let configured = get(&control).await;
    assert_eq!(
        (&configured["source"], &configured["epoch"], &configured["arms"][0]),
        (
            &json!("configuration"),
            &json!(1),
            &json!({"alias": "learner", "weight": 0.3, "explore": 0.02, "version": 1})
        )
    );
    assert_eq!(configured["warnings"], json!([]));

    for (body, status, expected) in [
        (json!({"arms": arms(&[("learner", 0.5)])}), 400, "sum to 1"),
        (json!({"arms": arms(&wider), "salt": "Ä"}), 400, "salt"),
        (json!({"arms": arms(&wider), "until": "later"}), 400, "unknown field"),
        (
            json!({"arms": arms(&[("learner", 0.5), ("ghost", 0.5)])}),
            409,
            "`ghost` does not exist",
        ),
        (json!({"arms": arms(&[("champion", 1.0)])}), 409, "keep an arm for it"),
        (
            json!({"arms": [{"alias": "learner", "weight": 1, "temperature_max": 2.5}]}),
            400,
            "temperature_max = 2.5; give 0 to 2",
        ),
        (
            json!({"arms": [{"alias": "learner", "weight": 1, "probability_min": 1.0}]}),
            400,
            "probability_min = 1; give 0 to below 1",
        ),
        (
            json!({"arms": arms(&wider), "replaces": uuid::Uuid::nil()}),
            409,
            "not in force any more",
        ),
    ] {
        let (answered, problem) = put(&control, &body).await;
        let detail = problem["detail"].as_str().unwrap();
        assert!(
            answered == status && detail.contains(expected),
            "{body}: {answered} {detail}"
        );
    }
    let count = "select count(*) from audit where action like 'experiment.%'";
    let audited = async || -> i64 { sqlx::query_scalar(count).fetch_one(&stack.pool).await.unwrap() };
    assert_eq!(audited().await, 1, "the configuration's arms alone");

    let request = json!({"arms": arms(&wider), "replaces": configured["id"], "reason": "no base"});
    let (status, done) = put(&control, &request).await;
    assert_eq!(
        (status, &done["epoch"], &done["source"]),
        (200, &json!(2), &json!("request"))
    );
    assert_eq!(
        done["warnings"].as_array().unwrap().len(),
        1,
        "the configuration has other arms"
    );
    let (action, actor, subject, detail, reason): (String, String, String, String, String) =
        sqlx::query_as("select action, actor, subject, detail, reason from audit order by id desc limit 1")
            .fetch_one(&stack.pool)
            .await
            .unwrap();
    assert_eq!(
        (&*action, &*actor, subject.as_str(), &*reason),
        ("experiment.set", "operator", done["id"].as_str().unwrap(), "no base")
    );
    assert!(
        detail.contains("policy demo, epoch 2: learner 0.2, champion 0.8"),
        "{detail}"
    );

    // the same again changes nothing
    let (status, again) = put(&control, &json!({"arms": arms(&wider), "reason": "again"})).await;
    assert_eq!((status, &again["id"], audited().await), (200, &done["id"], 2));
    let document = newest(&stack).await;
    assert_eq!((document.epoch, document.arms.len()), (2, 2));

    // bounds on what users get reach the fleet, and are told wherever the arms are
    let mut bounded = arms(&wider);
    bounded[1]["temperature_max"] = json!(0.3);
    bounded[1]["probability_min"] = json!(0.25);
    let (status, done) = put(&control, &json!({"arms": bounded, "reason": "steadier"})).await;
    let champion = &done["arms"][1];
    assert_eq!((status, &champion["temperature_max"]), (200, &json!(0.3)));
    assert_eq!(champion["probability_min"], json!(0.25));
    for bound in ["temperature_max", "probability_min"] {
        assert!(done["arms"][0].get(bound).is_none(), "{done}");
    }
    let newest = newest(&stack).await;
    assert_eq!((newest.epoch, newest.temperature_max_of("champion")), (3, Some(0.3)));
    assert_eq!(newest.probability_min_of("champion"), Some(0.25));
    assert_eq!(newest.probability_min_of("learner"), None);
    let detail: String = sqlx::query_scalar("select detail from audit order by id desc limit 1")
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    let told = "champion 0.8 (temperature at most 0.3, shows from probability 0.25)";
    assert!(detail.contains(told), "{detail}");
    control.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_configuration_counts_until_a_request_has_set_arms() {
    let stack = Stack::start("arms_config").await;
    let mut publisher = Publisher::new(&stack);
    publisher.publish(1, None, 0).await;
    releases(&stack).round().await.unwrap();
    let arm = |alias: &str, weight| ArmOptions {
        alias: alias.into(),
        weight,
        explore: 0.0,
        temperature_max: None,
        probability_min: None,
    };
    let with = |arms: Vec<ArmOptions>| {
        let options = ReleaseOptions {
            arms,
            ..ReleaseOptions::default()
        };
        releases_with(&stack, options)
    };
    // `control` restarts with another file
    let half = with(vec![arm("learner", 0.5), arm("base", 0.5)]);
    assert_eq!(half.round().await.unwrap().epoch, 2);
    let shares = |document: &Assignment| {
        let arms = document.arms.iter().map(|arm| (arm.alias.clone(), arm.weight));
        arms.collect::<Vec<_>>()
    };
    let of_file = [("learner".to_owned(), 0.5), ("base".to_owned(), 0.5)];
    assert_eq!(shares(&newest(&stack).await), of_file);
    assert_eq!(half.round().await.unwrap().epoch, 2, "nothing to do");

    let control_role = control(&stack, &half).await;
    let request = json!({"arms": arms(&[("learner", 1.0)]), "salt": "summer", "reason": "all"});
    assert_eq!(put(&control_role, &request).await.0, 200);
    control_role.stop().await;
    let other = with(vec![arm("learner", 0.1), arm("champion", 0.9)]);
    assert_eq!(other.round().await.unwrap().epoch, 3, "the request holds");
    let document = newest(&stack).await;
    assert_eq!(
        (shares(&document), document.salt.as_str()),
        (vec![("learner".to_owned(), 1.0)], "summer")
    );
    let control_role = control(&stack, &other).await;
    let shown = get(&control_role).await;
    assert!(
        shown["warnings"][0].as_str().unwrap().contains("are not used"),
        "{shown}"
    );
    control_role.stop().await;

    // a document that a crash left out is published with the arms of its epoch
    let folder = stack.store_url.strip_prefix("file://").unwrap().to_owned() + "/policy/demo/assignment";
    for epoch in [2, 3] {
        std::fs::remove_file(format!("{folder}/{epoch:010}.json")).unwrap();
    }
    other.round().await.unwrap();
    releases(&stack).round().await.unwrap();
    let store = Store::open(&stack.store_url).unwrap();
    let keys = TrustedKeys::load(&stack.keys_dir).unwrap();
    let second = store.get_assignment("demo", 2, &keys).await.unwrap();
    assert_eq!((shares(&second), second.salt.as_str()), (of_file.to_vec(), ""));
    assert_eq!(newest(&stack).await, document);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn champion_follows_learner_when_it_is_three_versions_behind_or_learner_left_it() {
    let stack = Stack::start("arms_every").await;
    let mut publisher = Publisher::new(&stack);
    let releases = releases_with(
        &stack,
        ReleaseOptions {
            champion_every: 3,
            ..ReleaseOptions::default()
        },
    );
    let served = async || -> Vec<i64> {
        let sql = "select version from alias where alias in ('champion', 'learner') order by alias";
        sqlx::query_scalar(sql).fetch_all(&stack.pool).await.unwrap()
    };
    // 3, 4 and 5 are versions of other runs
    for (version, parent, champion) in [
        (1, None, 1),
        (2, Some(1), 1),
        (6, Some(2), 1),
        (7, Some(6), 7),
        (8, Some(7), 7),
    ] {
        publisher.publish(version, parent, 0).await;
        releases.round().await.unwrap();
        assert_eq!(served().await, [champion, version]);
    }
    let control = control(&stack, &releases).await;
    let rollback = json!({"kind": "rollback", "alias": "learner", "version": 2, "reason": "worse"});
    let request = Client::new()
        .post(format!("{}/v1/releases", control.url))
        .json(&rollback);
    assert_eq!(request.send().await.unwrap().status(), 201);
    releases.round().await.unwrap();
    assert_eq!(served().await, [2, 2], "version 2 does not descend from 7");
    publisher.publish(9, Some(2), 1).await;
    releases.round().await.unwrap();
    assert_eq!(served().await, [2, 9]);
    let mut connection = stack.pool.acquire().await.unwrap();
    let faults = release::audited::faults(&mut connection).await.unwrap();
    assert_eq!(faults, Vec::<String>::new());
    control.stop().await;
}
