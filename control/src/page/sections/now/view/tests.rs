use super::*;
use crate::page::sections::fleet::tests::replica;
use crate::page::sections::now::read::Good;
use serde_json::json;
use time::macros::datetime;
use uuid::Uuid;

const NOW: OffsetDateTime = datetime!(2026-11-26 03:00 UTC);

fn alias(name: &str, version: i64, before: Option<i64>) -> Alias {
    Alias {
        alias: name.into(),
        version,
        follows: (name == "learner").then(|| "realtime".into()),
        epoch: 9,
        since: NOW - time::Duration::minutes(5),
        kind: Some("pin".into()),
        actor: Some("<ada>".into()),
        reason: Some("canaries decide & <b>nobody</b> else".into()),
        before,
    }
}

fn data() -> Data {
    let arm = |alias: &str, share, explore| Arm {
        alias: alias.into(),
        share,
        explore,
        temperature_max: (alias == "champion").then_some(0.3),
        probability_min: (alias == "champion").then_some(0.25),
    };
    let both = json!([{"version": 41, "aliases": ["champion"]}, {"version": 57, "aliases": ["learner"]}]);
    Data {
        aliases: vec![alias("champion", 41, Some(40)), alias("learner", 57, Some(56))],
        arms: vec![arm("learner", 0.2, 0.02), arm("champion", 0.8, 0.0)],
        replicas: vec![
            replica("r1", false, both),
            replica("r2", false, json!([{"version": 40, "aliases": ["champion"]}])),
            replica("r3", true, json!([{"version": 41, "aliases": ["champion"]}])),
        ],
        ..Data::default()
    }
}

fn shown(data: &Data) -> String {
    let regions = regions(data, NOW);
    regions.into_iter().map(|region| region.body.into_string()).collect()
}

#[test]
fn the_page_says_what_serves_whom_on_how_many_replicas_since_when_and_why() {
    let page = shown(&data());
    for part in [
        "<a href=\"/versions/champion\">champion</a>",
        "/versions/41",
        "80%",
        "1 of 2",
        "pin by <b>&lt;ada&gt;</b>",
        "5 min",
        "explores in 2%",
        "temperature at most 0.3",
        "shows from probability 0.25",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert!(!page.contains("<b>nobody</b>") && !page.contains("<ada>"), "{page}");
}

#[test]
fn a_canary_takes_its_users_from_champion_and_leads_the_page() {
    let mut data = data();
    data.canary = Some(Canary {
        id: Uuid::from_u128(7),
        version: 60,
        control: Some(41),
        state: "held".into(),
        step: 1,
        steps: 4,
        step_since: NOW,
        share: 0.25,
        why: Some("a monitor rings".into()),
    });
    data.aliases.push(alias("canary", 60, None));
    let page = shown(&data);
    for part in [
        "25% of champion",
        "step 2 of 4",
        "a monitor rings",
        "60%",
        "20%",
        "springtide canary abort",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
}

#[test]
fn going_back_leads_to_the_last_known_good_version_rather_than_to_the_one_before() {
    let mut data = data();
    let page = shown(&data);
    assert!(
        page.contains("rollback 40") && page.contains("Nobody has said that it is good"),
        "{page}"
    );
    data.good_before = Some(Good {
        version: 33,
        since: NOW,
        why: "it became champion as a canary".into(),
    });
    let page = shown(&data);
    assert!(page.contains("rollback 33") && !page.contains("rollback 40"), "{page}");
}

#[test]
fn alarms_stand_first_and_nothing_at_all_is_a_page_too() {
    let mut data = data();
    data.alarms = vec!["shows 3% <of> its generations".into()];
    let page = shown(&data);
    assert!(page.find("3% &lt;of&gt;") < page.find("champion"), "{page}");
    let page = shown(&Data::default());
    assert!(page.contains("No alias names a version yet"), "{page}");
    assert!(decide(&Data::default(), &Audience::with(true)).into_string().is_empty());
}

#[test]
fn buttons_post_to_the_api_and_need_the_scope() {
    let page = decide(&data(), &Audience::with(true)).into_string();
    assert!(
        page.contains("data-post=\"/v1/releases\"") && page.contains("value=\"40\""),
        "{page}"
    );
    assert!(page.contains("&quot;kind&quot;:&quot;rollback&quot;"), "{page}");
    let page = decide(&data(), &Audience::with(false)).into_string();
    assert!(
        !page.contains("<button") && page.contains("<code>release</code>"),
        "{page}"
    );
}
