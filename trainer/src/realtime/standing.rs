//! Where the realtime run stands towards the alias it learns from, and whether it may run at all.

use crate::claim;
use crate::execute::Trainer;
use serde_json::json;
use uuid::Uuid;

/// The alias, as seen from the line.
#[derive(Debug, PartialEq)]
pub(super) enum Standing {
    /// It follows the line (or is not assigned yet: then nothing is served that could be trained on).
    Follows,
    /// A release has put it on a version that the line is to go on from.
    Rebase { branch: i32, version: i64 },
    /// It does not follow the line, with the reason for people.
    Away(String),
}

/// The alias's row in force.
#[derive(Debug)]
struct Alias {
    version: i64,
    follows: Option<String>,
    branch: i32,
}

/// Asks where the alias stands.
pub(super) async fn of_alias(trainer: &Trainer, line_branch: i32) -> Result<Standing, sqlx::Error> {
    let options = &trainer.options.realtime;
    let row = sqlx::query_as!(
        Alias,
        r#"
        select version as "version!", follows, branch as "branch!"
        from alias
        where policy = $1 and alias = $2 and not withdrawn
        "#,
        trainer.policy,
        options.alias
    )
    .fetch_optional(&trainer.pool)
    .await?;
    Ok(row.map_or(Standing::Follows, |row| {
        judge(&row, &options.alias, &options.line, line_branch)
    }))
}

fn judge(row: &Alias, alias: &str, line: &str, line_branch: i32) -> Standing {
    match &row.follows {
        None => Standing::Away(format!(
            "{}{}; the run goes on when it follows line {line} again",
            pinned_prefix(alias),
            row.version
        )),
        Some(other) if other != line => Standing::Away(format!(
            "{}{other}; the run goes on when it follows line {line} again",
            elsewhere_prefix(alias)
        )),
        Some(_) if row.branch > line_branch => Standing::Rebase {
            branch: row.branch,
            version: row.version,
        },
        Some(_) => Standing::Follows,
    }
}

fn pinned_prefix(alias: &str) -> String {
    format!("{alias} is pinned to version ")
}

fn elsewhere_prefix(alias: &str) -> String {
    format!("{alias} follows line ")
}

/// The run's id; its row is made on first use. What it is configured with now is kept in the row.
pub(super) async fn ensure_run(trainer: &Trainer) -> anyhow::Result<Uuid> {
    let config = serde_json::to_value(&trainer.options.realtime)?;
    let options = &trainer.options.realtime;
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
    .fetch_one(&trainer.pool)
    .await?;
    Ok(id)
}

/// Whether the run may be claimed. One that paused because its alias was away is queued again when the alias follows.
pub(super) async fn may_run(trainer: &Trainer, run: Uuid) -> Result<bool, sqlx::Error> {
    let row = sqlx::query!("select status, reason from run where id = $1", run)
        .fetch_one(&trainer.pool)
        .await?;
    if row.status != "paused" {
        return Ok(matches!(row.status.as_str(), "queued" | "running" | "pausing"));
    }
    let alias = &trainer.options.realtime.alias;
    let reason = row.reason.unwrap_or_default();
    let was_away = reason.starts_with(&pinned_prefix(alias)) || reason.starts_with(&elsewhere_prefix(alias));
    if !was_away || matches!(of_alias(trainer, i32::MAX).await?, Standing::Away(_)) {
        return Ok(false);
    }
    let mut transaction = trainer.pool.begin().await?;
    // only if nobody has changed it meanwhile
    let queued = sqlx::query!(
        "update run set status = 'queued', reason = null where id = $1 and status = 'paused' and reason = $2",
        run,
        reason
    )
    .execute(&mut *transaction)
    .await?;
    if queued.rows_affected() == 1 {
        let message = format!("{alias} follows the line again: the run goes on");
        claim::event(&mut transaction, run, "info", &message, &json!({})).await?;
    }
    transaction.commit().await?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing(follows: Option<&str>, branch: i32, line_branch: i32) -> Standing {
        let row = Alias {
            version: 7,
            follows: follows.map(String::from),
            branch,
        };
        judge(&row, "champion", "realtime", line_branch)
    }

    #[test]
    fn an_alias_on_the_same_branch_is_followed() {
        assert_eq!(standing(Some("realtime"), 2, 2), Standing::Follows);
        assert_eq!(standing(Some("realtime"), 1, 2), Standing::Follows);
    }

    #[test]
    fn a_later_branch_re_bases_the_line() {
        assert_eq!(
            standing(Some("realtime"), 3, 2),
            Standing::Rebase { branch: 3, version: 7 }
        );
    }

    #[test]
    fn a_pin_says_to_which_version() {
        let Standing::Away(reason) = standing(None, 3, 2) else {
            panic!("a pinned alias is away")
        };
        assert!(reason.starts_with("champion is pinned to version 7"), "{reason}");
        let Standing::Away(reason) = standing(Some("run-1"), 3, 2) else {
            panic!("another line is away")
        };
        assert!(reason.starts_with("champion follows line run-1"), "{reason}");
    }
}
