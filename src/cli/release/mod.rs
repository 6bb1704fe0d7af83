//! `springtide release`: who is served by which version. A client of the control API.

mod arms;
mod compare;
mod view;

use serde_json::{Value, json};

use super::App;
use super::control_client::ControlClient;
use super::output::{Output, cell, rows};

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
    /// Give an alias a version. `learner` and `champion` follow again from there; other aliases stay.
    ///
    /// Without a version, `champion` gets that of `learner`. Other aliases need one.
    ///
    /// Example: springtide release promote 41 --reason "passed the evaluation"
    Promote(Move),
    /// Give an alias an older version. `champion` goes to the last version known to be good, and what it
    /// leaves counts as bad; without such a version, and other aliases, to the one served before. After
    /// a rollback of `champion`, `champion` stays there, and `learner` continues from there.
    ///
    /// Example: springtide release rollback --reason "worse completions"
    Rollback(Move),
    /// Say that a version is good or bad. What was trained on top of a bad version counts as bad too: it
    /// is no canary, and `champion` does not follow to it.
    ///
    /// Example: springtide release judge 41 bad --reason "it invents functions"
    Judge(Judgment),
    /// Hold an alias at a version, by default the current one. It follows nothing until it is
    /// promoted. Learning goes on unless `learner` is pinned.
    ///
    /// Example: springtide release pin 41 --reason "wait for the evaluation"
    Pin(Move),
    /// Show how users are divided, or change it. A change is in force within seconds.
    ///
    /// Example: springtide release arms --set learner=0.2,champion=0.7,base=0.1 --reason "wider"
    Arms(arms::Args),
    /// Compare what users do with an alias's answers now with an hour, a day and a week ago, or those of
    /// some versions: rewards, and what the answers are like.
    ///
    /// Example: springtide release compare --period 5m --since 6h; springtide release compare --versions 41,43
    Compare(compare::Args),
}

#[derive(Debug, Clone, clap::Args)]
pub struct Judgment {
    /// Number of the version.
    version: i64,
    verdict: Verdict,
    /// Why; kept for audits.
    #[arg(long)]
    reason: String,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Verdict {
    Good,
    Bad,
}

#[derive(Debug, Clone, clap::Args)]
pub struct Move {
    /// Number of the version. `--help` says what holds without it.
    version: Option<i64>,
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
            Self::List { history, output } => list(&client, history, output).await,
            Self::Promote(to) => to.send(&client, "promote").await,
            Self::Rollback(to) => to.send(&client, "rollback").await,
            Self::Pin(to) => to.send(&client, "pin").await,
            Self::Judge(judgment) => judgment.send(&client).await,
            Self::Arms(arms) => arms.run(&client).await,
            Self::Compare(compare) => compare.run(&client).await,
        }
    }
}

async fn list(client: &ControlClient, history: usize, output: Output) -> anyhow::Result<()> {
    let aliases: Value = client.get("/v1/aliases", &[]).await?;
    let releases: Value = client.get("/v1/releases", &[("limit", HISTORY)]).await?;
    let replicas: Value = client.get("/v1/replicas", &[]).await?;
    // before the first version there is none
    let experiment = match rows(&aliases["aliases"]).next() {
        Some(_) => or_unread(client.get("/v1/experiment", &[]).await),
        None => Value::Null,
    };
    let canaries = or_unread(client.get("/v1/canaries", &[("limit", "20")]).await);
    let judgments = or_unread(client.get("/v1/judgments", &[("limit", HISTORY)]).await);
    let is_under_way = |canary: &&Value| canary["share"].as_f64() > Some(0.0) || canary["state"] == "shadow";
    let canary = rows(&canaries["canaries"]).find(is_under_way);
    let unread = [
        ("judgments", &judgments),
        ("canaries", &canaries),
        ("arms", &experiment),
    ]
    .map(view::unread)
    .concat();
    let document = json!({
        "policy": aliases["policy"],
        "epoch": aliases["epoch"],
        "aliases": aliases["aliases"],
        "experiment": experiment,
        "canary": canary,
        "unread": unread.trim_end(),
        "last_known_good": judgments["last_known_good"],
        "champion_bad": judgments["champion_bad"],
        "learner_bad": judgments["learner_bad"],
        "replicas": replicas["replicas"],
        "releases": rows(&releases["releases"]).take(history).collect::<Vec<_>>(),
    });
    let now = time::OffsetDateTime::now_utc();
    let shown = view::Shown {
        aliases: &aliases,
        releases: &releases,
        replicas: &replicas,
        experiment: &experiment,
        judgments: &judgments,
        canary,
    };
    output.print(&document, || {
        let canary = canary.map_or_else(String::new, view::canary);
        unread + &view::judged(&judgments, now) + &canary + &view::page(&shown, history, now)
    })
}

/// The answer, or why there is none: the rest is shown without it.
fn or_unread(answer: anyhow::Result<Value>) -> Value {
    answer.unwrap_or_else(|error| json!({"unread": format!("{error:#}")}))
}

impl Judgment {
    async fn send(self, client: &ControlClient) -> anyhow::Result<()> {
        let verdict = match self.verdict {
            Verdict::Good => "good",
            Verdict::Bad => "bad",
        };
        let body = json!({"version": self.version, "verdict": verdict, "reason": self.reason});
        let judgments: Value = client.post("/v1/judgments", &body).await?;
        let now = time::OffsetDateTime::now_utc();
        self.output.print(&judgments, || {
            format!(
                "version {} counts as {verdict}\n{}",
                self.version,
                view::judged(&judgments, now)
            )
        })
    }
}

impl Move {
    async fn send(self, client: &ControlClient, kind: &str) -> anyhow::Result<()> {
        let mut body = json!({"kind": kind, "alias": self.alias, "reason": self.reason});
        if let Some(version) = self.version {
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
            let also = rows(&done["also"]).map(|moved| {
                let (alias, to) = (cell(&moved["alias"]), &moved["to_version"]);
                match moved["follows"].as_str() {
                    Some(line) => format!("\n{alias} has version {to} too; the line {line} continues from there"),
                    None => format!("\n{alias} has version {to} too, and stays pinned"),
                }
            });
            let also: String = also.collect();
            let bad = match kind == "rollback" && self.alias == "champion" {
                true => format!("\nversion {from} counts as bad now, and what was trained on top of it"),
                false => String::new(),
            };
            format!(
                "{}: version {from} → {to} (epoch {epoch})\n{then}{also}{bad}",
                self.alias
            )
        })
    }
}
