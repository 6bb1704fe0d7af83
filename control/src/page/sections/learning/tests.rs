use super::*;
use serde_json::json;
use time::macros::datetime;

const NOW: OffsetDateTime = datetime!(2026-11-26 03:00 UTC);

fn run(status: &str) -> Run {
    Run {
        id: Uuid::from_u128(7),
        line: "realtime".into(),
        status: status.into(),
        reason: Some("<why>".into()),
        requested: None,
        steps_done: 1234,
        head: Some(9),
        pinned: None,
    }
}

#[test]
fn the_page_shows_curves_worries_and_what_was_dropped() {
    let step = |step: i64| Step {
        step,
        version: step + 1,
        metrics: json!({"reward_mean": 0.1 * step as f64, "kl": 1e-6, "tokens": 10, "stale": {"tokens": 2}}),
        committed_at: NOW,
    };
    let data = Data {
        run: run("running"),
        steps: vec![step(1), step(2)],
        events: vec![Event {
            at: NOW,
            level: "warn".into(),
            message: "shows <3%>".into(),
            alarm: Some("show_rate".into()),
        }],
        fates: vec![
            Fate {
                kind: "held_out".into(),
                code: None,
                generations: 3000,
            },
            Fate {
                kind: "dropped".into(),
                code: Some("stale".into()),
                generations: 1000,
            },
        ],
        monitors: vec![Monitor {
            surface: "<agent>".into(),
            figures: json!([
                {"figure": "unscored", "levels": {"reference": 0.125, "recent": 0.5, "others": 0.125}, "evidence": 0.25,
                 "changed": false},
                {"figure": "length", "levels": {"reference": 120.0, "recent": 181.26, "others": null}, "evidence": 0.0,
                 "changed": false},
                {"figure": "tool_failed", "levels": null, "evidence": 0.0, "changed": true},
            ]),
            updated_at: NOW,
        }],
    };
    let page: String = shown(&data, Span::Hour, NOW)
        .into_iter()
        .map(|region| region.body.into_string())
        .collect();
    for part in [
        "1,234",
        "0.200",
        "KL of a step",
        "Stale tokens",
        "shows &lt;3%&gt;",
        "show_rate",
        "held out",
        "<code>stale</code>",
        "25.0%",
        "&lt;why&gt;",
        "the last hour",
        "&lt;agent&gt;",
        "12.5%",
        "181.3",
        "tool failed",
        "as before",
        "changed",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert!(
        !page.contains("Entropy") && !page.contains("NaN"),
        "not measured: {page}"
    );
}

#[test]
fn a_run_can_be_paused_or_resumed_by_those_who_may() {
    let of = |status: &str, may| decide(&run(status), &Audience::with(may)).into_string();
    assert!(of("running", true).contains("/pause\"") && of("paused", true).contains("/resume\""));
    assert!(of("failed", true).is_empty());
    let stopped = Run {
        pinned: Some(5),
        ..run("paused")
    };
    let page = decide(&stopped, &Audience::with(true)).into_string();
    assert!(
        page.contains("Learn again") && page.contains("promote 5 --alias learner"),
        "{page}"
    );
    assert!(of("running", false).contains("<code>research</code>"));
}
