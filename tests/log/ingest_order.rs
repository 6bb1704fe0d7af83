//! Property: the same events in any order give the same rows.
//!
//! Random stories (an episode, feedback about it, retractions, its end) are sent twice: once in
//! order, and once shuffled with all other stories and with repetitions. Both copies must end with
//! the same rows. [`crate::session_order`] does the same with sessions, whose trajectory is the
//! episode. `SPRINGTIDE_ORDER_STORIES=100000` runs more stories (`make fuzz NAME=order`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use event_log::event::{EpisodeEnd, Event, Feedback, Generation, Retraction, Target, Value};
use futures::future::try_join_all;
use ingest::reward::{Definition, MetricType};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::{Builder, Uuid};

use fixture::ingest::{Service, generation, patient_producer};
use fixture::{Stack, eventually};

pub const SEED: u64 = 20_261_121;
/// Stories per stack, which gives some ten thousand rows.
pub const STORIES_AT_ONCE: usize = 2_000;
const STORIES: usize = 300;
/// How long nothing may change.
const PATIENCE: Duration = Duration::from_secs(120);
const SOURCE: &str = "tests/order";
/// Events lie in the past, so that trajectories may close at once.
pub const BEGIN: Duration = Duration::from_secs(60);

/// Names an object within a story. Each copy of a story maps roles to its own ids, in the same
/// order.
pub type Role = u16;

#[derive(Debug, Clone)]
pub struct Step {
    /// Milliseconds after the story began.
    at: i64,
    action: Action,
}

#[derive(Debug, Clone)]
enum Action {
    Generation {
        role: Role,
        surface: &'static str,
        declined: bool,
    },
    Feedback {
        role: Role,
        about: About,
        metric: &'static str,
        value: Value,
    },
    Retraction {
        role: Role,
        feedback: Role,
    },
    EpisodeEnd {
        nth: u16,
    },
}

#[derive(Debug, Clone, Copy)]
enum About {
    Generation(Role),
    Episode,
}

const EPISODE: Role = 0;

/// One to three generations and up to nine events about them. Some targets are missing, some events
/// come after the horizon.
pub fn story(rng: &mut StdRng) -> Vec<Step> {
    let mut next: Role = EPISODE + 1;
    let mut role = || {
        next += 1;
        next
    };
    let surface = *["waiting", "ending", "graded"].choose_from(rng);
    let mut steps = Vec::new();
    let generations: Vec<Role> = (0..rng.random_range(1..=3)).map(|_| role()).collect();
    for &role in &generations {
        let declined = rng.random_bool(0.15);
        let action = Action::Generation {
            role,
            surface,
            declined,
        };
        steps.push(Step {
            at: rng.random_range(0..500),
            action,
        });
    }
    let feedback: Vec<Role> = (0..rng.random_range(0..=4)).map(|_| role()).collect();
    for &role in &feedback {
        let about = match rng.random_bool(0.3) {
            true => About::Episode,
            false => About::Generation(*generations.choose_from(rng)),
        };
        let (metric, value) = match rng.random_range(0..4) {
            0 => ("comment", Value::Text("well".to_owned())),
            _ if surface == "graded" => ("score", Value::Float(f64::from(rng.random_range(0..5)))),
            _ => ("accept", Value::Bool(rng.random_bool(0.5))),
        };
        // Few distinct times, so that some coincide.
        let at = 500 + 250 * rng.random_range(0..10);
        let action = Action::Feedback {
            role,
            about,
            metric,
            value,
        };
        steps.push(Step { at, action });
    }
    for _ in 0..rng.random_range(0..=2) {
        let missing = feedback.is_empty() || rng.random_bool(0.1);
        let feedback = if missing { role() } else { *feedback.choose_from(rng) };
        let action = Action::Retraction { role: role(), feedback };
        steps.push(Step {
            at: 500 + 250 * rng.random_range(0..12),
            action,
        });
    }
    for nth in 0..rng.random_range(0..=2) {
        steps.push(Step {
            at: 250 * rng.random_range(0..10),
            action: Action::EpisodeEnd { nth },
        });
    }
    steps
}

impl Step {
    /// Whether this is feedback or a retraction.
    pub fn is_feedback(&self) -> bool {
        matches!(self.action, Action::Feedback { .. } | Action::Retraction { .. })
    }
}

trait ChooseFrom<T> {
    fn choose_from(&self, rng: &mut StdRng) -> &T;
}

impl<T> ChooseFrom<T> for [T] {
    fn choose_from(&self, rng: &mut StdRng) -> &T {
        &self[rng.random_range(0..self.len())]
    }
}

/// A copy of a story, with its own ids.
#[derive(Clone, Copy)]
pub struct StoryCopy {
    begin: OffsetDateTime,
    random: u64,
}

impl StoryCopy {
    pub fn new(begin: OffsetDateTime, random: u64) -> Self {
        Self { begin, random }
    }

    pub fn begin(self) -> OffsetDateTime {
        self.begin
    }

    /// UUIDv7s that differ between copies but sort alike in each: by time, then role, then copy.
    pub fn id(self, role: Role) -> Uuid {
        let millis = u64::try_from(self.begin.unix_timestamp_nanos() / 1_000_000).unwrap();
        let mut tail = [0; 10];
        tail[..2].copy_from_slice(&role.to_be_bytes());
        tail[2..].copy_from_slice(&self.random.to_be_bytes());
        Builder::from_unix_timestamp_millis(millis, &tail).into_uuid()
    }

    pub fn event(self, step: &Step) -> Event {
        let time = self.begin + time::Duration::milliseconds(step.at);
        match &step.action {
            Action::Generation {
                role,
                surface,
                declined,
            } => {
                let generation = Generation {
                    id: self.id(*role),
                    episode_id: self.id(EPISODE),
                    surface: (*surface).to_owned(),
                    declined: *declined,
                    decline_suppressed: false,
                    exploration_share: None,
                    sampling: None,
                    untrainable: None,
                    engine: None,
                    proof: None,
                    ..generation()
                };
                let mut event = generation.into_event("default", SOURCE);
                event.time = time;
                event
            }
            Action::Feedback {
                role,
                about,
                metric,
                value,
            } => Feedback {
                id: self.id(*role),
                target: match about {
                    About::Generation(role) => Target::Generation(self.id(*role)),
                    About::Episode => Target::Episode(self.id(EPISODE)),
                },
                metric_name: (*metric).to_owned(),
                value: value.clone(),
                tags: BTreeMap::new(),
            }
            .into_event("default", SOURCE, time),
            Action::Retraction { role, feedback } => Retraction {
                id: self.id(*role),
                feedback_id: self.id(*feedback),
                reason: String::new(),
            }
            .into_event("default", SOURCE, time),
            Action::EpisodeEnd { nth } => {
                let end = EpisodeEnd {
                    episode_id: self.id(EPISODE),
                };
                end.into_event("default", format!("{SOURCE}/{nth}"), time)
            }
        }
    }
}

/// Surfaces that close at the horizon, at the end of the episode, and at the first feedback.
pub fn options() -> ingest::Options {
    let named = |name: &str| Definition {
        name: name.to_owned(),
        horizon_seconds: 2.0,
        ..Definition::completion()
    };
    ingest::Options {
        surface: vec![
            named("waiting"),
            Definition {
                close_on_episode_end: true,
                ..named("ending")
            },
            Definition {
                metric: "score".to_owned(),
                metric_type: MetricType::Float,
                decline: None,
                close_on_feedback: true,
                ..named("graded")
            },
        ],
        close_grace_seconds: 0.0,
        batch_records_max: 100,
        ..ingest::Options::default()
    }
}

/// Adds a partition that is never read, so that the closer waits.
pub async fn hold_the_closer(pool: &PgPool, topic: &str) {
    eventually("the service knows its partitions", PATIENCE, async || {
        let insert = sqlx::query(
            "insert into consumer_offset (consumer, cluster_id, topic, partition) \
             select distinct consumer, cluster_id, topic, 999 from consumer_offset \
             where consumer = 'sink' and topic = $1",
        );
        let inserted = insert.bind(topic).execute(pool).await.unwrap();
        (inserted.rows_affected() == 1).then_some(())
    })
    .await;
}

pub async fn release_the_closer(pool: &PgPool) {
    sqlx::query("delete from consumer_offset where partition = 999")
        .execute(pool)
        .await
        .unwrap();
}

pub async fn number(pool: &PgPool, query: &'static str) -> i64 {
    sqlx::query_scalar(query).fetch_one(pool).await.unwrap()
}

/// The rows as text by id, without what differs between copies.
async fn rows_by_id(pool: &PgPool) -> BTreeMap<Uuid, String> {
    let rows: Vec<(Uuid, String)> = sqlx::query_as(
        "select g.id, concat_ws(' ', t.surface, t.reward, t.censor_code, t.signal, t.feedback_at, t.reward_definition) \
         from generation g left join trajectory t on t.generation_id = g.id \
         union all select id, concat_ws(' ', metric_name, late, orphaned_at) from feedback \
         union all select id, concat_ws(' ', late) from retraction \
         union all select episode_id, ended_at::text from episode_end",
    )
    .fetch_all(pool)
    .await
    .unwrap();
    rows.into_iter().collect()
}

pub fn number_of_stories() -> usize {
    match std::env::var("SPRINGTIDE_ORDER_STORIES") {
        Ok(number) => number.parse().unwrap(),
        Err(_) => STORIES,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn any_order_of_the_same_events_gives_the_same_rows() {
    let stories = number_of_stories();
    let mut rng = StdRng::seed_from_u64(SEED);
    let mut outcomes: BTreeMap<String, usize> = BTreeMap::new();
    let (began, mut left) = (Instant::now(), stories);
    while left > 0 {
        let some = left.min(STORIES_AT_ONCE);
        run_stories(some, &mut rng, &mut outcomes).await;
        left -= some;
    }
    let took = began.elapsed();
    println!("{stories} stories, each sent twice, in {took:.0?}: {outcomes:?}");
    for kind in ["accept", "reject", "decline", "value", "no_feedback", "retracted"] {
        assert!(outcomes.contains_key(kind), "no story ended with {kind}: {outcomes:?}");
    }
}

async fn run_stories(stories: usize, rng: &mut StdRng, outcomes: &mut BTreeMap<String, usize>) {
    let stack = Stack::start("order").await;
    let service = Service::start_with(&stack, options()).await;
    hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
    let begin = OffsetDateTime::now_utc() - BEGIN;
    let mut in_order = Vec::new();
    let mut shuffled = Vec::new();
    let mut pairs = Vec::new();
    for _ in 0..stories {
        let story = story(rng);
        let [first, second] = [(); 2].map(|()| StoryCopy::new(begin, rng.random()));
        in_order.extend(story.iter().map(|step| first.event(step)));
        shuffled.extend(story.iter().map(|step| second.event(step)));
        let again: Vec<Step> = story.iter().filter(|_| rng.random_bool(0.3)).cloned().collect();
        shuffled.extend(again.iter().map(|step| second.event(step)));
        pairs.push((first, second, story));
    }
    shuffled.shuffle(rng);
    let mut sent = 0;
    send_and_read(&stack, &[&in_order, &shuffled], &mut sent).await;
    assert_eq!(
        number(&stack.pool, "select count(*) from trajectory").await,
        0,
        "the closer waits"
    );
    release_the_closer(&stack.pool).await;
    everything_closes(&stack.pool).await;
    let rows = rows_by_id(&stack.pool).await;
    for (first, second, story) in &pairs {
        for step in story {
            let role = match step.action {
                Action::Generation { role, .. } | Action::Feedback { role, .. } | Action::Retraction { role, .. } => {
                    role
                }
                Action::EpisodeEnd { .. } => EPISODE,
            };
            let [one, other] = [first, second].map(|copy| rows.get(&copy.id(role)));
            assert!(one.is_some(), "{step:?} has no row: {story:#?}");
            assert_eq!(one, other, "{step:?} of {story:#?}");
        }
    }
    let kinds: Vec<(String, i64)> =
        sqlx::query_as("select coalesce(signal, censor_code), count(*) from trajectory group by 1")
            .fetch_all(&stack.pool)
            .await
            .unwrap();
    for (kind, count) in kinds {
        *outcomes.entry(kind).or_default() += usize::try_from(count).unwrap();
    }
    service.stop().await;
}

/// Sends events, and waits until the tables hold them and the `sent` of before.
pub async fn send_and_read(stack: &Stack, batches: &[&[Event]], sent: &mut i64) {
    let producer = patient_producer(stack);
    for events in batches {
        for some in events.chunks(500) {
            try_join_all(some.iter().map(|event| producer.send_event(event)))
                .await
                .unwrap();
        }
        *sent += i64::try_from(events.len()).unwrap();
    }
    let read = "select coalesce(sum(next_offset), 0)::bigint from consumer_offset where consumer = 'sink'";
    becomes("records that the sink has read", &stack.pool, read, *sent).await;
}

pub async fn everything_closes(pool: &PgPool) {
    let open = "select (select count(*) from open_generation) + (select count(*) from open_episode)";
    becomes("what is open", pool, open, 0).await;
}

/// Waits until the query returns this number. Fails if the number has not changed for [`PATIENCE`].
async fn becomes(what: &str, pool: &PgPool, query: &'static str, wanted: i64) {
    let mut last = (number(pool, query).await, Instant::now());
    while last.0 != wanted {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let now = number(pool, query).await;
        if now != last.0 {
            last = (now, Instant::now());
        }
        assert!(last.1.elapsed() < PATIENCE, "{what} stays {now}, not {wanted}");
    }
}
