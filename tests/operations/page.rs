//! The page of a real control role: what each key sees, how a person logs in, and that neither another
//! site nor a person without the scope moves anything.

use std::collections::BTreeSet;
use std::time::Duration;

use edge::auth::Role;
use futures::StreamExt;
use reqwest::header::{ACCEPT, CONTENT_TYPE, COOKIE, LOCATION, ORIGIN, SET_COOKIE};
use reqwest::{Client, Response, redirect};
use serde_json::{Value, json};
use sqlx::Executor;

use fixture::control::Control;
use fixture::{Stack, create_key, eventually};

const DATA: &str = concat!(
    include_str!("two_versions.sql"),
    include_str!("control/history.sql"),
    include_str!("page/data.sql")
);
const CANARY: &str = "01980000-0000-7000-8000-0000000000ca";
const GENERATION: &str = "01980000-0000-7000-8000-000000000001";
const START: Duration = Duration::from_secs(30);
const PAGES: [&str; 16] = [
    "/",
    "/releases",
    "/releases/01980000-0000-7000-8000-0000000000ca",
    "/versions",
    "/versions/2",
    "/learning",
    "/learning?hours=24",
    "/trajectories?reward_min=0.2&arm=arm-of-default&code=",
    "/trajectories/01980000-0000-7000-8000-000000000001",
    "/runs",
    "/tide",
    "/fleet",
    "/feedback",
    "/feedback/dead-letters",
    "/ledger?hours=6",
    "/keys",
];

struct Site {
    _control: Control,
    stack: Stack,
    url: String,
    client: Client,
}

impl Site {
    async fn start(name: &str, required: bool) -> Self {
        let stack = Stack::start(name).await;
        stack.pool.execute(DATA).await.unwrap();
        let mut variables = vec![("SPRINGTIDE__POLICY__NAME", "traced")];
        if required {
            variables.extend([
                ("SPRINGTIDE__AUTH__REQUIRED", "true"),
                ("SPRINGTIDE__SERVE__API_KEY", "unused"),
                ("SPRINGTIDE__TRAINER__API_KEY", "unused"),
            ]);
        }
        let control = Control::start(&stack, &variables).await;
        Self {
            url: format!("http://127.0.0.1:{}", control.port),
            client: Client::builder().redirect(redirect::Policy::none()).build().unwrap(),
            _control: control,
            stack,
        }
    }

    async fn key(&self, role: Role) -> String {
        create_key(&self.stack.pool, "default", role, role.as_str()).await
    }

    /// As a browser, with this key in its cookie.
    async fn look(&self, path: &str, key: Option<&str>) -> Response {
        let mut request = self.client.get(format!("{}{path}", self.url));
        request = request.header(ACCEPT, "text/html,*/*;q=0.8");
        if let Some(key) = key {
            request = request.header(COOKIE, format!("springtide_key={key}"));
        }
        request.send().await.unwrap()
    }

    async fn decide(&self, decision: &str, headers: &[(&str, &str)]) -> Response {
        let mut request = self
            .client
            .post(format!("{}/v1/canaries/{CANARY}/{decision}", self.url));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request
            .json(&serde_json::json!({"reason": "because"}))
            .send()
            .await
            .unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_page_is_shown_to_those_who_may_and_texts_of_people_are_escaped() {
    let site = Site::start("page_shown", true).await;
    let (admin, release) = (site.key(Role::Admin).await, site.key(Role::Release).await);
    for path in PAGES {
        for key in [&admin, &release] {
            let answer = site.look(path, Some(key)).await;
            let status = answer.status().as_u16();
            let policy = answer.headers()["content-security-policy"].to_str().unwrap().to_owned();
            let page = answer.text().await.unwrap();
            let of_admins = ["/keys", "/feedback/dead-letters"].contains(&path);
            let expected = if of_admins && *key == release { 403 } else { 200 };
            assert_eq!(status, expected, "{path}: {page}");
            assert!(policy.contains("default-src 'self'"), "{path}: {policy}");
            assert!(page.starts_with("<!DOCTYPE html>"), "{path}: {page}");
            assert!(
                !page.contains("<script>") && !page.contains("<b>bold"),
                "{path}: {page}"
            );
            assert!(!page.contains("NaN") && !page.contains(key.as_str()), "{path}");
        }
    }
    let page = site.look(&format!("/trajectories/{GENERATION}"), Some(&release)).await;
    let page = page.text().await.unwrap();
    assert!(page.contains("0.750") && page.contains("accept"), "{page}");
    let page = site.look(&format!("/releases/{CANARY}"), Some(&release)).await;
    let page = page.text().await.unwrap();
    for part in [
        "class=\"band\"",
        "try &lt;b&gt;bold",
        "/promote\"",
        "springtide canary promote",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    let page = site.look("/versions/2", Some(&release)).await.text().await.unwrap();
    assert!(
        page.contains("champion 1</dd>") && page.contains("default 1</dd>"),
        "{page}"
    );
    // an alias leads to the version that it names now
    let answer = site.look("/versions/champion", Some(&release)).await;
    assert_eq!(answer.status(), 303);
    assert_eq!(answer.headers()[LOCATION], "/versions/1");
    let answer = site.look("/versions/nobody", Some(&release)).await;
    assert_eq!(answer.status(), 404);
    let page = answer.text().await.unwrap();
    assert!(page.contains("there is no alias `nobody`"), "{page}");
    for path in ["/page.js", "/page.css", "/login"] {
        assert_eq!(site.look(path, None).await.status(), 200, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_logs_in_once_and_only_our_own_pages_may_use_the_key() {
    let site = Site::start("page_login", true).await;
    let key = site.key(Role::Release).await;
    let answer = site.look(&format!("/releases/{CANARY}"), None).await;
    assert_eq!(answer.status(), 303);
    let form = answer.headers()[LOCATION].to_str().unwrap().to_owned();
    assert_eq!(site.look(&form, None).await.status(), 200);
    let body = format!("key={key}&next=%2Freleases%2F{CANARY}");
    let answer = site
        .client
        .post(format!("{}/login", site.url))
        .header(ORIGIN, &site.url);
    let answer = answer
        .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
        .body(body)
        .send()
        .await
        .unwrap();
    assert_eq!(
        answer.headers()[LOCATION].to_str().unwrap(),
        format!("/releases/{CANARY}")
    );
    let cookie = answer.headers()[SET_COOKIE].to_str().unwrap().to_owned();
    assert!(cookie.contains("HttpOnly; SameSite=Strict"), "{cookie}");
    let cookie = cookie.split(';').next().unwrap();

    let refused = [
        vec![("cookie", cookie)],
        vec![("cookie", cookie), ("origin", "http://evil.example")],
        vec![
            ("cookie", cookie),
            ("sec-fetch-site", "cross-site"),
            ("origin", &site.url),
        ],
        vec![("origin", &site.url)],
    ];
    for headers in refused {
        assert_eq!(site.decide("hold", &headers).await.status(), 401, "{headers:?}");
    }
    let answer = site.decide("hold", &[("cookie", cookie), ("origin", &site.url)]).await;
    let (status, canary) = (answer.status().as_u16(), answer.json::<Value>().await.unwrap());
    assert_eq!((status, &canary["state"]), (200, &"held".into()), "{canary}");
    assert_eq!(canary["transitions"][0]["actor"], "release");

    // who may only look has no buttons, and the cookie gives no more than the key
    let reader = site.key(Role::Serving).await;
    let page = site
        .look(&format!("/releases/{CANARY}"), Some(&reader))
        .await
        .text()
        .await
        .unwrap();
    assert!(
        page.contains("<code>release</code>") && !page.contains("data-post"),
        "{page}"
    );
    let cookie = format!("springtide_key={reader}");
    let answer = site
        .decide("abort", &[("cookie", &cookie), ("origin", &site.url)])
        .await;
    assert_eq!(answer.status(), 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_tenant_sees_no_page_of_the_policy_and_no_row_of_others() {
    let site = Site::start("page_tenants", true).await;
    let other = create_key(&site.stack.pool, "other", Role::Release, "other").await;
    for path in PAGES {
        assert_eq!(site.look(path, Some(&other)).await.status(), 403, "{path}");
    }
    // the owner's tenant has consented to nothing of the other's rows being shown
    let ours = site.key(Role::Release).await;
    let move_row = "update generation set tenant_id = 'other' where id = $1::uuid";
    sqlx::query(move_row)
        .bind(GENERATION)
        .execute(&site.stack.pool)
        .await
        .unwrap();
    assert_eq!(
        site.look(&format!("/trajectories/{GENERATION}"), Some(&ours))
            .await
            .status(),
        404
    );
    let admin = site.key(Role::Admin).await;
    assert_eq!(
        site.look(&format!("/trajectories/{GENERATION}"), Some(&admin))
            .await
            .status(),
        200
    );
    for path in ["/trajectories", "/feedback"] {
        for (key, theirs) in [(&ours, false), (&admin, true)] {
            let page = site.look(path, Some(key)).await.text().await.unwrap();
            assert!(page.contains("arm-of-default"), "{path}: {page}");
            assert_eq!(page.contains("arm-of-other"), theirs, "{path}: {page}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn live_regions_follow_what_happens_without_a_reload() {
    let site = Site::start("page_live", false).await;
    let answer = site.look(&format!("/live?section=canary&id={CANARY}"), None).await;
    assert_eq!(answer.headers()["content-type"], "text/event-stream");
    let mut events = answer.bytes_stream();
    let mut seen = String::new();
    let limit = Duration::from_secs(30);
    let mut until = async |text: &str| {
        while !seen.contains(text) {
            let part = tokio::time::timeout(limit, events.next()).await;
            let part = part.unwrap_or_else(|_| panic!("{text} is not in {seen}"));
            seen += &String::from_utf8_lossy(&part.unwrap().unwrap());
        }
    };
    until("\"state\":").await;
    assert_eq!(site.decide("hold", &[]).await.status(), 200);
    until(">held<").await;
    for wrong in ["/live", "/live?section=none", "/live?section=canary"] {
        assert_eq!(site.look(wrong, None).await.status(), 400, "{wrong}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_buttons_are_those_that_the_states_of_a_canary_allow() {
    let site = Site::start("page_decisions", false).await;
    let all = ["approve", "hold", "resume", "promote", "abort", "rollback"];
    for state in [
        "proposed",
        "gated",
        "canary",
        "paused",
        "held",
        "champion",
        "retired",
        "aborted",
        "rolled_back",
    ] {
        let offered: BTreeSet<&str> = ::control::page::decisions(state)
            .iter()
            .map(|(decision, _)| *decision)
            .collect();
        let impossible = all.into_iter().find(|decision| !offered.contains(decision)).unwrap();
        // the release loop may decide between the two statements
        let can = eventually("the canary is asked in that state", START, async || {
            let set = sqlx::query("update canary set state = $1 where id = $2::uuid");
            set.bind(state).bind(CANARY).execute(&site.stack.pool).await.unwrap();
            let answer = site.decide(impossible, &[]).await.json::<Value>().await.unwrap();
            let (asked, can) = answer["detail"].as_str()?.split_once("it can ")?;
            asked.contains(&format!("that is {state} ")).then(|| can.to_owned())
        })
        .await;
        let can: BTreeSet<&str> = can.split(", ").filter(|word| all.contains(word)).collect();
        assert_eq!(offered, can, "{state}");
    }
}

/// Answers of champion now and an hour ago: twenty users each, of both tenants; one that was forced.
const ANSWERS: &str = "
    update generation set proven = false where arm like 'arm-of-%';
    insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose,
                            surface, episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs,
                            temperature, top_p, finish_reason, declined, sampled_at, proven, decline_suppressed,
                            exploration_share)
    select uuidv7(make_interval(mins => ago)), tenant, 'traced', version, version, '[]', '', 'realtime', 'replica-<1>',
           'production', 'completion', uuidv7(), 'u' || n, 'champion', 0.8, '{5}', '{6}', '{-1}',
           1, 1, 'stop', n % 2 = 0, clock_timestamp() + make_interval(mins => ago), true, n = 21, 0.02
    from (values (-1, 2), (-65, 1)) period (ago, version), generate_series(1, 21) n, unnest(array['default', 'other']) tenant;
    insert into trajectory (generation_id, surface, reward_definition, reward)
    select id, 'completion', 1, case version when 1 then 0.5 else 0.1 end + 0.01 * (right(user_key, 1)::int % 2)
    from generation where arm = 'champion' and policy = 'traced' and user_key like 'u%';
    insert into feedback (id, tenant_id, generation_id, metric_name, value_bool, given_at)
    select uuidv7(), tenant_id, id, 'accept', true, now() from generation where user_key in ('u1', 'u3', 'u2')";

#[tokio::test(flavor = "multi_thread")]
async fn rewards_of_champion_now_stand_beside_those_before_for_each_tenant() {
    let site = Site::start("page_rewards", true).await;
    site.stack.pool.execute(ANSWERS).await.unwrap();
    let (admin, release) = (site.key(Role::Admin).await, site.key(Role::Release).await);
    let rewards = async |key: &str, query: &str| -> (u16, Value) {
        let request = site
            .client
            .get(format!("{}/v1/rewards{query}", site.url))
            .bearer_auth(key);
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    };
    for (key, answers) in [(&release, 20), (&admin, 40)] {
        let (status, found) = rewards(key, "?ago=0,3600,86400").await;
        assert_eq!((status, &found["arm"]), (200, &"champion".into()), "{found}");
        let [now, hour, day] = [0, 1, 2].map(|at| &found["periods"][at]);
        assert_eq!(
            (&now["answers"], &now["declined"], &now["last_version"]),
            (&answers.into(), &(answers / 2).into(), &2.into()),
            "{found}"
        );
        assert_eq!(
            (&hour["answers"], &hour["first_version"], &hour["ago"]),
            (&answers.into(), &1.into(), &3600.into()),
            "{found}"
        );
        let difference = hour["difference"]["mean"].as_f64().unwrap();
        assert!((difference + 0.4).abs() < 1e-9, "{found}");
        assert_eq!((&day["answers"], &day["reward"]), (&0.into(), &Value::Null), "{found}");

        // of version 1 there is nothing since it was made
        let (status, found) = rewards(key, "?versions=2,1&surface=completion").await;
        let [second, first] = [0, 1].map(|at| &found["periods"][at]);
        assert_eq!(
            (status, &second["ago"], &first["answers"]),
            (200, &Value::Null, &0.into()),
            "{found}"
        );
        assert_eq!(
            (&first["figures"], &second["figures"]),
            (&Value::Null, &now["figures"]),
            "{found}"
        );
        let figures = &second["figures"];
        assert_eq!(figures["answers"], answers, "{found}");
        for (figure, value) in [
            ("shown", json!(0.5)),
            ("accepted", json!(0.2)),
            ("unanswered", json!(0.8)),
            ("unscored", json!(0.0)),
            ("disagreement", json!(0.0)),
            ("length", json!(1.0)),
            ("repetition", Value::Null),
            ("entropy", json!(1.0)),
        ] {
            assert_eq!(figures[figure], value, "{figure}: {found}");
        }
        let (_, found) = rewards(key, "?versions=2&surface=other").await;
        assert_eq!(found["periods"][0]["answers"], 0, "{found}");
    }
    let (status, problem) = rewards(&release, "?versions=2&ago=0").await;
    assert_eq!(status, 400, "{problem}");
    let (status, problem) = rewards(&release, "?ago=1h").await;
    assert!(
        status == 400 && problem["detail"].as_str().unwrap().contains("seconds"),
        "{problem}"
    );
    let page = site.look("/versions", Some(&release)).await.text().await.unwrap();
    assert!(page.contains("class=\"bad\">−0.400"), "{page}");
}

/// A client that may log generations logs some under the name of a version, and rewards them itself.
const MADE_UP: &str = "
    insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose,
                            surface, episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs,
                            temperature, top_p, finish_reason, declined, sampled_at)
    select uuidv7(), 'default', 'traced', 2, 2, '[]', '', 'realtime', 'replica-<1>', 'production', 'completion', uuidv7(),
           'u' || n, 'made-up', 0.8, '{5}', '{6}', '{-1}', 1, 1, 'stop', false, clock_timestamp()
    from generate_series(1, 300) n;
    insert into trajectory (generation_id, surface, reward_definition, reward, signal)
    select id, 'completion', 1, -0.777, 'reject' from generation where arm = 'made-up'";

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_a_client_made_up_are_on_no_page() {
    let site = Site::start("page_made_up", false).await;
    site.stack.pool.execute(MADE_UP).await.unwrap();
    for (path, shown) in [("/feedback", "made-up"), ("/versions", "0.777")] {
        let page = site.look(path, None).await.text().await.unwrap();
        assert!(!page.contains(shown), "{path}: {page}");
    }
}
