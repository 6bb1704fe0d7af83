use super::*;
use serde_json::json;
use time::macros::datetime;

#[test]
fn a_version_shows_its_family_its_aliases_and_what_it_was_trained_on() {
    let now = datetime!(2026-11-26 03:00 UTC);
    let run = Uuid::from_u128(7);
    let data = Data {
        version: Version {
            serial: 5,
            root: "ab".repeat(32),
            manifest_key: "policy/<x>/5.json".into(),
            parent: Some(4),
            line: "realtime".into(),
            branch: 0,
            run_id: Some(run),
            step: Some(4),
            delta_bytes: Some(10),
            image_bytes: 100,
            created_at: now,
        },
        ancestors: vec![4, 3],
        children: vec![6],
        named: vec![Named {
            alias: "champion".into(),
            epoch: 12,
            at: now,
        }],
        step: Some(trained::tests::step()),
        trajectories: vec![Trained {
            id: run,
            version: 4,
            reward: Some(1.0),
            signal: Some("accept".into()),
        }],
        evaluations: vec![Evaluation {
            id: run,
            status: "succeeded".into(),
            result: Some(json!({"right": "<0.5>"})),
        }],
        used: Period::default(),
        judged: Some(Judged {
            version: 4,
            verdict: "bad".into(),
            actor: "ana".into(),
            reason: "it <lies>".into(),
            at: now,
        }),
        figures: vec![(
            5,
            Figures {
                answers: 1000,
                shown: Some(1.0),
                accepted: Some(0.31),
                edited: None,
                unanswered: Some(0.44),
                unscored: Some(0.44),
                disagreement: Some(0.0),
                tool_failed: Some(0.02),
                length: Some(181.26),
                repetition: Some(0.1),
                entropy: Some(0.47),
            },
        )],
    };
    let page: String = shown(&data, now)
        .into_iter()
        .map(|region| region.body.into_string())
        .collect();
    for part in [
        "abababab",
        "/versions/4",
        "/versions/6",
        "champion",
        "64, of which 2 are not shown here",
        "&lt;learner&gt; 32, champion 30",
        "default 42, other 20",
        ">02:00:00<",
        ">02:40:00<",
        "0.312",
        "stale 7, since the step before",
        "−0.2500",
        "1.0e−5",
        "accept",
        "&lt;0.5&gt;",
        "&lt;x&gt;",
        "because it was trained on top of",
        "it &lt;lies&gt;",
        "1,000",
        "44%",
        "181.3",
        "0.47",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
}
