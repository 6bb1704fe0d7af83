//! What must become of a session ([`crate::session_stories`]).
//!
//! The model knows only the events of one session and the words of the guide. It shares no code with
//! ingest: it works on milliseconds, reads everything at once, and has no tables.

use std::collections::{BTreeMap, BTreeSet};

use event_log::event::{Purpose, Value};
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::ingest_order::Role;
use crate::session_stories::{Action, Rules, Step, Turn};

/// How long after an early close turns still belong to the session.
const SLACK_MS: i64 = 1_000;

/// What a turn's row of `trajectory` says.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub reward: Option<f64>,
    pub code: Option<String>,
    pub signal: Option<String>,
    pub feedback_ms: Option<i64>,
    pub closes_ms: i64,
    /// Whether the trajectory is the session, and of how many turns.
    pub turns: Option<i32>,
    pub turn_reward: Option<f64>,
}

/// A value with its time and its role.
struct Given {
    at: i64,
    role: Role,
    turn: Option<Role>,
    metric: &'static str,
    value: Value,
    retracted_at: Option<i64>,
}

/// What must become of the turns of a session, whatever the order of its events.
pub fn expected(steps: &[Step], rules: Rules) -> BTreeMap<Role, Row> {
    let mut turns: Vec<(i64, &Turn)> = Vec::new();
    let mut given: Vec<Given> = Vec::new();
    let mut ended: Option<i64> = None;
    for step in steps {
        match &step.action {
            Action::Turn(turn) => turns.push((step.at, turn)),
            Action::End { .. } => ended = Some(ended.map_or(step.at, |at| at.min(step.at))),
            Action::Feedback {
                role,
                turn,
                metric,
                value,
            } => {
                let retractions = steps.iter().filter_map(|other| match other.action {
                    Action::Retraction { feedback, .. } if feedback == *role => Some(other.at),
                    _ => None,
                });
                given.push(Given {
                    at: step.at,
                    role: *role,
                    turn: *turn,
                    metric,
                    value: value.clone(),
                    retracted_at: retractions.min(),
                });
            }
            Action::Retraction { .. } => {}
        }
    }
    given.sort_by_key(|given| (given.at, given.role));
    turns.sort_by_key(|(at, turn)| (*at, turn.role));
    let surface = turns[0].1.surface;
    let scores = given
        .iter()
        .filter(|given| given.turn.is_none() && given.metric == "score");
    let stop = match surface {
        "task" if rules.ending => ended,
        "exam" if rules.graded => scores.map(|given| given.at).min(),
        _ => None,
    };
    // what is dated before the first turn shuts no later one out
    let stop = stop.map(|stop| stop.max(turns[0].0));
    let mut members: Vec<(i64, &Turn)> = vec![turns[0]];
    let mut late: Vec<(i64, &Turn)> = Vec::new();
    for &(at, turn) in &turns[1..] {
        let last = members[members.len() - 1].0;
        let fits = at <= last + rules.horizon_ms && stop.is_none_or(|stop| at <= stop + SLACK_MS);
        // Once a turn is late, so are all after it.
        if fits && late.is_empty() {
            members.push((at, turn));
        } else {
            late.push((at, turn));
        }
    }
    let horizon = members[members.len() - 1].0 + rules.horizon_ms;
    let closes_ms = stop.map_or(horizon, |stop| stop.min(horizon));
    members.sort_by_key(|(_, turn)| (turn.segment, turn.number, turn.role));
    let members: Vec<&Turn> = members.into_iter().map(|(_, turn)| turn).collect();

    let in_time = |given: &&Given| given.at <= closes_ms;
    let is_retracted = |given: &Given| given.retracted_at.is_some_and(|at| at <= closes_ms);
    let about = |turn: Option<Role>, metric: &str| -> Vec<&Given> {
        let about = given
            .iter()
            .filter(|given| given.turn == turn && given.metric == metric);
        about.filter(in_time).collect()
    };
    let standing = |turn: Option<Role>, metric: &str| -> Vec<&Given> {
        let about = about(turn, metric);
        about.into_iter().filter(|given| !is_retracted(given)).collect()
    };
    let is_ended = ended.is_some_and(|at| at <= closes_ms);
    let judged = judge(surface, is_ended, &members, &about, &standing, &is_retracted);
    let mut rows = BTreeMap::new();
    for turn in &members {
        let mut row = Row {
            reward: None,
            code: None,
            signal: None,
            feedback_ms: None,
            closes_ms,
            turns: Some(i32::try_from(members.len()).unwrap()),
            turn_reward: None,
        };
        match &judged {
            Err(code) => row.code = Some((*code).to_owned()),
            Ok((reward, signal, feedback_ms)) => {
                row.reward = Some(*reward);
                row.signal = Some((*signal).to_owned());
                row.feedback_ms = *feedback_ms;
                let thumbs = standing(Some(turn.role), "accept");
                let thumb = thumbs.first().filter(|_| surface == "task");
                row.turn_reward = thumb.map(|given| if given.value == Value::Bool(true) { 1.0 } else { -1.0 });
            }
        }
        rows.insert(turn.role, row);
    }
    for (at, turn) in late {
        rows.insert(turn.role, late_row(at));
    }
    rows
}

pub fn late_row(at: i64) -> Row {
    Row {
        reward: None,
        code: Some("late_turn".to_owned()),
        signal: None,
        feedback_ms: None,
        closes_ms: at,
        turns: None,
        turn_reward: None,
    }
}

type Judged = Result<(f64, &'static str, Option<i64>), &'static str>;

fn judge<'a>(
    surface: &str,
    is_ended: bool,
    members: &[&Turn],
    about: &impl Fn(Option<Role>, &str) -> Vec<&'a Given>,
    standing: &impl Fn(Option<Role>, &str) -> Vec<&'a Given>,
    is_retracted: &impl Fn(&Given) -> bool,
) -> Judged {
    let all = |holds: fn(&Turn) -> bool| members.iter().all(|turn| holds(turn));
    if !all(|turn| turn.consent) {
        return Err("no_consent");
    }
    if !all(|turn| turn.purpose != Purpose::Evaluation) {
        return Err("evaluation");
    }
    let differs = |turn: &&Turn| (turn.purpose, turn.run) != (members[0].purpose, members[0].run);
    if members.iter().any(differs) {
        return Err("mixed_purposes");
    }
    if members.iter().any(|turn| turn.surface != members[0].surface) {
        return Err("mixed_surfaces");
    }
    if members.iter().any(|turn| turn.policy != members[0].policy) {
        return Err("mixed_policies");
    }
    let all_declined = all(|turn| turn.declined);
    // A harness's turns are shown to nobody.
    let for_users = all(|turn| turn.purpose == Purpose::Production);
    if for_users && !all_declined && all(|turn| turn.declined || turn.shown == Some(false)) {
        return Err("not_shown");
    }
    let nothing = |retracted: bool| if retracted { "retracted" } else { "no_feedback" };
    if surface != "task" {
        if surface == "talk" && all_declined {
            return Ok((0.0, "decline", None));
        }
        let metric = if surface == "talk" { "accept" } else { "score" };
        let first = standing(None, metric).first().copied();
        return match first.map(|given| (&given.value, given.at)) {
            Some((Value::Bool(true), at)) => Ok((0.75, "accept", Some(at))),
            Some((Value::Bool(false), at)) => Ok((-0.25, "reject", Some(at))),
            Some((Value::Float(score), at)) => Ok((*score, "value", Some(at))),
            _ => Err(nothing(!about(None, metric).is_empty())),
        };
    }
    let thumbs_of = |turn: &Turn| standing(Some(turn.role), "accept");
    let scores = standing(None, "score");
    let last_read = members
        .iter()
        .flat_map(|turn| thumbs_of(turn))
        .chain(scores.iter().copied());
    let feedback_ms = last_read.map(|given| given.at).max();
    if let Some(Value::Float(score)) = scores.first().map(|given| &given.value) {
        return Ok((*score, "expression", feedback_ms));
    }
    let firsts: Vec<bool> = members
        .iter()
        .filter_map(|turn| thumbs_of(turn).first().map(|given| given.value == Value::Bool(true)))
        .collect();
    if firsts.is_empty() {
        let read = members.iter().flat_map(|turn| about(Some(turn.role), "accept"));
        let retracted = read.chain(about(None, "score")).any(is_retracted);
        return Err(nothing(retracted));
    }
    let accepted = firsts.iter().filter(|accepted| **accepted).count() as f64;
    let mean = accepted / firsts.len() as f64;
    let segments: BTreeSet<u32> = members.iter().map(|turn| turn.segment).collect();
    let tokens: u32 = members.iter().map(|turn| turn.tokens()).sum();
    let last = if firsts.ends_with(&[true]) { 8.0 } else { 0.0 };
    let end = if is_ended { 16.0 } else { 0.0 };
    let shape = mean + 0.125 * members.len() as f64 + 0.25 * segments.len() as f64;
    let reward = shape + f64::from(tokens) / 1024.0 + last + end;
    Ok((reward, "expression", feedback_ms))
}

/// What the ledger keeps of each turn, by generation, to compare with what was sent: segment, number,
/// versions with their tokens, newest and oldest version, purpose.
pub type Logged = (i32, i32, serde_json::Value, i64, i64, String);

pub fn as_logged(turn: &Turn) -> Logged {
    let spans: Vec<_> = turn
        .versions
        .iter()
        .map(|(version, tokens)| serde_json::json!([version, tokens]))
        .collect();
    let purpose = match turn.purpose {
        Purpose::Production => "production",
        Purpose::Rollout => "rollout",
        Purpose::Evaluation => "evaluation",
    };
    let (newest, oldest) = (turn.versions[turn.versions.len() - 1].0, turn.versions[0].0);
    (
        turn.segment.cast_signed(),
        turn.number.cast_signed(),
        spans.into(),
        newest,
        oldest,
        purpose.to_owned(),
    )
}

pub async fn logged(pool: &PgPool) -> BTreeMap<Uuid, Logged> {
    type Columns = (Uuid, i32, i32, serde_json::Value, i64, i64, String);
    let rows: Vec<Columns> =
        sqlx::query_as("select id, segment, turn, version_spans, version, version_oldest, purpose from generation")
            .fetch_all(pool)
            .await
            .unwrap();
    let row =
        |(id, segment, number, spans, newest, oldest, purpose)| (id, (segment, number, spans, newest, oldest, purpose));
    rows.into_iter().map(row).collect()
}

/// The rows of the tables by generation.
pub async fn stored(pool: &PgPool, begin: OffsetDateTime) -> BTreeMap<Uuid, Row> {
    type Columns = (
        Uuid,
        Option<f64>,
        Option<String>,
        Option<String>,
        Option<OffsetDateTime>,
        OffsetDateTime,
        Option<i32>,
        Option<f64>,
        Option<Uuid>,
        Uuid,
    );
    let rows: Vec<Columns> = sqlx::query_as(
        "select t.generation_id, t.reward, t.censor_code, t.signal, t.feedback_at, t.closes_at, t.episode_turns, t.turn_reward, \
                t.episode_id, g.episode_id \
         from trajectory t join generation g on g.id = t.generation_id",
    )
    .fetch_all(pool)
    .await
    .unwrap();
    let after = |at: OffsetDateTime| i64::try_from((at - begin).whole_milliseconds()).unwrap();
    let row = |columns: Columns| {
        let (id, reward, code, signal, feedback_at, closes_at, turns, turn_reward, of_episode, episode) = columns;
        assert!(of_episode.is_none_or(|of_episode| of_episode == episode));
        let row = Row {
            reward,
            code,
            signal,
            feedback_ms: feedback_at.map(after),
            closes_ms: after(closes_at),
            turns,
            turn_reward,
        };
        (id, row)
    };
    rows.into_iter().map(row).collect()
}
