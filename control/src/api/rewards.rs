//! `GET /v1/rewards`: what users did with an arm's answers now and in periods before, or with those of some
//! versions.

use crate::page::site::Site;
use crate::rewards::{self, Of, Shown};
use axum::extract::State;
use edge::Problem;
use edge::auth::Principal;
use edge::json::Json;
use edge::query::Query;
use serde::{Deserialize, Serialize};
use time::Duration;

use crate::caller::visible_tenant;
use crate::tables::unavailable;

/// Periods of one answer.
const PERIODS_MAX: usize = 100;
const AGO_MAX: i64 = 366 * 24 * 3600;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// Default: `champion`; with `versions` all.
    arm: Option<String>,
    /// In place of periods: the newest answers of these versions, with commas between.
    versions: Option<String>,
    /// Default: all.
    surface: Option<String>,
    /// Length of a period in seconds. Default: 900.
    period: Option<i64>,
    /// How many seconds ago each period ended, with commas between. Default: now, and an hour, a day and a
    /// week ago.
    ago: Option<String>,
    /// Only what this tenant logged. Default: the caller's, for administrators all.
    tenant: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Rewards {
    /// `null`: all.
    pub arm: Option<String>,
    /// Seconds. `null`: of versions.
    pub period: Option<i64>,
    pub periods: Vec<Shown>,
}

pub async fn rewards(
    State(site): State<Site>,
    principal: Principal,
    Query(asked): Query<Asked>,
) -> Result<Json<Rewards>, Problem> {
    let tenant = visible_tenant(&principal, asked.tenant.as_deref())?;
    let of = Of {
        policy: site.policy(),
        arm: asked.arm.as_deref(),
        surface: asked.surface.as_deref(),
        tenant,
    };
    let Some(versions) = &asked.versions else {
        return by_time(&site, &asked, of).await;
    };
    if asked.ago.is_some() || asked.period.is_some() {
        return Err(Problem::bad_request("give `versions`, or `period` and `ago`"));
    }
    let versions = serials(versions).map_err(Problem::bad_request)?;
    let mut reader = site.read(tenant).await?;
    let found = rewards::read_versions(&mut reader, of, &versions, rewards::ANSWERS_MAX).await;
    let mut found = found.map_err(unavailable)?;
    let added = rewards::add_figures(&mut reader, &mut found).await;
    added.map_err(unavailable)?;
    Ok(Json(Rewards {
        arm: asked.arm,
        period: None,
        periods: rewards::shown(&found, &[]),
    }))
}

async fn by_time(site: &Site, asked: &Asked, of: Of<'_>) -> Result<Json<Rewards>, Problem> {
    let arm = of.arm.unwrap_or("champion");
    let seconds = asked.period.unwrap_or(900);
    if !(1..=AGO_MAX).contains(&seconds) {
        return Err(Problem::bad_request(format!(
            "period is {seconds}; give 1 to {AGO_MAX} seconds"
        )));
    }
    let ages = ages(asked.ago.as_deref().unwrap_or("0,3600,86400,604800")).map_err(Problem::bad_request)?;
    let mut reader = site.read(of.tenant).await?;
    let of = Of { arm: Some(arm), ..of };
    let periods = rewards::read(&mut reader, of, Duration::seconds(seconds), &ages).await;
    let mut periods = periods.map_err(unavailable)?;
    let added = rewards::add_figures(&mut reader, &mut periods).await;
    added.map_err(unavailable)?;
    Ok(Json(Rewards {
        arm: Some(arm.to_owned()),
        period: Some(seconds),
        periods: rewards::shown(&periods, &ages),
    }))
}

fn serials(text: &str) -> Result<Vec<i64>, String> {
    let serials: Option<Vec<i64>> = text.split(',').map(|serial| serial.trim().parse().ok()).collect();
    serials
        .filter(|serials| serials.len() <= PERIODS_MAX)
        .ok_or_else(|| format!("versions is {text:?}; give 1 to {PERIODS_MAX} serials of versions with commas between"))
}

fn ages(text: &str) -> Result<Vec<Duration>, String> {
    let one = |text: &str| {
        let seconds = text
            .trim()
            .parse()
            .ok()
            .filter(|seconds| (0..=AGO_MAX).contains(seconds));
        seconds.map(Duration::seconds)
    };
    let ages: Option<Vec<Duration>> = text.split(',').map(one).collect();
    ages.filter(|ages| ages.len() <= PERIODS_MAX).ok_or_else(|| {
        format!("ago is {text:?}; give 1 to {PERIODS_MAX} numbers of seconds with commas between, each 0 to {AGO_MAX}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_serials_with_commas_between() {
        assert_eq!(serials("41, 43").unwrap(), [41, 43]);
        for text in ["", "v41", "41,", &vec!["1"; 101].join(",")] {
            assert!(serials(text).unwrap_err().starts_with("versions is"), "{text}");
        }
    }

    #[test]
    fn ages_are_seconds_with_commas_between() {
        assert_eq!(ages("0, 60").unwrap(), [Duration::ZERO, Duration::MINUTE]);
        for text in ["", "1h", "-1", "0,,1", "99999999999", &vec!["1"; 101].join(",")] {
            assert!(ages(text).unwrap_err().starts_with("ago is"), "{text}");
        }
    }
}
