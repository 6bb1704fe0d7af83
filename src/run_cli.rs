//! `springtide run …`: schedule and watch training runs. An HTTP client of the control API; what a run does is the
//! crate `trainer`'s.

use std::path::PathBuf;

use anyhow::Context;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::client::Control;
use crate::config::Config;

/// Training runs.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Schedule the run that a JSON file describes, as `POST /v1/runs` takes it.
    Create { file: PathBuf },
    /// The latest runs.
    List,
    /// Everything about one run.
    Show { id: Uuid },
    /// What happened to it.
    Events { id: Uuid },
    /// The versions it made.
    Checkpoints { id: Uuid },
    /// Hold it after its current step.
    Pause { id: Uuid },
    /// Let it go on.
    Resume { id: Uuid },
    /// End it.
    Cancel { id: Uuid },
}

pub async fn run(command: Command, config: &Config) -> anyhow::Result<()> {
    let control = Control::new(config)?;
    match command {
        Command::Create { file } => {
            let text = tokio::fs::read_to_string(&file)
                .await
                .with_context(|| format!("read {}", file.display()))?;
            let body: Value = serde_json::from_str(&text).context("read the run as JSON")?;
            show(&control.post("/v1/runs", &body).await?)
        }
        Command::List => {
            let page: Value = control.get("/v1/runs", &[]).await?;
            list(&page);
            Ok(())
        }
        Command::Show { id } => show(&control.get(&format!("/v1/runs/{id}"), &[]).await?),
        Command::Events { id } => {
            let page: Value = control.get(&format!("/v1/runs/{id}/events"), &[]).await?;
            for event in page["data"].as_array().into_iter().flatten() {
                println!(
                    "{}  {:<5} {}",
                    text(event, "at"),
                    text(event, "level"),
                    text(event, "message")
                );
            }
            Ok(())
        }
        Command::Checkpoints { id } => show(&control.get(&format!("/v1/runs/{id}/checkpoints"), &[]).await?),
        Command::Pause { id } => ask(&control, id, "pause").await,
        Command::Resume { id } => ask(&control, id, "resume").await,
        Command::Cancel { id } => ask(&control, id, "cancel").await,
    }
}

async fn ask(control: &Control, id: Uuid, what: &str) -> anyhow::Result<()> {
    let run: Value = control.post(&format!("/v1/runs/{id}/{what}"), &json!({})).await?;
    let requested = run["requested"]
        .as_str()
        .map_or(String::new(), |what| format!(", asked to {what}"));
    println!("{id}: {}{requested}", text(&run, "status"));
    Ok(())
}

fn list(page: &Value) {
    println!(
        "{:<36}  {:<8}  {:<12}  {:<10}  {:>9}  reason or alarm",
        "id", "kind", "line", "status", "steps"
    );
    for run in page["data"].as_array().into_iter().flatten() {
        let total = run["steps_total"]
            .as_i64()
            .map_or("∞".to_owned(), |steps| steps.to_string());
        println!(
            "{:<36}  {:<8}  {:<12}  {:<10}  {:>9}  {}",
            text(run, "id"),
            text(run, "kind"),
            text(run, "line"),
            text(run, "status"),
            format!("{}/{total}", run["steps_done"]),
            run["reason"].as_str().unwrap_or_else(|| text(run, "alarm")),
        );
    }
}

fn show(value: &Value) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or("")
}
