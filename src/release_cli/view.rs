//! The page that `springtide release list` prints: made to be read at three in the morning. Pure.

use std::fmt::Write;

use serde::Deserialize;
use serving::ArmOptions;
use time::OffsetDateTime;
use time::macros::format_description;

/// Hex digits of a root that are shown.
const ROOT_DIGITS: usize = 12;

#[derive(Debug, Deserialize)]
pub struct Aliases {
    policy: String,
    epoch: i64,
    aliases: Vec<Alias>,
}

#[derive(Debug, Deserialize)]
struct Alias {
    alias: String,
    version: i64,
    root: Option<String>,
    follows: Option<String>,
    #[serde(with = "time::serde::rfc3339")]
    since: OffsetDateTime,
}

#[derive(Debug, Deserialize)]
pub struct Releases {
    /// Newest first.
    releases: Vec<Release>,
}

#[derive(Debug, Deserialize)]
struct Release {
    alias: String,
    from_version: Option<i64>,
    to_version: i64,
    kind: String,
    status: String,
    actor: String,
    reason: String,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
}

#[derive(Debug, Deserialize)]
pub struct Replicas {
    replicas: Vec<Replica>,
}

#[derive(Debug, Deserialize)]
struct Replica {
    id: String,
    cluster: String,
    address: String,
    epoch: i64,
    resident: Vec<Resident>,
    ready: bool,
    silent: bool,
    #[serde(with = "time::serde::rfc3339")]
    reported_at: OffsetDateTime,
}

#[derive(Debug, Deserialize)]
struct Resident {
    version: i64,
    aliases: Vec<String>,
}

/// Everything, as text.
pub fn page(
    aliases: &Aliases,
    releases: &Releases,
    replicas: &Replicas,
    arms: &[ArmOptions],
    history: usize,
    now: OffsetDateTime,
) -> String {
    let mut page = String::new();
    let mut line = |text: &str| {
        page.push_str(text.trim_end());
        page.push('\n');
    };
    line(&format!("policy {}, epoch {}", aliases.policy, aliases.epoch));
    line("");
    line(&format!(
        "{:<14} {:>8}  {:<12}  {:>5}  {:<14} {:<34} why",
        "alias", "version", "root", "users", "follows", "since"
    ));
    for alias in &aliases.aliases {
        line(&alias_row(alias, releases, arms, now));
    }
    line("");
    line(&format!(
        "{:<14} {:<10} {:<28} {:<8} {:>6}  {:<10} serves",
        "replica", "cluster", "address", "state", "epoch", "heard"
    ));
    for replica in &replicas.replicas {
        line(&replica_row(replica, aliases.epoch, now));
    }
    if replicas.replicas.is_empty() {
        line("none has reported");
    }
    line("");
    line("latest moves");
    for release in releases.releases.iter().take(history) {
        line(&move_row(release));
    }
    for alias in &aliases.aliases {
        if let Some(version) = served_before(alias, releases) {
            line("");
            line(&format!(
                "to give {} the version it served before, {version}:",
                alias.alias
            ));
            line(&format!(
                "  springtide release rollback --alias {} --version {version} --reason '…'",
                alias.alias
            ));
        }
    }
    page
}

fn alias_row(alias: &Alias, releases: &Releases, arms: &[ArmOptions], now: OffsetDateTime) -> String {
    let root = alias.root.as_deref().unwrap_or("unknown");
    let root = root.get(..ROOT_DIGITS).unwrap_or(root);
    let users = arms.iter().find(|arm| arm.alias == alias.alias);
    let users = users.map_or("-".to_owned(), |arm| format!("{:.0}%", arm.weight * 100.0));
    let follows = alias.follows.as_deref().unwrap_or("pinned");
    let since = format!("{} ({} ago)", clock(alias.since), ago(now - alias.since));
    let why = last_move(&alias.alias, releases).map_or(String::new(), |release| {
        let by = if release.actor == release.kind {
            String::new() // the release loop itself
        } else {
            format!(" by {}", release.actor)
        };
        format!("{}{by}: {}", release.kind, release.reason)
    });
    format!(
        "{:<14} {:>8}  {root:<12}  {users:>5}  {follows:<14} {since:<34} {why}",
        alias.alias, alias.version
    )
}

fn replica_row(replica: &Replica, epoch: i64, now: OffsetDateTime) -> String {
    let state = match (replica.silent, replica.ready) {
        (true, _) => "silent",
        (false, true) => "ready",
        (false, false) => "starting",
    };
    let behind = if replica.epoch < epoch { "*" } else { "" };
    let mut serves = String::new();
    for resident in &replica.resident {
        let aliases = resident.aliases.join(",");
        let aliases = if aliases.is_empty() { "draining" } else { &aliases };
        let _ = write!(serves, "{aliases}={} ", resident.version); // writing to a String cannot fail
    }
    format!(
        "{:<14} {:<10} {:<28} {state:<8} {:>6}  {:<10} {serves}",
        replica.id,
        replica.cluster,
        replica.address,
        format!("{}{behind}", replica.epoch),
        format!("{} ago", ago(now - replica.reported_at)),
    )
}

fn move_row(release: &Release) -> String {
    let from = release
        .from_version
        .map_or("-".to_owned(), |version| version.to_string());
    format!(
        "  {}  {:<12} {:>6} → {:<6} {:<8} {:<8} {}: {}",
        clock(release.created_at),
        release.alias,
        from,
        release.to_version,
        release.kind,
        release.status,
        release.actor,
        release.reason
    )
}

/// The move that gave the alias what it has now.
fn last_move<'a>(alias: &str, releases: &'a Releases) -> Option<&'a Release> {
    let mut releases = releases.releases.iter();
    releases.find(|release| release.alias == alias && release.status == "done")
}

fn served_before(alias: &Alias, releases: &Releases) -> Option<i64> {
    let done = releases
        .releases
        .iter()
        .filter(|release| release.alias == alias.alias && release.status == "done");
    done.filter_map(|release| release.from_version)
        .find(|version| *version != alias.version)
}

fn clock(at: OffsetDateTime) -> String {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second]Z");
    at.format(format).unwrap_or_else(|_| at.to_string())
}

/// Like `4 min`; a clock that runs behind gives `0 s`.
fn ago(duration: time::Duration) -> String {
    match duration.whole_seconds().max(0) {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds @ 7200..172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use time::macros::datetime;

    #[test]
    fn the_page_says_who_is_served_since_when_why_where_and_how_to_go_back() {
        let aliases = serde_json::from_value(json!({"policy": "demo", "epoch": 12, "aliases": [
            {"alias": "base", "version": 1, "root": "aa".repeat(32), "follows": null, "branch": 0, "epoch": 1,
             "since": "2026-11-21T02:00:00Z"},
            {"alias": "champion", "version": 41, "root": "3f".repeat(32), "follows": "realtime", "branch": 0, "epoch": 12,
             "since": "2026-11-21T02:56:00Z"},
        ]}));
        let releases = serde_json::from_value(json!({"releases": [
            {"alias": "champion", "from_version": 41, "to_version": 43, "kind": "promote", "status": "refused",
             "actor": "ana", "reason": "try", "created_at": "2026-11-21T02:58:00Z"},
            {"alias": "champion", "from_version": 40, "to_version": 41, "kind": "follow", "status": "done",
             "actor": "follow", "reason": "head of realtime", "created_at": "2026-11-21T02:56:00Z"},
        ]}));
        let replicas = serde_json::from_value(json!({"replicas": [
            {"id": "replica-1", "cluster": "local", "policy": "demo", "address": "http://127.0.0.1:8000", "epoch": 11,
             "ready": true, "silent": false, "reported_at": "2026-11-21T02:59:58Z",
             "resident": [{"version": 40, "root": "x", "aliases": ["champion"]}, {"version": 39, "root": "y", "aliases": []}]},
        ]}));
        let arms = serving::ReleaseOptions::default().arms;
        let now = datetime!(2026-11-21 03:00:00 UTC);
        let page = page(&aliases.unwrap(), &releases.unwrap(), &replicas.unwrap(), &arms, 5, now);
        for expected in [
            "policy demo, epoch 12",
            "3f3f3f3f3f3f    60%  realtime       2026-11-21 02:56:00Z (4 min ago)   follow: head of realtime",
            "pinned",
            "11*",
            "champion=40 draining=39",
            "springtide release rollback --alias champion --version 40 --reason",
        ] {
            assert!(page.contains(expected), "no {expected:?} in\n{page}");
        }
    }

    #[test]
    fn times_are_told_in_the_unit_that_helps() {
        let told = [5, 150, 7_300, 400_000].map(|seconds| ago(time::Duration::seconds(seconds)));
        assert_eq!(told, ["5 s", "2 min", "2 h", "4 d"]);
        assert_eq!(ago(time::Duration::seconds(-3)), "0 s");
    }
}
