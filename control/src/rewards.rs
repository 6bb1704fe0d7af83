//! What users did with an arm's answers in some periods, or with those of some versions, to compare now
//! with before.

use report::{Clusters, Interval};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use crate::figures::{self, Figures};

/// Answers of one period that are read: the newest ones.
pub const ANSWERS_MAX: i64 = 1_000;

/// Users of a period, below which nothing is concluded.
const USERS_MIN: usize = 20;
/// Difference of the shares of answers that are scored, above which nothing is concluded: then the
/// feedback that is there may not be that of all.
const SCORED_DIFFERENCE_MAX: f64 = 0.1;

/// What users did in one period. They may be the users of another period too.
#[derive(Debug, Clone, Default)]
pub struct Period {
    /// The first and last version that answered.
    pub versions: Option<[i64; 2]>,
    pub answers: i64,
    pub declined: i64,
    /// Of the answers: failed, or not waited for.
    pub aborted: i64,
    /// Requests whose user left before the first token. They are no answers.
    pub not_begun: i64,
    /// By tenant and user.
    pub rewards: Clusters<(String, String)>,
    /// Its answers.
    ids: Vec<Uuid>,
    figures: Option<Figures>,
}

/// Whose answers are read.
#[derive(Debug, Clone, Copy)]
pub struct Of<'a> {
    pub policy: &'a str,
    /// `None`: all. By time there must be one.
    pub arm: Option<&'a str>,
    /// `None`: all.
    pub surface: Option<&'a str>,
    /// `None`: all.
    pub tenant: Option<&'a str>,
}

/// What one user did in one period.
struct Row {
    period: i64,
    tenant_id: String,
    user_key: String,
    first_version: i64,
    last_version: i64,
    answers: i64,
    declined: i64,
    aborted: i64,
    not_begun: i64,
    scored: i64,
    reward: f64,
    ids: Vec<Uuid>,
}

/// A period as JSON.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Shown {
    /// From the end of the period until now, in seconds. `null`: it is a version's newest answers, of any
    /// time.
    pub ago: Option<i64>,
    /// `null`: no answers.
    pub first_version: Option<i64>,
    pub last_version: Option<i64>,
    /// At most 1,000, the newest of the period.
    pub answers: i64,
    pub declined: i64,
    /// Of the answers: failed, or not waited for.
    pub aborted: i64,
    /// Requests whose user left before the first token. They are no answers.
    pub not_begun: i64,
    /// Answers with a reward, and how many users they are of.
    pub scored: u64,
    pub users: usize,
    /// Mean, with its 95% interval by user.
    pub reward: Option<f64>,
    pub interval: Option<[f64; 2]>,
    /// Mean reward of the first period less that of this one. `null` in the first.
    pub difference: Option<Interval>,
    /// The first period looks worse than this one: the whole interval of the difference is below 0, both
    /// have at least 20 users, and the shares of answers that are scored differ by at most 0.1.
    pub first_is_worse: bool,
    /// What the newest of its answers are like. `null`: there are none, or it was not asked for.
    pub figures: Option<Figures>,
}

impl Period {
    pub fn reward(&self) -> Option<f64> {
        self.rewards.mean()
    }

    pub fn interval(&self) -> Option<[f64; 2]> {
        self.rewards.interval().map(|interval| interval.ci95)
    }

    /// A number of its answers as a share of them. `None`: there are none.
    pub fn share(&self, count: i64) -> Option<f64> {
        (self.answers > 0).then(|| count as f64 / self.answers as f64)
    }

    /// See [`add_figures`].
    pub fn figures(&self) -> Option<Figures> {
        self.figures
    }

    /// Scored answers, and their users.
    pub fn scored(&self) -> (u64, usize) {
        (self.rewards.n(), self.rewards.len())
    }

    /// The difference of mean rewards, with its 95% interval as if no user were in both periods. Users
    /// differ from each other, so where they are in both, the true interval is narrower.
    pub fn minus(&self, other: &Period) -> Option<Interval> {
        Some(self.rewards.estimate()?.minus(other.rewards.estimate()?))
    }

    /// See [`Shown::first_is_worse`].
    pub fn is_worse_than(&self, other: &Period) -> bool {
        let enough = |period: &Period| period.rewards.len() >= USERS_MIN;
        let scored = |period: &Period| period.rewards.n() as f64 / period.answers.max(1) as f64;
        enough(self)
            && enough(other)
            && (scored(self) - scored(other)).abs() <= SCORED_DIFFERENCE_MAX
            && self.minus(other).is_some_and(|difference| difference.is_below_zero())
    }
}

/// As JSON, compared with the first one. `ages`: see [`read`]; empty for those of [`read_versions`].
pub fn shown(periods: &[Period], ages: &[Duration]) -> Vec<Shown> {
    let shown = |(number, period): (usize, &Period)| {
        let (scored, users) = period.scored();
        Shown {
            ago: ages.get(number).map(|ago| ago.whole_seconds()),
            first_version: period.versions.map(|[first, _]| first),
            last_version: period.versions.map(|[_, last]| last),
            answers: period.answers,
            declined: period.declined,
            aborted: period.aborted,
            not_begun: period.not_begun,
            scored,
            users,
            reward: period.reward(),
            interval: period.interval(),
            difference: periods
                .first()
                .filter(|_| number > 0)
                .and_then(|first| first.minus(period)),
            first_is_worse: periods.first().is_some_and(|first| first.is_worse_than(period)),
            figures: period.figures,
        }
    };
    periods.iter().enumerate().map(shown).collect()
}

/// What users did in the periods of this length that ended so long ago, in their order.
pub async fn read(
    reader: &mut PgConnection,
    of: Of<'_>,
    length: Duration,
    ages: &[Duration],
) -> sqlx::Result<Vec<Period>> {
    let now = OffsetDateTime::now_utc();
    let ends: Vec<OffsetDateTime> = ages.iter().map(|ago| now.saturating_sub(*ago)).collect();
    let begins: Vec<OffsetDateTime> = ends.iter().map(|end| end.saturating_sub(length)).collect();
    let rows = sqlx::query_file_as!(
        Row,
        "src/rewards.sql",
        of.policy,
        of.arm,
        &begins,
        &ends,
        of.tenant,
        ANSWERS_MAX,
        of.surface
    );
    Ok(periods(rows.fetch_all(reader).await?, ages.len()))
}

/// What users did with the newest answers of each of these versions, in their order.
pub async fn read_versions(
    reader: &mut PgConnection,
    of: Of<'_>,
    versions: &[i64],
    answers_max: i64,
) -> sqlx::Result<Vec<Period>> {
    let rows = sqlx::query_file_as!(
        Row,
        "src/rewards_by_version.sql",
        of.policy,
        of.arm,
        versions,
        of.tenant,
        answers_max,
        of.surface
    );
    Ok(periods(rows.fetch_all(reader).await?, versions.len()))
}

/// Reads what the answers of these periods are like, of the newest of each.
pub async fn add_figures(reader: &mut PgConnection, periods: &mut [Period]) -> sqlx::Result<()> {
    let of_each = figures::ANSWERS_MAX / periods.len().max(1);
    for period in periods {
        period.ids.sort_unstable_by(|one, other| other.cmp(one));
        period.ids.truncate(of_each);
        period.figures = figures::read(&mut *reader, &period.ids).await?;
    }
    Ok(())
}

fn periods(rows: Vec<Row>, count: usize) -> Vec<Period> {
    let mut periods = vec![Period::default(); count];
    for row in rows {
        let number = usize::try_from(row.period - 1).ok();
        let Some(period) = number.and_then(|number| periods.get_mut(number)) else {
            continue;
        };
        let [first, last] = period.versions.unwrap_or([row.first_version, row.last_version]);
        period.versions = Some([first.min(row.first_version), last.max(row.last_version)]);
        period.answers += row.answers;
        period.declined += row.declined;
        period.aborted += row.aborted;
        period.not_begun += row.not_begun;
        period.ids.extend(row.ids);
        if row.scored > 0 {
            period
                .rewards
                .add_many((row.tenant_id, row.user_key), row.reward, row.scored as f64);
        }
    }
    periods
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Users with one answer each.
    pub(crate) fn period(version: i64, rewards: &[f64]) -> Period {
        let users = rewards.iter().enumerate();
        Period {
            versions: Some([version, version + 1]),
            answers: rewards.len() as i64 + 1,
            declined: 1,
            aborted: 0,
            not_begun: 0,
            rewards: users
                .map(|(user, &reward)| (("t".to_owned(), user.to_string()), reward))
                .collect(),
            ..Period::default()
        }
    }

    #[test]
    fn periods_are_compared_with_the_first() {
        let periods = [period(7, &[0.5, 0.7]), period(3, &[0.1, 0.3]), Period::default()];
        let ages = [Duration::ZERO, Duration::HOUR, Duration::DAY];
        let [now, hour, day] = <[Shown; 3]>::try_from(shown(&periods, &ages)).unwrap();
        assert_eq!(
            (now.ago, now.first_version, now.last_version),
            (Some(0), Some(7), Some(8))
        );
        assert_eq!((now.answers, now.scored, now.users, now.difference), (3, 2, 2, None));
        assert!((now.reward.unwrap() - 0.6).abs() < 1e-12);
        let difference = hour.difference.unwrap();
        assert!(
            (difference.mean - 0.4).abs() < 1e-12 && difference.ci95[0] < 0.4,
            "{difference:?}"
        );
        assert_eq!(
            (day.ago, day.answers, day.reward, day.difference),
            (Some(86_400), 0, None, None)
        );
    }

    #[test]
    fn worse_needs_enough_users_and_feedback_for_as_many_answers() {
        let of = |reward: f64, users: usize| {
            let rewards: Vec<f64> = (0..users).map(|user| reward + 0.01 * (user % 3) as f64).collect();
            period(1, &rewards)
        };
        assert!(of(0.0, 20).is_worse_than(&of(0.5, 20)));
        assert!(!of(0.5, 20).is_worse_than(&of(0.5, 20)));
        assert!(!of(0.0, 19).is_worse_than(&of(0.5, 20)), "too few users");
        let mut early = of(0.0, 20);
        early.answers = 40;
        assert!(!early.is_worse_than(&of(0.5, 20)), "half of it has no feedback yet");
    }
}
