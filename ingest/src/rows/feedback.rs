//! Reads stored feedback and retractions. `crate::reward` computes rewards from them.
//!
//! Anyone may send any amount of feedback about an episode. So a query returns only what the rules
//! read, in pages that fit into memory.

use std::collections::BTreeMap;

use event_log::event::{TEXT_BYTES_MAX, Value};
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::reward::{Rule, Signal};

/// Events of a metric about one generation or episode that count, by event time.
pub(crate) const SIGNALS_MAX: i64 = 1_000;
/// The same where the rule reads their texts.
const TEXTS_MAX: i64 = 64;
/// Rows of a page.
const ROWS_MAX: i64 = 50_000;
/// Bytes of texts of a page.
const TEXT_PAGE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Retractions of one feedback event that a rescore sees, by event time.
const RETRACTIONS_MAX: i64 = 16;

/// A stored feedback event and what it is about.
#[derive(Debug, Clone)]
pub(crate) struct FeedbackRow {
    /// The generation or episode, of those that were asked for.
    pub about: Uuid,
    pub tenant: String,
    /// Unique in its tenant.
    pub id: Uuid,
    pub metric: String,
    /// Empty where the rule does not read the text.
    pub value: Value,
    pub given_at: OffsetDateTime,
    pub stored_at: OffsetDateTime,
    /// Its target had closed before.
    pub late: bool,
    /// Seconds from the storage of the generation to that of the feedback; negative if the feedback
    /// was first.
    pub after_seconds: f64,
}

impl FeedbackRow {
    /// What its retractions name it by.
    pub(crate) fn key(&self) -> (String, Uuid) {
        (self.tenant.clone(), self.id)
    }

    pub(crate) fn into_signal(self, retracted_at: Option<OffsetDateTime>) -> Signal {
        Signal {
            id: self.id,
            metric: self.metric,
            value: self.value,
            given_at: self.given_at,
            retracted_at,
        }
    }
}

/// A stored retraction.
#[derive(Debug, Clone)]
pub(crate) struct RetractionRow {
    pub tenant: String,
    pub feedback_id: Uuid,
    pub given_at: OffsetDateTime,
    pub stored_at: OffsetDateTime,
    /// The target of its feedback had closed before.
    pub late: bool,
}

/// What rules read, by surface. Columns of a table.
#[derive(Debug, Clone, Default)]
pub(crate) struct Needed {
    surfaces: Vec<String>,
    metrics: Vec<String>,
    signals_max: Vec<i64>,
    texts: Vec<bool>,
    rows_max: i64,
    /// Generations of a page whose texts fit into memory. A surface whose rule reads no texts has
    /// no entry.
    generations_max: BTreeMap<String, usize>,
}

impl Needed {
    /// About generations that are trajectories, directly or through their episode.
    pub(crate) fn by<'a>(rules: impl IntoIterator<Item = &'a Rule>) -> Self {
        let rules = rules.into_iter().filter(|rule| !rule.is_of_episodes());
        Self::from(rules.map(|rule| (rule, rule.metrics())), 2)
    }

    /// About episodes that are trajectories.
    pub(crate) fn about_episodes<'a>(rules: impl IntoIterator<Item = &'a Rule>) -> Self {
        let rules = rules.into_iter().filter(|rule| rule.is_of_episodes());
        Self::from(rules.map(|rule| (rule, rule.metrics())), 1)
    }

    /// About their turns.
    pub(crate) fn about_turns<'a>(rules: impl IntoIterator<Item = &'a Rule>) -> Self {
        let rules = rules.into_iter().filter(|rule| rule.is_of_episodes());
        Self::from(rules.map(|rule| (rule, rule.turn_metrics())), 1)
    }

    /// Rules with their metrics, each with whether its texts are read. `targets`: how many things
    /// the feedback of one entry may be about.
    fn from<'a>(rules: impl Iterator<Item = (&'a Rule, BTreeMap<&'a str, bool>)>, targets: i64) -> Self {
        let mut needed = Self {
            rows_max: ROWS_MAX,
            ..Self::default()
        };
        for (rule, metrics) in rules {
            let surface = &rule.definition.name;
            let (mut rows, mut texts) = (0, 0);
            for (metric, reads_text) in metrics {
                let signals_max = if reads_text { TEXTS_MAX } else { SIGNALS_MAX };
                needed.surfaces.push(surface.clone());
                needed.metrics.push(metric.to_owned());
                needed.signals_max.push(signals_max);
                needed.texts.push(reads_text);
                rows += targets * signals_max;
                texts += if reads_text { targets * TEXTS_MAX } else { 0 };
            }
            needed.rows_max = needed.rows_max.max(rows);
            let text_bytes = usize::try_from(texts).unwrap_or(0) * TEXT_BYTES_MAX;
            if let Some(generations) = TEXT_PAGE_BYTES_MAX.checked_div(text_bytes) {
                needed.generations_max.insert(surface.clone(), generations.max(1));
            }
        }
        needed
    }

    /// How many of these generations, given by their surfaces, are read at once.
    pub(crate) fn page<'a>(&self, surfaces: impl IntoIterator<Item = &'a str>) -> usize {
        let mut filled = 0.0;
        let fits = surfaces.into_iter().take_while(|surface| {
            filled += self.generations_max.get(*surface).map_or(0.0, |max| 1.0 / *max as f64);
            filled <= 1.0
        });
        fits.count().max(1)
    }
}

/// The feedback about the first of what was asked for.
pub(crate) struct Page {
    pub rows: Vec<FeedbackRow>,
    /// How many of the generations or episodes this covers, at least 1.
    pub generations: usize,
}

/// The feedback about these generations that is needed, directly or through their episode, of the
/// same tenant.
pub(crate) async fn feedback(
    connection: &mut PgConnection,
    generations: &[Uuid],
    needed: &Needed,
) -> sqlx::Result<Page> {
    let rows = sqlx::query_file!(
        "src/rows/feedback.sql",
        generations,
        &needed.surfaces,
        &needed.metrics,
        &needed.signals_max,
        &needed.texts,
        needed.rows_max + 1
    )
    .fetch_all(connection)
    .await?;
    let rows = rows.into_iter().map(|row| FeedbackRow {
        about: row.generation_id,
        tenant: row.tenant_id,
        id: row.id,
        metric: row.metric_name,
        value: value(row.value_bool, row.value_float, row.value_text),
        given_at: row.given_at,
        stored_at: row.stored_at,
        late: row.late,
        after_seconds: row.after_seconds,
    });
    Ok(Page::of(rows.collect(), generations, needed))
}

impl Page {
    fn of(rows: Vec<FeedbackRow>, targets: &[Uuid], needed: &Needed) -> Self {
        let mut page = Self {
            rows,
            generations: targets.len(),
        };
        // The last target of a full page may be incomplete. It is not the first one, whose rows
        // `rows_max` covers.
        let is_full = i64::try_from(page.rows.len()).is_ok_and(|rows| rows > needed.rows_max);
        let last = page.rows.last().map(|row| row.about).filter(|_| is_full);
        let before_last = last.and_then(|last| targets.iter().position(|id| *id == last));
        if let Some(before_last) = before_last.filter(|before_last| *before_last > 0) {
            page.rows.retain(|row| Some(row.about) != last);
            page.generations = before_last;
        }
        page
    }
}

/// What feedback is about, and when that was stored.
#[derive(Debug, Clone)]
pub(crate) struct About {
    pub tenant: String,
    pub id: Uuid,
    /// Whose rule says which feedback is needed.
    pub surface: String,
    pub stored_at: OffsetDateTime,
}

/// Reads feedback about the first of `about` by a query that takes [`About`] as columns.
macro_rules! read_about {
    ($connection:expr, $file:literal, $about:expr, $needed:expr) => {{
        let (about, needed) = ($about, $needed);
        let ids: Vec<Uuid> = about.iter().map(|about| about.id).collect();
        let rows = sqlx::query_file!(
            $file,
            &about.iter().map(|about| about.tenant.clone()).collect::<Vec<_>>(),
            &ids,
            &about.iter().map(|about| about.surface.clone()).collect::<Vec<_>>(),
            &about.iter().map(|about| about.stored_at).collect::<Vec<_>>(),
            &needed.surfaces,
            &needed.metrics,
            &needed.signals_max,
            &needed.texts,
            needed.rows_max + 1
        )
        .fetch_all($connection)
        .await?;
        let rows = rows.into_iter().map(|row| FeedbackRow {
            about: row.about,
            tenant: row.tenant_id,
            id: row.id,
            metric: row.metric_name,
            value: value(row.value_bool, row.value_float, row.value_text),
            given_at: row.given_at,
            stored_at: row.stored_at,
            late: row.late,
            after_seconds: row.after_seconds,
        });
        Ok(Page::of(rows.collect(), &ids, needed))
    }};
}

/// The feedback about the first of these episodes that is needed, without that about their turns. No
/// two have the same id, not even of two tenants.
pub(crate) async fn about_episodes(
    connection: &mut PgConnection,
    about: &[About],
    needed: &Needed,
) -> sqlx::Result<Page> {
    read_about!(connection, "src/rows/feedback/about_episodes.sql", about, needed)
}

/// The feedback about the first of these turns that is needed, without that about their episodes.
pub(crate) async fn about_turns(connection: &mut PgConnection, about: &[About], needed: &Needed) -> sqlx::Result<Page> {
    read_about!(connection, "src/rows/feedback/about_turns.sql", about, needed)
}

/// The value in the three columns of `feedback`, of which one is set.
pub(crate) fn value(bool: Option<bool>, float: Option<f64>, text: Option<String>) -> Value {
    match (bool, float) {
        (Some(value), _) => Value::Bool(value),
        (_, Some(value)) => Value::Float(value),
        _ => Value::Text(text.unwrap_or_default()),
    }
}

/// Tenants and ids, as two columns.
fn keys(feedback: &[FeedbackRow]) -> (Vec<String>, Vec<Uuid>) {
    feedback.iter().map(FeedbackRow::key).unzip()
}

/// When each of these feedback events was first retracted by its tenant, by event time. A judge's
/// answer is retracted with its text.
pub(crate) async fn first_retractions(
    connection: &mut PgConnection,
    feedback: &[FeedbackRow],
) -> sqlx::Result<BTreeMap<(String, Uuid), OffsetDateTime>> {
    if feedback.is_empty() {
        return Ok(BTreeMap::new());
    }
    let (tenants, ids) = keys(feedback);
    let rows = sqlx::query_file!("src/rows/feedback/first_retractions.sql", &tenants, &ids)
        .fetch_all(connection)
        .await?;
    let rows = rows.into_iter();
    Ok(rows
        .map(|row| ((row.tenant_id, row.feedback_id), row.given_at))
        .collect())
}

/// The first retractions of each of these feedback events, of the same tenant. A judge's answer has
/// those of its text.
pub(crate) async fn retractions(
    connection: &mut PgConnection,
    feedback: &[FeedbackRow],
) -> sqlx::Result<Vec<RetractionRow>> {
    if feedback.is_empty() {
        return Ok(Vec::new());
    }
    let (tenants, ids) = keys(feedback);
    sqlx::query_as!(
        RetractionRow,
        "select r.tenant_id as tenant, r.feedback_id as \"feedback_id!\", r.given_at, r.stored_at, r.late \
         from (select distinct * from unnest($1::text[], $2::uuid[])) as f (tenant_id, id) cross join lateral ( \
             select tenant_id, f.id as feedback_id, given_at, stored_at, late from retraction \
             where tenant_id = f.tenant_id and feedback_id in ( \
                 select f.id union all \
                 select feedback_id from judgement where answer_id = f.id and tenant_id = f.tenant_id) \
             order by given_at, id limit $3) r",
        &tenants,
        &ids,
        RETRACTIONS_MAX
    )
    .fetch_all(connection)
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reward::{Definition, Metric, MetricType};

    fn rule(reward: Option<&str>) -> Rule {
        let definition = Definition {
            reward: reward.map(str::to_owned),
            ..Definition::completion()
        };
        let metrics = [
            Metric::new("accept", MetricType::Boolean),
            Metric::new("retry", MetricType::Float),
            Metric::new("comment", MetricType::Comment),
            Metric::new("demonstration", MetricType::Demonstration),
        ];
        Rule::new(definition, &metrics).unwrap()
    }

    /// Each needed metric, and whether its text is.
    fn read(reward: Option<&str>) -> Vec<(String, bool)> {
        let needed = Needed::by([&rule(reward)]);
        needed.metrics.into_iter().zip(needed.texts).collect()
    }

    #[test]
    fn only_what_a_rule_reads_is_needed() {
        let metric = |name: &str, text| (name.to_owned(), text);
        let kept = metric("kept_characters", false);
        assert_eq!(read(None), [metric("accept", false), kept.clone()]);
        assert_eq!(
            read(Some("accept == null ? null : 1.0")),
            [metric("accept", false), kept.clone()]
        );
        assert_eq!(
            read(Some("comment == null ? null : double(comment.size())")),
            [metric("comment", true), kept.clone()]
        );
        // It may read any metric, but no text.
        assert_eq!(
            read(Some("-0.5 * double(all.retry.size())")),
            [
                metric("accept", false),
                metric("comment", false),
                metric("demonstration", false),
                kept,
                metric("retry", false)
            ]
        );
        assert!(read(Some("double(all.comment.size())")).contains(&metric("comment", true)));
        assert!(read(Some("double(all['com' + 'ment'].size())")).contains(&metric("comment", true)));
    }

    #[test]
    fn a_page_has_few_generations_where_texts_are_read() {
        let plain = Needed::by([&rule(None)]);
        assert_eq!(plain.page(["completion"; 500]), 500);
        let texts = Needed::by([&rule(Some("comment == null ? null : 1.0"))]);
        let generations = texts.page(["completion"; 500]);
        let bytes = generations * 2 * TEXTS_MAX as usize * TEXT_BYTES_MAX;
        assert!(generations >= 1 && bytes <= TEXT_PAGE_BYTES_MAX, "{generations}");
        assert_eq!(texts.page([]), 1);
    }
}
