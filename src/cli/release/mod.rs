//! `springtide release`: who is served by which version. A client of the control API.

mod view;

use serde_json::{Value, json};

use super::App;
use super::control_client::ControlClient;
use super::output::{Output, rows};

/// Releases to read: enough to find the last move of every alias.
const HISTORY: &str = "200";

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Show which version each alias serves, since when, why, on which replicas, and how to go
    /// back.
    List {
        /// Number of latest moves to show.
        #[arg(long, value_name = "COUNT", default_value_t = 5)]
        history: usize,
        #[command(flatten)]
        output: Output,
    },
    /// Give an alias a version. `champion` then follows the realtime line from there; other aliases
    /// stay.
    ///
    /// Example: springtide release promote 41 --reason "passed the evaluation"
    Promote(Move),
    /// Give an alias a version, by default the one it served before. `champion` then follows the
    /// realtime line from there.
    ///
    /// Example: springtide release rollback 40 --reason "worse completions"
    Rollback(Move),
    /// Hold an alias at a version, by default the current one. It follows nothing until it is
    /// promoted or rolled back.
    ///
    /// Example: springtide release pin 41 --reason "bad completions"
    Pin(Move),
}

#[derive(Debug, Clone, clap::Args)]
pub struct Move {
    /// Number of the version. `promote` needs it.
    version: Option<i64>,
    #[arg(long = "version", value_name = "VERSION", hide = true, conflicts_with = "version")]
    version_option: Option<i64>,
    /// Alias to move.
    #[arg(long, default_value = "champion")]
    alias: String,
    /// Why; kept for audits.
    #[arg(long)]
    reason: String,
    #[command(flatten)]
    output: Output,
}

impl Command {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let client = ControlClient::new(&app.config)?;
        match self {
            Self::List { history, output } => list(&client, app, history, output).await,
            Self::Promote(to) => to.send(&client, "promote").await,
            Self::Rollback(to) => to.send(&client, "rollback").await,
            Self::Pin(to) => to.send(&client, "pin").await,
        }
    }
}

async fn list(client: &ControlClient, app: &App, history: usize, output: Output) -> anyhow::Result<()> {
    let aliases: Value = client.get("/v1/aliases", &[]).await?;
    let releases: Value = client.get("/v1/releases", &[("limit", HISTORY)]).await?;
    let replicas: Value = client.get("/v1/replicas", &[]).await?;
    let document = json!({
        "policy": aliases["policy"],
        "epoch": aliases["epoch"],
        "aliases": aliases["aliases"],
        "replicas": replicas["replicas"],
        "releases": rows(&releases["releases"]).take(history).collect::<Vec<_>>(),
    });
    let now = time::OffsetDateTime::now_utc();
    let arms = &app.config.release.arms;
    output.print(&document, || {
        view::page(&aliases, &releases, &replicas, arms, history, now)
    })
}

impl Move {
    async fn send(self, client: &ControlClient, kind: &str) -> anyhow::Result<()> {
        let mut body = json!({"kind": kind, "alias": self.alias, "reason": self.reason});
        if let Some(version) = self.version.or(self.version_option) {
            body["version"] = version.into();
        }
        let done: Value = client.post("/v1/releases", &body).await?;
        self.output.print(&done, || {
            let from = done["from_version"].as_i64();
            let from = from.map_or("none".to_owned(), |version| version.to_string());
            let then = match done["follows"].as_str() {
                Some(line) => format!("it follows the line {line}"),
                None => "it is pinned".to_owned(),
            };
            let (to, epoch) = (&done["to_version"], &done["epoch"]);
            format!("{}: version {from} → {to} (epoch {epoch})\n{then}", self.alias)
        })
    }
}
