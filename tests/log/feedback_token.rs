//! What samplers sign, at ingest's API: the proof of a generation, and the token without which a
//! feedback key gives no feedback.

use edge::audit::Actor;
use edge::auth::key::{self, Grant, NewKey};
use edge::auth::{AuthOptions, Scope, Scopes};
use edge::sampler::{self, SamplerKey};
use event_log::event::{self, Proof, signed_bytes};
use event_log::feedback_token::issue;
use fixture::ingest::{Service, count, generation, no_dead_letters, options};
use fixture::{Stack, eventually};
use serde_json::{Value, json};
use time::format_description::well_known::Rfc3339;
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

const TEST: Actor<'static> = Actor {
    key: None,
    name: "test",
};
const SOON: std::time::Duration = std::time::Duration::from_secs(90);

/// An ingest role that needs keys.
async fn start(stack: &Stack) -> Service {
    let required = AuthOptions {
        required: true,
        ..AuthOptions::default()
    };
    Service::start_behind(stack, options(), required).await
}

/// A key of the tenant `acme`.
async fn key(stack: &Stack, scopes: &[Scope]) -> String {
    let new = NewKey {
        tenant: "acme",
        grant: Grant::Scopes(Scopes::of(scopes)),
        label: "app",
        expires_at: None,
        replica: None,
        requests_per_second: None,
    };
    key::create(&stack.pool, &new, TEST, "").await.unwrap().secret
}

async fn post(service: &Service, key: &str, path: &str, body: Value) -> (u16, Value) {
    let request = reqwest::Client::new()
        .post(format!("http://{}{path}", service.address))
        .timeout(SOON)
        .bearer_auth(key)
        .json(&body);
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_feedback_key_speaks_only_about_answers_whose_token_it_has() {
    let stack = Stack::start("feedback_token").await;
    let service = start(&stack).await;
    let browser = key(&stack, &[Scope::Feedback]).await;
    let back_end = key(&stack, &[Scope::Feedback, Scope::Completions]).await;
    let [replica, thief] = [1, 2].map(|seed| SamplerKey::from_seed(&[seed; 32]));
    let id = sampler::register(&stack.pool, &replica.public_key(), "r", None, None, TEST)
        .await
        .unwrap();

    let [answered, other] = [(); 2].map(|()| Uuid::now_v7());
    let soon = OffsetDateTime::now_utc() + Duration::hours(1);
    let token = issue(&replica, "acme", answered, answered, soon);
    let of_another_tenant = issue(&replica, "rival", answered, answered, soon);
    let forged = issue(&thief, "acme", answered, answered, soon);
    let expired = issue(&replica, "acme", answered, answered, soon - Duration::hours(2));
    let post = async |key: &str, path: &str, body: Value| post(&service, key, path, body).await;
    let about = |generation: Option<Uuid>, token: Option<&str>| json!({"generation_id": generation, "token": token, "metric_name": "accept", "value": true});

    for (generation, sent, status) in [
        (Some(answered), Some(&*token), 200),
        (None, Some(&*token), 200),
        (Some(answered), None, 403),
        (Some(other), Some(&*token), 403),
        (Some(answered), Some(&*of_another_tenant), 400),
        (Some(answered), Some(&*forged), 400),
        (Some(answered), Some(&*expired), 400),
        (Some(answered), Some("nonsense"), 400),
    ] {
        let (got, answer) = post(&browser, "/v1/feedback", about(generation, sent)).await;
        assert_eq!(got, status, "{generation:?} {sent:?}: {answer}");
    }
    // a trusted back end may do without
    let (status, answer) = post(&back_end, "/v1/feedback", about(Some(answered), None)).await;
    assert_eq!(status, 200, "{answer}");
    // nothing else gives feedback without a token
    let feedback =
        json!({"feedback_id": Uuid::now_v7(), "generation_id": answered, "metric_name": "accept", "value": true});
    let event = json!([{"source": "app", "id": "1", "time": "2026-11-23T00:00:00Z", "feedback": feedback}]);
    let (status, answer) = post(&browser, "/v1/events:batch", event).await;
    assert_eq!(
        (status, answer["results"][0]["status"].as_u64()),
        (207, Some(403)),
        "{answer}"
    );
    for (path, body) in [
        ("/v1/retractions", json!({"feedback_id": Uuid::now_v7()})),
        ("/v1/episode-ends", json!({"episode_id": answered})),
    ] {
        let (status, answer) = post(&browser, path, body).await;
        assert_eq!(status, 403, "{path}: {answer}");
    }

    sampler::revoke(&stack.pool, &id, TEST, "stolen").await.unwrap();
    // Within 5 seconds on a machine that is not busy.
    let revocation = std::time::Duration::from_secs(15);
    let answer = eventually("a revoked sampler's tokens are refused", revocation, async || {
        let (status, answer) = post(&browser, "/v1/feedback", about(Some(answered), Some(&token))).await;
        (status == 400).then_some(answer)
    })
    .await;
    assert!(answer.to_string().contains("unknown or revoked"), "{answer}");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_names_the_key_that_may_teach() {
    let stack = Stack::start("teacher").await;
    let service = start(&stack).await;
    let teacher = key(&stack, &[Scope::Feedback, Scope::Completions, Scope::Teach]).await;
    let other = key(&stack, &[Scope::Feedback, Scope::Completions]).await;
    let about = Uuid::now_v7();
    for key in [&teacher, &other] {
        let said = json!({"generation_id": about, "metric_name": "demonstration", "value": "yes"});
        let (status, answer) = post(&service, key, "/v1/feedback", said).await;
        assert_eq!(status, 200, "{answer}");
        let said = json!({"feedback_id": Uuid::now_v7(), "generation_id": about, "metric_name": "demonstration", "value": "no"});
        let event = json!([{"source": "app", "id": Uuid::now_v7(), "time": "2026-11-23T00:00:00Z", "feedback": said}]);
        let (status, answer) = post(&service, key, "/v1/events:batch", event).await;
        assert_eq!(status, 200, "{answer}");
    }
    let teachers = eventually("all are stored", SOON, async || {
        let teachers = "select value_text, teacher from feedback order by 1, 2";
        let teachers: Vec<(String, Option<Uuid>)> = sqlx::query_as(teachers).fetch_all(&stack.pool).await.unwrap();
        (teachers.len() == 4).then_some(teachers)
    })
    .await;
    let id: Uuid = sqlx::query_scalar("select id from api_key where 'teach' = any(scopes)")
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    let expected = ["no", "yes"].map(|text| [(text.to_owned(), Some(id)), (text.to_owned(), None)]);
    assert_eq!(teachers, expected.concat());
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_with_a_token_is_taken_while_the_database_does_not_answer() {
    let stack = Stack::start("token_outage").await;
    let service = start(&stack).await;
    let browser = key(&stack, &[Scope::Feedback]).await;
    let [replica, other] = [1, 2].map(|seed| SamplerKey::from_seed(&[seed; 32]));
    for sampler in [&replica, &other] {
        sampler::register(&stack.pool, &sampler.public_key(), "r", None, None, TEST)
            .await
            .unwrap();
    }
    let generation = Uuid::now_v7();
    let soon = OffsetDateTime::now_utc() + Duration::hours(1);
    let give = async |sampler: &SamplerKey| {
        let token = issue(sampler, "acme", generation, generation, soon);
        let feedback = json!({"token": token, "metric_name": "accept", "value": true});
        post(&service, &browser, "/v1/feedback", feedback).await
    };
    let (status, answer) = give(&replica).await;
    assert_eq!(status, 200, "{answer}");
    // Look-ups of samplers wait until the end of this transaction.
    let mut locked = edge::database::begin(&stack.pool).await.unwrap();
    sqlx::raw_sql("lock table sampler").execute(&mut *locked).await.unwrap();
    let known_since = std::time::Instant::now();
    // For longer than a look-up counts.
    while known_since.elapsed() < std::time::Duration::from_secs(8) {
        let (status, answer) = give(&replica).await;
        assert_eq!(status, 200, "{answer}");
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
    // A sampler that was not looked up before cannot be judged.
    assert_eq!(give(&other).await.0, 503);
    locked.rollback().await.unwrap();
    let (status, answer) = give(&other).await;
    assert_eq!(status, 200, "{answer}");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_with_a_token_cannot_take_the_identity_of_a_back_ends_or_another_users() {
    let stack = Stack::start("token_identity").await;
    let service = start(&stack).await;
    let browser = key(&stack, &[Scope::Feedback]).await;
    let back_end = key(&stack, &[Scope::Feedback, Scope::Completions]).await;
    let replica = SamplerKey::from_seed(&[1; 32]);
    sampler::register(&stack.pool, &replica.public_key(), "r", None, None, TEST)
        .await
        .unwrap();
    let soon = OffsetDateTime::now_utc() + Duration::hours(1);
    let (mine, theirs) = (Uuid::now_v7(), Uuid::now_v7());
    let id = Uuid::now_v7();
    let give = async |key: &str, answered: Uuid, value: bool, is_browser: bool, named: bool| {
        let token = is_browser.then(|| issue(&replica, "acme", answered, answered, soon));
        let feedback = json!({
            "token": token, "generation_id": answered, "source": "shop", "metric_name": "accept", "value": value,
            "id": named.then_some(id),
        });
        let request = reqwest::Client::new()
            .post(format!("http://{}/v1/feedback", service.address))
            .bearer_auth(key)
            .header("idempotency-key", "order-7")
            .json(&feedback);
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        let answer: Value = response.json().await.unwrap();
        assert_eq!(status, 200, "{answer}");
        answer["feedback_id"].as_str().unwrap().to_owned()
    };
    let mut ids = std::collections::BTreeSet::new();
    // By a name that the back end computes too, and by an id that it uses too.
    for named in [false, true] {
        let forged = give(&browser, mine, false, true, named).await;
        assert_eq!(give(&browser, mine, false, true, named).await, forged, "a repetition");
        ids.insert(forged);
        ids.insert(give(&browser, theirs, true, true, named).await);
        ids.insert(give(&back_end, theirs, true, false, named).await);
    }
    assert_eq!(ids.len(), 6);
    assert!(
        ids.contains(&id.to_string()),
        "the back end's is stored under its own id"
    );
    eventually("all are stored", SOON, async || {
        (count(&stack.pool, "select count(*) from feedback").await == 6).then_some(())
    })
    .await;
    no_dead_letters(&stack).await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proof_is_stored_with_its_generation_and_needs_the_signed_time() {
    let stack = Stack::start("proof").await;
    let service = Service::start(&stack).await;
    let key = SamplerKey::from_seed(&[1; 32]);
    let mut generation = generation();
    let (id, digest, now) = (generation.id, generation.unsigned_digest(), event::now());
    generation.proof = Some(Proof {
        sampler: key.id().to_owned(),
        signature: key.sign(&signed_bytes("default", now, &digest)),
    });
    let mut body = serde_json::to_value(&generation).unwrap();
    let post = async |body: &Value| {
        let request = reqwest::Client::new().post(format!("http://{}/v1/generations", service.address));
        let response = request.json(body).send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    };
    let (status, text) = post(&body).await;
    assert!(status == 400 && text.contains("signed `time`"), "{text}");
    body["time"] = json!(now.format(&Rfc3339).unwrap());
    let (status, text) = post(&body).await;
    assert_eq!(status, 200, "{text}");
    let stored = "select tenant_id, finished_at, unsigned_digest, sampler, signature from generation where id = $1";
    type Row = (String, OffsetDateTime, Vec<u8>, String, Vec<u8>);
    let (tenant, time, stored_digest, sampler, signature): Row =
        eventually("the generation is stored", SOON, async || {
            sqlx::query_as(stored)
                .bind(id)
                .fetch_optional(&stack.pool)
                .await
                .unwrap()
        })
        .await;
    assert_eq!(
        (sampler.as_str(), stored_digest.as_slice()),
        (key.id(), digest.as_slice())
    );
    let message = signed_bytes(&tenant, time, &digest);
    assert!(sampler::verify(&key.public_key(), &message, &signature));
    service.stop().await;
}
