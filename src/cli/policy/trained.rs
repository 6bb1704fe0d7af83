//! What a version was trained on. The store has only the run and the step; the rest is in the database.

use anyhow::Context;
use artifact::manifest::RunStep;
use control::trained::{self, Step};
use time::OffsetDateTime;
use time::macros::format_description;

use crate::config::Config;
use crate::database;

/// What is known of it. `None`: no step made the version. An error: why nothing is known.
pub type Trained = Option<Result<Step, String>>;

/// Asks the database, if it can be reached.
pub async fn trained_on(config: &Config, made_by: Option<RunStep>) -> Trained {
    let made_by = made_by?;
    let step = match read(config, made_by).await {
        Ok(step) => step.ok_or_else(|| {
            format!(
                "the database has no step {} of run {}: is postgres.url that of this store?",
                made_by.step, made_by.run
            )
        }),
        Err(error) => Err(format!("this needs the database: {error:#}")),
    };
    Some(step)
}

/// The same for people: names and values.
pub fn lines(trained: &Trained) -> Vec<(&'static str, String)> {
    match trained {
        None => Vec::new(),
        Some(Err(why)) => vec![("trained on", format!("not known: {why}"))],
        Some(Ok(step)) => known(step),
    }
}

async fn read(config: &Config, made_by: RunStep) -> anyhow::Result<Option<Step>> {
    let pool = database::connect_now(config).await?;
    let mut reader = control::tables::reader(&pool, None).await.context("begin to read")?;
    let step = trained::of_step(&mut reader, made_by.run, made_by.step, None).await;
    step.context("read what the step was trained on")
}

fn known(step: &Step) -> Vec<(&'static str, String)> {
    let mut lines = vec![(
        "trained on",
        format!(
            "{} generations, by a run of the kind {}, committed {}",
            step.generations,
            step.kind,
            utc(step.committed_at)
        ),
    )];
    if let Some(mean) = step.reward_mean() {
        lines.push(("reward", format!("{mean:.3} on average")));
    }
    if let Some([first, last]) = step.sampled() {
        lines.push(("sampled", format!("{} to {}", utc(first), utc(last))));
        lines.push(("arms", step.arms()));
        lines.push(("tenants", step.tenants()));
    }
    if step.hidden() > 0 {
        lines.push(("gone", format!("{} of them, past retention", step.hidden())));
    }
    if !step.dropped.is_empty() {
        lines.push(("dropped", format!("{}, since the step before", step.dropped())));
    }
    lines
}

fn utc(time: OffsetDateTime) -> String {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second] UTC");
    time.format(format).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::trained::{Dropped, Group};
    use serde_json::json;
    use time::macros::datetime;
    use uuid::Uuid;

    #[test]
    fn people_read_how_much_of_whom_and_when() {
        let group = |arm: &str, generations| Group {
            tenant: "default".into(),
            arm: arm.into(),
            generations,
            first_sampled_at: datetime!(2026-11-26 02:58 UTC),
            last_sampled_at: datetime!(2026-11-26 02:59 UTC),
        };
        let step = Step {
            run: Uuid::from_u128(7),
            kind: "realtime".into(),
            step: 4,
            committed_at: datetime!(2026-11-26 03:00 UTC),
            metrics: json!({"reward_mean": 0.31}),
            generations: 64,
            groups: vec![group("learner", 58), group("champion", 4)],
            dropped: vec![Dropped {
                code: "stale".into(),
                generations: 7,
            }],
        };
        let text = |trained: &Trained| -> String {
            lines(trained)
                .into_iter()
                .map(|(name, value)| format!("{name}: {value}\n"))
                .collect()
        };
        assert_eq!(
            text(&Some(Ok(step))),
            "trained on: 64 generations, by a run of the kind realtime, committed 2026-11-26 03:00:00 UTC\n\
             reward: 0.310 on average\n\
             sampled: 2026-11-26 02:58:00 UTC to 2026-11-26 02:59:00 UTC\n\
             arms: learner 58, champion 4\n\
             tenants: default 62\n\
             gone: 2 of them, past retention\n\
             dropped: stale 7, since the step before\n"
        );
        let unknown = Some(Err("this needs the database: no server".into()));
        assert_eq!(
            text(&unknown),
            "trained on: not known: this needs the database: no server\n"
        );
        assert!(text(&None).is_empty());
    }
}
