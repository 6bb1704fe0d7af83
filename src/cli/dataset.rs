//! `springtide dataset`: named queries over closed trajectories. A client of the control API.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use futures::StreamExt;
use runs::dataset::Reference;
use runs::dataset::file::Format;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use super::App;
use super::control_client::ControlClient;
use super::output::{Output, cell, rows, table};

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
        /// `jsonl` or `parquet`.
        #[arg(long, default_value = "jsonl", value_parser = format)]
        format: Format,
    },
}

fn format(text: &str) -> Result<Format, String> {
    let known = [Format::Jsonl, Format::Parquet];
    let found = known.into_iter().find(|format| format.as_str() == text);
    found.ok_or_else(|| "the format is `jsonl` or `parquet`".to_owned())
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
                let made: Value = client.post_and_wait("/v1/datasets", &body).await?;
                output.print(&made, || {
                    let (name, version) = (cell(&made["name"]), &made["version"]);
                    format!("{name}@{version}: {}", size(&made))
                })
            }
            Self::List { name, output } => {
                let query: Vec<(&str, &str)> = name.iter().map(|name| ("name", name.as_str())).collect();
                let page: Value = client.get("/v1/datasets", &query).await?;
                output.print(&page, || list(&page))
            }
            Self::Show { dataset, output } => {
                let shown: Value = client.get_and_wait(&path(&dataset)).await?;
                output.print(&shown, || facts(&shown))
            }
            Self::Export { dataset, out, format } => export(&client, &dataset, format, &out).await,
        }
    }
}

fn path(dataset: &Reference) -> String {
    format!("/v1/datasets/{}/{}", dataset.name, dataset.version)
}

async fn export(client: &ControlClient, dataset: &Reference, format: Format, out: &Path) -> anyhow::Result<()> {
    let body = json!({"kind": "export", "dataset": dataset, "format": format});
    let mut run: Value = client.post("/v1/runs", &body).await?;
    let id = cell(&run["id"]);
    while run["finished_at"].is_null() {
        if run["status"] == "paused" {
            bail!("run {id} is paused; `springtide run resume {id}` continues it");
        }
        tokio::time::sleep(POLL_EVERY).await;
        run = client.get(&format!("/v1/runs/{id}"), &[]).await?;
    }
    if run["status"] != "succeeded" {
        bail!("run {id}: {}: {}", cell(&run["status"]), cell(&run["reason"]));
    }
    let parameters = [("format", format.as_str())];
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
    println!("{}: {}", out.display(), size(&run["result"]));
    Ok(())
}

/// `12 trajectories, 40 generations`.
fn size(of: &Value) -> String {
    format!("{} trajectories, {} generations", of["trajectories"], of["generations"])
}

fn list(page: &Value) -> String {
    let row = |dataset: &Value| {
        [
            format!("{}@{}", cell(&dataset["name"]), dataset["version"]),
            cell(&dataset["trajectories"]),
            cell(&dataset["generations"]),
            cell(&dataset["created_at"]),
            cell(&dataset["created_by"]),
        ]
    };
    match rows(&page["data"]).next() {
        None => "there are no datasets yet".to_owned(),
        Some(_) => table(
            ["dataset", ">trajectories", ">generations", "created", "by"],
            rows(&page["data"]).map(row),
        ),
    }
}

/// What a dataset is, and one line about what is gone.
fn facts(dataset: &Value) -> String {
    let gone = |what: &str| dataset[what].as_i64().unwrap_or(0);
    let left = match dataset["complete"] == true {
        true => "all are available".to_owned(),
        false => format!(
            "{} ({} trajectories) are available; {} were deleted by retention, and the tenants of {} have withdrawn their \
             consent",
            dataset["available"],
            dataset["available_trajectories"],
            gone("expired"),
            gone("withdrawn")
        ),
    };
    format!(
        "{}@{} of policy {}\ncreated      {} by {}\ntrajectories {}\ngenerations  {}: {left}\ndigest       {}\nquery        {}\n",
        cell(&dataset["name"]),
        dataset["version"],
        cell(&dataset["policy"]),
        cell(&dataset["created_at"]),
        cell(&dataset["created_by"]),
        dataset["trajectories"],
        dataset["generations"],
        cell(&dataset["digest"]),
        dataset["query"]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gone_is_said() {
        let mut dataset = json!({"name": "accepted", "version": 2, "policy": "demo", "trajectories": 4, "generations": 10,
                                 "available": 7, "available_trajectories": 3, "expired": 2, "withdrawn": 1, "complete": false});
        let page = facts(&dataset);
        assert!(
            page.contains("7 (3 trajectories) are available; 2 were deleted by retention"),
            "{page}"
        );
        dataset["complete"] = true.into();
        assert!(facts(&dataset).contains("all are available"));
    }
}
