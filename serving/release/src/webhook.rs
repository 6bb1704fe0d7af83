//! Webhooks: each decision about a canary, and each move of an alias that a person asked for, is posted
//! to receivers as JSON, signed as <https://www.standardwebhooks.com> says.
//!
//! ```text
//! webhook-id          id of the decision; the same in every attempt, so a receiver that has seen it does nothing
//! webhook-timestamp   seconds since 1970, when it was sent
//! webhook-signature   v1,base64(HMAC-SHA256(secret, "ID.TIMESTAMP.BODY"))
//! ```
//! Each receiver gets the decisions in their order, at least once. One that does not answer with 2xx gets
//! the same decision again, later and later; after [`ATTEMPTS_MAX`] attempts the next one. How far each
//! has got is in the table `webhook`, so any number of processes may send, and one at a time does.

use super::ReleaseService;
use anyhow::{Context, ensure};
use axum::extract::State;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use edge::Problem;
use edge::auth::Scope;
use edge::database::unavailable;
use edge::json::Json;
use edge::routes::{Routes, get};
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::Sha256;
use sqlx::PgConnection;
use std::path::PathBuf;
use std::time::Duration;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const POLL_EVERY: Duration = Duration::from_secs(1);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// With waits of 1, 2, 4, … seconds, an hour at most: two days.
const ATTEMPTS_MAX: i32 = 60;
const WAIT_MAX_S: f64 = 3600.0;
/// In one transaction, which lasts as long as the receiver takes to answer.
const DECISIONS_AT_ONCE: i64 = 1;
/// What keys begin with.
const SECRET_PREFIX: &str = "whsec_";
const RECEIVERS_MAX: usize = 16;

/// A receiver: `[[release.webhook]]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// Of its own; what it has been sent is stored under it.
    pub name: String,
    pub url: String,
    /// File with the secret: `whsec_` and base64, 24 to 64 bytes. `openssl rand -base64 32` makes one.
    pub secret_file: PathBuf,
}

/// Checks all receivers. The error names the first invalid field.
pub fn check(receivers: &[Options]) -> anyhow::Result<()> {
    ensure!(
        receivers.len() <= RECEIVERS_MAX,
        "release.webhook has {} entries; give at most {RECEIVERS_MAX}",
        receivers.len()
    );
    for (i, receiver) in receivers.iter().enumerate() {
        let name = &receiver.name;
        ensure!(
            (1..=64).contains(&name.len()) && receivers[..i].iter().all(|other| other.name != *name),
            "release.webhook {name:?}: name must have 1 to 64 bytes, and no other receiver may have it"
        );
        ensure!(
            reqwest::Url::parse(&receiver.url).is_ok_and(|url| matches!(url.scheme(), "http" | "https")),
            "release.webhook {name:?}: url is no http:// or https:// URL"
        );
    }
    Ok(())
}

struct Receiver {
    name: String,
    url: String,
    secret: Vec<u8>,
}

impl Receiver {
    fn read(options: &Options) -> anyhow::Result<Self> {
        let file = options.secret_file.display();
        let text = std::fs::read_to_string(&options.secret_file).with_context(|| format!("read {file}"))?;
        let text = text.trim();
        let secret = BASE64.decode(text.strip_prefix(SECRET_PREFIX).unwrap_or(text)).ok();
        let secret = secret.filter(|secret| (24..=64).contains(&secret.len()));
        Ok(Receiver {
            name: options.name.clone(),
            url: options.url.clone(),
            secret: secret
                .with_context(|| format!("{file} holds no secret: write `whsec_` and base64 of 24 to 64 bytes"))?,
        })
    }
}

/// Notes receivers that are new: they are told of what comes from now on.
pub async fn register(connection: &mut PgConnection, policy: &str, receivers: &[Options]) -> sqlx::Result<()> {
    for receiver in receivers {
        sqlx::query!(
            "insert into webhook (policy, name, sent_until) values ($1, $2, uuidv7()) on conflict do nothing",
            policy,
            receiver.name
        )
        .execute(&mut *connection)
        .await?;
    }
    Ok(())
}

/// Sends decisions until `shutdown`. Without receivers it only waits.
pub async fn run(service: ReleaseService, shutdown: CancellationToken) -> anyhow::Result<()> {
    let receivers = service
        .0
        .options
        .webhook
        .iter()
        .map(|options| Receiver::read(options).with_context(|| format!("release.webhook {:?}", options.name)));
    let receivers: Vec<Receiver> = receivers.collect::<anyhow::Result<_>>()?;
    let client = edge::tls::client_of_others()
        .timeout(ANSWER_TIMEOUT)
        // whoever answers elsewhere is another receiver
        .redirect(reqwest::redirect::Policy::none())
        .build()?;
    let all = receivers
        .iter()
        .map(|receiver| deliver_all(&service, &client, receiver));
    tokio::select! {
        () = shutdown.cancelled() => {}
        _ = futures::future::join_all(all), if !receivers.is_empty() => {}
    }
    Ok(())
}

/// Never ends.
async fn deliver_all(service: &ReleaseService, client: &reqwest::Client, receiver: &Receiver) {
    loop {
        match deliver(service, client, receiver).await {
            Ok(true) => {}
            Ok(false) => tokio::time::sleep(POLL_EVERY).await,
            Err(error) => {
                tracing::warn!(
                    receiver = receiver.name,
                    error = format!("{error:#}"),
                    "could not look for decisions to send"
                );
                tokio::time::sleep(POLL_EVERY).await;
            }
        }
    }
}

/// Sends the next decision that the receiver has not acknowledged, unless another process does. Returns
/// whether there may be more.
async fn deliver(service: &ReleaseService, client: &reqwest::Client, receiver: &Receiver) -> anyhow::Result<bool> {
    let (pool, policy) = (&service.0.pool, &service.0.policy);
    let mut transaction = edge::database::begin(pool).await.context("begin")?;
    let mine = sqlx::query!(
        "select sent_until, failures from webhook
         where policy = $1 and name = $2 and next_at <= clock_timestamp() for update skip locked",
        policy,
        receiver.name
    )
    .fetch_optional(&mut *transaction)
    .await
    .context("read how far the receiver is")?;
    let Some(mine) = mine else { return Ok(false) };
    let (mut sent_until, mut failures) = (mine.sent_until, mine.failures);
    let mut sent = false;
    for decision in decisions(&mut transaction, policy, sent_until)
        .await
        .context("read decisions")?
    {
        let error = match post(client, receiver, &decision).await {
            Ok(()) => None,
            Err(error) => Some(format!("{error:#}")),
        };
        failures = error.as_ref().map_or(0, |_| failures + 1);
        let gives_up = failures >= ATTEMPTS_MAX;
        if let Some(error) = &error {
            tracing::warn!(receiver = receiver.name, decision = %decision.id, error, failures, gives_up, "a webhook failed");
            metrics::counter!("springtide_webhook_failures_total", "receiver" => receiver.name.clone()).increment(1);
        }
        let is_done = error.is_none() || gives_up;
        if is_done {
            (sent_until, failures) = (decision.id, 0);
        }
        sqlx::query!(
            "update webhook set sent_until = $3, failures = $4, last_error = $5, updated_at = clock_timestamp(),
                    next_at = clock_timestamp() + make_interval(secs => $6)
             where policy = $1 and name = $2",
            policy,
            receiver.name,
            sent_until,
            failures,
            error,
            wait_seconds(failures)
        )
        .execute(&mut *transaction)
        .await
        .context("note what was sent")?;
        sent = is_done;
    }
    transaction.commit().await.context("commit")?;
    Ok(sent)
}

fn wait_seconds(failures: i32) -> f64 {
    match failures {
        0 => 0.0,
        failures => 2f64.powi(failures - 1).min(WAIT_MAX_S),
    }
}

/// What a receiver is told.
#[derive(Debug)]
struct Decision {
    id: Uuid,
    kind: String,
    at: OffsetDateTime,
    data: Value,
}

/// Those after `after`, the oldest first. Ids rise in the order of commits, because every decision about a
/// policy is written under its lock.
async fn decisions(connection: &mut PgConnection, policy: &str, after: Uuid) -> sqlx::Result<Vec<Decision>> {
    sqlx::query_as!(
        Decision,
        r#"
        select t.id as "id!", 'canary.' || t.event as "kind!", t.at as "at!",
               jsonb_build_object('canary', t.canary_id, 'version', c.version, 'control', c.control, 'from', t.from_state,
                                  'to', t.to_state, 'step', t.step, 'share', t.share, 'epoch', t.epoch, 'actor', t.actor,
                                  'reason', t.reason) as "data!"
        from canary_transition t
        join canary c on c.id = t.canary_id
        where c.policy = $1 and t.id > $2
        union all
        select c.id, 'canary.propose', c.created_at,
               jsonb_build_object('canary', c.id, 'version', c.version, 'actor', c.actor, 'reason', c.reason)
        from canary c
        where c.policy = $1 and c.id > $2
        union all
        select t.id, 'release.' || r.kind, r.created_at,
               jsonb_build_object('alias', r.alias, 'from_version', r.from_version, 'to_version', r.to_version,
                                  'status', r.status, 'epoch', t.epoch, 'actor', t.actor, 'reason', t.reason)
        from transition t
        join release r on r.id = t.release_id
        -- a release is written before its transition, so its id is lower: those of a minute before are looked at
        where r.policy = $1 and t.id > $2 and r.kind in ('promote', 'rollback', 'pin') and r.status = 'done'
          and r.id > first_generation_id(uuid_extract_timestamp($2) - interval '1 minute')
        order by 1 limit $3
        "#,
        policy,
        after,
        DECISIONS_AT_ONCE
    )
    .fetch_all(connection)
    .await
}

async fn post(client: &reqwest::Client, receiver: &Receiver, decision: &Decision) -> anyhow::Result<()> {
    let body = json!({
        "type": decision.kind,
        "timestamp": decision.at.format(&time::format_description::well_known::Rfc3339)?,
        "data": decision.data,
    })
    .to_string();
    let id = decision.id.to_string();
    let sent_at = OffsetDateTime::now_utc().unix_timestamp();
    let answer = client
        .post(&receiver.url)
        .header("content-type", "application/json")
        .header("webhook-id", &id)
        .header("webhook-timestamp", sent_at)
        .header("webhook-signature", signature(&receiver.secret, &id, sent_at, &body)?)
        .body(body)
        .send()
        .await
        // the URL may hold a token
        .map_err(reqwest::Error::without_url)?;
    ensure!(
        answer.status().is_success(),
        "the receiver answered {}",
        answer.status()
    );
    Ok(())
}

fn signature(secret: &[u8], id: &str, sent_at: i64, body: &str) -> anyhow::Result<String> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret)?;
    mac.update(format!("{id}.{sent_at}.{body}").as_bytes());
    Ok(format!("v1,{}", BASE64.encode(mac.finalize().into_bytes())))
}

pub(super) fn routes() -> Routes<ReleaseService> {
    Routes::new().route(
        Scope::Read,
        "/v1/webhooks",
        "How far each receiver of decisions is",
        get(list),
    )
}

#[derive(Debug, Serialize)]
struct Webhooks {
    webhooks: Vec<View>,
}

#[derive(Debug, Serialize)]
struct View {
    name: String,
    /// Id of the last decision that it acknowledged, or that was given up.
    sent_until: Uuid,
    /// Attempts in a row that failed.
    failures: i32,
    /// Of the last attempt; null: it succeeded, or there was none.
    last_error: Option<String>,
    #[serde(with = "time::serde::rfc3339")]
    next_at: OffsetDateTime,
}

async fn list(State(service): State<ReleaseService>) -> Result<Json<Webhooks>, Problem> {
    let webhooks = sqlx::query_as!(
        View,
        "select name, sent_until, failures, last_error, next_at from webhook where policy = $1 order by name",
        service.0.policy
    )
    .fetch_all(&service.0.pool)
    .await
    .map_err(unavailable)?;
    Ok(Json(Webhooks { webhooks }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of <https://www.standardwebhooks.com>'s reference libraries.
    #[test]
    fn signatures_are_those_of_the_standard() {
        let secret = BASE64.decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        let id = "msg_p5jXN8AQM9LWM0D4loKWxJek";
        let signed = signature(&secret, id, 1_614_265_330, r#"{"test": 2432232314}"#).unwrap();
        assert_eq!(signed, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn waits_grow_to_an_hour() {
        let waits = [0, 1, 2, 5, 12, 13, 59].map(wait_seconds);
        assert_eq!(waits, [0.0, 1.0, 2.0, 16.0, 2048.0, 3600.0, 3600.0]);
    }

    #[test]
    fn errors_name_the_receiver_and_what_to_write() {
        let receiver = |name: &str, url: &str| Options {
            name: name.into(),
            url: url.into(),
            secret_file: "none".into(),
        };
        check(&[
            receiver("chat", "https://chat.example/hook"),
            receiver("ci", "http://ci:8080"),
        ])
        .unwrap();
        let refusal = |receivers: &[Options]| check(receivers).unwrap_err().to_string();
        assert!(refusal(&[receiver("chat", "chat.example")]).contains("\"chat\": url"));
        assert!(refusal(&[receiver("", "http://a")]).contains("name must have"));
        assert!(refusal(&[receiver("a", "http://a"), receiver("a", "http://b")]).contains("no other receiver"));
        let folder = tempfile::tempdir().unwrap();
        let mut short = receiver("a", "http://a");
        short.secret_file = folder.path().join("secret");
        std::fs::write(&short.secret_file, "whsec_c2hvcnQ=\n").unwrap();
        let error = format!("{:#}", Receiver::read(&short).err().unwrap());
        assert!(error.contains("holds no secret: write `whsec_`"), "{error}");
        let secret = BASE64.encode([7; 32]);
        std::fs::write(&short.secret_file, format!("whsec_{secret}\n")).unwrap();
        assert_eq!(Receiver::read(&short).unwrap().secret, [7; 32]);
    }
}
