//! Alarms when the learning arm's answers change: what users do with them, how long they are, what they
//! are like. A policy can gain by what no reward shows, such as answers that are never scored.
//!
//! Reads trajectories as they close, whether or not the realtime run executes, one surface after the
//! other. Each figure ([`evidence::figure`]) has a test of its own ([`evidence::change`]) against the
//! arms that do not follow the run, or against the arm's own past. Where they stand is in the table
//! `monitor`, so a restart misses nothing. When an alarm begins and when it ends, the run gets an
//! event. It stops nothing: people decide whether the change is a good one.

mod message;

use crate::options::{REALTIME_LINE, Realtime};
use crate::realtime::{self, Run};
use crate::select::first_id_of_the_last;
use crate::{alarm, learning};
use anyhow::Context;
use artifact::assignment::{CANARY, CHAMPION, LEARNER};
use evidence::change::{Change, News, Side};
use evidence::figure::Figure;
use message::Told;
use serde_json::{Value, json};
use sqlx::{PgConnection, PgPool};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const POLL_EVERY: Duration = Duration::from_secs(5);
/// The first trajectories that count for a new run are so young.
const RECENT: Duration = Duration::from_secs(60 * 60);
/// Trajectories that are taken in one transaction.
const TAKEN_MAX: i64 = 200;
/// Surfaces that are watched, the first by name.
const SURFACES_MAX: i64 = 16;

/// Polls until `shutdown`. Errors are logged and tried again.
pub async fn watch(pool: PgPool, policy: &str, options: &Realtime, shutdown: &CancellationToken) {
    if !options.enabled || options.alarms.change_margin >= 1.0 {
        return;
    }
    let monitors = Monitors { pool, policy, options };
    let watching = async {
        loop {
            if let Err(error) = monitors.poll().await {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "could not look for changes of the learning arm's answers"
                );
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    };
    shutdown.run_until_cancelled(watching).await;
}

#[derive(Debug)]
pub struct Monitors<'a> {
    pub pool: PgPool,
    pub policy: &'a str,
    pub options: &'a Realtime,
}

/// Whose answers are compared.
struct Arms {
    watched: &'static str,
    others: Vec<String>,
}

/// The means over one trajectory's answers.
#[derive(Debug)]
struct Row {
    id: Uuid,
    version: i64,
    watched: bool,
    shown: Option<f64>,
    accepted: Option<f64>,
    edited: Option<f64>,
    unanswered: Option<f64>,
    unscored: Option<f64>,
    disagreement: Option<f64>,
    tool_failed: Option<f64>,
    length: Option<f64>,
    repetition: Option<f64>,
    entropy: Option<f64>,
}

impl Row {
    fn value(&self, figure: Figure) -> Option<f64> {
        match figure {
            Figure::Shown => self.shown,
            Figure::Accepted => self.accepted,
            Figure::Edited => self.edited,
            Figure::Unanswered => self.unanswered,
            Figure::Unscored => self.unscored,
            Figure::Disagreement => self.disagreement,
            Figure::ToolFailed => self.tool_failed,
            Figure::Length => self.length,
            Figure::Repetition => self.repetition,
            Figure::Entropy => self.entropy,
        }
    }
}

impl Monitors<'_> {
    /// Takes all that has closed since the last time.
    pub async fn poll(&self) -> anyhow::Result<()> {
        let Some(Run { id: run, .. }) = realtime::find(&self.pool, self.policy, REALTIME_LINE).await? else {
            return Ok(());
        };
        let arms = self.arms().await?;
        let surfaces = sqlx::query_scalar!(
            r#"select distinct surface as "surface!" from reward_definition order by 1 limit $1"#,
            SURFACES_MAX
        );
        for surface in surfaces.fetch_all(&self.pool).await? {
            while self.take(run, &arms, &surface).await? == TAKEN_MAX as usize {}
        }
        Ok(())
    }

    async fn arms(&self) -> Result<Arms, sqlx::Error> {
        let others = sqlx::query_scalar!(
            r#"
            select arm ->> 'alias' as "alias!"
            from (select arms from experiment where policy = $1 order by epoch desc limit 1) newest
            cross join lateral jsonb_array_elements(newest.arms) arm
            where arm ->> 'alias' <> all ($2)
            "#,
            self.policy,
            // these serve versions of the line, so they would change with it
            &[LEARNER.to_owned(), CHAMPION.to_owned(), CANARY.to_owned()]
        );
        Ok(Arms {
            watched: learning::read(&self.pool, self.policy).await?.alias,
            others: others.fetch_all(&self.pool).await?,
        })
    }

    /// Takes the next trajectories of one surface. Returns how many.
    async fn take(&self, run: Uuid, arms: &Arms, surface: &str) -> anyhow::Result<usize> {
        let mut transaction = edge::database::begin(&self.pool).await?;
        let stored = sqlx::query!(
            "select last_id, state from monitor where run_id = $1 and surface = $2",
            run,
            surface
        );
        let (since, mut changes) = match stored.fetch_optional(&mut *transaction).await? {
            Some(stored) => (
                stored.last_id,
                serde_json::from_value(stored.state).context("read monitor.state")?,
            ),
            None => (first_id_of_the_last(RECENT), BTreeMap::<Figure, Change>::new()),
        };
        let rows = self.next(&mut transaction, arms, surface, since).await?;
        if let Some(last) = rows.last() {
            let told = self.observe(&rows, &mut changes);
            for (figure, told) in &told {
                self.append_event(&mut transaction, run, arms, surface, *figure, told)
                    .await?;
            }
            let (state, figures) = (serde_json::to_value(&changes)?, self.figures(&changes));
            sqlx::query!(
                "insert into monitor (run_id, surface, last_id, state, figures) values ($1, $2, $3, $4, $5)
                 on conflict (run_id, surface) do update
                 set last_id = excluded.last_id, state = excluded.state, figures = excluded.figures,
                     updated_at = clock_timestamp()",
                run,
                surface,
                last.id,
                state,
                figures
            )
            .execute(&mut *transaction)
            .await?;
            transaction.commit().await?;
        }
        self.record_metrics(surface, &changes);
        Ok(rows.len())
    }

    async fn next(
        &self,
        connection: &mut PgConnection,
        arms: &Arms,
        surface: &str,
        since: Uuid,
    ) -> Result<Vec<Row>, sqlx::Error> {
        // The query itself takes only what tenants logged that consent. This is for databases with one user for all roles.
        sqlx::query!("select set_config('springtide.all_tenants', 'on', true) as all_tenants")
            .fetch_one(&mut *connection)
            .await?;
        sqlx::query_file_as!(
            Row,
            "src/monitors/next.sql",
            self.policy,
            arms.watched,
            &arms.others,
            surface,
            since,
            self.options.answer_seconds_max,
            TAKEN_MAX
        )
        .fetch_all(connection)
        .await
    }

    fn observe(&self, rows: &[Row], changes: &mut BTreeMap<Figure, Change>) -> Vec<(Figure, Told)> {
        let mut told = Vec::new();
        for row in rows {
            let side = if row.watched { Side::Watched } else { Side::Others };
            for figure in Figure::ALL {
                let Some(value) = row.value(figure) else { continue };
                let change = changes.entry(figure).or_default();
                let news = change.observe(&self.options.alarms.design(figure), side, value);
                let version = row.version;
                told.extend(news.map(|news| (figure, Told { news, version })));
            }
        }
        told
    }

    async fn append_event(
        &self,
        connection: &mut PgConnection,
        run: Uuid,
        arms: &Arms,
        surface: &str,
        figure: Figure,
        told: &Told,
    ) -> Result<(), sqlx::Error> {
        let message = told.message(arms.watched, surface, figure, self.options.alarms.reference_answers);
        let (begins, levels) = match told.news {
            News::Changed(levels) => (true, levels),
            News::Settled(levels) => (false, levels),
        };
        let alarm = format!("{} of {surface}", figure.name());
        let data = json!({
            "figure": figure,
            "surface": surface,
            "version": told.version,
            "reference": levels.reference,
            "recent": levels.recent,
            "others": levels.others,
        });
        alarm::tell(connection, run, &alarm, begins, &message, data).await
    }

    /// For people, as the page shows it.
    fn figures(&self, changes: &BTreeMap<Figure, Change>) -> Value {
        let shown = changes.iter().map(|(figure, change)| {
            let design = self.options.alarms.design(*figure);
            json!({
                "figure": figure,
                "levels": change.levels(&design),
                "evidence": change.evidence(&design),
                "changed": change.is_changed(),
            })
        });
        shown.collect()
    }

    fn record_metrics(&self, surface: &str, changes: &BTreeMap<Figure, Change>) {
        for (figure, change) in changes {
            let labels = [("surface", surface.to_owned()), ("figure", figure.name().to_owned())];
            let changed = f64::from(u8::from(change.is_changed()));
            metrics::gauge!("springtide_train_figure_alarm", &labels).set(changed);
            let Some(levels) = change.levels(&self.options.alarms.design(*figure)) else {
                continue;
            };
            let of = [
                ("reference", Some(levels.reference)),
                ("recent", Some(levels.recent)),
                ("others", levels.others),
            ];
            for (level, value) in of {
                let labels = [&labels[..], &[("level", level.to_owned())]].concat();
                if let Some(value) = value {
                    metrics::gauge!("springtide_train_figure", &labels).set(value);
                }
            }
        }
    }
}
