//! The alias that the realtime run learns from: whether it follows the line, and whether the run
//! may execute.

use crate::trainer::Trainer;
use artifact::assignment::{CHAMPION, LEARNER};
use edge::audit::{self, Actor};
use runs::api::audited;
use runs::claim::{self, Claim};
use runs::learning::{self, Obstacle, Target};
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
    /// It does not follow the line: the run pauses.
    OtherTarget(OtherTarget),
    /// There is no such alias to learn from: the run waits, and sets nothing aside.
    Waits(Obstacle),
}

/// Where an alias is that does not follow the line. `run.reason` has it as text while the run is
/// paused.
#[derive(Debug, PartialEq)]
pub(super) enum OtherTarget {
    Pinned { version: i64 },
    OtherLine { line: String },
}

impl OtherTarget {
    /// The text of `run.reason`.
    pub fn to_reason(&self, alias: &str, line: &str) -> String {
        let place = match self {
            OtherTarget::Pinned { version } => format!("is pinned to version {version}"),
            OtherTarget::OtherLine { line } => format!("follows line {line}"),
        };
        format!("{alias} {place}; the run goes on when it follows line {line} again")
    }

    /// The inverse of [`to_reason`](Self::to_reason), whichever alias the run learned from then.
    /// `None`: the run is paused for another reason.
    pub fn from_reason(reason: &str) -> Option<Self> {
        let (alias, place) = reason.split_once(' ')?;
        if ![LEARNER, CHAMPION].contains(&alias) {
            return None;
        }
        let (place, _) = place.split_once("; the run goes on when it follows line ")?;
        match (
            place.strip_prefix("is pinned to version "),
            place.strip_prefix("follows line "),
        ) {
            (Some(version), _) => Some(OtherTarget::Pinned {
                version: version.parse().ok()?,
            }),
            (_, Some(line)) => Some(OtherTarget::OtherLine { line: line.to_owned() }),
            _ => None,
        }
    }
}

/// Reads which alias the run learns from, and its state.
pub(super) async fn state(trainer: &Trainer, line_branch: i32) -> Result<(&'static str, AliasState), sqlx::Error> {
    let options = &trainer.options.realtime;
    let learning = learning::read(&trainer.pool, &trainer.policy).await?;
    let state = match (learning.obstacle(options.alias.as_deref()), learning.target) {
        (Some(obstacle), _) => AliasState::Waits(obstacle),
        (None, Some(target)) => state_of(target, &options.line, line_branch),
        (None, None) => AliasState::Waits(Obstacle::NothingAssigned),
    };
    Ok((learning.alias, state))
}

fn state_of(row: Target, line: &str, line_branch: i32) -> AliasState {
    match row.follows {
        None => AliasState::OtherTarget(OtherTarget::Pinned { version: row.version }),
        Some(other) if other != line => AliasState::OtherTarget(OtherTarget::OtherLine { line: other }),
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

/// The run's id. Creates its row on first use, and stores the current configuration in it. Both are
/// in the audit.
pub(super) async fn ensure_run(trainer: &Trainer) -> anyhow::Result<Uuid> {
    let config = serde_json::to_value(&trainer.options.realtime)?;
    let options = &trainer.options.realtime;
    let known = sqlx::query!(
        r#"
        select id, config = $3 as "same_config!", base_version is not null as "based!" from run
        where kind = 'realtime' and policy = $1 and line = $2
        "#,
        trainer.policy,
        options.line,
        config
    )
    .fetch_optional(&trainer.pool)
    .await?;
    if let Some(run) = known.as_ref().filter(|run| run.same_config && run.based) {
        return Ok(run.id);
    }
    let mut transaction = edge::database::begin(&trainer.pool).await?;
    let id = sqlx::query_scalar!(
        r#"
        insert into run (id, kind, policy, line, status, config, base_version)
        values ($1, 'realtime', $2, $3, 'queued', $4, (select head from line where policy = $2 and line = $3))
        on conflict (policy, line) where kind = 'realtime'
        do update set config = excluded.config, base_version = coalesce(run.base_version, excluded.base_version)
        returning id
        "#,
        Uuid::now_v7(),
        trainer.policy,
        options.line,
        config
    )
    .fetch_one(&mut *transaction)
    .await?;
    let action = match known {
        None => Some("run.create"),
        Some(run) if !run.same_config => Some("run.configure"),
        Some(_) => None,
    };
    if let Some(action) = action {
        let role = audit::role_name("train");
        let actor = Actor { key: None, name: &role };
        let about = format!("line {}, by the configuration", options.line);
        audited::append(&mut transaction, actor, id, action, &about).await?;
    }
    transaction.commit().await?;
    Ok(id)
}

/// Whether the run may be claimed. A run that paused because of its alias is queued again when the
/// alias follows the line.
pub(super) async fn may_run(trainer: &Trainer, run: Uuid) -> Result<bool, sqlx::Error> {
    let row = sqlx::query!("select status, reason from run where id = $1", run)
        .fetch_one(&trainer.pool)
        .await?;
    if row.status != "paused" {
        return Ok(matches!(row.status.as_str(), "queued" | "running" | "pausing"));
    }
    let reason = row.reason.unwrap_or_default();
    if OtherTarget::from_reason(&reason).is_none() {
        return Ok(false);
    }
    let (alias, AliasState::Follows) = state(trainer, i32::MAX).await? else {
        return Ok(false);
    };
    let mut transaction = edge::database::begin(&trainer.pool).await?;
    // only if the run has not changed meanwhile
    let queued = sqlx::query!(
        "update run set status = 'queued', reason = null where id = $1 and status = 'paused' and reason = $2",
        run,
        reason
    )
    .execute(&mut *transaction)
    .await?;
    if queued.rows_affected() == 1 {
        let message = format!("{alias} follows the line again: the run continues");
        claim::append_event(&mut transaction, run, "info", &message, &json!({})).await?;
    }
    transaction.commit().await?;
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
    fn a_pause_because_of_the_alias_is_read_back_from_its_reason() {
        for (follows, text) in [
            (
                None,
                "learner is pinned to version 7; the run goes on when it follows line realtime again",
            ),
            (
                Some("run-1"),
                "learner follows line run-1; the run goes on when it follows line realtime again",
            ),
        ] {
            let AliasState::OtherTarget(target) = judged(follows, 3, 2) else {
                panic!("the alias does not follow the line")
            };
            let reason = target.to_reason("learner", "realtime");
            assert_eq!(reason, text);
            assert_eq!(OtherTarget::from_reason(&reason).as_ref(), Some(&target));
            // a run that was paused while it learned from champion
            let before = target.to_reason("champion", "realtime");
            assert_eq!(OtherTarget::from_reason(&before), Some(target));
        }
        assert_eq!(OtherTarget::from_reason("paused by request"), None);
    }
}
