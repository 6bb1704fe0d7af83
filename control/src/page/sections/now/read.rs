//! What the page shows: aliases, arms, the canary under way, replicas, alarms.

use edge::Problem;
use serde_json::Value;
use serving::fleet::{self, Replica};
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::page::site::Site;
use crate::tables::unavailable;

/// Everything that the page shows.
#[derive(Debug, Default)]
pub struct Data {
    pub aliases: Vec<Alias>,
    pub arms: Vec<Arm>,
    pub canary: Option<Canary>,
    pub replicas: Vec<Replica>,
    /// Alarms of the realtime run, in words.
    pub alarms: Vec<String>,
    pub good: Option<Good>,
    /// The same, but for the version that `champion` has: what one goes back to.
    pub good_before: Option<Good>,
}

/// An alias, and the move that led to it.
#[derive(Debug, Clone)]
pub struct Alias {
    pub alias: String,
    pub version: i64,
    /// `None`: it is pinned.
    pub follows: Option<String>,
    pub epoch: i64,
    pub since: OffsetDateTime,
    pub kind: Option<String>,
    pub actor: Option<String>,
    pub reason: Option<String>,
    /// The version that it served before, of those that were not judged bad.
    pub before: Option<i64>,
}

/// An arm of the experiment in force.
#[derive(Debug, Clone, PartialEq)]
pub struct Arm {
    pub alias: String,
    /// Of all users, 0 to 1.
    pub share: f64,
    pub explore: f64,
    /// Highest temperature of users' requests. `None`: no bound.
    pub temperature_max: Option<f64>,
    /// Lowest probability of a text that users are shown. `None`: they are shown all.
    pub probability_min: Option<f64>,
}

/// The canary under way.
#[derive(Debug, Clone)]
pub struct Canary {
    pub id: Uuid,
    pub version: i64,
    pub control: Option<i64>,
    pub state: String,
    pub step: i32,
    pub steps: i32,
    pub step_since: OffsetDateTime,
    /// Of champion's users, 0 to 1.
    pub share: f64,
    pub why: Option<String>,
}

/// A version that is known to be good.
#[derive(Debug, Clone)]
pub struct Good {
    pub version: i64,
    pub since: OffsetDateTime,
    pub why: String,
}

/// The version that was judged good last, by a canary's evidence or by a person, and not bad since.
/// `except`: not this one.
pub async fn last_known_good(
    connection: &mut PgConnection,
    policy: &str,
    except: Option<i64>,
) -> sqlx::Result<Option<Good>> {
    let row = sqlx::query!(
        r#"select version as "version!", actor as "actor!", reason as "reason!", at as "at!" from version_judgment
           where policy = $1 and verdict = 'good' and version is distinct from $2
           order by id desc limit 1"#,
        policy,
        except
    )
    .fetch_optional(connection)
    .await?;
    Ok(row.map(|row| Good {
        version: row.version,
        since: row.at,
        why: format!("judged good by {}: {}", row.actor, row.reason),
    }))
}

pub async fn read(site: &Site) -> Result<Data, Problem> {
    // nothing here belongs to a tenant's rows
    let mut reader = site.read(Some("")).await?;
    read_all(&mut reader, site.policy()).await.map_err(unavailable)
}

async fn read_all(reader: &mut PgConnection, policy: &str) -> sqlx::Result<Data> {
    let aliases = sqlx::query_file_as!(Alias, "src/page/sections/now.sql", policy)
        .fetch_all(&mut *reader)
        .await?;
    let arms = sqlx::query_scalar!(
        "select arms from experiment where policy = $1 order by epoch desc limit 1",
        policy
    )
    .fetch_optional(&mut *reader)
    .await?;
    let canary = sqlx::query_as!(
        Canary,
        r#"select c.id, c.version, c.control, c.state, c.step, c.step_since,
                  coalesce(jsonb_array_length(c.strategy -> 'steps'), 0) as "steps!",
                  coalesce(last.share, 0) as "share!", last.reason as "why?"
           from canary c
           left join lateral (select t.share, t.reason from canary_transition t
                              where t.canary_id = c.id order by t.id desc limit 1) last on true
           where c.policy = $1 and c.state in ('gated', 'shadow', 'canary', 'paused', 'held')"#,
        policy
    )
    .fetch_optional(&mut *reader)
    .await?;
    let alarms = sqlx::query_scalar!(
        r#"select e.message as "message!"
           from run r
           cross join lateral (select distinct on (data ->> 'alarm') message, data ->> 'state' as state
                               from run_event
                               where run_id = r.id and data ? 'alarm'
                               order by data ->> 'alarm', id desc) e
           where r.policy = $1 and r.kind = 'realtime' and r.status not in ('succeeded', 'failed', 'cancelled')
             and e.state = 'began'
           limit 20"#,
        policy
    )
    .fetch_all(&mut *reader)
    .await?;
    let champion = aliases
        .iter()
        .find(|alias| alias.alias == "champion")
        .map(|alias| alias.version);
    Ok(Data {
        arms: arms.map(|arms| arms_of(&arms)).unwrap_or_default(),
        canary,
        replicas: fleet::replicas(&mut *reader, policy).await?,
        alarms,
        good: last_known_good(&mut *reader, policy, None).await?,
        good_before: last_known_good(&mut *reader, policy, champion).await?,
        aliases,
    })
}

/// Weights become shares.
fn arms_of(arms: &Value) -> Vec<Arm> {
    let arms: Vec<&Value> = arms.as_array().into_iter().flatten().collect();
    let weight = |arm: &Value| arm["weight"].as_f64().unwrap_or(0.0);
    let total: f64 = arms.iter().map(|arm| weight(arm)).sum();
    let arm = |arm: &&Value| Arm {
        alias: arm["alias"].as_str().unwrap_or_default().to_owned(),
        share: if total > 0.0 { weight(arm) / total } else { 0.0 },
        explore: arm["explore"].as_f64().unwrap_or(0.0),
        temperature_max: arm["temperature_max"].as_f64(),
        probability_min: arm["probability_min"].as_f64(),
    };
    arms.iter().map(arm).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn weights_are_shown_as_shares_of_all_users() {
        let arms =
            arms_of(&json!([{"alias": "learner", "weight": 3, "explore": 0.02}, {"alias": "base", "weight": 1}]));
        let shares: Vec<_> = arms.iter().map(|arm| (&*arm.alias, arm.share, arm.explore)).collect();
        assert_eq!(shares, [("learner", 0.75, 0.02), ("base", 0.25, 0.0)]);
        assert_eq!(arms_of(&json!("nonsense")), []);
        let bounded =
            arms_of(&json!([{"alias": "a", "temperature_max": 0.3, "probability_min": 0.25}, {"alias": "b"}]));
        let bounds = |arm: &Arm| (arm.temperature_max, arm.probability_min);
        assert_eq!((bounded[0].share, bounds(&bounded[0])), (0.0, (Some(0.3), Some(0.25))));
        assert_eq!(bounds(&bounded[1]), (None, None));
    }
}
