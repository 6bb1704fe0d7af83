//! `springtide run`: schedules and watches training runs, and exports what their steps measured. A client
//! of the control API.

mod curve;
mod mlflow;
mod tensorboard;

use std::path::PathBuf;

use anyhow::Context;
use control::times::rfc3339;
use runs::api::{List, runs as api};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use uuid::Uuid;

use super::App;
use super::control_client::ControlClient;
use super::output::{Output, cell, print, table};

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
                let run: api::Run = client.post("/v1/runs", &body).await?;
                output.print(&run, || status(&run))
            }
            Self::List(output) => {
                let runs: List<api::Run> = client.get("/v1/runs", &[]).await?;
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
                let fork: api::Run = client.post(&format!("/v1/runs/{}/fork", run.id), &changes).await?;
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
    async fn get<T: Serialize + DeserializeOwned>(
        self,
        client: &ControlClient,
        part: &str,
        text: fn(&T) -> String,
    ) -> anyhow::Result<()> {
        let document: T = client.get(&format!("/v1/runs/{}{part}", self.id), &[]).await?;
        self.output.print(&document, || text(&document))
    }

    async fn request(self, client: &ControlClient, action: &str) -> anyhow::Result<()> {
        let path = format!("/v1/runs/{}/{action}", self.id);
        let run: api::Run = client.post(&path, &json!({})).await?;
        self.output.print(&run, || status(&run))
    }
}

fn status(run: &api::Run) -> String {
    let requested = run.requested.as_ref();
    let requested = requested.map_or(String::new(), |action| format!(", asked to {action}"));
    format!("{}: {}{requested}", run.id, run.status)
}

fn list(page: &List<api::Run>) -> String {
    let row = |run: &api::Run| {
        let total = run.steps_total.map_or("∞".to_owned(), |steps| steps.to_string());
        [
            run.id.to_string(),
            run.kind.clone(),
            run.line.clone(),
            run.status.clone(),
            format!("{}/{total}", run.steps_done),
            run.reason.clone().or(run.alarm.clone()).unwrap_or_default(),
        ]
    };
    let header = ["id", "kind", "line", "status", ">steps", "reason or alarm"];
    match page.data.is_empty() {
        true => "there are no runs yet".to_owned(),
        false => table(header, page.data.iter().map(row)),
    }
}

fn events(page: &List<api::Event>) -> String {
    let row = |event: &api::Event| [rfc3339(event.at), event.level.clone(), event.message.clone()];
    table(["at", "level", "message"], page.data.iter().map(row))
}

fn checkpoints(page: &List<api::CommittedStep>) -> String {
    let row = |step: &api::CommittedStep| {
        [
            step.step.to_string(),
            step.version.to_string(),
            step.root.clone(),
            rfc3339(step.committed_at),
        ]
    };
    table(
        [">step", ">version", "content hash", "committed"],
        page.data.iter().map(row),
    )
}

/// One field a line.
fn facts(document: &Value) -> String {
    let fields = document.as_object().into_iter().flatten();
    fields
        .map(|(name, value)| format!("{name:<16} {}\n", cell(value)))
        .collect()
}
