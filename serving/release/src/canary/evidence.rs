//! What users did with a canary's answers and with `champion`'s at the same time, from the tables that
//! every deployment has.
//!
//! Users are drawn into the arms by a hash, so the arms differ in the version alone. The shares change
//! from step to step, and rewards over the day, so the sides are compared within each period of one
//! share ([`Design::across`]). Users come back, so the user is the sampling unit.
//!
//! Not everybody says what an answer was worth. What both versions leave unscored is taken to be alike.
//! Where one leaves more, the surplus might have had any reward that the surface can give: a version is
//! better, or worse, only if it is so either way.

use super::machine::State;
use super::strategy::Judge;
use super::sums;
use super::tables::{self, Canary};
use ::evidence::rates::{self, Arm, Rates};
use ::evidence::ratio::{CONCENTRATION, SampleRatio};
use ::evidence::sequence::{Bounds, Design, NotYet, Sides};
use ::evidence::verdict::{Goal, Margins, Rule, Verdict};
use ::evidence::{Clusters, Estimate};
use serde::Serialize;
use sqlx::{Connection as _, PgConnection, Postgres, Transaction};
use std::collections::{BTreeMap, BTreeSet};
use time::OffsetDateTime;
use uuid::Uuid;

pub use super::look::Found;

/// How much more often a version may decline, or users may hang up, as a share of the answers. More is
/// harm, whatever the rewards are: those come later.
const GUARD_MARGIN: f64 = 0.2;
/// The difference of mean lengths that is seen soonest, in tokens. It does not depend on what was seen.
const LENGTH_EFFECT: f64 = 5.0;
/// How many more of the first answers must be aborted, as a share, that it counts as harm: every version
/// differs a little, and with many users a test shows it.
const FAILURES_MARGIN: f64 = 0.02;
/// Share of `judge.alpha` that each guard has. Rewards have all of it: the guards add a tenth each.
const GUARD_ALPHA: f64 = 0.1;
/// How often at most an alarm about the sample ratio is wrong, over all looks.
const SAMPLE_RATIO_ALPHA: f64 = 0.001;
/// Only requests whose user waited for the answer are answered unseen. Where users leave more of `champion`'s
/// answers than this share, those that they waited for are short ones, so lengths are not compared.
const LEFT_MAX: f64 = 0.05;
/// For the query, in milliseconds.
const READ_MS_MAX: &str = "10000";

/// Both sides, and what follows.
#[derive(Debug, Clone, Serialize)]
pub struct Evidence {
    pub canary: Side,
    pub champion: Side,
    /// Mean reward of the canary less that of `champion`. Null: too few users.
    pub reward: Option<Bounds>,
    /// Share of declined answers, likewise.
    pub declined: Option<Bounds>,
    /// Share of answers that failed or that the user did not wait for, likewise.
    pub aborted: Option<Bounds>,
    /// Share of answers that took longer than `judge.slowMs`, likewise.
    pub slow: Option<Bounds>,
    /// Share of closed trajectories without a reward, likewise.
    pub unscored: Option<Bounds>,
    /// Mean length of the answers that are whole and not declined, in tokens, likewise.
    pub length: Option<Bounds>,
    /// Of each user's first answer alone, so that it says something after few.
    pub failures: Failures,
    /// Always-valid p-value of "users reached both sides in the shares that the steps say".
    pub sample_ratio_p: f64,
    pub found: Found,
}

/// What users did with the answers of one version.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Side {
    pub version: i64,
    pub users: usize,
    pub answers: i64,
    /// Trajectories with a reward: a session is one.
    pub rewarded: i64,
    /// Null: no trajectory has a reward yet.
    pub mean_reward: Option<f64>,
    pub declined: i64,
    /// They failed, or the user did not wait for them.
    pub aborted: i64,
    /// They took longer than `judge.slowMs`.
    pub slow: i64,
    /// Of the answers that are whole and not declined. Null: there is none.
    pub mean_tokens: Option<f64>,
    /// Trajectories that closed without a reward, or with one that does not count.
    pub unscored: i64,
    /// Of these, those whose reward is out of its definition's bounds.
    pub excluded: i64,
}

/// How many of the users' first answers were aborted.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Failures {
    /// First answers of the canary, and those of them that were aborted.
    pub canary: [u64; 2],
    pub champion: [u64; 2],
    /// Always-valid p-value of "the canary's are not aborted more often".
    pub p: f64,
}

/// What one user did on one side in one period, or a part of that.
#[derive(Debug, Clone)]
struct Row {
    is_canary: bool,
    period: i64,
    user_key: String,
    /// The first answer. `None`: the row has none.
    first: Option<Uuid>,
    first_aborted: bool,
    answers: i64,
    declined: i64,
    aborted: i64,
    slow: i64,
    /// Answers that are whole and not declined, and their tokens.
    whole: i64,
    tokens: i64,
    rewarded: i64,
    unscored: i64,
    excluded: i64,
    reward: f64,
    /// What the unscored would add to `reward` at least, and at most.
    lowest: f64,
    highest: f64,
}

/// Which answers count, and how they are told apart.
pub struct Answers<'a> {
    pub canary: Uuid,
    pub policy: &'a str,
    /// That the alias `canary` has.
    pub version: i64,
    pub champion: i64,
    /// Of the periods, of `champion`'s users.
    pub shares: &'a [f64],
    /// The share of all users that are `champion`'s.
    pub weight: f64,
    pub from: OffsetDateTime,
    pub until: OffsetDateTime,
    pub slow_seconds: Option<f64>,
}

/// Reads from when the canary got its first users until now, or until it lost them. Before that, in
/// `shadow`, it reads the unseen answers. `sums_up`: what is new is added to the sums first, which the release loop
/// alone does. Must not be dropped if the connection is one of a pool.
pub async fn read(
    connection: &mut PgConnection,
    policy: &str,
    canary: &Canary,
    sums_up: bool,
) -> sqlx::Result<Evidence> {
    let control = canary.control.unwrap_or_default();
    if canary.shadow().is_some() {
        return read_unseen(connection, policy, canary, control).await;
    }
    let (mut periods, until) = tables::periods(connection, canary.id).await?;
    // the alias `canary` has the version before then, and `champion` the new one
    let watched = canary.state == State::Watched;
    if watched {
        periods = vec![(canary.step_since, canary.share())];
    }
    let (champion, other) = match watched {
        true => (canary.version, control),
        false => (control, canary.version),
    };
    let (began, mut shares): (Vec<OffsetDateTime>, Vec<f64>) = periods.into_iter().unzip();
    let Some(&from) = began.first() else {
        return Ok(Evidence::of(canary, control, &[], &[]));
    };
    let until = until.unwrap_or_else(|| OffsetDateTime::now_utc() + sums::CLOCKS_DIFFER_MAX);
    let weight = tables::champion_weight(connection, policy, canary.id).await?;
    let answers = Answers {
        canary: canary.id,
        policy,
        version: other,
        champion,
        shares: &shares,
        weight,
        from,
        until,
        slow_seconds: canary.slow_seconds(),
    };
    if sums_up {
        sums::advance(connection, &answers).await?;
    }
    // both queries read the same sums
    #[expect(
        clippy::disallowed_methods,
        reason = "the caller sees to it that this is not dropped"
    )]
    let mut transaction = connection.begin_with("begin isolation level repeatable read").await?;
    set(&mut transaction).await?;
    let summed_until = sqlx::query_scalar!(
        "select until_at from canary_sums where canary_id = $1 and since = $2",
        canary.id,
        from
    )
    .fetch_optional(&mut *transaction)
    .await?;
    let mut rows = sqlx::query_file_as!(
        Row,
        "src/canary/evidence.sql",
        canary.id,
        policy,
        other,
        champion,
        &shares,
        weight,
        from,
        until,
        canary.slow_seconds(),
        summed_until
    )
    .fetch_all(&mut *transaction)
    .await?;
    transaction.rollback().await?;
    if watched {
        rows.iter_mut().for_each(|row| row.is_canary = !row.is_canary);
        shares.iter_mut().for_each(|share| *share = 1.0 - *share);
    }
    Ok(Evidence::of(canary, control, &shares, &rows))
}

async fn read_unseen(
    connection: &mut PgConnection,
    policy: &str,
    canary: &Canary,
    control: i64,
) -> sqlx::Result<Evidence> {
    let weight = tables::champion_weight(connection, policy, canary.id).await?;
    let (from, until) = (canary.step_since, OffsetDateTime::now_utc());
    let mut transaction = begin(connection).await?;
    let rows = sqlx::query_file_as!(
        Row,
        "src/canary/shadow.sql",
        policy,
        canary.version,
        control,
        weight,
        from,
        until
    )
    .fetch_all(&mut *transaction)
    .await?;
    let left = sqlx::query_file_scalar!("src/canary/left.sql", policy, control, weight, from)
        .fetch_one(&mut *transaction)
        .await?;
    transaction.rollback().await?;
    // in pairs
    let mut evidence = Evidence::of(canary, control, &[0.5], &rows);
    evidence.found.length.take_if(|_| left > LEFT_MAX);
    Ok(evidence)
}

/// The query says of which tenants, and the release loop waits for it.
pub(super) async fn begin(connection: &mut PgConnection) -> sqlx::Result<Transaction<'_, Postgres>> {
    #[expect(
        clippy::disallowed_methods,
        reason = "the caller sees to it that this is not dropped"
    )]
    let mut transaction = connection.begin().await?;
    set(&mut transaction).await?;
    Ok(transaction)
}

/// A plan for any time would read all answers.
async fn set(transaction: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query!(
        "select set_config('springtide.all_tenants', 'on', true) as all_tenants,
                set_config('plan_cache_mode', 'force_custom_plan', true) as plan_cache_mode,
                set_config('statement_timeout', $1, true) as statement_timeout",
        READ_MS_MAX
    )
    .fetch_one(transaction)
    .await?;
    Ok(())
}

/// Alarms of the realtime run, in words. Not those about what learning is meant to change: how much is shown and
/// accepted, and the entropy. A canary has evidence of its own on them.
pub async fn alarms(connection: &mut PgConnection, policy: &str) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar!(
        r#"
        select e.message as "message!"
        from run r
        cross join lateral (select distinct on (data ->> 'alarm') message, data ->> 'state' as state,
                                   data ->> 'figure' as figure, data ->> 'surface' as surface
                            from run_event
                            where run_id = r.id and data ? 'alarm'
                              and coalesce(data ->> 'figure' not in ('shown', 'accepted', 'entropy'), true)
                            order by data ->> 'alarm', id desc) e
        where r.policy = $1 and r.kind = 'realtime' and r.status not in ('succeeded', 'failed', 'cancelled')
          and e.state = 'began'
          -- a figure that nobody watches any more has no alarm
          and (e.figure is null or exists (select from monitor m
                                           where m.run_id = r.id and m.surface = e.surface
                                             and m.updated_at > clock_timestamp() - interval '1 hour'))
        "#,
        policy
    )
    .fetch_all(connection)
    .await
}

impl Evidence {
    /// `shares`: of `champion`'s users, in each period.
    fn of(canary: &Canary, control: i64, shares: &[f64], rows: &[Row]) -> Self {
        let judge = &canary.strategy.judge;
        let guard = Judge {
            alpha: judge.alpha * GUARD_ALPHA,
            effect: GUARD_MARGIN,
            ..*judge
        };
        let of_answers =
            |count: fn(&Row) -> i64| difference(rows, &guard, share, |row| (count(row) as f64, row.answers as f64));
        let unscored = difference(rows, &guard, share, |row| {
            (row.unscored as f64, (row.rewarded + row.unscored) as f64)
        })
        .ok();
        let counted = surplus(rows, unscored);
        // the mean reward if the surplus of each side had these rewards
        let with_surplus = |counted: [f64; 2], of_row: fn(&Row) -> f64| {
            difference(
                rows,
                judge,
                |rewards| rewards.estimate(),
                |row| {
                    let more = counted[usize::from(row.is_canary)];
                    let rewarded = row.rewarded as f64 + more * row.unscored as f64;
                    (row.reward + more * of_row(row), rewarded)
                },
            )
        };
        let reward = with_surplus([0.0; 2], |_| 0.0);
        let worst = with_surplus(counted, |row| if row.is_canary { row.lowest } else { row.highest });
        let best = with_surplus(counted, |row| if row.is_canary { row.highest } else { row.lowest });
        let mut evidence = Evidence {
            canary: side(rows, true, canary.version),
            champion: side(rows, false, control),
            reward: reward.ok(),
            declined: of_answers(|row| row.declined).ok(),
            aborted: of_answers(|row| row.aborted).ok(),
            slow: canary.slow_seconds().and_then(|_| of_answers(|row| row.slow).ok()),
            unscored,
            length: lengths(rows, &guard, 0.0),
            failures: failures(rows, canary, shares, guard.alpha),
            sample_ratio_p: match canary.shadow() {
                Some(_) => 1.0,
                None => sample_ratio(rows, shares),
            },
            found: Found::default(),
        };
        evidence.found = Found {
            length: evidence.length_changed(rows, &guard),
            answers: evidence.canary.answers,
            ..evidence.conclude(judge, worst, best)
        };
        evidence
    }

    /// `worst`, `best`: the difference of mean rewards if the surplus of unscored trajectories had the lowest
    /// rewards in the canary and the highest in `champion`, and the other way round.
    fn conclude(&self, judge: &Judge, worst: Result<Bounds, NotYet>, best: Result<Bounds, NotYet>) -> Found {
        let (not_worse, better) = (rule(Goal::NonInferiority, judge), rule(Goal::Superiority, judge));
        let (Some(not_worse), Some(better)) = (not_worse, better) else {
            return Found::default();
        };
        let (tolerant, strict, at_best) = (not_worse.decide(worst), better.decide(worst), not_worse.decide(best));
        let versions = format!(
            "version {} beside version {}",
            self.canary.version, self.champion.version
        );
        let guards = [
            (self.declined, "declines"),
            (self.aborted, "fails or loses users who do not wait"),
            (self.slow, "is slow"),
        ];
        let broken = guards.into_iter().find_map(|(bounds, what)| {
            let low = bounds?.low;
            (low > GUARD_MARGIN).then(|| {
                format!(
                    "{versions}: it {what} in {low:.2} or more of the answers more, and {GUARD_MARGIN} is the limit"
                )
            })
        });
        let share = |[all, aborted]: [u64; 2]| aborted as f64 / all.max(1) as f64;
        let more = share(self.failures.canary) - share(self.failures.champion);
        let fails = (self.failures.p <= judge.alpha * GUARD_ALPHA && more > FAILURES_MARGIN).then(|| {
            let ([all, aborted], [all_of_champion, aborted_of_champion]) = (self.failures.canary, self.failures.champion);
            format!(
                "{versions}: of its users' first answers {aborted} of {all} failed or were not waited for, of champion's \
                 {aborted_of_champion} of {all_of_champion}"
            )
        });
        let scored = self.unscored.and_then(|bounds| {
            (bounds.low > GUARD_MARGIN || bounds.high < -GUARD_MARGIN).then(|| {
                format!(
                    "{versions}: the share of its trajectories without a reward differs by {:+.2}, and {GUARD_MARGIN} is the \
                     limit, so their rewards may not mean the same",
                    bounds.difference
                )
            })
        });
        let mismatch = (self.sample_ratio_p < SAMPLE_RATIO_ALPHA).then(|| {
            format!(
                "{versions}: {} and {} users are not the shares of the steps (p {:.1e}), so something else than the version \
                 decides who is counted",
                self.canary.users, self.champion.users, self.sample_ratio_p
            )
        });
        Found {
            harm: fails.or(broken).or_else(|| {
                (at_best.verdict == Verdict::Harmful).then(|| format!("{versions}, rewards: {}", at_best.reason))
            }),
            not_worse: matches!(tolerant.verdict, Verdict::Superior | Verdict::NonInferior),
            better: strict.verdict == Verdict::Superior,
            length: None,
            answers: 0,
            mismatch: mismatch.or(scored),
            summary: format!("{versions}: {}", tolerant.reason),
        }
    }

    /// In words, if answers are longer or shorter by more than `judge.lengthMargin`.
    fn length_changed(&self, rows: &[Row], judge: &Judge) -> Option<String> {
        let margin = judge.length_margin;
        let what = if lengths(rows, judge, margin).is_some_and(|beside_longer| beside_longer.low > 0.0) {
            "longer"
        } else if margin < 1.0 && lengths(rows, judge, -margin).is_some_and(|beside_shorter| beside_shorter.high < 0.0)
        {
            "shorter"
        } else {
            return None;
        };
        let mean = |side: &Side| side.mean_tokens.unwrap_or_default();
        Some(format!(
            "version {} beside version {}: answers are more than {:.0}% {what}, {:.1} tokens on average and not {:.1}, so \
             their rewards may not mean the same",
            self.canary.version,
            self.champion.version,
            100.0 * margin,
            mean(&self.canary),
            mean(&self.champion)
        ))
    }
}

/// Canary less champion of the mean length, if `champion`'s answers were longer by this share.
fn lengths(rows: &[Row], judge: &Judge, longer: f64) -> Option<Bounds> {
    let judge = Judge {
        effect: LENGTH_EFFECT,
        ..*judge
    };
    let of = |row: &Row| {
        let scale = if row.is_canary { 1.0 } else { 1.0 + longer };
        (scale * row.tokens as f64, row.whole as f64)
    };
    difference(rows, &judge, |whole| whole.estimate(), of).ok()
}

/// Which share of the unscored trajectories of `champion` and of the canary counts as surplus: of the side that has
/// more of them, as far as chance does not explain it.
fn surplus(rows: &[Row], unscored: Option<Bounds>) -> [f64; 2] {
    let Some(bounds) = unscored else { return [0.0; 2] };
    let more = bounds.difference.abs() - bounds.information.powf(-0.5);
    let of_side = |is_canary| {
        let of_side = || rows.iter().filter(move |row| row.is_canary == is_canary);
        let all: i64 = of_side().map(|row| row.rewarded + row.unscored).sum();
        let share = of_side().map(|row| row.unscored).sum::<i64>() as f64 / all.max(1) as f64;
        match is_canary == (bounds.difference > 0.0) && share > 0.0 {
            true => (more / share).clamp(0.0, 1.0),
            false => 0.0,
        }
    };
    [of_side(false), of_side(true)]
}

/// `None`: the margins are out of range, which [`Strategy::check`](super::Strategy::check) refuses.
fn rule(goal: Goal, judge: &Judge) -> Option<Rule> {
    let margins = Margins {
        superiority: 0.0,
        noninferiority: judge.margin,
        harm: 0.0,
        equivalence: None,
        information_max: None,
    };
    Rule::new(goal, margins).ok()
}

/// Compares the first answers of users, in the order of time. A user counts once: where they were first.
/// Unseen answers are to users of `champion`, who count once on each side.
fn failures(rows: &[Row], canary: &Canary, shares: &[f64], alpha: f64) -> Failures {
    let unseen = canary.shadow().is_some();
    let mut first: BTreeMap<(&str, bool), &Row> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.first.is_some()) {
        let side = unseen && row.is_canary;
        let seen = first.entry((&row.user_key, side)).or_insert(row);
        if row.first < seen.first {
            *seen = row;
        }
    }
    let mut first: Vec<&Row> = first.into_values().collect();
    first.sort_by_key(|row| row.first);
    // about in the ratio of traffic, as it was in the first period
    let share = shares.first().copied().unwrap_or(0.5).clamp(0.05, 0.95);
    let design = rates::Design {
        alpha,
        block: [1, ((1.0 - share) / share).round().max(1.0) as u32],
        ..rates::Design::default()
    };
    let Ok(mut test) = Rates::new(design) else {
        return Failures {
            p: 1.0,
            ..Failures::default()
        };
    };
    let mut found = Failures::default();
    for row in first {
        let (arm, side) = match row.is_canary {
            true => (Arm::Candidate, &mut found.canary),
            false => (Arm::Baseline, &mut found.champion),
        };
        side[0] += 1;
        side[1] += u64::from(row.first_aborted);
        test.observe(arm, row.first_aborted);
    }
    found.p = test.p();
    found
}

/// The p-value of the shares, over all periods. A user counts in the period in which they came first.
fn sample_ratio(rows: &[Row], shares: &[f64]) -> f64 {
    let mut first: BTreeMap<&str, (i64, bool)> = BTreeMap::new();
    for row in rows {
        let seen = first.entry(&row.user_key).or_insert((row.period, row.is_canary));
        *seen = (*seen).min((row.period, row.is_canary));
    }
    let mut test: Option<SampleRatio> = None;
    let mut p: f64 = 1.0;
    for (period, share) in (1i64..).zip(shares) {
        let weights = [1.0 - share, *share];
        // with all users in the canary there is nothing to compare
        let ready = match &mut test {
            Some(test) => test.next_phase(&weights).is_ok(),
            None => {
                test = SampleRatio::new(&weights, CONCENTRATION).ok();
                test.is_some()
            }
        };
        let users =
            [false, true].map(|is_canary| first.values().filter(|seen| **seen == (period, is_canary)).count() as u64);
        if let (true, Some(test)) = (ready, &mut test)
            && let Ok(look) = test.look(&users)
        {
            p = p.min(look.p);
        }
    }
    p
}

fn side(rows: &[Row], is_canary: bool, version: i64) -> Side {
    let of_side = || rows.iter().filter(|row| row.is_canary == is_canary);
    let sum = |of: fn(&Row) -> i64| of_side().map(of).sum::<i64>();
    let rewarded = sum(|row| row.rewarded);
    let reward: f64 = of_side().map(|row| row.reward).sum();
    let whole = sum(|row| row.whole);
    Side {
        version,
        users: of_side().map(|row| &row.user_key).collect::<BTreeSet<_>>().len(),
        answers: sum(|row| row.answers),
        rewarded,
        mean_reward: (rewarded > 0).then(|| reward / rewarded as f64),
        declined: sum(|row| row.declined),
        aborted: sum(|row| row.aborted),
        slow: sum(|row| row.slow),
        mean_tokens: (whole > 0).then(|| sum(|row| row.tokens) as f64 / whole as f64),
        unscored: sum(|row| row.unscored),
        excluded: sum(|row| row.excluded),
    }
}

/// Canary less champion of the mean Σ sum / Σ count that `of` gives of each row.
fn difference(
    rows: &[Row],
    judge: &Judge,
    estimate: fn(&Clusters<&str>) -> Option<Estimate>,
    of: impl Fn(&Row) -> (f64, f64),
) -> Result<Bounds, NotYet> {
    let mut periods: BTreeMap<i64, [Clusters<&str>; 2]> = BTreeMap::new();
    for row in rows {
        let (sum, count) = of(row);
        if count > 0.0 {
            let sides = periods.entry(row.period).or_default();
            sides[usize::from(row.is_canary)].add_many(&row.user_key, sum, count);
        }
    }
    let periods: Vec<[Clusters<&str>; 2]> = periods
        .into_values()
        .map(|[champion, canary]| [canary, champion])
        .collect();
    let design = Design::new(judge.alpha, Sides::Both, judge.effect, u64::from(judge.users_min));
    // parameters out of range are refused with the strategy
    design.map_err(|_| NotYet::NotFinite)?.across(&periods, estimate)
}

/// A mean of zeros and ones. If all users had the same, it is still no more certain than with two users
/// more of each (Agresti and Coull 1998, with users as the sample).
fn share(clusters: &Clusters<&str>) -> Option<Estimate> {
    let estimate = clusters.estimate()?;
    let users = clusters.len() as f64;
    let wide = (users * estimate.mean + 2.0) / (users + 4.0);
    Some(Estimate {
        variance: estimate.variance.max(wide * (1.0 - wide) / (users + 4.0)),
        ..estimate
    })
}

#[cfg(test)]
mod tests;
