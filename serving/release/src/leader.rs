//! The release loop. One leader at a time runs it, elected by an advisory lock that ends with its
//! connection.
//!
//! The database notifies the leader when a line moves; it also polls. Each round publishes missing
//! documents, plans the automatic changes and writes them as one epoch.

use super::decide::{Change, ReleaseState, arms, automatic};
use super::{ArmOptions, REALTIME, ReleaseService, audited, canary, tables, webhook};
use anyhow::Context;
use edge::audit::{self, Actor};
use sqlx::PgConnection;
use sqlx::postgres::PgListener;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// First half of the leader lock's key; the second is a hash of the policy's name.
const LEADER_CLASS: i32 = 0x5274_6c65;
/// How often a standby tries to become the leader, and the wait after an error.
const STANDBY_INTERVAL: Duration = Duration::from_secs(1);
/// How often the timestamp is renewed. Followers refuse one that is six times as old.
const TIMESTAMP_INTERVAL: Duration = Duration::from_secs(10);
/// The channel on which the database announces that a line moved.
const LINE_MOVED: &str = "springtide_line";

/// The result of one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Round {
    /// Newest epoch; 0: nothing was assigned yet.
    pub epoch: i64,
    /// Aliases that moved.
    pub changes: usize,
}

/// Runs until `shutdown`, as leader or standby, and sends decisions to their receivers. Failures of
/// database and store are logged and retried.
pub async fn run(service: ReleaseService, shutdown: CancellationToken) -> anyhow::Result<()> {
    let send = webhook::run(service.clone(), shutdown.clone());
    tokio::try_join!(send, lead_or_wait(service, shutdown)).map(drop)
}

async fn lead_or_wait(service: ReleaseService, shutdown: CancellationToken) -> anyhow::Result<()> {
    loop {
        let led = tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            led = lead(&service) => led,
        };
        if let Err(error) = led {
            tracing::warn!(error = format!("{error:#}"), "release loop interrupted");
        }
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            () = tokio::time::sleep(STANDBY_INTERVAL) => {}
        }
    }
}

/// Leads until an error; returns at once if another process leads.
async fn lead(service: &ReleaseService) -> anyhow::Result<()> {
    let inner = &service.0;
    // detached from the pool, so that the lock ends with this future
    let mut connection = inner.pool.acquire().await.context("connect")?.detach();
    let leads = sqlx::query_scalar!(
        r#"select pg_try_advisory_lock($1, hashtext($2)) as "leads!""#,
        LEADER_CLASS,
        inner.policy
    )
    .fetch_one(&mut connection)
    .await
    .context("ask for the lead")?;
    if !leads {
        return Ok(());
    }
    tracing::info!(policy = inner.policy, "leading releases");
    catch_up(service, &mut connection).await?;
    let mut warned = false;
    let mut moved = PgListener::connect_with(&inner.pool).await.context("listen")?;
    moved.listen(LINE_MOVED).await.context("listen")?;
    let mut ticks = tokio::time::interval(Duration::from_millis(inner.options.poll_interval_ms));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut timestamp: Option<Instant> = None;
    let mut next_look = Instant::now();
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            notification = moved.recv() => drop(notification.context("listen")?),
        }
        if timestamp.is_none_or(|at| at.elapsed() >= TIMESTAMP_INTERVAL) {
            service.publish_timestamp().await?;
            timestamp = Some(Instant::now());
        }
        round(service, &mut connection).await?;
        look_at_canaries(service, &mut connection, &mut next_look).await;
        if !warned {
            warned = warn(service, &mut connection).await?;
        }
    }
}

/// Logs what is wrong with the arms in force. Returns false if there are none yet.
async fn warn(service: &ReleaseService, connection: &mut PgConnection) -> anyhow::Result<bool> {
    let inner = &service.0;
    let state = tables::read(connection, &inner.policy, service.rules()).await;
    let Some(experiment) = state.context("read the release state")?.experiment else {
        return Ok(false);
    };
    for warning in arms::warnings(&experiment, &inner.options.arms, inner.learning) {
        tracing::warn!("{warning}");
    }
    Ok(true)
}

/// Notes new receivers of decisions. Then goes on from the tables' newest epoch, or states all aliases
/// again under an epoch that is free in the store (see [`ReleaseService::taken_epoch`]).
async fn catch_up(service: &ReleaseService, connection: &mut PgConnection) -> anyhow::Result<()> {
    webhook::register(connection, &service.0.policy, &service.0.options.webhook)
        .await
        .context("note the receivers of decisions")?;
    service.check_key().await?;
    if let Some(taken) = service.taken_epoch().await?
        && let Some((epoch, _)) = write_changes(service, connection, taken, restate).await?
    {
        tracing::warn!(
            taken,
            epoch,
            "the store's newest assignment is not the one of the tables: aliases stated again"
        );
        // Earlier epochs that are missing are not needed any longer, and may be taken.
        service.0.published.store(epoch - 1, Ordering::Relaxed);
    }
    service.publish_missing().await?;
    Ok(())
}

/// Looks at the canaries from `next` on, which it moves. What fails is logged: aliases follow their lines
/// whatever canaries do.
async fn look_at_canaries(service: &ReleaseService, connection: &mut PgConnection, next: &mut Instant) {
    let began = Instant::now();
    if began < *next {
        return;
    }
    let looked = async {
        if canary::round(service, connection).await? > 0 {
            service.publish_missing().await?;
        }
        anyhow::Ok(())
    };
    if let Err(error) = looked.await {
        tracing::error!(error = format!("{error:#}"), "could not look at the canaries");
    }
    *next = Instant::now() + canary::LOOK_EVERY.max(10 * began.elapsed());
}

/// Publishes, plans, writes, publishes.
async fn round(service: &ReleaseService, connection: &mut PgConnection) -> anyhow::Result<Round> {
    let epoch = service.publish_missing().await?;
    // without the lock first: almost every round has nothing to do
    let state = read(service, connection).await?;
    if changes(&state, &service.0.options.arms, automatic::plan).is_empty() {
        return Ok(Round { epoch, changes: 0 });
    }
    let Some((epoch, changes)) = write_changes(service, connection, 0, automatic::plan).await? else {
        return Ok(Round { epoch, changes: 0 });
    };
    for change in &changes {
        tracing::info!(
            epoch,
            alias = change.alias,
            version = change.to,
            reason = change.reason,
            "alias moved"
        );
        metrics::counter!("springtide_alias_moves_total", "kind" => "follow").increment(1);
    }
    service.publish_missing().await?;
    Ok(Round {
        epoch,
        changes: changes.len(),
    })
}

/// The release state, with which of the newest versions are bad.
async fn read(service: &ReleaseService, connection: &mut PgConnection) -> anyhow::Result<ReleaseState> {
    let policy = &service.0.policy;
    let state = tables::read(connection, policy, service.rules()).await;
    let mut state = state.context("read the release state")?;
    let head = state.line(REALTIME).map(|line| line.head);
    let newest = head.into_iter().chain(state.learner().map(|learner| learner.version));
    let bad = service.0.clear.bad(connection, policy, newest.collect()).await;
    state.bad = bad.context("look for bad versions")?;
    Ok(state)
}

/// What `decide` decides, or one alias as it is if the configuration changes the arms alone.
fn changes(state: &ReleaseState, configured: &[ArmOptions], decide: fn(&ReleaseState) -> Vec<Change>) -> Vec<Change> {
    let changes = decide(state);
    if changes.is_empty() && state.configured(configured).is_some() {
        return state.restate("stated again with other arms").into_iter().collect();
    }
    changes
}

/// Decides under the lock and writes the changes as one epoch above `taken`, with the arms of the
/// configuration if they count and are new. `None`: there were no changes.
async fn write_changes(
    service: &ReleaseService,
    connection: &mut PgConnection,
    taken: i64,
    decide: fn(&ReleaseState) -> Vec<Change>,
) -> anyhow::Result<Option<(i64, Vec<Change>)>> {
    let (policy, configured) = (&service.0.policy, &service.0.options.arms);
    let mut transaction = tables::begin_on(connection, policy).await.context("begin")?;
    let state = read(service, &mut transaction).await?;
    let changes = changes(&state, configured, decide);
    if changes.is_empty() {
        return Ok(None);
    }
    let (epoch, _) = tables::write(&mut transaction, policy, taken, "follow", "follow", &changes)
        .await
        .context("write assignment")?;
    if let Some(draft) = state.configured(configured) {
        let role = audit::role_name("control");
        let actor = Actor { key: None, name: &role };
        audited::write_experiment(&mut transaction, policy, epoch, &draft, actor)
            .await
            .context("write the arms of the configuration")?;
        tracing::info!(
            policy,
            epoch,
            arms = draft.text(),
            reason = draft.reason,
            "arms in force"
        );
    }
    transaction.commit().await.context("commit assignment")?;
    Ok(Some((epoch, changes)))
}

/// One alias as it is. The document of its epoch has all aliases and arms.
fn restate(state: &ReleaseState) -> Vec<Change> {
    let change = state.restate("stated again: the store's newest assignment was not ours");
    change.into_iter().collect()
}

impl ReleaseService {
    /// What a new leader does first, then one round of the loop, a look at the canaries and a timestamp;
    /// for tests of releases. Only [`run`] shows what a leader does that meets a document in its way.
    pub async fn round(&self) -> anyhow::Result<Round> {
        let mut connection = self.0.pool.acquire().await.context("connect")?;
        catch_up(self, &mut connection).await?;
        let done = round(self, &mut connection).await?;
        if canary::round(self, &mut connection).await? > 0 {
            self.publish_missing().await?;
        }
        self.publish_timestamp().await?;
        Ok(done)
    }
}
