//! The page that `springtide release list` prints. Pure.

use release::answers::{AliasView, Aliases, ArmView, CanaryState, CanaryView, Judgment, Judgments, ReleaseView};
use serving::fleet::{Replica, ReportedVersion};
use time::OffsetDateTime;
use time::macros::format_description;

use crate::cli::output::table;

/// Hexadecimal digits of a content hash to show.
const HASH_DIGITS: usize = 12;

/// What `page` shows: answers of the control API. `releases` and `judgments` are newest first, and `canary`
/// is the one under way, if there is one.
#[derive(Clone, Copy)]
pub struct Shown<'a> {
    pub aliases: &'a Aliases,
    pub releases: &'a [ReleaseView],
    pub replicas: &'a [Replica],
    pub arms: &'a [ArmView],
    pub judgments: &'a [Judgment],
    pub canary: Option<&'a CanaryView>,
}

/// Everything, as text.
pub fn page(shown: &Shown, history: usize, now: OffsetDateTime) -> String {
    let Aliases { policy, epoch, aliases } = shown.aliases;
    let mut page = format!("policy {policy}, epoch {epoch}\n\n");
    page += &table(
        ["alias", ">version", "content hash", ">users", "follows", "since", "why"],
        aliases.iter().map(|alias| alias_row(alias, shown, now)),
    );
    page.push('\n');
    page += &match shown.replicas.is_empty() {
        true => "no replica has reported\n".to_owned(),
        false => table(
            ["replica", "cluster", "address", "state", ">epoch", "reported", "serves"],
            shown.replicas.iter().map(|replica| replica_row(replica, *epoch, now)),
        ),
    };
    page += "\nlatest moves\n";
    page += &table(
        ["at", "alias", ">from", ">to", "kind", "status", "by", "why"],
        shown.releases.iter().take(history).map(move_row),
    );
    for alias in aliases {
        if let Some(version) = served_before(alias, shown) {
            let name = &alias.alias;
            page += &format!(
                "\nto give {name} the version it served before, {version}:\n  \
                 springtide release rollback {version} --alias {name} --reason '…'\n"
            );
        }
    }
    page
}

/// What is known to be good and bad, as it stands before everything else.
pub fn judged(judgments: &Judgments, now: OffsetDateTime) -> String {
    let told = |judgment: &Judgment| {
        let Judgment {
            version, actor, reason, ..
        } = judgment;
        format!("{version} by {actor}, {} ago: {reason}", ago(judgment.at, now))
    };
    let mut text = match &judgments.last_known_good {
        Some(good) => format!(
            "last known good: version {}\n  to go back to it: springtide release rollback {} --reason '…'\n",
            told(good),
            good.version
        ),
        None => {
            "last known good: none yet; a canary that becomes champion by evidence is, and what a person judges good\n"
                .to_owned()
        }
    };
    for (alias, bad) in [
        ("champion", &judgments.champion_bad),
        ("learner", &judgments.learner_bad),
    ] {
        if let Some(bad) = bad {
            text += &format!("{alias} builds on a bad version: {}\n", told(bad));
        }
    }
    text + "\n"
}

/// The canary under way, in one line, as it stands before everything else.
pub fn canary(canary: &CanaryView) -> String {
    let (version, share) = (canary.version, canary.share * 100.0);
    let control = canary.control.map_or("none".to_owned(), |control| control.to_string());
    match canary.state {
        CanaryState::Shadow => format!(
            "canary: version {version} answers requests of champion unseen, beside version {control} (`springtide canary show`; to \
             end it: `springtide canary abort --reason '…'`)\n\n"
        ),
        CanaryState::Watched => format!(
            "canary: version {version} is champion and watched: {share:.0}% of champion's users keep version {control} \
             (`springtide canary show`; to go back: `springtide canary rollback --reason '…'`)\n\n"
        ),
        state => format!(
            "canary: {share:.0}% of champion's users get version {version} beside version {control}; it is {} (`springtide canary \
             show`; to end it: `springtide canary abort --reason '…'`)\n\n",
            state.name()
        ),
    }
}

fn alias_row(alias: &AliasView, shown: &Shown, now: OffsetDateTime) -> [String; 7] {
    let root = alias.root.as_deref().unwrap_or("unknown");
    let weight_of = |alias: &str| shown.arms.iter().find(|arm| arm.alias == alias).map(|arm| arm.weight);
    // a canary has its users from champion
    let share = shown.canary.map_or(0.0, |canary| canary.share);
    let users = match alias.alias.as_str() {
        "champion" => weight_of("champion").map(|weight| weight * (1.0 - share)),
        "canary" if share > 0.0 => weight_of("champion").map(|weight| weight * share),
        name => weight_of(name),
    };
    let why = done(alias, shown.releases).next().map_or(String::new(), |release| {
        let ReleaseView {
            kind, actor, reason, ..
        } = release;
        match actor == kind {
            true => format!("{kind}: {reason}"), // the release loop itself
            false => format!("{kind} by {actor}: {reason}"),
        }
    });
    [
        alias.alias.clone(),
        alias.version.to_string(),
        root.get(..HASH_DIGITS).unwrap_or(root).to_owned(),
        users.map_or("-".to_owned(), |weight| format!("{:.0}%", weight * 100.0)),
        alias.follows.clone().unwrap_or_else(|| "pinned".to_owned()),
        format!("{} ({} ago)", clock(alias.since), ago(alias.since, now)),
        why,
    ]
}

fn replica_row(replica: &Replica, epoch: i64, now: OffsetDateTime) -> [String; 7] {
    let state = match (replica.silent, replica.ready) {
        (true, _) => "silent",
        (false, true) => "ready",
        (false, false) => "starting",
    };
    let behind = if replica.epoch < epoch { "*" } else { "" };
    let resident: Vec<ReportedVersion> = serde_json::from_value(replica.resident.clone()).unwrap_or_default();
    let serves = resident.iter().map(|resident| match resident.aliases.is_empty() {
        true => format!("draining={}", resident.version),
        false => format!("{}={}", resident.aliases.join(","), resident.version),
    });
    [
        replica.id.clone(),
        replica.cluster.clone(),
        replica.address.clone(),
        state.to_owned(),
        format!("{}{behind}", replica.epoch),
        format!("{} ago", ago(replica.reported_at, now)),
        serves.collect::<Vec<_>>().join(" "),
    ]
}

fn move_row(release: &ReleaseView) -> [String; 8] {
    [
        clock(release.created_at),
        release.alias.clone(),
        release.from_version.map_or("-".to_owned(), |from| from.to_string()),
        release.to_version.to_string(),
        release.kind.clone(),
        release.status.clone(),
        release.actor.clone(),
        release.reason.clone(),
    ]
}

/// Of the versions that were not judged bad.
fn served_before(alias: &AliasView, shown: &Shown) -> Option<i64> {
    let is_bad = |version: i64| {
        let newest = shown.judgments.iter().find(|judgment| judgment.version == version);
        newest.is_some_and(|judgment| judgment.verdict == "bad")
    };
    done(alias, shown.releases)
        .filter_map(|release| release.from_version)
        .find(|version| *version != alias.version && !is_bad(*version))
}

/// The moves of an alias, newest first.
fn done<'a>(alias: &'a AliasView, releases: &'a [ReleaseView]) -> impl Iterator<Item = &'a ReleaseView> {
    releases
        .iter()
        .filter(|release| release.alias == alias.alias && release.status == "done")
}

/// To the second.
fn clock(at: OffsetDateTime) -> String {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second]Z");
    at.format(format).unwrap_or_default()
}

/// Like `4 min`. A time in the future, from clocks that differ, gives `0 s`.
fn ago(at: OffsetDateTime, now: OffsetDateTime) -> String {
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
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};
    use time::macros::datetime;

    fn answer<T: DeserializeOwned>(json: Value) -> T {
        serde_json::from_value(json).unwrap()
    }

    fn under_way(state: &str, share: f64) -> CanaryView {
        answer(json!({
            "id": uuid::Uuid::nil(), "version": 41, "control": 40, "state": state, "step": 0, "share": share,
            "step_since": "2026-11-21T02:56:00Z", "clusters": null, "strategy": {}, "actor": "ana", "reason": "try",
            "created_at": "2026-11-21T02:56:00Z",
        }))
    }

    fn judgment(version: i64, verdict: &str, reason: &str) -> Value {
        json!({"version": version, "verdict": verdict, "canary_id": null, "actor": "release", "reason": reason,
               "at": "2026-11-21T02:50:00Z"})
    }

    #[test]
    fn the_page_says_who_is_served_since_when_why_where_and_how_to_go_back() {
        let aliases: Aliases = answer(json!({"policy": "demo", "epoch": 12, "aliases": [
            {"alias": "base", "version": 1, "root": "aa".repeat(32), "follows": null, "branch": 0, "epoch": 1,
             "since": "2026-11-21T02:00:00Z"},
            {"alias": "champion", "version": 41, "root": "3f".repeat(32), "follows": "realtime", "branch": 0, "epoch": 12,
             "since": "2026-11-21T02:56:00Z"},
        ]}));
        let id = uuid::Uuid::nil();
        let releases: Vec<ReleaseView> = answer(json!([
            {"id": id, "epoch": null, "alias": "champion", "from_version": 41, "to_version": 43, "kind": "promote", "status": "refused",
             "actor": "ana", "reason": "try", "created_at": "2026-11-21T02:58:00Z"},
            {"id": id, "epoch": 12, "alias": "champion", "from_version": 40, "to_version": 41, "kind": "follow", "status": "done",
             "actor": "follow", "reason": "head of realtime", "created_at": "2026-11-21T02:56:00Z"},
        ]));
        let replicas: Vec<Replica> = answer(json!([
            {"id": "replica-1", "cluster": "local", "policy": "demo", "address": "http://127.0.0.1:8000", "epoch": 11,
             "ready": true, "silent": false, "reported_at": "2026-11-21T02:59:58Z",
             "resident": [{"version": 40, "root": "x", "aliases": ["champion"]}, {"version": 39, "root": "y", "aliases": []}]},
        ]));
        let arms: Vec<ArmView> = answer(json!([{"alias": "champion", "weight": 0.6, "explore": 0.0, "version": 41}]));
        let now = datetime!(2026-11-21 03:00:00 UTC);
        let mut shown = Shown {
            aliases: &aliases,
            releases: &releases,
            replicas: &replicas,
            arms: &arms,
            judgments: &[],
            canary: None,
        };
        let text = page(&shown, 5, now);
        let bad: Vec<Judgment> = answer(json!([judgment(40, "bad", ""), judgment(40, "good", "")]));
        let canary = under_way("canary", 0.25);
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
        let judgments: Judgments = answer(json!({
            "last_known_good": judgment(40, "good", "it is better"),
            "champion_bad": null,
            "learner_bad": judgment(41, "bad", "rewards are lower"),
            "judgments": [],
        }));
        let text = judged(&judgments, now);
        assert_eq!(
            text,
            "last known good: version 40 by release, 10 min ago: it is better\n  \
             to go back to it: springtide release rollback 40 --reason '…'\n\
             learner builds on a bad version: 41 by release, 10 min ago: rewards are lower\n\n"
        );
        let none: Judgments = answer(json!({"judgments": []}));
        assert!(judged(&none, now).starts_with("last known good: none yet"));
    }

    #[test]
    fn a_canary_under_way_is_one_line() {
        let line = canary(&under_way("held", 0.25));
        let unseen = canary(&under_way("shadow", 0.0));
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
        let seconds = [5, 150, 7_300, 432_000, -3];
        let ages = seconds.map(|seconds| ago(now - time::Duration::seconds(seconds), now));
        assert_eq!(ages, ["5 s", "2 min", "2 h", "5 d", "0 s"]);
    }
}
