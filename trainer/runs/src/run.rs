//! The kinds of runs and their statuses, as the table `run` and the API have them.

use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use std::fmt;
use uuid::Uuid;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, sqlx::Type)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum Kind {
    Realtime,
    Grpo,
    Sft,
    Dpo,
    Kto,
    Evaluate,
    Export,
}

impl Kind {
    /// Whether it is offline and makes steps. Only such a run gives way to others.
    pub fn trains_offline(self) -> bool {
        matches!(self, Kind::Grpo | Kind::Sft | Kind::Dpo | Kind::Kto)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, sqlx::Type)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum Status {
    ValidatingFiles,
    Queued,
    Running,
    Pausing,
    Paused,
    Succeeded,
    Failed,
    Cancelled,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Notes that an export's parts have been deleted.
pub async fn forget_parts(pool: &PgPool, run: Uuid) -> sqlx::Result<()> {
    sqlx::query!(
        "update run set result = jsonb_set(result, '{parts}', '[]') where id = $1",
        run
    )
    .execute(pool)
    .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_statuses_have_the_texts_of_the_table() {
        assert_eq!(Kind::Evaluate.to_string(), "evaluate");
        assert_eq!(Status::ValidatingFiles.to_string(), "validating_files");
    }
}
