//! The release loop: one leader at a time, elected by an advisory lock that lives and dies with its connection. A round is due
//! when a line has moved, as the database says at once, and now and then without that. Each round it publishes what is missing, asks `plan` what should change, and writes that as one epoch.

use super::{CHAMPION, Desk, books, plan};
use anyhow::Context;
use sqlx::PgConnection;
use sqlx::postgres::PgListener;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// First half of the leader lock's key; the second is the policy's.
const LEADER_CLASS: i32 = 0x5274_6c65;
/// How often a stand-by asks for the lead, and how long an error is waited out.
const STAND_BY: Duration = Duration::from_secs(1);
/// How often it is said what is newest; followers believe nothing new for longer than six times that.
const STATE_EVERY: Duration = Duration::from_secs(10);
/// On which the database says that a line has moved.
const MOVED: &str = "springtide_line";

/// What one round did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Follow {
    /// Newest epoch, 0 where nothing was ever assigned.
    pub epoch: i64,
    /// Aliases that moved.
    pub changes: usize,
}

/// Runs until `shutdown`: leads, or stands by to lead. Database and store may come and go.
pub async fn follow(desk: Desk, shutdown: CancellationToken) -> anyhow::Result<()> {
    loop {
        let led = tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            led = lead(&desk) => led,
        };
        if let Err(error) = led {
            tracing::warn!(error = format!("{error:#}"), "release loop interrupted");
        }
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            () = tokio::time::sleep(STAND_BY) => {}
        }
    }
}

/// Leads until something breaks; returns at once when another leads.
async fn lead(desk: &Desk) -> anyhow::Result<()> {
    let inner = &desk.0;
    // taken out of the pool, so that the lock ends with this future and nobody inherits it
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
    restate_arms(desk, &mut connection).await?;
    let mut moved = PgListener::connect_with(&inner.pool).await.context("listen")?;
    moved.listen(MOVED).await.context("listen")?;
    let mut ticks = tokio::time::interval(Duration::from_millis(inner.options.poll_interval_ms));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut stated: Option<Instant> = None;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            news = moved.recv() => drop(news.context("listen")?),
        }
        if stated.is_none_or(|stated| stated.elapsed() >= STATE_EVERY) {
            desk.state().await?;
            stated = Some(Instant::now());
        }
        round(desk, &mut connection).await?;
    }
}

/// Publishes, plans, writes, publishes.
async fn round(desk: &Desk, connection: &mut PgConnection) -> anyhow::Result<Follow> {
    let inner = &desk.0;
    // read outside a lock first: almost every round finds nothing to do
    let epoch = desk.publish_missing().await?;
    let books = books::read(connection, &inner.policy).await.context("read the books")?;
    if plan::plan(&books).is_empty() {
        return Ok(Follow { epoch, changes: 0 });
    }
    let mut transaction = books::begin(connection, &inner.policy).await.context("begin")?;
    let books = books::read(&mut transaction, &inner.policy)
        .await
        .context("read the books")?;
    let changes = plan::plan(&books);
    if changes.is_empty() {
        return Ok(Follow { epoch, changes: 0 });
    }
    let (epoch, _) = books::write(&mut transaction, &inner.policy, "follow", "follow", &changes)
        .await
        .context("write assignment")?;
    transaction.commit().await.context("commit assignment")?;
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
    desk.publish_missing().await?;
    Ok(Follow {
        epoch,
        changes: changes.len(),
    })
}

/// The experiment's arms are part of every assignment: other arms in the options than in the newest one need a new epoch.
async fn restate_arms(desk: &Desk, connection: &mut PgConnection) -> anyhow::Result<()> {
    let inner = &desk.0;
    if !desk.arms_changed().await? {
        return Ok(());
    }
    let mut transaction = books::begin(connection, &inner.policy).await.context("begin")?;
    let books = books::read(&mut transaction, &inner.policy)
        .await
        .context("read the books")?;
    let Some(champion) = books.alias(CHAMPION) else {
        return Ok(());
    };
    let change = plan::Change {
        alias: champion.alias.clone(),
        from: Some(champion.version),
        to: champion.version,
        follows: champion.follows.clone(),
        branch: champion.branch,
        withdrawn: false,
        reason: "the experiment's arms changed".into(),
    };
    let (epoch, _) = books::write(&mut transaction, &inner.policy, "follow", "follow", &[change])
        .await
        .context("write assignment")?;
    transaction.commit().await.context("commit assignment")?;
    tracing::info!(epoch, "experiment arms changed");
    desk.publish_missing().await?;
    Ok(())
}

impl Desk {
    /// One round of the loop, for whoever drives it by hand: the tests.
    pub async fn round(&self) -> anyhow::Result<Follow> {
        let mut connection = self.0.pool.acquire().await.context("connect")?;
        round(self, &mut connection).await
    }
}
