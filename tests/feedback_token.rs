//! What samplers sign, at ingest's API: the proof of a generation, and the token without which a
//! feedback key gives no feedback.

use crate::ingest::{Service, generation, options};
use crate::support::{Stack, eventually};
use edge::audit::Actor;
use edge::auth::key::{self, Grant, NewKey};
use edge::auth::{AuthOptions, Scope, Scopes};
use edge::sampler::{self, SamplerKey};
use ingest::event::{self, Proof, signed_bytes};
use ingest::feedback_token::issue;
use serde_json::{Value, json};
use time::format_description::well_known::Rfc3339;
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

const TEST: Actor<'static> = Actor {
    key: None,
    name: "test",
};
const SOON: std::time::Duration = std::time::Duration::from_secs(90);

#[tokio::test(flavor = "multi_thread")]
async fn a_feedback_key_speaks_only_about_answers_whose_token_it_has() {
    let stack = Stack::start("feedback_token").await;
    let service = Service::start_behind(&stack, options(), AuthOptions { required: true }).await;
    let key = |scopes: &'static [Scope]| {
        let new = NewKey {
            tenant: "acme",
            grant: Grant::Scopes(Scopes::of(scopes)),
            label: "app",
            expires_at: None,
            replica: None,
        };
        let pool = stack.pool.clone();
        async move { key::create(&pool, &new, TEST, "").await.unwrap().secret }
    };
    let browser = key(&[Scope::Feedback]).await;
    let back_end = key(&[Scope::Feedback, Scope::Completions]).await;
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
    let post = async |key: &str, path: &str, body: Value| {
        let request = reqwest::Client::new()
            .post(format!("http://{}{path}", service.address))
            .bearer_auth(key)
            .json(&body);
        request.send().await.unwrap().status().as_u16()
    };
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
        let got = post(&browser, "/v1/feedback", about(generation, sent)).await;
        assert_eq!(got, status, "{generation:?} {sent:?}");
    }
    // a trusted back end may do without
    assert_eq!(post(&back_end, "/v1/feedback", about(Some(answered), None)).await, 200);
    // nothing else gives feedback without a token
    let feedback =
        json!({"feedback_id": Uuid::now_v7(), "generation_id": answered, "metric_name": "accept", "value": true});
    let event = json!([{"source": "app", "id": "1", "time": "2026-11-23T00:00:00Z", "feedback": feedback}]);
    assert_ne!(post(&browser, "/v1/events:batch", event).await, 200);
    let retraction = json!({"feedback_id": Uuid::now_v7()});
    assert_eq!(post(&browser, "/v1/retractions", retraction).await, 403);
    assert_eq!(
        post(&browser, "/v1/episode-ends", json!({"episode_id": answered})).await,
        403
    );

    sampler::revoke(&stack.pool, &id, TEST, "stolen").await.unwrap();
    crate::support::eventually(
        "a revoked sampler's tokens are refused",
        std::time::Duration::from_secs(60),
        async || {
            let refused = post(&browser, "/v1/feedback", about(Some(answered), Some(&token))).await == 400;
            refused.then_some(())
        },
    )
    .await;
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
