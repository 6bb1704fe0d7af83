//! The page that `springtide release list` prints. Pure.

use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use time::macros::format_description;

use crate::cli::output::{cell, rows, table};

/// Hexadecimal digits of a content hash to show.
const HASH_DIGITS: usize = 12;

/// What `page` shows: answers of the control API. `releases` and `judgments` are newest first, and `canary`
/// is the one under way, if there is one.
pub struct Shown<'a> {
    pub aliases: &'a Value,
    pub releases: &'a Value,
    pub replicas: &'a Value,
    pub experiment: &'a Value,
    pub judgments: &'a Value,
    pub canary: Option<&'a Value>,
}

/// Everything, as text.
pub fn page(shown: &Shown, history: usize, now: OffsetDateTime) -> String {
    let Shown {
        aliases,
        releases,
        replicas,
        ..
    } = *shown;
    let epoch = aliases["epoch"].as_i64();
    let mut page = format!(
        "policy {}, epoch {}\n\n",
        cell(&aliases["policy"]),
        cell(&aliases["epoch"])
    );
    page += &table(
        ["alias", ">version", "content hash", ">users", "follows", "since", "why"],
        rows(&aliases["aliases"]).map(|alias| alias_row(alias, shown, now)),
    );
    page.push('\n');
    page += &match rows(&replicas["replicas"]).next() {
        None => "no replica has reported\n".to_owned(),
        Some(_) => table(
            ["replica", "cluster", "address", "state", ">epoch", "reported", "serves"],
            rows(&replicas["replicas"]).map(|replica| replica_row(replica, epoch, now)),
        ),
    };
    page += "\nlatest moves\n";
    page += &table(
        ["at", "alias", ">from", ">to", "kind", "status", "by", "why"],
        rows(&releases["releases"]).take(history).map(move_row),
    );
    for alias in rows(&aliases["aliases"]) {
        if let Some(version) = served_before(alias, shown) {
            let name = cell(&alias["alias"]);
            page += &format!(
                "\nto give {name} the version it served before, {version}:\n  \
                 springtide release rollback {version} --alias {name} --reason '…'\n"
            );
        }
    }
    page
}

/// What is known to be good and bad, as it stands before everything else. `judgments` is the answer of the
/// control API.
pub fn judged(judgments: &Value, now: OffsetDateTime) -> String {
    let told = |judgment: &Value| {
        format!(
            "{} by {}, {} ago: {}",
            cell(&judgment["version"]),
            cell(&judgment["actor"]),
            ago(&judgment["at"], now),
            cell(&judgment["reason"])
        )
    };
    let good = &judgments["last_known_good"];
    let mut text = match good.is_object() {
        _ if judgments["unread"].is_string() => return String::new(),
        true => format!(
            "last known good: version {}\n  to go back to it: springtide release rollback {} --reason '…'\n",
            told(good),
            cell(&good["version"])
        ),
        false => {
            "last known good: none yet; a canary that becomes champion by evidence is, and what a person judges good\n"
                .to_owned()
        }
    };
    for alias in ["champion", "learner"] {
        let bad = &judgments[format!("{alias}_bad")];
        if bad.is_object() {
            text += &format!("{alias} builds on a bad version: {}\n", told(bad));
        }
    }
    text + "\n"
}

/// Says that a part could not be read, if it could not.
pub fn unread((part, answer): (&str, &Value)) -> String {
    let reason = answer["unread"].as_str();
    reason.map_or_else(String::new, |reason| {
        format!("the {part} could not be read: {reason}\n\n")
    })
}

/// The canary under way, in one line, as it stands before everything else.
pub fn canary(canary: &Value) -> String {
    if canary["state"] == "shadow" {
        return format!(
            "canary: version {} answers requests of champion unseen, beside version {} (`springtide canary show`; to end it: \
             `springtide canary abort --reason '…'`)\n\n",
            canary["version"], canary["control"],
        );
    }
    let share = canary["share"].as_f64().unwrap_or(0.0) * 100.0;
    if canary["state"] == "watched" {
        return format!(
            "canary: version {} is champion and watched: {share:.0}% of champion's users keep version {} (`springtide canary \
             show`; to go back: `springtide canary rollback --reason '…'`)\n\n",
            canary["version"], canary["control"],
        );
    }
    format!(
        "canary: {share:.0}% of champion's users get version {} beside version {}; it is {} (`springtide canary show`; to end \
         it: `springtide canary abort --reason '…'`)\n\n",
        canary["version"],
        canary["control"],
        cell(&canary["state"]),
    )
}

fn alias_row(alias: &Value, shown: &Shown, now: OffsetDateTime) -> [String; 7] {
    let name = cell(&alias["alias"]);
    let root = alias["root"].as_str().unwrap_or("unknown");
    let weight_of = |alias: &str| {
        let arm = rows(&shown.experiment["arms"]).find(|arm| arm["alias"] == alias);
        arm.and_then(|arm| arm["weight"].as_f64())
    };
    // a canary has its users from champion
    let share = shown.canary.and_then(|canary| canary["share"].as_f64()).unwrap_or(0.0);
    let users = match name.as_str() {
        "champion" => weight_of("champion").map(|weight| weight * (1.0 - share)),
        "canary" if share > 0.0 => weight_of("champion").map(|weight| weight * share),
        name => weight_of(name),
    };
    let why = done(alias, shown.releases).next().map_or(String::new(), |release| {
        let (kind, actor) = (cell(&release["kind"]), cell(&release["actor"]));
        let by = if actor == kind {
            String::new() // the release loop itself
        } else {
            format!(" by {actor}")
        };
        format!("{kind}{by}: {}", cell(&release["reason"]))
    });
    [
        name,
        cell(&alias["version"]),
        root.get(..HASH_DIGITS).unwrap_or(root).to_owned(),
        users.map_or("-".to_owned(), |weight| format!("{:.0}%", weight * 100.0)),
        alias["follows"].as_str().unwrap_or("pinned").to_owned(),
        format!("{} ({} ago)", clock(&alias["since"]), ago(&alias["since"], now)),
        why,
    ]
}

fn replica_row(replica: &Value, epoch: Option<i64>, now: OffsetDateTime) -> [String; 7] {
    let state = match (&replica["silent"], &replica["ready"]) {
        (Value::Bool(true), _) => "silent",
        (_, Value::Bool(true)) => "ready",
        _ => "starting",
    };
    let behind = if replica["epoch"].as_i64() < epoch { "*" } else { "" };
    let serves = rows(&replica["resident"]).map(|resident| {
        let aliases: Vec<String> = rows(&resident["aliases"]).map(cell).collect();
        let aliases = if aliases.is_empty() {
            "draining".to_owned()
        } else {
            aliases.join(",")
        };
        format!("{aliases}={}", resident["version"])
    });
    [
        cell(&replica["id"]),
        cell(&replica["cluster"]),
        cell(&replica["address"]),
        state.to_owned(),
        format!("{}{behind}", replica["epoch"]),
        format!("{} ago", ago(&replica["reported_at"], now)),
        serves.collect::<Vec<_>>().join(" "),
    ]
}

fn move_row(release: &Value) -> [String; 8] {
    let text = |field: &str| cell(&release[field]);
    let from = if release["from_version"].is_null() {
        "-".to_owned()
    } else {
        text("from_version")
    };
    let at = clock(&release["created_at"]);
    [
        at,
        text("alias"),
        from,
        text("to_version"),
        text("kind"),
        text("status"),
        text("actor"),
        text("reason"),
    ]
}

/// Of the versions that were not judged bad.
fn served_before(alias: &Value, shown: &Shown) -> Option<i64> {
    let is_bad = |version: i64| {
        let newest = rows(&shown.judgments["judgments"]).find(|judgment| judgment["version"].as_i64() == Some(version));
        newest.is_some_and(|judgment| judgment["verdict"] == "bad")
    };
    done(alias, shown.releases)
        .filter_map(|release| release["from_version"].as_i64())
        .find(|version| Some(*version) != alias["version"].as_i64() && !is_bad(*version))
}

/// The moves of an alias, newest first.
fn done<'a>(alias: &'a Value, releases: &'a Value) -> impl Iterator<Item = &'a Value> {
    rows(&releases["releases"]).filter(|release| release["alias"] == alias["alias"] && release["status"] == "done")
}

fn time(value: &Value) -> Option<OffsetDateTime> {
    OffsetDateTime::parse(value.as_str()?, &Rfc3339).ok()
}

/// To the second.
fn clock(at: &Value) -> String {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second]Z");
    time(at)
        .and_then(|at| at.format(format).ok())
        .unwrap_or_else(|| cell(at))
}

/// Like `4 min`. A time in the future, from clocks that differ, gives `0 s`.
fn ago(at: &Value, now: OffsetDateTime) -> String {
    let Some(at) = time(at) else { return "?".to_owned() };
    match (now - at).whole_seconds().max(0) {
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
        let aliases = json!({"policy": "demo", "epoch": 12, "aliases": [
            {"alias": "base", "version": 1, "root": "aa".repeat(32), "follows": null, "branch": 0, "epoch": 1,
             "since": "2026-11-21T02:00:00Z"},
            {"alias": "champion", "version": 41, "root": "3f".repeat(32), "follows": "realtime", "branch": 0, "epoch": 12,
             "since": "2026-11-21T02:56:00Z"},
        ]});
        let releases = json!({"releases": [
            {"alias": "champion", "from_version": 41, "to_version": 43, "kind": "promote", "status": "refused",
             "actor": "ana", "reason": "try", "created_at": "2026-11-21T02:58:00Z"},
            {"alias": "champion", "from_version": 40, "to_version": 41, "kind": "follow", "status": "done",
             "actor": "follow", "reason": "head of realtime", "created_at": "2026-11-21T02:56:00Z"},
        ]});
        let replicas = json!({"replicas": [
            {"id": "replica-1", "cluster": "local", "policy": "demo", "address": "http://127.0.0.1:8000", "epoch": 11,
             "ready": true, "silent": false, "reported_at": "2026-11-21T02:59:58Z",
             "resident": [{"version": 40, "root": "x", "aliases": ["champion"]}, {"version": 39, "root": "y", "aliases": []}]},
        ]});
        let experiment = json!({"arms": [{"alias": "champion", "weight": 0.6}]});
        let now = datetime!(2026-11-21 03:00:00 UTC);
        let mut shown = Shown {
            aliases: &aliases,
            releases: &releases,
            replicas: &replicas,
            experiment: &experiment,
            judgments: &Value::Null,
            canary: None,
        };
        let text = page(&shown, 5, now);
        let bad = json!({"judgments": [{"version": 40, "verdict": "bad"}, {"version": 40, "verdict": "good"}]});
        let canary = json!({"share": 0.25});
        (shown.judgments, shown.canary) = (&bad, Some(&canary));
        let after = page(&shown, 5, now);
        assert!(!after.contains("rollback 40"), "it was judged bad\n{after}");
        assert!(
            after.contains(" 45%"),
            "a quarter of its users have the canary\n{after}"
        );
        let page = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for expected in [
            "policy demo, epoch 12",
            "champion 41 3f3f3f3f3f3f 60% realtime 2026-11-21 02:56:00Z (4 min ago) follow: head of realtime",
            "pinned",
            "11*",
            "champion=40 draining=39",
            "springtide release rollback 40 --alias champion --reason",
        ] {
            assert!(page.contains(expected), "no {expected:?} in\n{page}");
        }
    }

    #[test]
    fn what_is_known_good_and_what_builds_on_a_bad_version_comes_first() {
        let now = datetime!(2026-11-21 03:00:00 UTC);
        let judgment = |version, verdict: &str, reason: &str| json!({"version": version, "verdict": verdict, "actor": "release", "reason": reason, "at": "2026-11-21T02:50:00Z"});
        let judgments = json!({
            "last_known_good": judgment(40, "good", "it is better"),
            "champion_bad": null,
            "learner_bad": judgment(41, "bad", "rewards are lower"),
        });
        let text = judged(&judgments, now);
        assert_eq!(
            text,
            "last known good: version 40 by release, 10 min ago: it is better\n  \
             to go back to it: springtide release rollback 40 --reason '…'\n\
             learner builds on a bad version: 41 by release, 10 min ago: rewards are lower\n\n"
        );
        assert!(judged(&Value::Null, now).starts_with("last known good: none yet"));
    }

    #[test]
    fn what_could_not_be_read_is_said_and_not_taken_for_nothing() {
        let failed = super::super::or_unread(Err(anyhow::anyhow!("503: the database does not answer")));
        assert_eq!(judged(&failed, datetime!(2026-11-21 03:00:00 UTC)), "");
        let said = unread(("canaries", &failed));
        assert_eq!(
            said,
            "the canaries could not be read: 503: the database does not answer\n\n"
        );
        let read = super::super::or_unread(Ok(json!({"canaries": []})));
        assert_eq!(unread(("canaries", &read)), "");
    }

    #[test]
    fn a_canary_under_way_is_one_line() {
        let under_way = json!({"version": 41, "control": 40, "state": "held", "share": 0.25});
        let line = canary(&under_way);
        let unseen = canary(&json!({"version": 41, "control": 40, "state": "shadow", "share": 0.0}));
        assert!(
            unseen.starts_with("canary: version 41 answers requests of champion unseen"),
            "{unseen}"
        );
        assert!(
            line.starts_with("canary: 25% of champion's users get version 41 beside version 40; it is held"),
            "{line}"
        );
    }

    #[test]
    fn ages_use_a_readable_unit() {
        let now = datetime!(2026-11-21 03:00:00 UTC);
        let ages = ["02:59:55", "02:57:30", "00:58:20"].map(|time| ago(&format!("2026-11-21T{time}Z").into(), now));
        assert_eq!(ages, ["5 s", "2 min", "2 h"]);
        assert_eq!(ago(&"2026-11-16T03:00:00Z".into(), now), "5 d");
        assert_eq!(ago(&"2026-11-21T03:00:03Z".into(), now), "0 s");
    }
}
