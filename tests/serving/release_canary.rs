//! A version on its way to `champion`: proposed over HTTP, served to some of champion's users by a real
//! replica, compared on what users did, and promoted or taken back.
//!
//! What users did is written as rows, as the sink writes them: so each case has the evidence that it is
//! about.

mod cadence;
mod rollback;
mod shadow;
mod sums;

use fixture::Stack;
use fixture::serving::{Publisher, Role, control, releases_with, serve, wait_for, wait_until_ready};
use release::{ChampionBy, Options, ReleaseService, audited};
use serde_json::{Value, json};
use std::collections::BTreeSet;

pub struct World {
    pub stack: Stack,
    releases: ReleaseService,
    control: Role,
    pub replica: Role,
}

impl World {
    /// Versions 1 ← 2 ← 3. `champion` is held at 1; `learner` follows.
    async fn start(name: &str) -> Self {
        let options = Options {
            champion: ChampionBy::Canary,
            ..Options::default()
        };
        World::start_with(Stack::start(name).await, options).await
    }

    pub async fn start_with(stack: Stack, options: Options) -> Self {
        let releases = releases_with(&stack, options);
        let control = control(&stack, &releases).await;
        let replica = serve(&stack, Some(control.url.clone()), stack.dir.path().join("serve")).await;
        let mut publisher = Publisher::new(&stack);
        publisher.publish(1, None, 0).await;
        releases.round().await.unwrap();
        wait_until_ready(&replica.url).await;
        let world = World {
            releases,
            control,
            replica,
            stack,
        };
        let mut publisher = Publisher::new(&world.stack);
        publisher.checkpoints = [(1, model::random_checkpoint(&fixture::serving::tiny(), 1))].into();
        publisher.publish(2, Some(1), 0).await;
        publisher.publish(3, Some(2), 0).await;
        world.releases.round().await.unwrap();
        world
    }

    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let url = format!("{}{path}", self.control.url);
        let answer = reqwest::Client::new().post(url).json(body).send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    }

    pub async fn get(&self, path: &str) -> Value {
        let answer = reqwest::get(format!("{}{path}", self.control.url)).await.unwrap();
        assert_eq!(answer.status(), 200, "{path}");
        answer.json().await.unwrap()
    }

    /// Proposes a version with these steps. Returns the canary's id.
    pub async fn propose(&self, version: i64, steps: Value) -> String {
        let body = json!({"version": version, "reason": "try", "strategy": {"steps": steps}});
        let (status, canary) = self.post("/v1/canaries", &body).await;
        assert_eq!((status, &canary["state"]), (201, &json!("proposed")), "{canary}");
        canary["id"].as_str().unwrap().to_owned()
    }

    pub async fn decide(&self, id: &str, decision: &str) -> (u16, Value) {
        self.post(&format!("/v1/canaries/{id}/{decision}"), &json!({"reason": "because"}))
            .await
    }

    /// Looks until nothing changes any more, also once the replica holds the version. Returns the canary.
    async fn settled(&self, id: &str) -> Value {
        let mut before = Value::Null;
        loop {
            self.releases.round().await.unwrap();
            let now = self.get(&format!("/v1/canaries/{id}")).await;
            if now == before && now["state"] != "gated" {
                return now;
            }
            if now == before {
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
            before = now;
        }
    }

    async fn judgments(&self) -> Value {
        self.get("/v1/judgments").await
    }

    async fn version_of(&self, alias: &str) -> Option<i64> {
        let aliases = self.get("/v1/aliases").await;
        let of = aliases["aliases"]
            .as_array()
            .unwrap()
            .iter()
            .find(|row| row["alias"] == alias)?;
        of["version"].as_i64()
    }

    /// `users` users of an arm get ten answers each. Half of the users reward them with 0.2 more than
    /// `mean`, half with 0.2 less. `share`: of the canary, of champion's users, who are half of all.
    pub async fn answers(&self, arm: &str, version: i64, users: i32, mean: f64, share: f64) {
        let mut connection = self.stack.pool.acquire().await.unwrap();
        answer(&mut connection, arm, version, users, mean, share).await;
    }

    /// The same of version 1 as `champion` and of 2 as a canary that takes half of its users, at once: no
    /// look sees one side alone.
    pub async fn answers_of_both(&self, users: i32, champion: f64, canary: f64) {
        let mut transaction = edge::database::begin(&self.stack.pool).await.unwrap();
        answer(&mut transaction, "champion", 1, users, champion, 0.5).await;
        answer(&mut transaction, "canary", 2, users, canary, 0.5).await;
        transaction.commit().await.unwrap();
    }

    /// The arms that a hundred users get from the replica, as `arm=version`.
    async fn served(&self) -> Vec<String> {
        self.served_with(json!({"consent": false})).await
    }

    async fn served_with(&self, metadata: Value) -> Vec<String> {
        let client = reqwest::Client::new();
        let mut served = Vec::new();
        for user in 0..100 {
            let body = json!({"model": "demo", "prompt": [5, 6, 7], "max_tokens": 1, "user": format!("u{user}"),
                              "metadata": metadata});
            let url = format!("{}/v1/completions", self.replica.url);
            let answer = client.post(url).json(&body).send().await.unwrap();
            let answer: Value = answer.json().await.unwrap();
            let choice = &answer["choices"][0];
            served.push(format!("{}={}", choice["arm"].as_str().unwrap(), choice["version"]));
        }
        served
    }

    /// Nothing was done that the audit does not explain.
    pub async fn end(self) {
        let mut connection = self.stack.pool.acquire().await.unwrap();
        assert_eq!(audited::faults(&mut connection).await.unwrap(), Vec::<String>::new());
        drop(connection);
        self.replica.stop().await;
        self.control.stop().await;
    }
}

/// See [`World::answers`].
async fn answer(connection: &mut sqlx::PgConnection, arm: &str, version: i64, users: i32, mean: f64, share: f64) {
    let define = "insert into reward_definition (surface, version, definition) values ('completion', 1, '{}') on conflict do nothing";
    sqlx::query(define).execute(&mut *connection).await.unwrap();
    sqlx::query(
        "with made as (
             insert into generation
                 (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, surface,
                  episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p,
                  finish_reason, declined, finished_at, sampled_at, proven)
             select uuidv7(), 'default', 'demo', $2, $2, '[]', '', 'realtime', 'replica', 'production', 'completion',
                    uuidv7(), $1 || (n % $3), $1, $5, '{5}', '{6}', '{-1}', 1, 1,
                    'stop', false, clock_timestamp(), clock_timestamp(), true
             from generate_series(0, $3 * 10 - 1) n
             returning id, user_key
         )
         insert into trajectory (generation_id, surface, reward_definition, reward)
         select id, 'completion', 1, $4 + case when right(user_key, 1)::int % 2 = 0 then 0.2 else -0.2 end from made",
    )
    .bind(arm)
    .bind(version)
    .bind(users)
    .bind(mean)
    .bind(0.5 * if arm == "canary" { share } else { 1.0 - share })
    .execute(&mut *connection)
    .await
    .unwrap();
}

fn users_of(served: &[String], arm: &str) -> BTreeSet<usize> {
    let of_arm = served
        .iter()
        .enumerate()
        .filter(|(_, of)| of.split('=').next() == Some(arm));
    of_arm.map(|(user, _)| user).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_better_version_gets_more_users_step_by_step_and_becomes_champion() {
    let world = World::start("canary_better").await;
    let before = world.served().await;
    let steps = json!([{"setWeight": 20}, {"analysis": {"successCondition": "not_worse"}},
                       {"setWeight": 60}, {"pause": {}}, {"analysis": {"successCondition": "better"}}]);
    let id = world.propose(2, steps).await;
    let canary = world.settled(&id).await;
    assert_eq!(
        (&canary["state"], canary["step"].as_i64()),
        (&json!("canary"), Some(1)),
        "{canary}"
    );
    assert_eq!(canary["share"], 0.2);
    wait_for(&world.replica.url, "demo@canary", 2).await;
    let few = world.served().await;

    world.answers("champion", 1, 240, 0.5, 0.2).await;
    world.answers("canary", 2, 60, 0.5, 0.2).await;
    // requests that name an alias, and answers of an earlier assignment, are not drawn by the canary's shares
    world.answers("canary", 2, 500, 1.0, 2.0).await;
    world.answers("champion", 1, 500, 0.0, 0.0).await;
    let canary = world.settled(&id).await;
    assert_eq!(
        canary["step"], 1,
        "sixty users do not show that a version is at most 0.02 worse: {canary}"
    );
    world.answers("canary", 2, 60, 0.8, 0.2).await;
    let canary = world.settled(&id).await;
    assert_eq!(
        (&canary["state"], canary["step"].as_i64()),
        (&json!("canary"), Some(3)),
        "{canary}"
    );
    let many = eventually_more(&world, users_of(&few, "canary").len()).await;
    let (before, few, many) = (
        users_of(&before, "canary"),
        users_of(&few, "canary"),
        users_of(&many, "canary"),
    );
    assert!(
        before.is_empty() && !few.is_empty() && few.is_subset(&many),
        "{few:?} {many:?}"
    );

    assert_eq!(world.decide(&id, "resume").await.0, 200);
    let canary = world.settled(&id).await;
    assert_eq!(
        (&canary["state"], &canary["share"]),
        (&json!("champion"), &json!(0.0)),
        "{canary}"
    );
    assert_eq!(
        (world.version_of("champion").await, world.version_of("canary").await),
        (Some(2), None)
    );
    let last = &canary["transitions"][0];
    assert_eq!((&last["event"], &last["actor"]), (&json!("pass"), &json!("release")));
    assert!(last["evidence"]["canary"]["users"].as_i64() >= Some(60), "{last}");
    wait_for(&world.replica.url, "demo@champion", 2).await;
    let good = world.judgments().await["last_known_good"].clone();
    assert_eq!(
        (&good["version"], &good["canary_id"]),
        (&json!(2), &canary["id"]),
        "{good}"
    );

    // a person goes back from it
    let (status, canary) = world.decide(&id, "rollback").await;
    assert_eq!((status, &canary["state"]), (200, &json!("rolled_back")), "{canary}");
    assert_eq!(world.version_of("champion").await, Some(1));
    // what was trained on top of it is bad too, so learner continues from champion
    assert_eq!(world.version_of("learner").await, Some(1));
    let judged = world.judgments().await;
    assert_eq!(
        (
            &judged["last_known_good"],
            &judged["learner_bad"],
            &judged["champion_bad"]
        ),
        (&Value::Null, &Value::Null, &Value::Null)
    );
    assert_eq!(
        (&judged["judgments"][0]["version"], &judged["judgments"][0]["verdict"]),
        (&json!(2), &json!("bad"))
    );
    world.end().await;
}

/// Waits until the replica serves more than so many of the hundred users with the canary.
async fn eventually_more(world: &World, than: usize) -> Vec<String> {
    fixture::eventually("more users get it", std::time::Duration::from_secs(60), async || {
        Some(world.served().await).filter(|served| users_of(served, "canary").len() > than)
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worse_version_is_taken_back_at_the_next_look_and_the_next_one_has_its_turn() {
    let world = World::start("canary_worse").await;
    let steps = json!([{"setWeight": 50}, {"pause": {}}]);
    let worse = world.propose(2, steps.clone()).await;
    let next = world.propose(3, steps.clone()).await;
    assert_eq!(world.settled(&worse).await["state"], "canary");
    assert_eq!(world.settled(&next).await["state"], "proposed", "one at a time");
    world.answers("champion", 1, 60, 0.5, 0.5).await;
    world.answers("canary", 2, 60, 0.2, 0.5).await;
    let canary = world.settled(&worse).await;
    assert_eq!(canary["state"], "rolled_back", "{canary}");
    let reason = canary["transitions"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("reward"), "{reason}");
    assert_eq!(world.version_of("champion").await, Some(1));
    assert_eq!(
        world.version_of("learner").await,
        Some(1),
        "it was trained on top of version 2"
    );
    // the next one was trained on top of it too
    let canary = world.settled(&next).await;
    let reason = canary["transitions"][0]["reason"].as_str().unwrap();
    assert!(
        canary["state"] == "aborted" && reason.contains("on top of version 2, which was judged bad"),
        "{canary}"
    );
    let (status, problem) = world.post("/v1/canaries", &json!({"version": 3})).await;
    assert_eq!(status, 409, "{problem}");
    let good = json!({"version": 3, "verdict": "good", "reason": "only its words are from there"});
    let (status, judged) = world.post("/v1/judgments", &good).await;
    assert_eq!(
        (status, &judged["last_known_good"]["version"]),
        (201, &json!(3)),
        "{judged}"
    );
    assert_eq!(
        world
            .post("/v1/judgments", &json!({"version": 9, "verdict": "bad"}))
            .await
            .0,
        404
    );

    // it has users of its own
    let next = world.propose(3, steps).await;
    let canary = world.settled(&next).await;
    assert_eq!(
        (&canary["state"], &canary["control"]),
        (&json!("canary"), &json!(1)),
        "{canary}"
    );
    assert_eq!(world.version_of("canary").await, Some(3));
    let evidence = world.get(&format!("/v1/canaries/{next}/evidence")).await;
    assert_eq!(
        evidence["canary"]["answers"], 0,
        "what users did with another version is not its: {evidence}"
    );

    // champion moves by a person: nothing is left to compare with
    let pin = json!({"kind": "pin", "alias": "champion", "version": 2, "reason": "by hand"});
    assert_eq!(world.post("/v1/releases", &pin).await.0, 201);
    assert_eq!(world.settled(&next).await["state"], "aborted");
    assert_eq!(world.version_of("canary").await, None);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn people_decide_and_every_refusal_says_what_to_do() {
    let world = World::start("canary_people").await;
    let steps = json!([{"setWeight": 50}, {"pause": {}}, {"setWeight": 100}, {"pause": {}}]);
    for (body, status, expected) in [
        (json!({"version": 9}), 404, "no version 9"),
        (json!({"version": 1}), 409, "serves version 1 already"),
        (
            json!({"version": 2, "strategy": {"steps": [{"pause": {}}]}}),
            400,
            "must begin with setWeight",
        ),
    ] {
        let (found, problem) = world.post("/v1/canaries", &body).await;
        assert_eq!(found, status, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains(expected), "{problem}");
    }
    let id = world.propose(2, steps.clone()).await;
    let (status, problem) = world.post("/v1/canaries", &json!({"version": 2})).await;
    assert_eq!(status, 409, "{problem}");
    assert_eq!(world.decide(&id, "resume").await.0, 409, "it has no users yet");
    assert_eq!(world.settled(&id).await["step"], 1);
    assert_eq!(world.decide(&id, "wait").await.0, 404);
    let (status, problem) = world
        .post("/v1/releases", &json!({"kind": "pin", "alias": "canary", "version": 3}))
        .await;
    assert_eq!(status, 409, "{problem}");

    let arms = json!({"arms": [{"alias": "learner", "weight": 0.5}, {"alias": "champion", "weight": 0.5}]});
    let url = format!("{}/v1/experiment", world.control.url);
    let refused = reqwest::Client::new().put(url).json(&arms).send().await.unwrap();
    assert_eq!(refused.status(), 409, "the arms stay while a canary serves");

    for (decision, state, step) in [("hold", "held", 1), ("resume", "canary", 2)] {
        let (status, canary) = world.decide(&id, decision).await;
        assert_eq!(
            (status, &canary["state"], canary["step"].as_i64()),
            (200, &json!(state), Some(step)),
            "{canary}"
        );
    }
    assert_eq!(world.settled(&id).await["share"], 1.0);
    let (_, canary) = world.decide(&id, "abort").await;
    assert_eq!(canary["state"], "aborted");
    assert_eq!(world.decide(&id, "promote").await.0, 409, "it has ended");

    let promoted = world.propose(3, steps).await;
    world.settled(&promoted).await;
    assert_eq!(world.decide(&promoted, "promote").await.1["state"], "champion");
    let back = json!({"kind": "pin", "alias": "champion", "version": 2, "reason": "by hand"});
    assert_eq!(world.post("/v1/releases", &back).await.0, 201);
    assert_eq!(world.settled(&promoted).await["state"], "retired");

    let strategy = json!({"steps": [{"setWeight": 10}, {"pause": {}}], "requiresApproval": 1});
    let (_, canary) = world
        .post("/v1/canaries", &json!({"version": 3, "strategy": strategy}))
        .await;
    let id = canary["id"].as_str().unwrap();
    assert_eq!(world.settled(id).await["state"], "proposed");
    let (status, problem) = world.decide(id, "approve").await;
    assert_eq!(status, 403, "nobody approves what they proposed: {problem}");
    assert_eq!(world.decide(id, "abort").await.1["state"], "aborted");
    world.end().await;
}

/// Twenty canaries of equal versions through the query that the release loop reads. Every shape alone would have
/// decided before: sessions of other lengths, one reward of 1e12, one caller without a name, quick feedback first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_shape_of_what_users_do_decides_nothing() {
    let world = World::start("canary_shape").await;
    let steps = json!([{"setWeight": 50}, {"pause": {}}]);
    let id = world.propose(2, steps).await;
    assert_eq!(world.settled(&id).await["state"], "canary");
    let mut connection = world.stack.pool.acquire().await.unwrap();
    // the surface's definition
    answer(&mut connection, "champion", 1, 1, 0.5, 0.5).await;
    for seed in 0..20 {
        for table in [
            "canary_user",
            "canary_closed",
            "canary_sums",
            "open_generation",
            "trajectory",
            "generation",
        ] {
            sqlx::query(sqlx::AssertSqlSafe(format!("delete from {table}")))
                .execute(&mut *connection)
                .await
                .unwrap();
        }
        sqlx::query(include_str!("release_canary/shape.sql"))
            .bind(seed)
            .execute(&mut *connection)
            .await
            .unwrap();
        let evidence = world.get(&format!("/v1/canaries/{id}/evidence")).await;
        for side in ["canary", "champion"] {
            let side = &evidence[side];
            assert_eq!(
                (&side["rewarded"], &side["excluded"]),
                (&json!(200), &json!(1)),
                "{evidence}"
            );
            // 200 with sessions, one more with a name, and one for all without
            assert_eq!(side["users"], 202, "{evidence}");
            assert_eq!(side["mean_reward"], 0.5, "{evidence}");
        }
        let found = &evidence["found"];
        assert_eq!(
            (&found["harm"], &found["better"]),
            (&Value::Null, &json!(false)),
            "{evidence}"
        );
    }
    drop(connection);
    world.end().await;
}

/// A champion that does harm only once nearly everybody has it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_champion_is_watched_beside_the_one_before_and_taken_back() {
    let world = World::start("canary_watched").await;
    let strategy = json!({"steps": [{"setWeight": 50}, {"pause": {}}], "watch": {"duration": "1h", "holdBack": 20}});
    let body = json!({"version": 2, "reason": "try", "strategy": strategy});
    let (_, canary) = world.post("/v1/canaries", &body).await;
    let id = canary["id"].as_str().unwrap().to_owned();
    assert_eq!(world.settled(&id).await["state"], "canary");
    assert_eq!(world.decide(&id, "promote").await.1["state"], "watched");
    assert_eq!(
        (world.version_of("champion").await, world.version_of("canary").await),
        (Some(2), Some(1))
    );
    assert_eq!(world.settled(&id).await["state"], "watched");
    world.answers("champion", 2, 240, 0.2, 0.2).await;
    world.answers("canary", 1, 60, 0.5, 0.2).await;
    let canary = world.settled(&id).await;
    assert_eq!(canary["state"], "rolled_back", "{canary}");
    assert_eq!(
        (world.version_of("champion").await, world.version_of("canary").await),
        (Some(1), None)
    );
    world.end().await;
}

/// Nobody would see harm.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_canary_whose_evidence_cannot_be_read_is_held() {
    let world = World::start("canary_unread").await;
    let id = world.propose(2, json!([{"setWeight": 50}, {"pause": {}}])).await;
    assert_eq!(world.settled(&id).await["state"], "canary");
    sqlx::query("alter view answer_reward rename to answer_reward_away")
        .execute(&world.stack.pool)
        .await
        .unwrap();
    sqlx::query("create view answer_reward as select * from answer_reward_away where 1 / (random() * 0)::int = 1")
        .execute(&world.stack.pool)
        .await
        .unwrap();
    world.answers_of_both(60, 0.5, 0.2).await;
    for _ in 0..3 {
        world.releases.round().await.unwrap();
    }
    let canary = world.get(&format!("/v1/canaries/{id}")).await;
    let reason = canary["transitions"][0]["reason"].as_str().unwrap();
    assert!(
        canary["state"] == "held" && reason.contains("could not be read"),
        "{canary}"
    );
    world.end().await;
}

/// The configuration's number is the least.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proposal_cannot_waive_approvals() {
    let mut options = Options {
        champion: ChampionBy::Canary,
        ..Options::default()
    };
    options.canary.requires_approval = 2;
    let world = World::start_with(Stack::start("canary_waives").await, options).await;
    let strategy = json!({"steps": [{"setWeight": 50}, {"pause": {}}], "requiresApproval": 0});
    let (status, problem) = world
        .post("/v1/canaries", &json!({"version": 2, "strategy": strategy}))
        .await;
    assert_eq!(status, 400, "{problem}");
    world.end().await;
}
