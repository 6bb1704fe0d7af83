//! Checks afterwards that every acknowledged event is stored exactly once, or is a dead letter with
//! a reason.

use std::collections::{BTreeMap, HashMap, HashSet};

use event_log::ClientOptions;
use event_log::event::Event;
use event_log::{DlqEntry, DlqReader};
use futures::TryStreamExt;
use rdkafka::consumer::{BaseConsumer, Consumer};
use sqlx::PgPool;
use uuid::Uuid;

use super::ledger::{Entry, Kind, short};
use super::stories::SOURCE;

/// The result. [`Audit::failures`] lists the numbers that must be 0.
#[derive(Debug, Default, serde::Serialize)]
pub struct Audit {
    /// Events that were acknowledged at least once.
    pub acked_events: u64,
    pub rows: BTreeMap<&'static str, u64>,
    /// Acknowledged, but neither a row nor a dead letter.
    pub lost: u64,
    /// Rows that were never sent, and dead letters of stored events.
    pub doubled: u64,
    /// An event key without its row, or a row without its key.
    pub torn: u64,
    /// Events with an id that is taken: acknowledged and then a dead letter, or refused with 409.
    pub conflicts_dead: u64,
    pub conflicts_refused: u64,
    /// Refused with 409 although the same event is stored.
    pub refused_wrongly: u64,
    /// Refused with another status than 409.
    pub refused_otherwise: u64,
    /// Distinct dead letters by reason.
    pub dead: BTreeMap<String, u64>,
    /// Repeated dead letters, after crashes between writing one and the commit.
    pub dead_repeated: u64,
    /// Acknowledged undecodable records that are not dead letters.
    pub poison_lost: u64,
    /// Unread records of the log.
    pub behind: i64,
    /// Generations without exactly one disposition.
    pub unaccounted: i64,
    /// See [`GENERATIONS_MISJUDGED`].
    pub generations_misjudged: i64,
    /// Sessions that closed.
    pub episodes: i64,
    /// Turns that came after their session had closed.
    pub late_turns: i64,
    /// See [`SPLIT`], [`TURNS_MISPLACED`], and [`SESSIONS_MISJUDGED`] with [`TURNS_MISJUDGED`].
    pub split: i64,
    pub turns_misplaced: i64,
    pub sessions_misjudged: i64,
    /// Examples of failures.
    pub examples: Vec<String>,
    /// Feedback without a generation that did not become a dead letter.
    pub orphans_unmarked: i64,
}

impl Audit {
    pub fn failures(&self) -> Vec<(&'static str, i64)> {
        let count = |number: u64| i64::try_from(number).unwrap();
        let must_be_zero = [
            ("lost", count(self.lost)),
            ("doubled", count(self.doubled)),
            ("torn", count(self.torn)),
            ("refused although stored", count(self.refused_wrongly)),
            ("refused for another reason", count(self.refused_otherwise)),
            ("poison lost", count(self.poison_lost)),
            ("behind", self.behind),
            ("unaccounted for", self.unaccounted),
            ("generations misjudged", self.generations_misjudged),
            ("episodes split", self.split),
            ("turns misplaced", self.turns_misplaced),
            ("sessions misjudged", self.sessions_misjudged),
            ("orphans not reported", self.orphans_unmarked),
        ];
        must_be_zero.into_iter().filter(|(_, number)| *number != 0).collect()
    }
}

type Digest = [u8; 8];

/// The contents of the dead letters.
#[derive(Default)]
struct DeadLetters {
    /// Conflicts and refusals: the bodies by event id.
    events: HashMap<Uuid, HashSet<Digest>>,
    /// Their origins and details, for messages.
    details: HashMap<Uuid, Vec<String>>,
    /// Undecodable records.
    raw: HashSet<Vec<u8>>,
    reasons: BTreeMap<String, u64>,
    repeated: u64,
}

pub async fn audit(entries: &[Entry], poison: &[Vec<u8>], pool: &PgPool, kafka: &ClientOptions) -> Audit {
    let keys = keys(pool).await;
    let rows = rows(pool).await;
    let dead = dead(kafka).await;
    let mut audit = Audit {
        rows: rows.iter().map(|(kind, ids)| (kind.name(), ids.len() as u64)).collect(),
        dead: dead.reasons.clone(),
        dead_repeated: dead.repeated,
        ..Audit::default()
    };
    let mut bodies: HashMap<Uuid, u32> = HashMap::new();
    for entry in entries {
        *bodies.entry(entry.id).or_default() += 1;
    }
    for entry in entries {
        let stored = keys.get(&entry.id) == Some(&entry.digest);
        let has_row = rows[&entry.kind].contains(&entry.id);
        let is_dead = dead
            .events
            .get(&entry.id)
            .is_some_and(|bodies| bodies.contains(&entry.digest));
        audit.acked_events += u64::from(entry.acked > 0);
        audit.lost += u64::from(entry.acked > 0 && !(stored && has_row) && !is_dead);
        audit.doubled += u64::from(stored && is_dead);
        audit.torn += u64::from(stored != has_row && !(has_row && keys.contains_key(&entry.id)));
        audit.conflicts_dead += u64::from(is_dead);
        audit.conflicts_refused += u64::from(entry.conflicts > 0);
        // Of two bodies with the same id in one request, either may be refused.
        audit.refused_wrongly += u64::from(entry.conflicts > 0 && stored && bodies[&entry.id] == 1);
        if stored && is_dead {
            audit
                .examples
                .push(format!("stored and dead: {entry:?} {:?}", dead.details[&entry.id]));
        }
        audit.refused_otherwise += u64::from(entry.refused != 0);
    }
    let foreign = |ids: &HashSet<Uuid>| ids.iter().filter(|id| !bodies.contains_key(id)).count() as u64;
    audit.doubled += rows.values().map(foreign).sum::<u64>();
    audit.torn += keys
        .keys()
        .filter(|id| !rows.values().any(|ids| ids.contains(id)))
        .count() as u64;
    audit.poison_lost = poison.iter().filter(|poison| !dead.raw.contains(*poison)).count() as u64;
    audit.behind = behind(pool, kafka).await;
    audit.unaccounted = number(
        pool,
        "select abs((select count(*) from generation) - (select count(distinct generation_id) from ledger)) \
              + abs((select count(*) from generation) - (select count(*) from ledger)) \
              + abs((select count(*) from generation) - (select count(*) from trajectory)) \
              + (select count(*) from ledger where disposition not in ('queued', 'censored'))",
    )
    .await;
    audit.generations_misjudged = number(pool, GENERATIONS_MISJUDGED).await;
    audit.episodes = number(pool, "select count(distinct episode_id) from trajectory").await;
    audit.late_turns = number(pool, "select count(*) from trajectory where censor_code = 'late_turn'").await;
    audit.split = number(pool, SPLIT).await;
    audit.turns_misplaced = number(pool, TURNS_MISPLACED).await;
    audit.sessions_misjudged = number(pool, SESSIONS_MISJUDGED).await + number(pool, TURNS_MISJUDGED).await;
    audit.orphans_unmarked = number(pool, ORPHANS_UNMARKED).await;
    audit
}

/// Episodes that are open, or whose turns did not all close with one outcome in one transaction.
const SPLIT: &str = "\
    select (select count(*) from open_episode) + count(*) from ( \
        select from trajectory where episode_id is not null group by episode_id \
        having count(distinct (reward, censor_code, signal, feedback_at, closes_at, closed_at)) > 1 \
            or count(distinct xmin::text) > 1 or count(*) <> min(episode_turns)) as split";

/// Turns that neither belong to their episode nor say that they came late; turns that were late to
/// nothing, or for no reason (a transaction may begin before the closure and wait for it); and turns of
/// an episode, other than its first, that are of a time after its close.
const TURNS_MISPLACED: &str = "\
    with turn as ( \
        select g.id, g.episode_id, g.stored_at, greatest(g.sampled_at, g.finished_at) as starts_at, t.episode_id as closed_with, \
               t.censor_code, t.closes_at, t.closed_at, \
               row_number() over (partition by t.episode_id order by greatest(g.sampled_at, g.finished_at), g.id) as nth \
        from generation g join trajectory t on t.generation_id = g.id \
        where g.surface in ('session', 'ending', 'deciding') \
    ) \
    select count(*) from turn \
    left join (select distinct episode_id, closes_at, closed_at from turn where closed_with is not null) closed \
        on closed.episode_id = turn.episode_id \
    where (turn.closed_with is null) <> (turn.censor_code is not distinct from 'late_turn') \
       or turn.closed_with <> turn.episode_id \
       or turn.closed_with is null and closed.episode_id is null \
       or turn.closed_with is null and turn.starts_at <= closed.closes_at \
          and turn.stored_at < closed.closed_at - interval '1 minute' \
       or turn.closed_with is not null and turn.nth > 1 and turn.starts_at > turn.closes_at + interval '1 second'";

/// Generations, trajectories of their own, whose reward is not that of the first feedback about them or
/// their episode that was stored and given in time and not retracted in time.
///
/// Feedback about an episode, or its retraction, is not late while any of the episode's generations is
/// open. Those that closed before it was stored did not use it. So such a generation may have either
/// reward.
const GENERATIONS_MISJUDGED: &str = "\
    with closed as ( \
        select t.*, g.episode_id as episode, \
               exists (select from generation other where other.episode_id = g.episode_id and other.id <> g.id) as has_siblings \
        from trajectory t join generation g on g.id = t.generation_id \
        where t.surface = 'completion' \
    ), signal as ( \
        select t.generation_id, f.id, f.value_bool, f.given_at, \
               f.stored_at > t.closed_at and f.episode_id is not null and has_siblings as is_after, \
               r.given_at is not null as is_retracted, \
               r.given_at is not null and not (r.stored_at > t.closed_at and f.episode_id is not null and has_siblings) \
                   as was_retracted \
        from closed t \
        join feedback f on f.generation_id = t.generation_id or f.episode_id = t.episode \
        left join lateral ( \
            select given_at, stored_at from retraction r \
            where r.feedback_id = f.id and not r.late and r.given_at <= t.closes_at \
            order by stored_at limit 1 \
        ) r on true \
        where f.metric_name = 'accept' and not f.late and f.given_at <= t.closes_at \
    ), expected as ( \
        select t.reward, \
               (select value_bool from signal s where s.generation_id = t.generation_id and not is_retracted \
                order by given_at, id limit 1) as of_all, \
               (select value_bool from signal s where s.generation_id = t.generation_id and not is_after and not was_retracted \
                order by given_at, id limit 1) as of_those_before \
        from closed t \
    ) \
    select count(*) from expected \
    where reward is distinct from case of_all when true then 0.75 when false then -0.25 end \
      and reward is distinct from case of_those_before when true then 0.75 when false then -0.25 end";

/// Sessions whose reward is not that of the first feedback about them that was stored and given in
/// time and not retracted in time.
const SESSIONS_MISJUDGED: &str = "\
    select count(*) from ( \
        select episode_id, min(closes_at) as closes_at, min(reward) as reward from trajectory \
        where episode_id is not null group by episode_id \
    ) session \
    left join lateral ( \
        select f.value_bool from feedback f \
        where f.episode_id = session.episode_id and f.metric_name = 'accept' and not f.late \
          and f.given_at <= session.closes_at \
          and not exists (select from retraction r \
                          where r.feedback_id = f.id and not r.late and r.given_at <= session.closes_at) \
        order by f.given_at, f.id limit 1 \
    ) first on true \
    where session.reward is distinct from case first.value_bool when true then 0.75 when false then -0.25 end";

/// The same for the own rewards of turns.
const TURNS_MISJUDGED: &str = "\
    select count(*) from trajectory t \
    left join lateral ( \
        select f.value_bool from feedback f \
        where f.generation_id = t.generation_id and f.metric_name = 'accept' and not f.late and f.given_at <= t.closes_at \
          and not exists (select from retraction r where r.feedback_id = f.id and not r.late and r.given_at <= t.closes_at) \
        order by f.given_at, f.id limit 1 \
    ) first on true \
    where t.surface = 'session' and t.reward is not null \
      and t.turn_reward is distinct from case first.value_bool when true then 1.0 when false then 0.0 end";

pub const ORPHANS_UNMARKED: &str = "select count(*) from feedback f where f.orphaned_at is null \
     and not exists (select from generation g where g.id = f.generation_id or g.episode_id = f.episode_id)";

pub async fn number(pool: &PgPool, query: &'static str) -> i64 {
    sqlx::query_scalar(query).fetch_one(pool).await.unwrap()
}

async fn keys(pool: &PgPool) -> HashMap<Uuid, Digest> {
    let rows = sqlx::query_as::<_, (String, Vec<u8>)>(
        "select event_id, digest from event_key where tenant_id = 'default' and source = $1",
    );
    let mut rows = rows.bind(SOURCE).fetch(pool);
    let mut keys = HashMap::new();
    while let Some((id, digest)) = rows.try_next().await.unwrap() {
        keys.insert(id.parse().unwrap(), short(&digest));
    }
    keys
}

async fn rows(pool: &PgPool) -> BTreeMap<Kind, HashSet<Uuid>> {
    let tables = [
        (Kind::Generation, "select id from generation"),
        (Kind::Feedback, "select id from feedback"),
        (Kind::Retraction, "select id from retraction"),
        (Kind::EpisodeEnd, "select episode_id from episode_end"),
    ];
    let mut rows = BTreeMap::new();
    for (kind, query) in tables {
        let ids: Vec<Uuid> = sqlx::query_scalar(query).fetch_all(pool).await.unwrap();
        let count = ids.len();
        let ids: HashSet<Uuid> = ids.into_iter().collect();
        assert_eq!(ids.len(), count, "{} has one row of an id", kind.name());
        rows.insert(kind, ids);
    }
    rows
}

async fn dead(kafka: &ClientOptions) -> DeadLetters {
    let mut dead = DeadLetters::default();
    let mut seen = HashSet::new();
    let reader = DlqReader::open(kafka).await.unwrap();
    let mut scan = reader.scan().unwrap();
    while let Some(record) = scan.next().await.unwrap() {
        let DlqEntry::Record(record) = record else { continue };
        let from = record.from.map(|from| (from.topic, from.partition, from.offset));
        if !seen.insert((from.clone(), record.value.clone())) {
            dead.repeated += 1;
            continue;
        }
        *dead.reasons.entry(record.reason.clone()).or_default() += 1;
        match Event::decode(&record.value) {
            Ok(event) if record.reason != "orphan" => {
                let about = dead.details.entry(event.id.parse().unwrap()).or_default();
                about.push(format!(
                    "{from:?} {} {}: {:02x?}",
                    record.reason,
                    record.detail,
                    short(&event.digest())
                ));
                let bodies = dead.events.entry(event.id.parse().unwrap()).or_default();
                bodies.insert(short(&event.digest()));
            }
            Ok(_) => {}
            Err(_) => {
                dead.raw.insert(record.value);
            }
        }
    }
    dead
}

/// Number of records in the log that are not yet in the tables.
pub async fn behind(pool: &PgPool, kafka: &ClientOptions) -> i64 {
    let rows: Vec<(String, i32, i64)> =
        sqlx::query_as("select topic, partition, next_offset from consumer_offset where consumer = 'sink'")
            .fetch_all(pool)
            .await
            .unwrap();
    let client = kafka.config(&[]);
    let look = move || {
        let consumer: BaseConsumer = client.create().unwrap();
        let behind = rows.iter().map(|(topic, partition, next)| {
            let (_, end) = consumer
                .fetch_watermarks(topic, *partition, std::time::Duration::from_secs(10))
                .unwrap();
            end - next
        });
        behind.sum()
    };
    tokio::task::spawn_blocking(look).await.unwrap()
}
