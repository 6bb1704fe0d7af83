//! Rescoring sessions with another definition gives what the model says of that definition, and
//! with the same definition and the feedback of then what is stored.

use std::collections::BTreeMap;
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

use crate::ingest_order::{StoryCopy, options};
use crate::ingest_rescore::{SEED, STORIES, lines, rescored_lines, run_service, springtide, write};
use crate::session_model::{Row, expected, stored};
use crate::session_stories::{RULES, Rules, SURFACES, afterwards, is_mixed, session, surfaces};
use fixture::ingest::count;

/// The scores of sessions, without how many turns they had.
fn sessions(lines: &[Value], begin: OffsetDateTime) -> BTreeMap<Uuid, Row> {
    let after = |value: &Value| {
        let at = value
            .as_str()
            .map(|text| OffsetDateTime::parse(text, &Rfc3339).unwrap());
        at.map(|at| i64::try_from((at - begin).whole_milliseconds()).unwrap())
    };
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let row = |line: &Value| {
        let row = Row {
            reward: line["reward"].as_f64(),
            code: text(&line["censor_code"]),
            signal: text(&line["signal"]),
            feedback_ms: after(&line["feedback_at"]),
            closes_ms: after(&line["closes_at"]).unwrap(),
            turns: line["episode_id"].as_str().map(|_| 1),
            turn_reward: line["turn_reward"].as_f64(),
        };
        (line["generation_id"].as_str().unwrap().parse().unwrap(), row)
    };
    lines.iter().map(row).collect()
}

fn without_counts(mut rows: BTreeMap<Uuid, Row>) -> BTreeMap<Uuid, Row> {
    for row in rows.values_mut() {
        row.turns = row.turns.map(|_| 1);
    }
    rows
}

#[tokio::test(flavor = "multi_thread")]
async fn rescoring_sessions_gives_what_the_model_says_of_the_other_definition() {
    let mut rng = StdRng::seed_from_u64(SEED);
    let begin = OffsetDateTime::now_utc() - Duration::from_secs(60);
    let begin = begin.replace_nanosecond(0).unwrap();
    let (mut in_time, mut late, mut stories) = (Vec::new(), Vec::new(), Vec::new());
    while stories.len() < STORIES {
        let mut steps = session(&mut rng);
        if is_mixed(&steps) {
            continue;
        }
        let nth = stories.len();
        let copy = StoryCopy::new(begin, nth as u64);
        let too_late = if nth % 4 == 2 { afterwards(&steps) } else { Vec::new() };
        for step in &steps {
            let comes_late = nth % 4 == 3 && step.is_feedback();
            if comes_late { &mut late } else { &mut in_time }.push(copy.event_of_session(step));
        }
        late.extend(too_late.iter().map(|step| copy.event_of_session(step)));
        steps.extend(too_late);
        stories.push((copy, steps));
    }
    let with = |rules: Rules| ingest::Options {
        surface: surfaces(rules),
        ..options()
    };
    let stack = run_service("rescore-sessions", with(RULES), &in_time, &late).await;
    let file = |name: &str| stack.dir.path().join(name);
    let config = file("springtide.toml");
    write(&with(RULES), &config);
    let before = without_counts(stored(&stack.pool, begin).await);
    let rescore = async |definition: &str, more: &[&str]| {
        let lines = rescored_lines(&stack, &config, SURFACES, definition, more).await;
        sessions(&lines, begin)
    };
    let as_seen = rescore("1", &["--as-seen"]).await;
    for (id, row) in &before {
        assert_eq!(as_seen.get(id), Some(row), "as seen: {id}");
    }
    assert_eq!(as_seen.len(), before.len());
    // By event time, also what came late counts.
    let others = [
        RULES,
        Rules {
            horizon_ms: 3_250,
            ending: false,
            graded: false,
        },
        Rules {
            horizon_ms: 900,
            ..RULES
        },
    ];
    for (nth, rules) in others.into_iter().enumerate() {
        let definition = file(&format!("sessions-{nth}.toml"));
        write(&with(rules), &definition);
        let again = rescore(definition.to_str().unwrap(), &[]).await;
        let mut says = BTreeMap::new();
        for (copy, steps) in &stories {
            let rows = expected(steps, rules).into_iter();
            says.extend(rows.map(|(role, row)| (copy.id(role), row)));
        }
        let says = without_counts(says);
        for (copy, steps) in &stories {
            for role in expected(steps, rules).into_keys() {
                let id = copy.id(role);
                assert_eq!(again.get(&id), says.get(&id), "{rules:?}: turn {role} of {steps:#?}");
            }
        }
        assert_eq!(again.len(), says.len());
        assert_ne!(again, before, "{rules:?}");
    }
    let after = without_counts(stored(&stack.pool, begin).await);
    assert_eq!(after, before, "stored trajectories are unchanged");
    // Retention has deleted a week with turns of a session.
    sqlx::query(
        "with cut as (select generation_id from trajectory t where surface = 'talk' and episode_turns = 3 \
                      and (select count(*) from generation g where g.episode_id = t.episode_id) = 3 limit 1), \
              gone as (delete from generation where id in (select generation_id from cut)) \
         delete from trajectory where generation_id in (select generation_id from cut)",
    )
    .execute(&stack.pool)
    .await
    .unwrap();
    let output = springtide(&stack, &config, &["rescore", "--surface", "talk", "--definition", "1"]).await;
    let summary = String::from_utf8(output.stderr).unwrap();
    assert!(
        summary.contains("left out: 1 episodes of which turns have expired"),
        "{summary}"
    );
    assert_eq!(lines(&output.stdout).len(), {
        let talk = "select count(*) from trajectory where surface = 'talk'";
        usize::try_from(count(&stack.pool, talk).await).unwrap() - 2
    });
}
