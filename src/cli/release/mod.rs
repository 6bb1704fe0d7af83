//! `springtide release`: who is served by which version. A client of the control API.

mod arms;
mod compare;
mod view;

use release::answers::{Aliases, Canaries, CanaryState, CanaryView, ExperimentView, Judgments, Released, Releases};
use serde_json::json;
use serving::fleet::Replicas;

use super::App;
use super::control_client::ControlClient;
use super::output::Output;

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
    #[arg(value_parser = ["good", "bad"])]
    verdict: String,
    /// Why; kept for audits.
    #[arg(long)]
    reason: String,
    #[command(flatten)]
    output: Output,
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
    let aliases: Aliases = client.get("/v1/aliases", &[]).await?;
    let Releases { releases } = client.get("/v1/releases", &[("limit", HISTORY)]).await?;
    let Replicas { replicas } = client.get("/v1/replicas", &[]).await?;
    let mut unread = String::new();
    let judgments = client.get("/v1/judgments", &[("limit", HISTORY)]).await;
    let judgments: Option<Judgments> = read("judgments", judgments, &mut unread);
    let canaries = client.get("/v1/canaries", &[("limit", "20")]).await;
    let canaries: Option<Canaries> = read("canaries", canaries, &mut unread);
    let experiment: Option<ExperimentView> = match aliases.aliases.is_empty() {
        // before the first version there is none
        true => None,
        false => read("arms", client.get("/v1/experiment", &[]).await, &mut unread),
    };
    let is_under_way = |canary: &CanaryView| canary.share > 0.0 || canary.state == CanaryState::Shadow;
    let mut canaries = canaries.into_iter().flat_map(|answer| answer.canaries);
    let canary = canaries.find(is_under_way);
    let judged = judgments.as_ref();
    let document = json!({
        "policy": aliases.policy,
        "epoch": aliases.epoch,
        "aliases": aliases.aliases,
        "experiment": experiment,
        "canary": canary,
        "unread": unread.trim_end(),
        "last_known_good": judged.map(|judgments| &judgments.last_known_good),
        "champion_bad": judged.map(|judgments| &judgments.champion_bad),
        "learner_bad": judged.map(|judgments| &judgments.learner_bad),
        "replicas": replicas,
        "releases": releases.iter().take(history).collect::<Vec<_>>(),
    });
    let now = time::OffsetDateTime::now_utc();
    let shown = view::Shown {
        aliases: &aliases,
        releases: &releases,
        replicas: &replicas,
        arms: experiment.as_ref().map_or(&[], |experiment| &experiment.arms),
        judgments: judged.map_or(&[], |judgments| &judgments.judgments),
        canary: canary.as_ref(),
    };
    output.print(&document, || {
        let judged = judged.map_or_else(String::new, |judgments| view::judged(judgments, now));
        let canary = canary.as_ref().map_or_else(String::new, view::canary);
        unread.clone() + &judged + &canary + &view::page(&shown, history, now)
    })
}

/// The answer. If there is none, `unread` says why, and the rest is shown without it.
fn read<T>(part: &str, answer: anyhow::Result<T>, unread: &mut String) -> Option<T> {
    let said = |error| *unread += &format!("the {part} could not be read: {error:#}\n\n");
    answer.map_err(said).ok()
}

impl Judgment {
    async fn send(self, client: &ControlClient) -> anyhow::Result<()> {
        let verdict = &self.verdict;
        let body = json!({"version": self.version, "verdict": verdict, "reason": self.reason});
        let judgments: Judgments = client.post("/v1/judgments", &body).await?;
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
        let done: Released = client.post("/v1/releases", &body).await?;
        self.output.print(&done, || {
            let from = done
                .from_version
                .map_or("none".to_owned(), |version| version.to_string());
            let then = match &done.follows {
                Some(line) => format!("it follows the line {line}"),
                None => "it is pinned".to_owned(),
            };
            let (to, epoch) = (done.to_version, done.epoch);
            let also = done.also.iter().map(|moved| {
                let (alias, to) = (&moved.alias, moved.to_version);
                match &moved.follows {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_not_be_read_is_said_and_not_taken_for_nothing() {
        let mut unread = String::new();
        assert_eq!(read("arms", Ok(1), &mut unread), Some(1));
        let failed: anyhow::Result<i32> = Err(anyhow::anyhow!("503: the database does not answer"));
        assert_eq!(read("canaries", failed, &mut unread), None);
        assert_eq!(
            unread,
            "the canaries could not be read: 503: the database does not answer\n\n"
        );
    }
}
