//! The alias that the realtime run learns from: whether it follows the line, and whether the run
//! may execute.

use crate::trainer::Trainer;
use artifact::assignment::CHAMPION;
use runs::REALTIME_LINE;
use runs::claim::{self, Claim};
use runs::learning::{self, Obstacle, Target};
use runs::realtime;
use runs::run::Status;
use serde_json::json;
use sqlx::PgPool;
use uuid::Uuid;

/// The alias, as seen from the line.
#[derive(Debug, PartialEq)]
pub(super) enum AliasState {
    /// It follows the line.
    Follows,
    /// A release moved it to a version that the line must continue from.
    Rebase { branch: i32, version: i64 },
    /// It does not follow the line: the run pauses. Says where it is.
    Elsewhere(String),
    /// There is no such alias to learn from: the run waits, and sets nothing aside.
    Waits(Obstacle),
}

/// Reads which alias the run learns from, and its state.
pub(super) async fn state(trainer: &Trainer, line_branch: i32) -> Result<(&'static str, AliasState), sqlx::Error> {
    let options = &trainer.options.realtime;
    let learning = learning::read(&trainer.pool, &trainer.policy).await?;
    let state = match (learning.obstacle(options.alias.as_deref()), learning.target) {
        (Some(obstacle), _) => AliasState::Waits(obstacle),
        (None, Some(target)) => state_of(target, REALTIME_LINE, line_branch),
        (None, None) => AliasState::Waits(Obstacle::NothingAssigned),
    };
    Ok((learning.alias, state))
}

fn state_of(row: Target, line: &str, line_branch: i32) -> AliasState {
    match row.follows {
        None => AliasState::Elsewhere(format!("is pinned to version {}", row.version)),
        Some(other) if other != line => AliasState::Elsewhere(format!("follows line {other}")),
        Some(_) if row.branch > line_branch => AliasState::Rebase {
            branch: row.branch,
            version: row.version,
        },
        Some(_) => AliasState::Follows,
    }
}

/// Tells people which alias the run learns from, and why it waits.
#[derive(Debug)]
pub(super) struct Announced {
    learns_from: String,
    /// Set while the run waits.
    advice: Option<String>,
}

impl Announced {
    /// What the run's events say. A run without such an event learned from `champion`.
    pub async fn open(pool: &PgPool, claim: &Claim) -> Result<Self, sqlx::Error> {
        let said = sqlx::query_scalar!(
            r#"select data ->> 'learns_from' as "alias!" from run_event
               where run_id = $1 and data ? 'learns_from' order by id desc limit 1"#,
            claim.run
        )
        .fetch_optional(pool)
        .await?;
        Ok(Announced {
            learns_from: said.unwrap_or_else(|| CHAMPION.into()),
            advice: None,
        })
    }

    /// The run waits. One event for each reason.
    pub async fn waits(&mut self, pool: &PgPool, claim: &Claim, obstacle: &Obstacle) -> Result<(), sqlx::Error> {
        let advice = obstacle.advice();
        metrics::gauge!("springtide_train_alias_missing").set(f64::from(u8::from(advice.is_some())));
        if advice == self.advice.as_deref() {
            return Ok(());
        }
        self.advice = advice.map(str::to_owned);
        let Some(advice) = advice else { return Ok(()) };
        let message = format!("learns nothing, and sets nothing aside: {advice}");
        tracing::warn!(run = %claim.run, "{message}");
        let mut connection = pool.acquire().await?;
        claim::append_event(&mut connection, claim.run, "warn", &message, &json!({})).await
    }

    /// The run learns from this alias, and from the arms of `others`. An event if it is another alias than
    /// before. `steps_done`: by the run.
    pub async fn learns_from(
        &mut self,
        pool: &PgPool,
        claim: &Claim,
        alias: &str,
        others: &[String],
        steps_done: i64,
    ) -> Result<(), sqlx::Error> {
        metrics::gauge!("springtide_train_alias_missing").set(0.0);
        let waited = self.advice.take().is_some();
        if self.learns_from == alias && !waited {
            return Ok(());
        }
        let before = std::mem::replace(&mut self.learns_from, alias.to_owned());
        let message = if before == alias || steps_done == 0 || others.contains(&before) {
            format!("learns from `{alias}`")
        } else {
            format!(
                "learns from `{alias}`, and from `{before}` no more: what `{before}` has answered and is not trained on yet \
                 gets the disposition `held_out`"
            )
        };
        tracing::info!(run = %claim.run, "{message}");
        let mut connection = pool.acquire().await?;
        let data = json!({"learns_from": alias});
        claim::append_event(&mut connection, claim.run, "info", &message, &data).await
    }
}

/// Whether the run may be claimed. A run that paused because of its alias is queued again when the
/// alias follows the line.
pub(super) async fn may_run(trainer: &Trainer, run: Uuid) -> Result<bool, sqlx::Error> {
    match realtime::status(&trainer.pool, run).await? {
        (Status::Queued | Status::Running | Status::Pausing, _) => return Ok(true),
        (Status::Paused, true) => {}
        _ => return Ok(false),
    }
    let (alias, AliasState::Follows) = state(trainer, i32::MAX).await? else {
        return Ok(false);
    };
    realtime::go_on(&trainer.pool, run, alias).await?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(follows: Option<&str>, branch: i32, line_branch: i32) -> AliasState {
        let row = Target {
            version: 7,
            follows: follows.map(String::from),
            branch,
        };
        state_of(row, "realtime", line_branch)
    }

    #[test]
    fn an_alias_on_the_same_branch_is_followed() {
        assert_eq!(judged(Some("realtime"), 2, 2), AliasState::Follows);
        assert_eq!(judged(Some("realtime"), 1, 2), AliasState::Follows);
    }

    #[test]
    fn a_later_branch_re_bases_the_line() {
        assert_eq!(
            judged(Some("realtime"), 3, 2),
            AliasState::Rebase { branch: 3, version: 7 }
        );
    }

    #[test]
    fn an_alias_elsewhere_pauses_the_run() {
        let elsewhere = |place: &str| AliasState::Elsewhere(place.into());
        assert_eq!(judged(None, 3, 2), elsewhere("is pinned to version 7"));
        assert_eq!(judged(Some("run-1"), 3, 2), elsewhere("follows line run-1"));
    }
}
