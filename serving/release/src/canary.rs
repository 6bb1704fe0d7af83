//! Canaries: a version gets some of `champion`'s users, is compared with `champion` on what they did,
//! and becomes `champion` by evidence, or ends.
//!
//! ```text
//! machine    the states, and the ways between them
//! strategy   the steps, and what the evidence is compared with
//! evidence   what users did with both versions, from the tables
//! gate       evaluations on logged trajectories before the first user
//! look       what happens at one look
//! cadence    proposals of the release loop
//! tables     canary, canary_transition
//! http       proposals and decisions of people
//! ```
//! The leader's loop looks at every canary. What happens is one transaction: the canary's row, its
//! transition with the evidence, and the assignments of a new epoch. So a process that dies in between
//! leaves what was before, and the next leader goes on.

mod cadence;
mod evidence;
mod gate;
pub(super) mod http;
mod look;
mod machine;
mod strategy;
mod sums;
mod tables;

use super::decide::{Change, ReleaseState, manual};
use super::judgment::{self, Verdict};
use super::{AfterHarm, CANARY, CHAMPION, ChampionBy, LEARNER, REALTIME, ReleaseService};
use anyhow::Context;
use evidence::Evidence;
pub use gate::Evaluator;
use gate::Gate;
use look::{Prepared, Seen};
use machine::Event;
pub use machine::State;
use sqlx::PgConnection;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
pub use strategy::{Span, Strategy};
use tables::{Canary, Transition};
use time::OffsetDateTime;
use uuid::Uuid;

/// Who decided, in `canary_transition.actor`, if no person did.
const LOOP: &str = "release";
/// In `release.kind`.
const KIND: &str = "canary";
/// How often the evidence of a canary is read.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(2);

/// After so many looks in a row without evidence a canary is held.
const UNREAD_MAX: u32 = 3;

/// How many looks in a row could not read the evidence of a canary.
#[derive(Debug, Default)]
pub(super) struct Unread(Mutex<BTreeMap<Uuid, u32>>);

impl Unread {
    fn failed(&self, canary: Uuid) -> u32 {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = looks.entry(canary).or_default();
        *failed += 1;
        metrics::gauge!("springtide_canary_unread_looks").set(f64::from(*failed));
        *failed
    }

    fn read(&self, canary: Uuid) {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if looks.remove(&canary).is_some() {
            metrics::gauge!("springtide_canary_unread_looks").set(0.0);
        }
    }
}

/// Looks at every canary once, and does what is to be done. Returns how many changed. What fails for one
/// is logged, and the others are looked at.
pub(super) async fn round(service: &ReleaseService, connection: &mut PgConnection) -> anyhow::Result<usize> {
    let policy = &service.0.policy;
    let canaries = tables::unfinished(connection, policy).await.context("read canaries")?;
    let mut changed = 0;
    for canary in canaries {
        match look_at(service, connection, &canary).await {
            Ok(done) => changed += usize::from(done),
            Err(error) => tracing::error!(
                canary = %canary.id,
                error = format!("{error:#}"),
                "could not look at the canary; its users keep what they have until it can, and it is held if its evidence \
                 cannot be read"
            ),
        }
    }
    match cadence::propose(service, connection).await {
        Ok(proposed) => changed += usize::from(proposed),
        Err(error) => tracing::error!(error = format!("{error:#}"), "could not look for a version to propose"),
    }
    if let Err(error) = gate::cancel_left(service, connection).await {
        tracing::warn!(
            error = format!("{error:#}"),
            "evaluations of a canary that has ended still run"
        );
    }
    Ok(changed)
}

/// Whether a canary is compared with `champion`, also one that this program cannot read.
pub(super) async fn serves(connection: &mut PgConnection, policy: &str) -> sqlx::Result<bool> {
    let compared = State::ALL.into_iter().filter(|state| state.is_compared());
    let compared: Vec<String> = compared.map(|state| state.name().to_owned()).collect();
    sqlx::query_scalar!(
        r#"select exists (select from canary where policy = $1 and state = any ($2)) as "serves!""#,
        policy,
        &compared
    )
    .fetch_one(connection)
    .await
}

/// Returns whether something happened.
async fn look_at(service: &ReleaseService, connection: &mut PgConnection, canary: &Canary) -> anyhow::Result<bool> {
    let policy = &service.0.policy;
    let mut looked = Looked::default();
    // all that takes long, before the lock
    if canary.state.is_compared() {
        let read = async {
            let evidence = evidence::read(&mut *connection, policy, canary, true)
                .await
                .context("read the evidence")?;
            let alarms = evidence::alarms(&mut *connection, policy)
                .await
                .context("read alarms")?;
            anyhow::Ok((evidence, alarms))
        };
        match read.await {
            Ok((evidence, alarms)) => {
                service.0.unread.read(canary.id);
                (looked.evidence, looked.alarms) = (Some(evidence), alarms);
            }
            // nobody would see harm, so it does not go on
            Err(error) => {
                let failed = service.0.unread.failed(canary.id);
                if failed < UNREAD_MAX || canary.state != State::Canary {
                    return Err(error);
                }
                let alarm = format!("what users do with it could not be read at {failed} looks: {error:#}");
                looked.alarms.push(alarm);
            }
        }
    }
    if canary.state.is_compared() || canary.state == State::Gated {
        let bad = judgment::bad_ancestor(connection, policy, canary.version).await;
        let bad = bad.context("look for a bad version below it")?;
        let bad = bad.map(|bad| judgment::explain(canary.version, &bad));
        match canary.state.is_before_users() {
            true => looked.refusal = bad,
            false => looked.alarms.extend(bad),
        }
    }
    if canary.state.is_before_users() {
        let loadable = super::http::check_loadable(service, canary.version).await;
        let refusal = loadable.err().map(|problem| problem.detail.unwrap_or_default());
        looked.refusal = refusal.or(looked.refusal);
    }
    let now = OffsetDateTime::now_utc();
    let frozen = service.0.options.freeze.iter().find(|window| window.contains(now));
    looked.frozen = frozen.map(ToString::to_string);
    let state = super::tables::read(connection, policy, service.rules()).await;
    let state = state.context("read the release state")?;
    if canary.state == State::Gated && looked.refusal.is_none() {
        looked.gate = gate::look(service, connection, &state, canary)
            .await
            .context("look at its evaluations")?;
    }
    let Some(seen) = looked.seen(connection, policy, &state, canary).await? else {
        return Ok(false);
    };
    if look::look(canary, &seen).is_none() {
        return Ok(false);
    }
    let mut transaction = super::tables::begin_on(connection, policy).await.context("begin")?;
    // a person may have decided meanwhile
    let now = tables::one(&mut transaction, policy, canary.id)
        .await
        .context("read the canary")?;
    if now.as_ref() != Some(canary) {
        return Ok(false);
    }
    let state = super::tables::read(&mut transaction, policy, service.rules()).await;
    let state = state.context("read the release state")?;
    let Some(seen) = looked.seen(&mut transaction, policy, &state, canary).await? else {
        return Ok(false);
    };
    let Some((event, reason)) = look::look(canary, &seen) else {
        return Ok(false);
    };
    let decision = Decision {
        event,
        actor: LOOP.to_owned(),
        reason,
        evidence: looked.evidence,
    };
    let done = apply(&mut transaction, policy, &state, canary, decision)
        .await
        .context("write the decision")?;
    transaction.commit().await.context("commit the decision")?;
    tracing::info!(
        canary = %canary.id,
        version = canary.version,
        event = event.name(),
        state = done.name(),
        "canary decided"
    );
    metrics::counter!("springtide_canary_transitions_total", "event" => event.name()).increment(1);
    Ok(true)
}

/// What takes long to find out.
#[derive(Default)]
struct Looked {
    evidence: Option<Evidence>,
    alarms: Vec<String>,
    /// Why the version cannot have users, whatever `champion` is.
    refusal: Option<String>,
    gate: Option<Gate>,
    /// The hours of now in which nothing goes on by itself.
    frozen: Option<String>,
}

impl Looked {
    /// With what is known at this moment. `None`: there is no champion.
    async fn seen(
        &self,
        connection: &mut PgConnection,
        policy: &str,
        state: &ReleaseState,
        canary: &Canary,
    ) -> anyhow::Result<Option<Seen>> {
        let Some(champion) = state.alias(CHAMPION) else {
            return Ok(None);
        };
        let others = tables::unfinished(connection, policy).await.context("read canaries")?;
        let approvals = tables::approvals(connection, canary.id).await;
        let in_the_way = match canary.state {
            before if before.is_before_users() => check(state, canary.version).err(),
            _ => None,
        };
        Ok(Some(Seen {
            now: OffsetDateTime::now_utc(),
            champion: champion.version,
            another_is_under_way: others.iter().any(|other| {
                let waits_before = other.state == State::Proposed && other.id < canary.id;
                let is_under_way = other.state.is_before_users() || other.state.is_compared();
                other.id != canary.id && (is_under_way || waits_before)
            }),
            approvals: approvals.context("read approvals")?.len(),
            refusal: in_the_way.or_else(|| self.refusal.clone()),
            gate: self.gate.clone(),
            replicas: prepared(connection, policy, state, canary)
                .await
                .context("read the replicas")?,
            frozen: self.frozen.clone(),
            alarms: self.alarms.clone(),
            found: self
                .evidence
                .as_ref()
                .map(|evidence| evidence.found.clone())
                .unwrap_or_default(),
        }))
    }
}

/// The replicas that answer, and which of them hold a canary that they load. `None`: they do not load it
/// yet, because no assignment names it.
async fn prepared(
    connection: &mut PgConnection,
    policy: &str,
    state: &ReleaseState,
    canary: &Canary,
) -> sqlx::Result<Option<Prepared>> {
    let is_assigned = state.alias(CANARY).is_some_and(|alias| alias.version == canary.version);
    if canary.state != State::Gated || !is_assigned || !tables::was_prepared(connection, canary.id).await? {
        return Ok(None);
    }
    // those whose users get it first
    let clusters = canary.strategy.clusters(1);
    let replicas = sqlx::query!(
        r#"select id, exists (select from jsonb_array_elements(resident) held
                              where (held ->> 'version')::bigint = $2) as "holds!"
           from replica
           where policy = $1 and ready and reported_at > now() - make_interval(secs => $3)
             and ($4::text[] is null or cluster = any ($4))
           order by id"#,
        policy,
        canary.version,
        edge::REPLICA_SILENT_SECONDS,
        clusters.as_deref()
    )
    .fetch_all(connection)
    .await?;
    let (ready, waiting): (Vec<_>, Vec<_>) = replicas.into_iter().partition(|replica| replica.holds);
    Ok(Some(Prepared {
        since: Some(canary.step_since),
        ready: ready.len(),
        waiting: waiting.into_iter().map(|replica| replica.id).collect(),
    }))
}

/// Whether a canary of the version can have users as things are. The error says what to do.
fn check(state: &ReleaseState, version: i64) -> Result<(), String> {
    let champion = state
        .alias(CHAMPION)
        .ok_or("there is no champion to compare with: publish a version first")?;
    if champion.version == version {
        return Err(format!("champion serves version {version} already"));
    }
    if let (Some(line), ChampionBy::Follow) = (&champion.follows, state.rules.champion) {
        return Err(format!(
            "champion follows the line {line}, so it would move while it is compared with: hold it first with \
             `springtide release pin --reason …`, or set release.champion to \"canary\""
        ));
    }
    let arms = state
        .experiment
        .as_ref()
        .map(|experiment| &*experiment.arms)
        .unwrap_or_default();
    if arms.iter().any(|arm| arm.alias == CANARY) {
        return Err(format!(
            "an arm serves the alias `{CANARY}` already: take it away with `springtide release arms`"
        ));
    }
    if !arms.is_empty() && arms.iter().all(|arm| arm.alias != CHAMPION) {
        return Err(format!(
            "no arm serves `{CHAMPION}`, so there are no users to share: add one with `springtide release arms`"
        ));
    }
    Ok(())
}

/// What happens to a canary, and who decided.
struct Decision {
    event: Event,
    actor: String,
    reason: String,
    evidence: Option<Evidence>,
}

/// Writes the canary's new state, the assignments that it needs, and the transition. Returns the state.
async fn apply(
    transaction: &mut sqlx::Transaction<'_, sqlx::Postgres>,
    policy: &str,
    state: &ReleaseState,
    canary: &Canary,
    mut decision: Decision,
) -> anyhow::Result<State> {
    let all_users = canary.state.serves() && matches!(decision.event, Event::Pass | Event::Promote);
    if all_users && canary.strategy.watch.is_some() {
        decision.event = Event::Watch;
    }
    let after = after(canary, state, decision.event)?;
    let mut changes = changes(state, canary, &after, &decision.reason);
    if after.state == State::RolledBack
        && let Some(learner) = state.learner()
        && judgment::descends(transaction, policy, learner.version, canary.version).await?
    {
        changes.extend(learner_after_harm(state, canary, &decision.reason));
    }
    let epoch = match changes.is_empty() {
        true => None,
        false => {
            let (epoch, _) = super::tables::write(transaction, policy, 0, KIND, &decision.actor, &changes).await?;
            Some(epoch)
        }
    };
    let verdict = match (after.state, decision.event) {
        (State::Champion, Event::Pass) => Some(Verdict::Good),
        (State::RolledBack, _) => Some(Verdict::Bad),
        _ => None,
    };
    if let Some(verdict) = verdict {
        let new = judgment::New {
            version: canary.version,
            verdict,
            canary: Some(canary.id),
            actor: &decision.actor,
            reason: &decision.reason,
        };
        judgment::write(transaction, policy, new).await?;
    }
    let transition = Transition {
        event: decision.event,
        from: canary.state,
        epoch,
        actor: decision.actor,
        reason: decision.reason,
        evidence: decision.evidence.map(serde_json::to_value).transpose()?,
    };
    tables::write(transaction, &after, &transition).await?;
    if !after.state.is_compared() {
        sums::forget(transaction, canary.id).await?;
    }
    Ok(after.state)
}

/// The canary after an event.
fn after(canary: &Canary, state: &ReleaseState, event: Event) -> Result<Canary, machine::Refused> {
    let mut after = Canary {
        state: canary.state.after(event)?,
        ..canary.clone()
    };
    match (canary.state, event) {
        (State::Gated, Event::Shadow | Event::Pass) | (State::Shadow, Event::Pass) => {
            after.step = 0;
            after.control = state.alias(CHAMPION).map(|champion| champion.version);
        }
        (_, Event::Step) => after.step += 1,
        (_, Event::Resume) => after.step = look::resumed(canary),
        _ => {}
    }
    let moved = after.step != canary.step || after.state != canary.state || event == Event::Resume;
    let has_users = matches!(after.state, State::Canary | State::Watched);
    if matches!(event, Event::Prepare | Event::Shadow) || moved && has_users {
        after.step_since = OffsetDateTime::now_utc();
    }
    Ok(after)
}

/// The moves of aliases that lead from one to the other.
fn changes(state: &ReleaseState, before: &Canary, after: &Canary, reason: &str) -> Vec<Change> {
    let mut changes = Vec::new();
    let champion = |to| state.pin(CHAMPION, to, reason);
    match after.state {
        now if now.is_champion() && !before.state.is_champion() => changes.push(champion(after.version)),
        State::RolledBack if before.state.is_champion() => {
            let is_champion = state
                .alias(CHAMPION)
                .is_some_and(|alias| alias.version == before.version);
            changes.extend(before.control.filter(|_| is_champion).map(champion));
        }
        _ => {}
    }
    let share = |canary: &Canary| Some(canary.share()).filter(|share| *share > 0.0);
    let is_named = state.alias(CANARY).is_some_and(|alias| alias.version == after.version);
    // without a share, replicas hold it and no user gets it
    let names = after.state == State::Gated && after.step_since != before.step_since;
    let ends = before.state.is_before_users() && after.state == State::Aborted && is_named;
    let of_users = |canary: &Canary| (share(canary), canary.clusters(), canary.shadow(), canary.served());
    if of_users(before) != of_users(after) || names || ends {
        changes.push(Change {
            share: share(after),
            clusters: after.clusters(),
            shadow: after.shadow(),
            withdrawn: share(after).is_none() && after.shadow().is_none() && !names,
            ..state.pin(CANARY, after.served(), reason)
        });
    }
    changes
}

/// What becomes of `learner`, which was trained on top of a version that did harm. `None`: it stays.
/// A `learner` that a person holds stays held.
fn learner_after_harm(state: &ReleaseState, canary: &Canary, reason: &str) -> Option<Change> {
    let learner = state.learner().filter(|learner| learner.follows.is_some())?;
    let line = state.line(REALTIME)?;
    match state.rules.after_harm {
        AfterHarm::Rebase => Some(manual::continue_line(
            state,
            line,
            state.pin(LEARNER, canary.control?, reason),
        )),
        AfterHarm::Pause => Some(state.pin(LEARNER, learner.version, reason)),
        AfterHarm::Continue => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::decide::Alias;
    use super::super::decide::arms::{Experiment, Source};
    use super::super::{ArmOptions, REALTIME};
    use super::strategy::Strategy;
    use super::*;
    use time::macros::datetime;

    fn state(champion: i64, follows: Option<&str>) -> ReleaseState {
        ReleaseState {
            aliases: vec![Alias {
                alias: CHAMPION.into(),
                version: champion,
                follows: follows.map(Into::into),
                branch: 0,
                withdrawn: false,
                created_at: datetime!(2026-12-02 10:00 UTC),
            }],
            ..ReleaseState::default()
        }
    }

    fn canary(state: State, step: usize) -> Canary {
        Canary {
            id: Uuid::from_u128(1),
            version: 41,
            control: (state.serves() || state == State::Champion).then_some(40),
            strategy: Strategy::default(),
            state,
            step,
            step_since: datetime!(2026-12-02 10:00 UTC),
            actor: "ana".into(),
            reason: "try".into(),
            created_at: datetime!(2026-12-02 10:00 UTC),
        }
    }

    /// Alias, version, share, withdrawn.
    fn moves(canary: &Canary, event: Event, champion: i64) -> Vec<(String, i64, Option<f64>, bool)> {
        let state = state(champion, None);
        let after = after(canary, &state, event).unwrap();
        let changes = changes(&state, canary, &after, "why");
        let moved = |change: Change| (change.alias, change.to, change.share, change.withdrawn);
        changes.into_iter().map(moved).collect()
    }

    #[test]
    fn a_canary_takes_users_step_by_step_and_gives_them_back() {
        let (canary_alias, champion) = (CANARY.to_owned(), CHAMPION.to_owned());
        assert_eq!(moves(&canary(State::Proposed, 0), Event::Approve, 40), []);
        assert_eq!(
            moves(&canary(State::Gated, 0), Event::Pass, 40),
            [(canary_alias.clone(), 41, Some(0.1), false)]
        );
        assert_eq!(
            moves(&canary(State::Canary, 0), Event::Step, 40),
            [],
            "the weight stays"
        );
        assert_eq!(
            moves(&canary(State::Canary, 1), Event::Step, 40),
            [(canary_alias.clone(), 41, Some(0.5), false)]
        );
        for event in [Event::Hold, Event::Inconclusive, Event::Resume] {
            assert_eq!(moves(&canary(State::Canary, 3), event, 40), [], "{event:?}");
        }
        let withdrawn = (canary_alias, 41, None, true);
        for event in [Event::Harm, Event::Abort, Event::Supersede] {
            assert_eq!(
                moves(&canary(State::Canary, 3), event, 40),
                std::slice::from_ref(&withdrawn),
                "{event:?}"
            );
        }
        for event in [Event::Pass, Event::Promote] {
            assert_eq!(
                moves(&canary(State::Canary, 3), event, 40),
                [(champion.clone(), 41, None, false), withdrawn.clone()],
                "{event:?}"
            );
        }
        let promoted = canary(State::Champion, 3);
        assert_eq!(moves(&promoted, Event::Rollback, 41), [(champion, 40, None, false)]);
        assert_eq!(
            moves(&promoted, Event::Rollback, 39),
            [],
            "a person moved champion before"
        );
        assert_eq!(moves(&promoted, Event::Supersede, 42), []);
    }

    #[test]
    fn a_watched_champion_leaves_a_few_users_the_version_before() {
        let (canary_alias, champion) = (CANARY.to_owned(), CHAMPION.to_owned());
        let watched = |state| {
            let mut watched = canary(state, 3);
            watched.control = Some(40);
            watched.strategy.watch = serde_json::from_value(serde_json::json!({"duration": "1h"})).unwrap();
            watched
        };
        assert_eq!(
            moves(&watched(State::Canary), Event::Watch, 40),
            [
                (champion.clone(), 41, None, false),
                (canary_alias.clone(), 40, Some(0.05), false)
            ]
        );
        let withdrawn = |version| (canary_alias.clone(), version, None, true);
        assert_eq!(moves(&watched(State::Watched), Event::Pass, 41), [withdrawn(41)]);
        for event in [Event::Harm, Event::Rollback] {
            assert_eq!(
                moves(&watched(State::Watched), event, 41),
                [(champion.clone(), 40, None, false), withdrawn(41)]
            );
        }
        assert_eq!(moves(&watched(State::Watched), Event::Supersede, 42), [withdrawn(41)]);
    }

    #[test]
    fn looks_without_evidence_are_counted_until_one_has_it() {
        let (unread, one, other) = (Unread::default(), Uuid::from_u128(1), Uuid::from_u128(2));
        assert_eq!([one, other, one].map(|canary| unread.failed(canary)), [1, 1, 2]);
        unread.read(one);
        assert_eq!([one, other].map(|canary| unread.failed(canary)), [1, 2]);
    }

    #[test]
    fn the_gate_says_what_is_in_the_way() {
        let with_arms = |aliases: &[&str]| ReleaseState {
            experiment: Some(Experiment {
                id: Uuid::from_u128(2),
                epoch: 1,
                salt: String::new(),
                arms: aliases
                    .iter()
                    .map(|alias| ArmOptions {
                        alias: (*alias).into(),
                        weight: 0.5,
                        explore: 0.0,
                        temperature_max: None,
                        probability_min: None,
                    })
                    .collect(),
                source: Source::Request,
                actor: "ana".into(),
                reason: String::new(),
                created_at: datetime!(2026-12-02 10:00 UTC),
            }),
            ..state(40, None)
        };
        assert_eq!(check(&state(40, None), 41), Ok(()));
        assert_eq!(check(&with_arms(&["learner", CHAMPION]), 41), Ok(()));
        for (state, version, expected) in [
            (ReleaseState::default(), 41, "there is no champion"),
            (state(41, None), 41, "champion serves version 41 already"),
            (state(40, Some(REALTIME)), 41, "springtide release pin"),
            (with_arms(&[CANARY, CHAMPION]), 41, "an arm serves the alias `canary`"),
            (with_arms(&["learner"]), 41, "no arm serves `champion`"),
        ] {
            let error = check(&state, version).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
