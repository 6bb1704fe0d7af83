use super::*;
use serde_json::json;
use time::macros::datetime;

const NOW: OffsetDateTime = datetime!(2026-11-26 03:00 UTC);

fn canary(state: &str) -> Canary {
    Canary {
        id: Uuid::from_u128(7),
        version: 60,
        control: Some(41),
        strategy: json!({
            "steps": [{"setWeight": 10.0}, {"analysis": {"successCondition": "not_worse", "timeout": "2h"}}, {"pause": {}},
                      {"pause": {"duration": "10m"}}],
            "judge": {"margin": 0.02},
        }),
        state: state.into(),
        step: 1,
        step_since: NOW,
        actor: "ada".into(),
        reason: "try".into(),
        created_at: NOW,
    }
}

fn transition(minutes: i64, difference: f64, low: &Value) -> Transition {
    Transition {
        event: "step".into(),
        from_state: "canary".into(),
        to_state: "canary".into(),
        share: 0.1,
        actor: "release".into(),
        reason: "the reason is <long>".into(),
        evidence: Some(json!({
            "canary": {"version": 60, "users": 1234, "answers": 2000, "mean_reward": 0.51, "declined": 100, "aborted": 0, "unscored": 4},
            "champion": {"version": 41, "users": 900, "answers": 0, "mean_reward": null},
            "reward": {"difference": difference, "low": low, "high": 0.2},
            "found": {"summary": "rewards: it is not worse"},
        })),
        at: NOW + time::Duration::minutes(minutes),
    }
}

fn page(canary: &Canary, transitions: &[Transition]) -> String {
    let regions = shown(canary, transitions, NOW);
    regions.into_iter().map(|region| region.body.into_string()).collect()
}

#[test]
fn the_evidence_is_drawn_as_its_confidence_sequence_over_time() {
    // the latest first, as it is read
    let transitions = [transition(20, 0.05, &json!(-0.01)), transition(0, 0.02, &json!(-0.1))];
    let looks = looks(&transitions);
    assert_eq!((looks[0].difference, looks[1].bounds), (0.02, [-0.01, 0.2]));
    let page = page(&canary("canary"), &transitions);
    for part in [
        "class=\"band\"",
        "+0.050 (−0.010 … +0.200)",
        "margin of",
        "1,234",
        "5.0%",
        "rewards: it is not worse",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert!(
        !page.contains("NaN") && page.contains("the reason is &lt;long&gt;"),
        "{page}"
    );
}

#[test]
fn a_look_without_an_interval_is_not_drawn() {
    let page = page(&canary("canary"), &[transition(0, 0.02, &Value::Null)]);
    assert!(
        page.contains("No decision was made on evidence yet") && !page.contains("<svg"),
        "{page}"
    );
    let mut person = transition(0, 0.0, &json!(0.0));
    person.evidence = None;
    assert!(looks(&[person]).is_empty());
}

#[test]
fn the_steps_are_in_words_and_the_current_one_is_marked() {
    let page = page(&canary("canary"), &[]);
    for part in [
        "10% of champion's users get it",
        "<b>wait until it is not worse than champion; after 2h a person decides</b>",
        "pause until a person resumes",
        "pause for 10m",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    let page = self::page(&canary("aborted"), &[]);
    assert!(!page.contains("aria-current"), "an ended canary is at no step: {page}");
}

#[test]
fn only_what_the_state_allows_has_a_button() {
    let of = |state: &str| decide(&canary(state), &Audience::with(true)).into_string();
    for (state, offered, not) in [
        ("canary", "/hold", "/rollback"),
        ("held", "/resume", "/hold"),
        ("champion", "/rollback", "/promote"),
        ("proposed", "/approve", "/resume"),
    ] {
        let page = of(state);
        let path = |decision: &str| format!("/v1/canaries/00000000-0000-0000-0000-000000000007{decision}\"");
        assert!(
            page.contains(&path(offered)) && !page.contains(&path(not)),
            "{state}: {page}"
        );
    }
    assert!(of("retired").contains("nothing to decide"));
    assert!(
        !decide(&canary("held"), &Audience::with(false))
            .into_string()
            .contains("<button")
    );
}
