//! `springtide dataset`: named queries over closed trajectories. A client of the control API.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use control::times::rfc3339;
use futures::StreamExt;
use runs::api::List;
use runs::api::datasets::Shown;
use runs::api::runs::Run;
use runs::dataset::Reference;
use serde_json::json;
use tokio::io::AsyncWriteExt;

use super::App;
use super::control_client::ControlClient;
use super::output::{Output, table};

/// How often the run of an export is asked whether it has ended.
const POLL_EVERY: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Make the next version of a dataset.
    ///
    /// Example: springtide dataset create accepted query.json
    Create {
        /// Lower-case letters, digits, `-`, `_` and `.`.
        name: String,
        /// JSON file with the query [default: every closed trajectory with a reward].
        query: Option<PathBuf>,
        #[command(flatten)]
        output: Output,
    },
    /// List datasets by name, the newest version of each first.
    List {
        /// Only versions of this name.
        #[arg(long)]
        name: Option<String>,
        #[command(flatten)]
        output: Output,
    },
    /// Show a dataset, and how much of it is gone.
    ///
    /// Example: springtide dataset show accepted@1
    Show {
        /// `name@version`.
        dataset: Reference,
        #[command(flatten)]
        output: Output,
    },
    /// Export a dataset: schedules the run, waits for it and downloads the file.
    ///
    /// Example: springtide dataset export accepted@1 --out accepted.jsonl
    Export {
        /// `name@version`.
        dataset: Reference,
        /// The file to write.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// Of the file.
        #[arg(long, default_value = "jsonl", value_parser = ["jsonl", "parquet"])]
        format: String,
    },
}

impl Command {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let client = ControlClient::new(&app.config)?;
        match self {
            Self::Create { name, query, output } => {
                let query = match &query {
                    None => json!({}),
                    Some(file) => {
                        let text = tokio::fs::read_to_string(file).await;
                        let text = text.with_context(|| format!("read {}", file.display()))?;
                        serde_json::from_str(&text).context("read the query as JSON")?
                    }
                };
                let body = json!({"name": name, "query": query});
                let made: Shown = client.post_and_wait("/v1/datasets", &body).await?;
                output.print(&made, || format!("{}@{}: {}", made.name, made.version, size(&made)))
            }
            Self::List { name, output } => {
                let query: Vec<(&str, &str)> = name.iter().map(|name| ("name", name.as_str())).collect();
                let page: List<Shown> = client.get("/v1/datasets", &query).await?;
                output.print(&page, || list(&page))
            }
            Self::Show { dataset, output } => {
                let shown: Shown = client.get_and_wait(&path(&dataset)).await?;
                output.print(&shown, || facts(&shown))
            }
            Self::Export { dataset, out, format } => export(&client, &dataset, &format, &out).await,
        }
    }
}

fn path(dataset: &Reference) -> String {
    format!("/v1/datasets/{}/{}", dataset.name, dataset.version)
}

async fn export(client: &ControlClient, dataset: &Reference, format: &str, out: &Path) -> anyhow::Result<()> {
    let body = json!({"kind": "export", "dataset": dataset, "format": format});
    let mut run: Run = client.post("/v1/runs", &body).await?;
    let id = run.id;
    while run.finished_at.is_none() {
        if run.status == "paused" {
            bail!("run {id} is paused; `springtide run resume {id}` continues it");
        }
        tokio::time::sleep(POLL_EVERY).await;
        run = client.get(&format!("/v1/runs/{id}"), &[]).await?;
    }
    if run.status != "succeeded" {
        bail!("run {id}: {}: {}", run.status, run.reason.unwrap_or_default());
    }
    let parameters = [("format", format)];
    let response = client
        .download(&format!("{}/export", path(dataset)), &parameters)
        .await?;
    let mut body = response.bytes_stream();
    // Renamed when it is complete, so that nobody reads half a file.
    let unfinished = out.with_added_extension("part");
    let mut file = tokio::fs::File::create(&unfinished)
        .await
        .with_context(|| format!("create {}", unfinished.display()))?;
    while let Some(part) = body.next().await {
        let part = part.context("download the export")?;
        let written = file.write_all(&part).await;
        written.with_context(|| format!("write {}", unfinished.display()))?;
    }
    file.sync_all()
        .await
        .with_context(|| format!("write {}", unfinished.display()))?;
    let renamed = tokio::fs::rename(&unfinished, out).await;
    renamed.with_context(|| format!("write {}", out.display()))?;
    let result = run.result.unwrap_or_default();
    let (trajectories, generations) = (&result["trajectories"], &result["generations"]);
    println!(
        "{}: {trajectories} trajectories, {generations} generations",
        out.display()
    );
    Ok(())
}

/// `12 trajectories, 40 generations`.
fn size(of: &Shown) -> String {
    format!("{} trajectories, {} generations", of.trajectories, of.generations)
}

fn list(page: &List<Shown>) -> String {
    let row = |dataset: &Shown| {
        [
            format!("{}@{}", dataset.name, dataset.version),
            dataset.trajectories.to_string(),
            dataset.generations.to_string(),
            rfc3339(dataset.created_at),
            dataset.created_by.clone(),
        ]
    };
    match page.data.is_empty() {
        true => "there are no datasets yet".to_owned(),
        false => table(
            ["dataset", ">trajectories", ">generations", "created", "by"],
            page.data.iter().map(row),
        ),
    }
}

/// What a dataset is, and one line about what is gone.
fn facts(dataset: &Shown) -> String {
    let left = match &dataset.now {
        Some(now) if !now.complete => format!(
            "{} ({} trajectories) are available; {} were deleted by retention, and the tenants of {} have withdrawn their \
             consent",
            now.available, now.available_trajectories, now.expired, now.withdrawn
        ),
        _ => "all are available".to_owned(),
    };
    let Shown {
        name,
        version,
        policy,
        created_by,
        trajectories,
        generations,
        digest,
        query,
        ..
    } = dataset;
    let created = rfc3339(dataset.created_at);
    format!(
        "{name}@{version} of policy {policy}\ncreated      {created} by {created_by}\ntrajectories {trajectories}\n\
         generations  {generations}: {left}\ndigest       {digest}\nquery        {query}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gone_is_said() {
        let dataset = json!({"name": "accepted", "version": 2, "policy": "demo", "tenant": "a", "query": {}, "digest": "00",
                             "created_by": "ana", "created_at": "2026-11-25T12:00:00Z", "trajectories": 4,
                             "generations": 10, "available": 7, "available_trajectories": 3, "expired": 2,
                             "withdrawn": 1, "complete": false});
        let mut dataset: Shown = serde_json::from_value(dataset).unwrap();
        let page = facts(&dataset);
        assert!(
            page.contains("7 (3 trajectories) are available; 2 were deleted by retention"),
            "{page}"
        );
        dataset.now.as_mut().unwrap().complete = true;
        assert!(facts(&dataset).contains("all are available"));
    }
}
