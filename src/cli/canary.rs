//! `springtide canary`: a version is tried on some of champion's users. A client of the control API.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::App;
use super::control_client::ControlClient;
use super::output::{Output, cell, print, rows, table};

const PATH: &str = "/v1/canaries";
const WATCH_EVERY: Duration = Duration::from_secs(2);
/// Reads in a row that may fail: five minutes.
const WATCH_FAILURES_MAX: u32 = 150;

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Propose a version. It gets users step by step, and becomes `champion` by evidence.
    ///
    /// Example: springtide canary propose 41 --reason "passed the evaluation"
    Propose {
        /// Number of the version.
        version: i64,
        /// Why; kept for audits.
        #[arg(long)]
        reason: String,
        /// JSON file with the strategy. Default: `[release.canary]` of the configuration of `control`.
        #[arg(long, value_name = "FILE")]
        strategy: Option<PathBuf>,
        #[command(flatten)]
        output: Output,
    },
    /// Show the latest canaries.
    List {
        #[command(flatten)]
        output: Output,
    },
    /// Show a canary: its state, the evidence, and each decision with its reason.
    Show(Which),
    /// Print each decision about a canary as it is made, until the canary has ended.
    Watch {
        #[command(flatten)]
        which: Which,
        /// For scripts: end also when the canary is `paused` or `held`, and fail unless it became champion.
        /// Approvals and pauses of the strategy are waited for.
        #[arg(long)]
        exit_code: bool,
    },
    /// Approve a canary that somebody else proposed.
    Approve(Decision),
    /// Stop a canary where it is. Its users keep it.
    Hold(Decision),
    /// Let a canary go on that pauses or is held.
    Resume(Decision),
    /// Give the version to all of champion's users now.
    Promote(Decision),
    /// End a canary. Its users get champion again.
    Abort(Decision),
    /// Go back from a canary that became champion to the version before it.
    Rollback(Decision),
}

#[derive(Debug, Clone, clap::Args)]
pub struct Which {
    /// Id of the canary. Default: the newest.
    id: Option<String>,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Clone, clap::Args)]
pub struct Decision {
    /// Id of the canary. Default: the newest.
    id: Option<String>,
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
            Self::Propose {
                version,
                reason,
                strategy,
                output,
            } => {
                let mut body = json!({"version": version, "reason": reason});
                if let Some(file) = strategy {
                    let text = std::fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
                    body["strategy"] =
                        serde_json::from_str(&text).with_context(|| format!("{} is no JSON", file.display()))?;
                }
                let canary: Value = client.post(PATH, &body).await?;
                output.print(&canary, || page(&canary, None))
            }
            Self::List { output } => {
                let canaries: Value = client.get(PATH, &[]).await?;
                output.print(&canaries, || list(&canaries))
            }
            Self::Show(which) => which.show(&client).await,
            Self::Watch { which, exit_code } => which.watch(&client, exit_code).await,
            Self::Approve(decision) => decision.send(&client, "approve").await,
            Self::Hold(decision) => decision.send(&client, "hold").await,
            Self::Resume(decision) => decision.send(&client, "resume").await,
            Self::Promote(decision) => decision.send(&client, "promote").await,
            Self::Abort(decision) => decision.send(&client, "abort").await,
            Self::Rollback(decision) => decision.send(&client, "rollback").await,
        }
    }
}

/// `id`, or that of the newest.
async fn id(client: &ControlClient, id: Option<String>) -> anyhow::Result<String> {
    if let Some(id) = id {
        return Ok(id);
    }
    let canaries: Value = client.get(PATH, &[("limit", "1")]).await?;
    match canaries["canaries"][0]["id"].as_str() {
        Some(id) => Ok(id.to_owned()),
        None => bail!("there is no canary yet: propose one with `springtide canary propose VERSION --reason …`"),
    }
}

impl Which {
    async fn show(self, client: &ControlClient) -> anyhow::Result<()> {
        let id = id(client, self.id).await?;
        let mut canary: Value = client.get(&format!("{PATH}/{id}"), &[]).await?;
        let had_users = rows(&canary["transitions"]).any(|row| row["share"].as_f64() > Some(0.0));
        let evidence: Option<Value> = match had_users || canary["state"] == "shadow" {
            true => Some(client.get(&format!("{PATH}/{id}/evidence"), &[]).await?),
            // of a shadow that was refused
            false => rows(&canary["transitions"])
                .map(|row| row["evidence"].clone())
                .find(|seen| !seen.is_null()),
        };
        canary["evidence"] = evidence.clone().unwrap_or_default();
        self.output.print(&canary, || page(&canary, evidence.as_ref()))
    }

    async fn watch(self, client: &ControlClient, exit_code: bool) -> anyhow::Result<()> {
        let id = id(client, self.id).await?;
        let (mut printed, mut failed) = (0, 0);
        loop {
            let canary: Value = match client.get(&format!("{PATH}/{id}"), &[]).await {
                Ok(canary) => canary,
                // control may restart while a canary is under way for days
                Err(error) if failed < WATCH_FAILURES_MAX => {
                    failed += 1;
                    eprintln!("the canary could not be read, and is asked about again: {error:#}");
                    tokio::time::sleep(WATCH_EVERY).await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            failed = 0;
            let made: Vec<&Value> = rows(&canary["transitions"]).collect();
            for transition in made.iter().rev().skip(printed) {
                match self.output.json {
                    true => print(&transition.to_string())?,
                    false => print(&transition_cells(transition).join("  "))?,
                }
            }
            printed = made.len().max(printed);
            match canary["state"].as_str().unwrap_or_default() {
                "champion" | "retired" => return Ok(()),
                state @ ("aborted" | "rolled_back" | "paused" | "held") if exit_code => {
                    bail!("version {} is {state}, not champion", canary["version"])
                }
                "aborted" | "rolled_back" => return Ok(()),
                _ => {}
            }
            tokio::time::sleep(WATCH_EVERY).await;
        }
    }
}

impl Decision {
    async fn send(self, client: &ControlClient, decision: &str) -> anyhow::Result<()> {
        let id = id(client, self.id).await?;
        let body = json!({"reason": self.reason});
        let canary: Value = client.post(&format!("{PATH}/{id}/{decision}"), &body).await?;
        self.output.print(&canary, || page(&canary, None))
    }
}

fn list(canaries: &Value) -> String {
    let shown = table(
        ["canary", ">version", "state", ">step", ">users", "by", "why"],
        rows(&canaries["canaries"]).map(|canary| {
            [
                cell(&canary["id"]),
                cell(&canary["version"]),
                cell(&canary["state"]),
                step(canary),
                share(&canary["share"]),
                cell(&canary["actor"]),
                cell(&canary["reason"]),
            ]
        }),
    );
    match shown.is_empty() {
        true => "there is no canary yet".to_owned(),
        false => shown,
    }
}

fn step(canary: &Value) -> String {
    let of = canary["strategy"]["steps"].as_array().map_or(0, Vec::len);
    let step = canary["step"].as_u64().map_or(0, |step| step as usize);
    format!("{} of {of}", (step + 1).min(of))
}

fn share(share: &Value) -> String {
    format!("{:.0}%", share.as_f64().unwrap_or(0.0) * 100.0)
}

/// One canary as text. The users are those of champion.
fn page(canary: &Value, evidence: Option<&Value>) -> String {
    let users = match canary["share"].as_f64() {
        Some(users) if users > 0.0 => format!("{} of champion's users", share(&canary["share"])),
        _ => "no users as a canary".to_owned(),
    };
    let mut page = format!(
        "canary {}: version {} is {}, step {}, {}\n",
        cell(&canary["id"]),
        cell(&canary["version"]),
        cell(&canary["state"]),
        step(canary),
        users,
    );
    page += &format!("proposed by {}: {}\n", cell(&canary["actor"]), cell(&canary["reason"]));
    if let Some(evidence) = evidence {
        page += &format!("evidence: {}\n", cell(&evidence["found"]["summary"]));
        page += &table(
            [
                "",
                ">users",
                ">answers",
                ">rewarded",
                ">mean reward",
                ">mean tokens",
                ">declined",
                ">aborted",
                ">unscored",
            ],
            ["canary", "champion"].map(|side| {
                let of = &evidence[side];
                let number = |field: &str| cell(&of[field]);
                let mean = |field: &str, digits: usize| {
                    of[field]
                        .as_f64()
                        .map_or("-".to_owned(), |mean| format!("{mean:.digits$}"))
                };
                [
                    format!("{side} (version {})", number("version")),
                    number("users"),
                    number("answers"),
                    number("rewarded"),
                    mean("mean_reward", 4),
                    mean("mean_tokens", 1),
                    number("declined"),
                    number("aborted"),
                    number("unscored"),
                ]
            }),
        );
    }
    page += "\ndecisions, the latest first\n";
    page + &table(
        ["at", "event", "to", ">step", ">users", "by", "why"],
        rows(&canary["transitions"]).map(transition_cells),
    )
}

fn transition_cells(transition: &Value) -> [String; 7] {
    let text = |field: &str| cell(&transition[field]);
    [
        text("at").chars().take(19).collect(),
        text("event"),
        text("to_state"),
        (transition["step"].as_i64().unwrap_or(0) + 1).to_string(),
        share(&transition["share"]),
        text("actor"),
        text("reason"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_says_where_a_canary_is_what_is_known_and_who_decided_what() {
        let canary = json!({
            "id": "c1", "version": 41, "state": "rolled_back", "step": 1, "share": 0.0, "actor": "ana", "reason": "try",
            "strategy": {"steps": [{"setWeight": 10}, {"analysis": {"successCondition": "better"}}]},
            "transitions": [{"at": "2026-12-02T10:00:01.25Z", "event": "harm", "to_state": "rolled_back", "step": 1,
                             "share": 0.0, "actor": "release", "reason": "rewards are lower"}],
        });
        let evidence = json!({
            "found": {"summary": "worse by 0.1"},
            "canary": {"version": 41, "users": 9, "answers": 90, "rewarded": 80, "mean_reward": 0.05, "mean_tokens": 7.25,
                       "declined": 3,
                       "aborted": 0, "unscored": 1},
            "champion": {"version": 40, "users": 80, "answers": 800, "rewarded": 700, "mean_reward": null, "declined": 30,
                         "aborted": 0, "unscored": 9},
        });
        let page = page(&canary, Some(&evidence));
        let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
        for expected in [
            "canary c1: version 41 is rolled_back, step 2 of 2, no users as a canary",
            "proposed by ana: try",
            "evidence: worse by 0.1",
            "canary (version 41) 9 90 80 0.0500 7.2 3 0 1",
            "champion (version 40) 80 800 700 - - 30 0 9",
            "2026-12-02T10:00:01 harm rolled_back 2 0% release rewards are lower",
        ] {
            assert!(page.contains(expected), "no {expected:?} in\n{page}");
        }
        assert_eq!(list(&json!({"canaries": []})), "there is no canary yet");
    }
}
