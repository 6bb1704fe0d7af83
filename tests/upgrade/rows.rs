//! A database with many rows of before sessions were trajectories: how long each later migration
//! takes, what it locks, and how long others wait. Nothing is lost and nothing is rewritten.
//!
//! `make bench-migrate` fills 10⁷ generations, a plain test run 10⁴.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sqlx::{Connection, Executor, PgConnection, PgPool};
use tokio::task::JoinHandle;

use crate::ingest::count;
use crate::plans::{fill_history, rows_or};
use crate::support::Stack;

/// The last migration of before.
const OLD: i64 = 20_261_126_000_007;
const ROWS: i64 = 10_000;
/// Pause of a probe between two transactions.
const PROBE_EVERY: Duration = Duration::from_millis(2);

/// What the roles do, which are stopped during a migration. What would they notice?
const PROBES: [(&str, &str); 4] = [
    (
        "a sink stores a generation",
        "insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, surface,
                                 episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p,
                                 finish_reason, declined, sampled_at)
         values (uuidv7(), 'default', 'demo', 1, 1, '[]', '', 'realtime', 'replica-1', 'production', 'completion', uuidv7(), 'user',
                 'champion', 1, array[1], array[2], array[-0.5], 1, 1, 'stop', false, now());
         insert into open_generation (generation_id, surface, closes_at) values (uuidv7(), 'completion', now())",
    ),
    (
        "a closer closes one",
        "insert into trajectory (generation_id, surface, reward_definition, reward) values (uuidv7(), 'completion', 1, 0.75)",
    ),
    (
        "a trainer commits a step",
        "insert into disposition (generation_id, kind, run_id, step) values (uuidv7(), 'trained', uuidv7(), 1)",
    ),
    (
        "somebody reads the ledger",
        "select disposition from ledger where generation_id = '01900000-0000-7000-8000-000000000000';
         select kind from run limit 1",
    ),
];

/// Transactions that run beside the migrations and roll back.
struct Probe {
    stop: Arc<AtomicBool>,
    /// The longest wait by migration, and errors.
    running: JoinHandle<(BTreeMap<usize, Duration>, Vec<String>)>,
}

impl Probe {
    async fn start(url: &str, sql: &'static str, migration: Arc<AtomicUsize>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut connection = PgConnection::connect(url).await.unwrap();
        let stopped = stop.clone();
        let running = tokio::spawn(async move {
            let (mut longest, mut errors) = (BTreeMap::<usize, Duration>::new(), Vec::new());
            while !stopped.load(Ordering::Relaxed) {
                let (during, began) = (migration.load(Ordering::Relaxed), Instant::now());
                let mut transaction = connection.begin().await.unwrap();
                if let Err(error) = sqlx::raw_sql(sql).execute(&mut *transaction).await {
                    errors.push(error.to_string());
                }
                transaction.rollback().await.unwrap();
                let longest = longest.entry(during).or_default();
                *longest = (*longest).max(began.elapsed());
                tokio::time::sleep(PROBE_EVERY).await;
            }
            (longest, errors)
        });
        Self { stop, running }
    }

    async fn stop(self) -> (BTreeMap<usize, Duration>, Vec<String>) {
        self.stop.store(true, Ordering::Relaxed);
        self.running.await.unwrap()
    }
}

/// How long the backend held each lock that keeps others from writing, by table and mode. Partitions
/// count as their table.
struct Locks {
    stop: Arc<AtomicBool>,
    running: JoinHandle<BTreeMap<(String, String), Duration>>,
}

impl Locks {
    async fn watch(url: &str, backend: i32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut connection = PgConnection::connect(url).await.unwrap();
        let stopped = stop.clone();
        // Tables that the migration makes are not visible here.
        let sql = "select distinct regexp_replace(c.relname, '_([0-9]{4}w[0-9]{2}|default|before_.*)$', ''), l.mode
                   from pg_locks l join pg_class c on c.oid = l.relation
                   where l.pid = $1 and l.granted and c.relkind in ('r', 'p') and c.relnamespace = 'public'::regnamespace
                     and l.mode in ('ShareUpdateExclusiveLock', 'ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock',
                                    'AccessExclusiveLock')";
        let running = tokio::spawn(async move {
            let mut held: BTreeMap<(String, String), Duration> = BTreeMap::new();
            let mut last = Instant::now();
            while !stopped.load(Ordering::Relaxed) {
                let locks: Vec<(String, String)> = sqlx::query_as(sql)
                    .bind(backend)
                    .fetch_all(&mut connection)
                    .await
                    .unwrap();
                let since = last.elapsed();
                last = Instant::now();
                for lock in locks {
                    *held.entry(lock).or_default() += since;
                }
                tokio::time::sleep(PROBE_EVERY).await;
            }
            held
        });
        Self { stop, running }
    }

    async fn stop(self) -> BTreeMap<(String, String), Duration> {
        self.stop.store(true, Ordering::Relaxed);
        self.running.await.unwrap()
    }
}

/// How many generations became what, and the sum of their rewards.
async fn balance(pool: &PgPool) -> Vec<String> {
    let sql = "select concat_ws(' ', tenant_id, policy, purpose, arm, disposition, code, run_id, count(*), sum(reward))
               from ledger group by tenant_id, policy, purpose, arm, disposition, code, run_id order by 1";
    sqlx::query_scalar(sql).fetch_all(pool).await.unwrap()
}

/// The file of each table. Another one means that the table was rewritten.
async fn files(pool: &PgPool) -> BTreeMap<String, i64> {
    let sql = "select relname::text, relfilenode::bigint from pg_class
               where relkind = 'r' and relnamespace = 'public'::regnamespace";
    let rows: Vec<(String, i64)> = sqlx::query_as(sql).fetch_all(pool).await.unwrap();
    rows.into_iter().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_database_with_many_rows_keeps_its_ledger_and_rewrites_no_table() {
    let stack = Stack::start("migrate").await;
    let (pool, url) = (&stack.pool, &stack.database_url);
    let empty = "drop schema public cascade; create schema public";
    pool.execute(empty).await.unwrap();
    let migrations = sqlx::migrate!();
    migrations.run_to(OLD, pool).await.unwrap();
    let (rows, filling) = (rows_or("SPRINGTIDE_MIGRATE_ROWS", ROWS), Instant::now());
    fill_history(pool, rows).await;
    println!("{rows} generations, filled in {:.0?}", filling.elapsed());
    let (balance_before, files_before) = (balance(pool).await, files(pool).await);
    let size = "select pg_database_size(current_database())";
    let trained = count(pool, "select count(*) from disposition where kind = 'trained'").await;

    let during = Arc::new(AtomicUsize::new(0));
    let mut probes = Vec::new();
    for (_, sql) in PROBES {
        probes.push(Probe::start(url, sql, during.clone()).await);
    }
    let mut report = Vec::new();
    let newer = migrations.iter().filter(|migration| migration.version > OLD);
    for (nth, migration) in newer.enumerate() {
        during.store(nth, Ordering::Relaxed);
        let mut connection = PgConnection::connect(url).await.unwrap();
        let backend: i32 = sqlx::query_scalar("select pg_backend_pid()")
            .fetch_one(&mut connection)
            .await
            .unwrap();
        let locks = Locks::watch(url, backend).await;
        let (before, began) = (count(pool, size).await, Instant::now());
        migrations.run_to(migration.version, &mut connection).await.unwrap();
        let took = began.elapsed();
        let grown = count(pool, size).await - before;
        report.push((migration.version, took, grown, locks.stop().await));
    }
    let mut waits = Vec::new();
    for (probe, (name, _)) in probes.into_iter().zip(PROBES) {
        let (longest, errors) = probe.stop().await;
        println!("{name}: {} errors {:?}", errors.len(), errors.first());
        waits.push(longest);
    }
    publish(rows, &report, &waits);

    assert_eq!(balance(pool).await, balance_before, "the ledger balances");
    let files_after = files(pool).await;
    for (table, file) in files_before {
        assert_eq!(files_after.get(&table), Some(&file), "{table} was rewritten");
    }
    let unchecked = "select count(*) from pg_constraint where not convalidated";
    assert_eq!(count(pool, unchecked).await, 0, "every constraint is checked");
    let used = "select count(*) from disposition d join trajectory_use u using (generation_id, run_id, step)
                where d.kind = 'trained' and u.purpose = 'trained' and u.used_at = d.decided_at";
    assert_eq!(count(pool, used).await, trained, "each is a use");
    assert_eq!(count(pool, "select count(*) from trajectory_use").await, trained);
}

type Migrated = (i64, Duration, i64, BTreeMap<(String, String), Duration>);

/// Prints a table, and writes SPRINGTIDE_MIGRATE_JSON.
fn publish(rows: i64, report: &[Migrated], waits: &[BTreeMap<usize, Duration>]) {
    let millis = |duration: Duration| duration.as_millis();
    let mut document = Vec::new();
    for (nth, (version, took, grown, locks)) in report.iter().enumerate() {
        println!("{version}: {:.2} s, {} MiB more", took.as_secs_f64(), grown >> 20);
        let waited: Vec<_> = PROBES
            .iter()
            .zip(waits)
            .map(|((name, _), longest)| (*name, millis(longest.get(&nth).copied().unwrap_or_default())))
            .collect();
        for (name, longest) in &waited {
            println!("    {name}: waited {longest} ms at most");
        }
        for ((table, mode), held) in locks {
            println!("    {mode} on {table} for {} ms", millis(*held));
        }
        let locks = locks
            .iter()
            .map(|((table, mode), held)| json!({"table": table, "mode": mode, "milliseconds": millis(*held)}));
        let waited: BTreeMap<_, _> = waited.into_iter().collect();
        document.push(
            json!({"migration": version, "seconds": took.as_secs_f64(), "bytes": grown,
                             "longest_wait_ms": waited, "locks": locks.collect::<Vec<Value>>()}),
        );
    }
    if let Ok(path) = std::env::var("SPRINGTIDE_MIGRATE_JSON") {
        let document = json!({"generations": rows, "migrations": document});
        std::fs::write(path, serde_json::to_string_pretty(&document).unwrap()).unwrap();
    }
}
