//! `springtide run`: schedules and watches training runs, and exports what their steps measured. A client
//! of the control API.

mod curve;
mod mlflow;
mod tensorboard;

use std::path::PathBuf;

use anyhow::Context;
use serde_json::{Value, json};
use uuid::Uuid;

use super::App;
use super::control_client::ControlClient;
use super::output::{Output, cell, print, rows, table};

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Schedule the run that a JSON file describes. The file is the body of `POST /v1/runs`.
    ///
    /// Example: springtide run create run.json
    Create {
        /// JSON file.
        file: PathBuf,
        #[command(flatten)]
        output: Output,
    },
    /// List the latest runs.
    List(Output),
    /// Show everything about a run.
    Show(Run),
    /// Show what happened to a run.
    Events(Run),
    /// List the versions that a run made.
    Checkpoints(Run),
    /// Print the request that makes the same run, for `springtide run create`.
    Spec(Run),
    /// Make the same run again from a version of its line, by default the head.
    ///
    /// Example: springtide run fork RUN --changes '{"learning_rate": 1e-5}'
    Fork {
        #[command(flatten)]
        run: Run,
        /// Fields of the request that are to be different, as a JSON object.
        #[arg(long, value_name = "JSON", default_value = "{}")]
        changes: String,
    },
    /// Show what the steps of a run measured.
    Curve(Run),
    /// Write what the steps measured as a file that TensorBoard reads.
    ///
    /// Example: springtide run export-tensorboard RUN runs/first && tensorboard --logdir runs
    ExportTensorboard {
        /// As `springtide run list` prints it.
        id: Uuid,
        /// Folder for the file. A later export of the same run replaces it.
        dir: PathBuf,
    },
    /// Send what the steps measured to an MLflow server, as a new run.
    ///
    /// Example: springtide run export-mlflow RUN http://127.0.0.1:5000
    ExportMlflow {
        /// As `springtide run list` prints it.
        id: Uuid,
        /// The server's URL.
        url: String,
        /// The experiment that it belongs to; made if there is none.
        #[arg(long, default_value = "springtide")]
        experiment: String,
    },
    /// Pause a run after its current step.
    Pause(Run),
    /// Resume a paused run.
    Resume(Run),
    /// End a run for good. Its versions stay.
    Cancel(Run),
}

#[derive(Debug, Clone, clap::Args)]
pub struct Run {
    /// As `springtide run list` prints it.
    id: Uuid,
    #[command(flatten)]
    output: Output,
}

impl Command {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let client = ControlClient::new(&app.config)?;
        match self {
            Self::Create { file, output } => {
                let text = tokio::fs::read_to_string(&file).await;
                let text = text.with_context(|| format!("read {}", file.display()))?;
                let body: Value = serde_json::from_str(&text).context("read the run as JSON")?;
                let run: Value = client.post("/v1/runs", &body).await?;
                output.print(&run, || status(&run))
            }
            Self::List(output) => {
                let runs: Value = client.get("/v1/runs", &[]).await?;
                output.print(&runs, || list(&runs))
            }
            Self::Show(run) => run.get(&client, "", facts).await,
            Self::Events(run) => run.get(&client, "/events", events).await,
            Self::Checkpoints(run) => run.get(&client, "/checkpoints", checkpoints).await,
            Self::Spec(run) => {
                let spec: Value = client.get(&format!("/v1/runs/{}/spec", run.id), &[]).await?;
                print(&serde_json::to_string_pretty(&spec).context("write JSON")?)
            }
            Self::Fork { run, changes } => {
                let changes: Value = serde_json::from_str(&changes).context("read --changes as JSON")?;
                let fork: Value = client.post(&format!("/v1/runs/{}/fork", run.id), &changes).await?;
                run.output.print(&fork, || status(&fork))
            }
            Self::Curve(run) => {
                let points = curve::points(&client, run.id).await?;
                run.output.print(&points, || curve::text(&points))
            }
            Self::ExportTensorboard { id, dir } => {
                let path = tensorboard::export(&client, id, &dir).await?;
                print(&format!("wrote {}", path.display()))
            }
            Self::ExportMlflow { id, url, experiment } => {
                let made = mlflow::export(&client, id, &url, &experiment).await?;
                print(&format!("made run {made} of experiment {experiment}"))
            }
            Self::Pause(run) => run.request(&client, "pause").await,
            Self::Resume(run) => run.request(&client, "resume").await,
            Self::Cancel(run) => run.request(&client, "cancel").await,
        }
    }
}

impl Run {
    async fn get(self, client: &ControlClient, part: &str, text: fn(&Value) -> String) -> anyhow::Result<()> {
        let document: Value = client.get(&format!("/v1/runs/{}{part}", self.id), &[]).await?;
        self.output.print(&document, || text(&document))
    }

    async fn request(self, client: &ControlClient, action: &str) -> anyhow::Result<()> {
        let run: Value = client
            .post(&format!("/v1/runs/{}/{action}", self.id), &json!({}))
            .await?;
        self.output.print(&run, || status(&run))
    }
}

fn status(run: &Value) -> String {
    let requested = run["requested"].as_str();
    let requested = requested.map_or(String::new(), |action| format!(", asked to {action}"));
    format!("{}: {}{requested}", cell(&run["id"]), cell(&run["status"]))
}

fn list(page: &Value) -> String {
    let row = |run: &Value| {
        let total = run["steps_total"].as_i64();
        let total = total.map_or("∞".to_owned(), |steps| steps.to_string());
        [
            cell(&run["id"]),
            cell(&run["kind"]),
            cell(&run["line"]),
            cell(&run["status"]),
            format!("{}/{total}", run["steps_done"]),
            cell(if run["reason"].is_null() {
                &run["alarm"]
            } else {
                &run["reason"]
            }),
        ]
    };
    let header = ["id", "kind", "line", "status", ">steps", "reason or alarm"];
    match rows(&page["data"]).next() {
        None => "there are no runs yet".to_owned(),
        Some(_) => table(header, rows(&page["data"]).map(row)),
    }
}

fn events(page: &Value) -> String {
    let row = |event: &Value| [cell(&event["at"]), cell(&event["level"]), cell(&event["message"])];
    table(["at", "level", "message"], rows(&page["data"]).map(row))
}

fn checkpoints(page: &Value) -> String {
    let row = |step: &Value| ["step", "version", "root", "committed_at"].map(|field| cell(&step[field]));
    table(
        [">step", ">version", "content hash", "committed"],
        rows(&page["data"]).map(row),
    )
}

/// One field a line.
fn facts(document: &Value) -> String {
    let fields = document.as_object().into_iter().flatten();
    fields
        .map(|(name, value)| format!("{name:<16} {}\n", cell(value)))
        .collect()
}
