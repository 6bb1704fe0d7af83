//! `GET /v1/dead-letters` and `POST /v1/dead-letters/replay`: what `springtide dlq list` and `replay`
//! do. For administrators, because a record may be of any tenant, and one that cannot be decoded is of
//! none.
//!
//! The queue may be long, so reading it is bounded: the newest records of each partition, some seconds,
//! one reader at a time. `springtide dlq` reads all.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use edge::Problem;
use edge::audit::Change;
use edge::auth::{Principal, Scope};
use edge::database::page_limit;
use edge::json::Json;
use edge::query::Query;
use edge::routes::{Routes, get, post};
use edge::turns::Turns;
use event_log::{ClientOptions, DlqPosition, DlqReader, Producer};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sqlx::PgPool;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::caller;
use crate::dead_letters::replay::{self, Plan, Selected};
use crate::dead_letters::{self, Filter, Listed};
use crate::fields::filled;
use crate::times;

/// Of each partition.
const READ_RECORDS_MAX: u32 = 20_000;
const READ_MAX: Duration = Duration::from_secs(20);
const LISTED_DEFAULT: i64 = 50;
const LISTED_MAX: i64 = 200;
/// Records that one request puts back, and names.
const SENT_MAX: usize = 1_000;
/// No record is sent later than this after the first.
const SEND_MAX: Duration = Duration::from_secs(60);
/// One reads. Another waits for as long as a reading may take.
const AT_ONCE: usize = 2;
const PER_KEY: usize = 4;
const GONE: &str = "there is no such record: it is a note that one was put back, or retention has removed it";

/// The query of `GET /v1/dead-letters`. An empty field is none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Asked {
    /// Why they were put aside, such as `invalid`.
    #[serde(deserialize_with = "filled")]
    pub cause: Option<String>,
    /// Where they came from: a topic's full name, or `generation` or `feedback`.
    #[serde(deserialize_with = "filled")]
    pub topic: Option<String>,
    /// A time (RFC 3339) or an age, such as `2h`.
    #[serde(deserialize_with = "filled")]
    pub since: Option<String>,
    /// Only those that were not put back yet.
    pub open: bool,
    /// Largest number of records. Default: 50.
    #[serde(deserialize_with = "filled")]
    pub limit: Option<i64>,
}

/// Reads the queue, and puts records back.
pub struct DeadLetters {
    pool: PgPool,
    kafka: ClientOptions,
    producer: Producer,
    turn: Semaphore,
}

/// Which records are put back, and why.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// As the list names them, such as `0/17`; also those that were put back before.
    #[serde(default)]
    records: Vec<String>,
    /// Instead of `records`: those of this cause that were not put back yet.
    cause: Option<String>,
    /// Narrows `cause` down.
    topic: Option<String>,
    /// Narrows `cause` down: a time (RFC 3339) or an age, such as `2h`.
    since: Option<String>,
    /// Kept in the audit.
    reason: String,
}

#[derive(Debug, Serialize)]
struct Replayed {
    /// How many were put back.
    count: usize,
    put_back: Vec<PutBack>,
    /// How many cannot be put back.
    refused_count: usize,
    /// The first 1,000 of them.
    refused: Vec<Refused>,
    /// How many more would go back: repeat the request.
    left: usize,
    /// Whether the queue has older records, which were not read.
    truncated: bool,
}

/// A record, and its new position.
#[derive(Debug, Serialize)]
struct PutBack {
    letter: String,
    topic: String,
    partition: i32,
    offset: i64,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct Refused {
    letter: String,
    why: String,
}

pub fn routes(letters: Arc<DeadLetters>) -> Routes {
    let turns = Turns::new(AT_ONCE, PER_KEY);
    Routes::new()
        .route(
            Scope::Admin,
            "/v1/dead-letters",
            "Records that could not be stored, without what they hold",
            get(list).in_turn(turns.clone()),
        )
        .route(
            Scope::Admin,
            "/v1/dead-letters/replay",
            "Put such records back into their topics",
            post(put_back).in_turn(turns),
        )
        .with_state(letters)
}

async fn list(State(letters): State<Arc<DeadLetters>>, Query(asked): Query<Asked>) -> Result<Json<Listed>, Problem> {
    letters.newest(&asked).await.map(Json)
}

/// Runs to its end also if the caller hangs up, because it is in turn.
async fn put_back(
    State(letters): State<Arc<DeadLetters>>,
    principal: Principal,
    Json(request): Json<Request>,
) -> Result<Json<Replayed>, Problem> {
    letters.put_back(&principal, &request).await.map(Json)
}

impl DeadLetters {
    pub fn new(pool: PgPool, kafka: ClientOptions, producer: Producer) -> Self {
        Self {
            pool,
            kafka,
            producer,
            turn: Semaphore::new(1),
        }
    }

    /// # Errors
    /// 400 for a filter that cannot be read, and 503 if the log does not answer in time.
    pub async fn newest(&self, asked: &Asked) -> Result<Listed, Problem> {
        let limit = page_limit(asked.limit, LISTED_DEFAULT, LISTED_MAX)?.unsigned_abs() as usize;
        let filter = filter(asked.cause.as_deref(), asked.topic.as_deref(), asked.since.as_deref())?;
        let _turn = self.turn().await?;
        within(READ_MAX, async {
            let queue = DlqReader::open_newest(&self.kafka, READ_RECORDS_MAX).await?;
            dead_letters::list(&queue, &filter, asked.open, limit, &self.kafka.topic_prefix).await
        })
        .await
    }

    async fn put_back(&self, principal: &Principal, request: &Request) -> Result<Replayed, Problem> {
        let reason = caller::reason(&request.reason)?;
        let selected = request.selected()?;
        let topics = self.kafka.topics();
        let _turn = self.turn().await?;
        let (queue, plan) = within(READ_MAX, async {
            let queue = DlqReader::open_newest(&self.kafka, READ_RECORDS_MAX).await?;
            let plan = replay::plan(&queue, &selected, &topics, &self.kafka.topic_prefix).await?;
            anyhow::Ok((queue, plan))
        })
        .await?;
        let mut refused = refused(&queue, &plan);
        let mut chosen: BTreeSet<DlqPosition> = plan.chosen.keys().copied().take(SENT_MAX).collect();
        if chosen.is_empty() {
            return Err(nothing(&plan, &refused));
        }
        self.note(principal, &plan, &chosen, reason).await?;
        let (put_back, is_overdue) = self.send(&queue, &mut chosen).await?;
        let mut left = plan.chosen.len() - put_back.len() - chosen.len();
        match is_overdue {
            true => left += chosen.len(),
            false => refused.extend(chosen.iter().map(|position| Refused::new(*position, GONE))),
        }
        let refused_count = refused.len();
        refused.truncate(SENT_MAX);
        Ok(Replayed {
            count: put_back.len(),
            put_back,
            refused_count,
            refused,
            left,
            truncated: queue.is_truncated(),
        })
    }

    async fn turn(&self) -> Result<SemaphorePermit<'_>, Problem> {
        let turn = tokio::time::timeout(READ_MAX, self.turn.acquire()).await;
        let turn = turn.map_err(|_| Problem::unavailable("somebody else reads the dead-letter queue: try again", 5))?;
        turn.map_err(Problem::internal)
    }

    /// Says in the audit who puts which records back. It is committed before the first is sent.
    async fn note(
        &self,
        principal: &Principal,
        plan: &Plan<'_>,
        chosen: &BTreeSet<DlqPosition>,
        reason: &str,
    ) -> Result<(), Problem> {
        let rows = chosen.iter().filter_map(|position| {
            let topic = plan.chosen.get(position)?;
            Some((position.to_string(), format!("to {topic}")))
        });
        let rows: Vec<(String, String)> = rows.collect();
        let changes = rows.iter().map(|(subject, detail)| Change {
            tenant: &principal.tenant,
            action: "dead_letter.replay",
            subject,
            detail,
            reason,
        });
        let changes: Vec<Change<'_>> = changes.collect();
        caller::note(&self.pool, principal, &changes).await
    }

    /// Takes those that were sent out of `chosen`. Returns them, and whether the time ran out.
    async fn send(
        &self,
        queue: &DlqReader,
        chosen: &mut BTreeSet<DlqPosition>,
    ) -> Result<(Vec<PutBack>, bool), Problem> {
        let until = Instant::now() + SEND_MAX;
        let mut put_back = Vec::new();
        let sent = replay::send(queue, &self.producer, chosen, Some(until), |letter, to| {
            put_back.push(PutBack {
                letter: letter.to_string(),
                topic: to.topic,
                partition: to.partition,
                offset: to.offset,
            });
        })
        .await;
        match sent {
            Ok(()) => Ok((put_back, Instant::now() >= until)),
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), "dead letters were not all put back");
                let detail = format!("{error:#}. Repeating the request is harmless");
                Err(Problem::unavailable(detail, 5).with("put_back", json!(put_back)))
            }
        }
    }
}

impl Request {
    fn selected(&self) -> Result<Selected, Problem> {
        let is_narrowed = self.topic.is_some() || self.since.is_some();
        match (self.records.len(), self.cause.as_deref()) {
            (0, Some(cause)) => {
                let filter = filter(Some(cause), self.topic.as_deref(), self.since.as_deref())?;
                Ok(Selected::Open(filter))
            }
            (1..=SENT_MAX, None) if !is_narrowed => {
                let named = self.records.iter().map(|record| {
                    let position = record.parse::<DlqPosition>();
                    position.map_err(|why| Problem::bad_request(format!("records: {record:?}: {why}")))
                });
                let named: Result<BTreeSet<DlqPosition>, Problem> = named.collect();
                named.map(Selected::Named)
            }
            _ => Err(Problem::bad_request(format!(
                "give `records`, such as [\"0/17\"], at most {SENT_MAX}, or a `cause`, which `topic` and `since` narrow down"
            ))),
        }
    }
}

impl Refused {
    fn new(letter: DlqPosition, why: &str) -> Self {
        Self {
            letter: letter.to_string(),
            why: why.to_owned(),
        }
    }
}

/// Reads in bounded time.
async fn within<T>(limit: Duration, reads: impl Future<Output = anyhow::Result<T>>) -> Result<T, Problem> {
    match tokio::time::timeout(limit, reads).await {
        Ok(Ok(read)) => Ok(read),
        Ok(Err(error)) => {
            tracing::warn!(error = format!("{error:#}"), "cannot read the dead-letter queue");
            Err(Problem::unavailable(format!("{error:#}"), 5))
        }
        Err(_) => Err(Problem::unavailable(
            format!(
                "reading the dead-letter queue takes longer than {} s: use `springtide dlq`",
                limit.as_secs()
            ),
            30,
        )),
    }
}

fn filter(cause: Option<&str>, topic: Option<&str>, since: Option<&str>) -> Result<Filter, Problem> {
    let since = since.map(times::since).transpose();
    Ok(Filter {
        cause: cause.map(str::to_owned),
        topic: topic.map(str::to_owned),
        since: since.map_err(|error| Problem::bad_request(format!("since: {error}")))?,
    })
}

/// Those that are selected and cannot go back.
fn refused(queue: &DlqReader, plan: &Plan<'_>) -> Vec<Refused> {
    let left = plan.left.iter();
    let left = left.flat_map(|(why, positions)| positions.iter().map(move |position| Refused::new(*position, why)));
    let missing = plan.missing.iter().map(|position| match queue.check(*position) {
        Ok(()) => Refused::new(*position, GONE),
        Err(error) => Refused::new(*position, &error.to_string()),
    });
    left.chain(missing).collect()
}

/// Why no record is put back.
fn nothing(plan: &Plan<'_>, refused: &[Refused]) -> Problem {
    match refused.first() {
        None => Problem::not_found("no record matches that was not put back yet"),
        Some(first) if plan.left.is_empty() => Problem::not_found(&first.why),
        Some(first) => Problem::conflict(format!(
            "nothing was put back, of {} selected: {}",
            refused.len(),
            first.why
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn asked(query: &str) -> Result<Asked, String> {
        let uri: axum::http::Uri = format!("/v1/dead-letters?{query}").parse().unwrap();
        let read = axum::extract::Query::<Asked>::try_from_uri(&uri);
        read.map(|query| query.0).map_err(|rejection| rejection.body_text())
    }

    #[test]
    fn empty_fields_filter_nothing_and_unknown_ones_are_refused() {
        assert_eq!(asked("cause=&topic=&since=&limit=").unwrap(), Asked::default());
        assert_eq!(asked("").unwrap(), Asked::default());
        let some = asked("cause=invalid&open=true&since=2h&limit=7").unwrap();
        let expected = Asked {
            cause: Some("invalid".to_owned()),
            since: Some("2h".to_owned()),
            open: true,
            limit: Some(7),
            ..Asked::default()
        };
        assert_eq!(some, expected);
        for wrong in ["open=perhaps", "limit=few", "reason=invalid"] {
            assert!(asked(wrong).is_err(), "{wrong}");
        }
    }

    fn selected(body: serde_json::Value) -> Result<Selected, Problem> {
        serde_json::from_value::<Request>(body).unwrap().selected()
    }

    #[test]
    fn a_request_names_records_or_a_cause() {
        let named = selected(json!({"records": ["0/17", "1/3", "0/17"], "reason": "r"})).unwrap();
        let Selected::Named(named) = named else {
            panic!("records")
        };
        let expected: BTreeSet<DlqPosition> = ["0/17", "1/3"].map(|position| position.parse().unwrap()).into();
        assert_eq!(named, expected);
        let by_cause = json!({"cause": "invalid", "topic": "feedback", "since": "2h", "reason": "r"});
        let Selected::Open(filter) = selected(by_cause).unwrap() else {
            panic!("a cause")
        };
        assert_eq!(
            (filter.cause.as_deref(), filter.topic.as_deref()),
            (Some("invalid"), Some("feedback"))
        );
        assert!(filter.since.is_some());
        for wrong in [
            json!({"reason": "r"}),
            json!({"records": [], "reason": "r"}),
            json!({"records": ["17"], "reason": "r"}),
            json!({"records": ["0/17"], "cause": "invalid", "reason": "r"}),
            json!({"records": ["0/17"], "since": "2h", "reason": "r"}),
            json!({"topic": "feedback", "reason": "r"}),
            json!({"cause": "invalid", "since": "yesterday", "reason": "r"}),
            json!({"records": vec!["0/17"; SENT_MAX + 1], "reason": "r"}),
        ] {
            assert_eq!(selected(wrong.clone()).unwrap_err().status, 400, "{wrong}");
        }
        assert!(
            serde_json::from_value::<Request>(json!({"cause": "invalid"})).is_err(),
            "a reason is needed"
        );
    }

    #[test]
    fn a_request_that_changes_nothing_says_why() {
        let position: DlqPosition = "0/17".parse().unwrap();
        let refused = [Refused::new(position, "it was made from a row")];
        assert_eq!(nothing(&Plan::default(), &[]).status, 404);
        assert_eq!(nothing(&Plan::default(), &refused).status, 404);
        let plan = Plan {
            left: BTreeMap::from([("it was made from a row".to_owned(), vec![position])]),
            ..Plan::default()
        };
        let problem = nothing(&plan, &refused);
        assert_eq!(problem.status, 409);
        assert!(
            problem
                .detail
                .unwrap()
                .ends_with("of 1 selected: it was made from a row")
        );
    }

    #[tokio::test]
    async fn a_reading_that_fails_or_takes_too_long_says_what_to_do() {
        let slow = std::future::pending::<anyhow::Result<()>>();
        let problem = within(Duration::ZERO, slow).await.unwrap_err();
        assert_eq!(problem.status, 503);
        assert!(problem.detail.unwrap().contains("springtide dlq"));
        let down = std::future::ready(Err::<(), _>(anyhow::anyhow!("the broker is down")));
        let problem = within(READ_MAX, down).await.unwrap_err();
        assert_eq!(
            (problem.status.as_u16(), problem.detail.as_deref()),
            (503, Some("the broker is down"))
        );
    }
}
