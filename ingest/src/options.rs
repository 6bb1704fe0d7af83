//! The configuration of ingest. Contradictions are refused at startup.

use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, Method, Uri, header};
use edge::intake::Intake;
use edge::options::{above, above_to};
use serde::{Deserialize, Serialize};
use tower_http::cors::{AllowOrigin, CorsLayer};

use crate::judge::{self, Judges};
use crate::reward::episode::JOIN_MAX;
use crate::reward::{Definition, KEPT_CHARACTERS, Level, Metric, MetricType, Rule, Unit};

edge::options! {
    /// `[ingest]` of the configuration file.
    pub struct Options {
        /// `[[ingest.surface]]`: how each surface turns signals into rewards. The surfaces
        /// `rollout`, whose reward is a grader's float, and `environment`, whose episodes end with
        /// the reward of a harness, always exist; a surface of that name here replaces each.
        pub surface: Vec<Definition> = vec![Definition::completion()],
        /// `[[ingest.metric]]`: metrics of feedback besides those of surfaces, `comment`,
        /// `demonstration` and `kept_characters`.
        pub metric: Vec<Metric> = Vec::new(),
        /// `[[ingest.judge]]`: models that score texts of users.
        pub judge: Vec<judge::Options> = Vec::new(),
        /// Partitions of event topics that ingest creates.
        pub partitions: i32 = 4 => 1..,
        /// How long feedback may wait for its generation before a copy goes to the dead-letter
        /// queue, seconds.
        pub orphan_ttl_seconds: f64 = 600.0 => above(0.0),
        /// How long after a horizon feedback may still reach the log, seconds.
        pub close_grace_seconds: f64 = 0.25 => 0.0..f64::INFINITY,
        /// The alarm is on if a larger share of a surface's latest 1000 trajectories has no usable
        /// signal.
        pub unscored_share_max: f64 = 0.9 => 0.0..=1.0,
        /// How far an event's time may be ahead of the database's clock, and how far this host's
        /// clock may differ from it, seconds.
        pub clock_skew_seconds_max: f64 = 300.0 => above(0.0),
        /// Maximum records of a batch, which the writers share.
        pub batch_records_max: usize = 500 => 1..=10_000,
        /// How long the first record of a batch waits for others, milliseconds.
        pub batch_wait_ms: u64 = 10 => 0..=1_000,
        /// Concurrent transactions per process. They share the partitions of a batch.
        pub writers: usize = 2 => 1..=64,
        /// Continue although the tables were filled from another log: another cluster, a recreated
        /// topic, or one whose retention removed unread records. Unread records of the old log are
        /// lost.
        pub accept_other_log: bool = false,
        /// Object store of long contexts and expert ids, a `file://` or `s3://` URL. Default:
        /// `payloads` in the state folder.
        pub payload_store: Option<String> = None,
        /// How long an uploaded payload waits for an event that refers to it, hours. Then it is
        /// deleted, and later events must upload it again. 0: forever.
        pub payload_unnamed_hours: u32 = 168 => 0..=876_000,
        /// Retention of generations and everything about them, days. Deleted by whole weeks. 0:
        /// forever.
        pub retention_days: u32 = 365 => 0..=36_500,
        /// `[[ingest.retention]]`: tenants and surfaces whose generations lose their content earlier:
        /// `tenant` and `surface` (absent: all) and `days`. Prompts, tokens, users and texts go; what
        /// became of each generation stays, and is counted as erased.
        pub retention: Vec<ContentRetention> = Vec::new(),
        /// Maximum disk space of ingest's tables, bytes. Above it the oldest weeks are deleted. If
        /// none can be deleted, events get 507. 0: unlimited.
        pub disk_bytes_max: u64 = 0,
        /// Maximum share of `disk_bytes_max` that one tenant may take at the expense of others. When
        /// the space runs out, a tenant that holds more, and less of the oldest week, gets 507. 1:
        /// never.
        pub disk_tenant_share_max: f64 = 0.5 => above_to(0.0, 1.0),
        /// Maximum body of an HTTP request, before and after decompression, bytes.
        pub request_bytes_max: usize = 8 * 1024 * 1024 => 1024..=1 << 30,
        /// How long a body may take to arrive, seconds.
        pub request_read_seconds_max: f64 = 30.0 => above_to(0.0, 3600.0),
        /// Maximum events of an HTTP batch.
        pub request_events_max: usize = 500 => 1..=10_000,
        /// Maximum bytes of decompressed bodies in this process. Further requests get 429. Decoded
        /// events take a small multiple of it.
        pub in_flight_bytes_max: usize = 64 * 1024 * 1024,
        /// Maximum share of `in_flight_bytes_max` for a single tenant. Busy tenants get equal shares
        /// and leave room for one more.
        pub tenant_share_max: f64 = 0.5,
        /// Origins whose pages may send feedback from browsers, such as `https://app.example`. Default:
        /// none, so browsers refuse the answer to a page of another origin.
        pub feedback_origins: Vec<String> = Vec::new(),
        /// After this many failed sends in a row, further events are refused at once.
        pub log_failures_max: u32 = 5 => 1..,
        /// While events are refused, one send per interval tests whether the log is back, seconds.
        pub log_probe_seconds: f64 = 1.0 => above_to(0.0, 3600.0),
    }
}

/// `[[ingest.retention]]`: how long generations keep their content.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContentRetention {
    /// Absent: of every tenant.
    #[serde(default)]
    pub tenant: Option<String>,
    /// Absent: of every surface.
    #[serde(default)]
    pub surface: Option<String>,
    /// From the time of sampling.
    pub days: u32,
}

impl Options {
    /// All surfaces, including the built-in ones.
    pub fn surfaces(&self) -> Vec<Definition> {
        let mut surfaces = self.surface.clone();
        for built_in in [Definition::rollout(), Definition::environment()] {
            if !surfaces.iter().any(|surface| surface.name == built_in.name) {
                surfaces.push(built_in);
            }
        }
        surfaces
    }

    /// All metrics: the declared ones, those of surfaces, and the three that always exist.
    pub fn metrics(&self) -> anyhow::Result<Vec<Metric>> {
        let mut metrics = self.metric.clone();
        for (index, metric) in metrics.iter().enumerate() {
            let name = &metric.name;
            anyhow::ensure!(!name.is_empty(), "ingest.metric: a name is empty");
            let is_repeated = metrics[..index].iter().any(|other| other.name == *name);
            anyhow::ensure!(!is_repeated, "ingest.metric {name:?} is declared twice");
        }
        let surfaces = self.surfaces();
        let declared = metrics.iter().position(|metric| metric.name == KEPT_CHARACTERS);
        let kept = match declared {
            None => Metric::new(KEPT_CHARACTERS, MetricType::Float),
            Some(at) => metrics.remove(at),
        };
        anyhow::ensure!(
            kept.metric_type == MetricType::Float && kept.level != Some(Level::Episode),
            "ingest.metric {KEPT_CHARACTERS:?} is a float about a generation"
        );
        metrics.push(Metric {
            level: Some(Level::Generation),
            ..kept
        });
        let deciding = surfaces
            .iter()
            .map(|surface| (surface.metric.as_str(), surface.metric_type));
        let always = [
            ("comment", MetricType::Comment),
            ("demonstration", MetricType::Demonstration),
        ];
        for (name, metric_type) in deciding.chain(always) {
            match metrics.iter().find(|metric| metric.name == name) {
                Some(metric) => anyhow::ensure!(
                    metric.metric_type == metric_type,
                    "metric {name:?} is a {} in one place of [ingest] and a {} in another",
                    metric.metric_type.as_str(),
                    metric_type.as_str()
                ),
                None => metrics.push(Metric::new(name, metric_type)),
            }
        }
        Ok(metrics)
    }

    /// The rules of all surfaces. Refuses invalid reward expressions.
    pub fn rules(&self) -> anyhow::Result<Vec<Rule>> {
        let metrics = self.metrics()?;
        let surfaces = self.surfaces().into_iter();
        surfaces.map(|surface| Rule::new(surface, &metrics)).collect()
    }

    /// All judges. Refuses those that contradict the metrics or each other.
    pub fn judges(&self) -> anyhow::Result<Judges> {
        Judges::new(&self.judge, &self.metrics()?)
    }

    /// The rule if `definition` replaced the surface of its name, and `metrics` those of their
    /// names.
    pub fn rule_of(&self, definition: Definition, metrics: &[Metric]) -> anyhow::Result<Rule> {
        let mut options = self.clone();
        options
            .metric
            .retain(|metric| !metrics.iter().any(|other| other.name == metric.name));
        options.metric.extend_from_slice(metrics);
        options.surface.retain(|surface| surface.name != definition.name);
        options.surface.push(definition.clone());
        options.check()?;
        Rule::new(definition, &options.metrics()?)
    }

    /// Refuses values that are out of range or contradict each other.
    pub fn check(&self) -> anyhow::Result<()> {
        self.check_ranges("ingest")?;
        self.check_requests()?;
        let surfaces = self.surfaces();
        for (index, surface) in surfaces.iter().enumerate() {
            surface.check()?;
            anyhow::ensure!(
                !surfaces[..index].iter().any(|other| other.name == surface.name),
                "ingest.surface {:?} is declared twice",
                surface.name
            );
            let kept_seconds = f64::from(self.retention_days) * 86_400.0;
            anyhow::ensure!(
                self.retention_days == 0 || surface.horizon_seconds < kept_seconds,
                "ingest.surface {:?}: horizon_seconds must be below the {} days of ingest.retention_days, because a week \
                 stays while one of its generations is open",
                surface.name,
                self.retention_days
            );
        }
        self.check_retention(&surfaces)?;
        self.judges()?;
        self.rules().map(|_| ())
    }

    fn check_retention(&self, surfaces: &[Definition]) -> anyhow::Result<()> {
        for (index, rule) in self.retention.iter().enumerate() {
            let ContentRetention { tenant, surface, days } = rule;
            anyhow::ensure!(
                tenant.as_deref() != Some("") && surface.as_deref() != Some(""),
                "ingest.retention: a tenant or surface is empty; leave it out for all"
            );
            anyhow::ensure!(*days <= 36_500, "ingest.retention: {days} days must be at most 36,500");
            let is_repeated = self.retention[..index]
                .iter()
                .any(|other| (&other.tenant, &other.surface) == (tenant, surface));
            anyhow::ensure!(
                !is_repeated,
                "ingest.retention: {tenant:?} and {surface:?} are declared twice"
            );
            anyhow::ensure!(
                *days > 0 && (self.retention_days == 0 || *days < self.retention_days),
                "ingest.retention: {days} days must be above 0 and below the {} of ingest.retention_days",
                self.retention_days
            );
            let seconds = f64::from(*days) * 86_400.0;
            for open in surfaces
                .iter()
                .filter(|open| surface.as_ref().is_none_or(|name| *name == open.name))
            {
                let turns = match open.trajectory {
                    Unit::Generation => 0.0,
                    Unit::Episode => JOIN_MAX.as_seconds_f64(),
                };
                anyhow::ensure!(
                    open.horizon_seconds + turns < seconds,
                    "ingest.retention: {days} days must be above the horizon_seconds of surface {:?}, and for an episode a \
                     week more, or its content goes before its feedback comes",
                    open.name
                );
            }
        }
        Ok(())
    }

    /// The answer to browsers that ask for pages of [`feedback_origins`](Self::feedback_origins) whether
    /// they may send feedback. `None`: there are none.
    pub(crate) fn cors(&self) -> anyhow::Result<Option<CorsLayer>> {
        let mut origins = Vec::new();
        for origin in &self.feedback_origins {
            let is_origin = origin.parse::<Uri>().is_ok_and(|uri| {
                let has_host = uri.authority().is_some() && uri.scheme().is_some();
                // Browsers send it without a path, and in lower case.
                has_host && !origin.ends_with('/') && uri.path() == "/" && *origin == origin.to_ascii_lowercase()
            });
            anyhow::ensure!(
                is_origin,
                "ingest.feedback_origins: {origin:?} is not an origin; write it as browsers do, such as https://app.example"
            );
            origins.push(HeaderValue::from_str(origin)?);
        }
        if origins.is_empty() {
            return Ok(None);
        }
        let allowed = AllowOrigin::predicate(move |origin, request| {
            request.uri.path() == "/v1/feedback" && origins.contains(origin)
        });
        Ok(Some(
            CorsLayer::new()
                .allow_origin(allowed)
                .allow_methods([Method::POST])
                .allow_headers([
                    header::AUTHORIZATION,
                    header::CONTENT_TYPE,
                    HeaderName::from_static("idempotency-key"),
                ])
                .max_age(Duration::from_secs(3600)),
        ))
    }

    fn check_requests(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.tenant_share_max > 0.0 && self.tenant_share_max < 1.0,
            "ingest.tenant_share_max must be above 0 and below 1"
        );
        self.cors()?;
        // Otherwise a request could get 429 forever.
        let needed = Intake::in_flight_bytes_min(self.tenant_share_max, self.request_bytes_max);
        anyhow::ensure!(
            self.in_flight_bytes_max >= needed,
            "ingest.in_flight_bytes_max must be at least {needed}: a request of request_bytes_max has to fit into one \
             tenant's share"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use edge::intake::REQUEST_BYTES;

    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        Options::default().check().unwrap();
        let names: Vec<_> = Options::default()
            .surfaces()
            .into_iter()
            .map(|surface| surface.name)
            .collect();
        assert_eq!(names, ["completion", "rollout", "environment"]);
    }

    #[test]
    fn a_metric_has_one_type_everywhere() {
        let mut options = Options::default();
        options.surface.push(Definition {
            name: "chat".to_owned(),
            metric_type: MetricType::Float,
            ..Definition::completion()
        });
        let error = options.check().unwrap_err().to_string();
        assert!(error.contains("in another"), "{error}");
    }

    #[test]
    fn the_largest_request_fits_into_one_tenants_share() {
        let exactly = Options {
            request_bytes_max: 1024 * 1024 - REQUEST_BYTES,
            in_flight_bytes_max: 4 * 1024 * 1024,
            tenant_share_max: 0.25,
            ..Options::default()
        };
        exactly.check().unwrap();
        let short = Options {
            in_flight_bytes_max: exactly.in_flight_bytes_max - 1,
            ..exactly
        };
        let error = short.check().unwrap_err().to_string();
        assert!(error.contains("in_flight_bytes_max"), "{error}");
        for share in [0.0, 1.0, f64::NAN] {
            let odd = Options {
                tenant_share_max: share,
                ..Options::default()
            };
            assert!(odd.check().is_err(), "{share}");
        }
    }

    #[test]
    fn a_definition_can_replace_its_surface() {
        let definition = Definition {
            reward: Some("kept".to_owned()),
            ..Definition::completion()
        };
        let options = Options::default();
        let error = options.rule_of(definition.clone(), &[]).unwrap_err();
        assert!(format!("{error:#}").contains("names \"kept\""), "{error:#}");
        let metric = Metric::new("kept", MetricType::Float);
        let rule = options.rule_of(definition.clone(), &[metric]).unwrap();
        assert_eq!(rule.definition, definition);
    }

    #[test]
    fn a_horizon_is_shorter_than_retention() {
        let mut options = Options {
            retention_days: 7,
            ..Options::default()
        };
        options.surface[0].horizon_seconds = 8.0 * 86_400.0;
        assert!(
            options
                .check()
                .unwrap_err()
                .to_string()
                .contains("ingest.retention_days")
        );
        options.retention_days = 0;
        options.check().unwrap();
    }

    #[test]
    fn content_is_kept_longer_than_a_horizon_and_shorter_than_its_row() {
        let with = |rules: &[(Option<&str>, u32)]| {
            let rule = |&(surface, days): &(Option<&str>, u32)| ContentRetention {
                tenant: None,
                surface: surface.map(str::to_owned),
                days,
            };
            let retention = rules.iter().map(rule).collect();
            let mut options = Options {
                retention,
                ..Options::default()
            };
            options.surface[0].horizon_seconds = 2.0 * 86_400.0;
            options.check()
        };
        let completion = Some("completion");
        with(&[(completion, 3), (None, 30)]).unwrap();
        for wrong in [
            &[(completion, 2)][..],
            &[(None, 0)],
            &[(None, 365)],
            &[(None, 40_000)],
            &[(Some("environment"), 8)],
            &[(Some(""), 30)],
            &[(None, 30), (None, 40)],
        ] {
            let error = with(wrong).unwrap_err().to_string();
            assert!(error.starts_with("ingest.retention:"), "{wrong:?}: {error}");
        }
    }

    #[test]
    fn people_have_minutes_to_answer() {
        assert!(Definition::completion().horizon_seconds >= 60.0);
    }

    #[test]
    fn a_surface_is_defined_once() {
        let options = Options {
            surface: vec![Definition::completion(), Definition::completion()],
            ..Options::default()
        };
        assert!(options.check().is_err());
    }
}
