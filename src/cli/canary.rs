//! `springtide canary`: a version is tried on some of champion's users. A client of the control API.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use control::times::rfc3339;
use release::answers::{Canaries, CanaryState, CanaryView, FullCanary, TransitionView};
use serde_json::{Value, json};

use super::App;
use super::control_client::ControlClient;
use super::output::{Output, cell, print, table};

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
                let canary: FullCanary = client.post(PATH, &body).await?;
                output.print(&canary, || page(&canary, None))
            }
            Self::List { output } => {
                let canaries: Canaries = client.get(PATH, &[]).await?;
                output.print(&canaries, || list(&canaries.canaries))
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
    let Canaries { canaries } = client.get(PATH, &[("limit", "1")]).await?;
    match canaries.first() {
        Some(canary) => Ok(canary.id.to_string()),
        None => bail!("there is no canary yet: propose one with `springtide canary propose VERSION --reason …`"),
    }
}

impl Which {
    async fn show(self, client: &ControlClient) -> anyhow::Result<()> {
        let id = id(client, self.id).await?;
        let canary: FullCanary = client.get(&format!("{PATH}/{id}"), &[]).await?;
        let had_users = canary.transitions.iter().any(|transition| transition.share > 0.0);
        let evidence: Option<Value> = match had_users || canary.canary.state == CanaryState::Shadow {
            true => Some(client.get(&format!("{PATH}/{id}/evidence"), &[]).await?),
            // of a shadow that was refused
            false => canary
                .transitions
                .iter()
                .find_map(|transition| transition.evidence.clone()),
        };
        let mut document = serde_json::to_value(&canary).context("write JSON")?;
        document["evidence"] = evidence.clone().unwrap_or_default();
        self.output.print(&document, || page(&canary, evidence.as_ref()))
    }

    async fn watch(self, client: &ControlClient, exit_code: bool) -> anyhow::Result<()> {
        let id = id(client, self.id).await?;
        let (mut printed, mut failed) = (0, 0);
        loop {
            let canary: FullCanary = match client.get(&format!("{PATH}/{id}"), &[]).await {
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
            let made = &canary.transitions;
            for transition in made.iter().rev().skip(printed) {
                match self.output.json {
                    true => print(&serde_json::to_string(transition).context("write JSON")?)?,
                    false => print(&transition_cells(transition).join("  "))?,
                }
            }
            printed = made.len().max(printed);
            let CanaryView { state, version, .. } = canary.canary;
            match state {
                CanaryState::Champion | CanaryState::Retired => return Ok(()),
                CanaryState::Aborted | CanaryState::RolledBack | CanaryState::Paused | CanaryState::Held
                    if exit_code =>
                {
                    bail!("version {version} is {}, not champion", state.name())
                }
                CanaryState::Aborted | CanaryState::RolledBack => return Ok(()),
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
        let canary: FullCanary = client.post(&format!("{PATH}/{id}/{decision}"), &body).await?;
        self.output.print(&canary, || page(&canary, None))
    }
}

fn list(canaries: &[CanaryView]) -> String {
    let shown = table(
        ["canary", ">version", "state", ">step", ">users", "by", "why"],
        canaries.iter().map(|canary| {
            [
                canary.id.to_string(),
                canary.version.to_string(),
                canary.state.name().to_owned(),
                step(canary),
                share(canary.share),
                canary.actor.clone(),
                canary.reason.clone(),
            ]
        }),
    );
    match shown.is_empty() {
        true => "there is no canary yet".to_owned(),
        false => shown,
    }
}

fn step(canary: &CanaryView) -> String {
    let of = canary.strategy.steps.len();
    format!("{} of {of}", (canary.step + 1).min(of))
}

fn share(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// One canary as text. The users are those of champion.
fn page(full: &FullCanary, evidence: Option<&Value>) -> String {
    let canary = &full.canary;
    let users = match canary.share > 0.0 {
        true => format!("{} of champion's users", share(canary.share)),
        false => "no users as a canary".to_owned(),
    };
    let mut page = format!(
        "canary {}: version {} is {}, step {}, {users}\nproposed by {}: {}\n",
        canary.id,
        canary.version,
        canary.state.name(),
        step(canary),
        canary.actor,
        canary.reason
    );
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
        full.transitions.iter().map(transition_cells),
    )
}

fn transition_cells(transition: &TransitionView) -> [String; 7] {
    [
        rfc3339(transition.at).chars().take(19).collect(),
        transition.event.clone(),
        transition.to_state.clone(),
        (transition.step + 1).to_string(),
        share(transition.share),
        transition.actor.clone(),
        transition.reason.clone(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn the_page_says_where_a_canary_is_what_is_known_and_who_decided_what() {
        let canary = json!({
            "id": Uuid::nil(), "version": 41, "control": 40, "state": "rolled_back", "step": 1,
            "step_since": "2026-12-02T10:00:00Z", "share": 0.0, "clusters": null, "actor": "ana", "reason": "try",
            "created_at": "2026-12-02T09:00:00Z",
            "strategy": {"steps": [{"setWeight": 10.0}, {"analysis": {"successCondition": "better"}}]},
            "transitions": [{"at": "2026-12-02T10:00:01.25Z", "event": "harm", "from_state": "canary",
                             "to_state": "rolled_back", "step": 1, "epoch": 3, "share": 0.0, "actor": "release",
                             "reason": "rewards are lower", "evidence": null}],
        });
        let canary: FullCanary = serde_json::from_value(canary).unwrap();
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
            "canary 00000000-0000-0000-0000-000000000000: version 41 is rolled_back, step 2 of 2, no users as a canary",
            "proposed by ana: try",
            "evidence: worse by 0.1",
            "canary (version 41) 9 90 80 0.0500 7.2 3 0 1",
            "champion (version 40) 80 800 700 - - 30 0 9",
            "2026-12-02T10:00:01 harm rolled_back 2 0% release rewards are lower",
        ] {
            assert!(page.contains(expected), "no {expected:?} in\n{page}");
        }
        assert_eq!(list(&[]), "there is no canary yet");
    }
}
