//! Which loaded version answers a request, by the assignment in force. The follower replaces the
//! table, the API reads it. Holding a route keeps its version loaded.

use crate::engine::LoadedVersion;
use artifact::assignment::{Assignment, CANARY, CHAMPION};
use event_log::event::SHADOW;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

/// The routes of one replica.
#[derive(Debug, Default)]
pub struct RouteTable(RwLock<Table>);

#[derive(Debug, Default)]
struct Table {
    /// `None` until the first assignment is applied.
    assignment: Option<Assignment>,
    /// By serial.
    versions: BTreeMap<i64, Arc<LoadedVersion>>,
}

/// How a request is answered.
#[derive(Debug, Clone)]
pub struct Route {
    pub version: Arc<LoadedVersion>,
    /// The alias that answers, or `v<serial>` for a version requested by its serial.
    pub arm: String,
    /// Probability that this user is in that arm, (0, 1].
    pub probability: f64,
    /// Share of the arm's requests that explore.
    pub explore: f64,
    /// Highest temperature of users' requests of the arm. `None`: they have no bound.
    pub temperature_max: Option<f64>,
    /// Lowest probability of a text that users of the arm are shown. `None`: they are shown all.
    pub probability_min: Option<f64>,
}

/// Why a request has no route. Each message says what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    #[error("no version of {0} serves yet; try again shortly")]
    NotReady(String),
    #[error("model {model:?} is not served here; ask for one of: {}", known.join(", "))]
    Unknown { model: String, known: Vec<String> },
    #[error("{model} is not resident on this replica; resident are: {}", loaded.join(", "))]
    NotLoaded { model: String, loaded: Vec<String> },
}

impl RouteTable {
    /// Puts an assignment in force. Versions that it does not name retire after their last request.
    pub fn apply(&self, assignment: Assignment, versions: BTreeMap<i64, Arc<LoadedVersion>>) {
        let new = Table {
            assignment: Some(assignment),
            versions,
        };
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let replaced = std::mem::replace(&mut *table, new);
        // free the old versions without holding the lock
        drop(table);
        drop(replaced);
    }

    /// Epoch of the assignment in force; 0: none yet.
    pub fn epoch(&self) -> i64 {
        self.read().assignment.as_ref().map_or(0, |assignment| assignment.epoch)
    }

    /// Whether requests can be answered.
    pub fn ready(&self) -> bool {
        self.read().assignment.is_some()
    }

    /// Every loaded version, with the aliases that name it.
    pub fn served(&self) -> Vec<(Arc<LoadedVersion>, Vec<String>)> {
        let table = self.read();
        let versions = table.versions.iter();
        versions
            .map(|(&serial, version)| (version.clone(), table.aliases_of(serial)))
            .collect()
    }

    /// The serials in force and the share of users that each has.
    pub fn shares(&self) -> Vec<(i64, f64)> {
        let table = self.read();
        let serials = table.versions.keys();
        serials.map(|&serial| (serial, table.share_of(serial))).collect()
    }

    /// The version that an alias names.
    pub fn serial_of(&self, alias: &str) -> Option<i64> {
        let table = self.read();
        let target = table.assignment.as_ref()?.aliases.get(alias)?;
        Some(target.version)
    }

    /// `policy`: the experiment decides by the user's key. `policy@alias` or `policy@serial`: that
    /// version.
    pub fn route(&self, policy: &str, model: &str, user_key: &str) -> Result<Route, RouteError> {
        let table = self.read();
        let not_ready = || RouteError::NotReady(policy.into());
        let assignment = table.assignment.as_ref().ok_or_else(not_ready)?;
        if model == policy {
            let (alias, probability) = assignment.arm_for(user_key);
            let target = assignment.aliases.get(alias).ok_or_else(not_ready)?;
            return Ok(Route {
                version: table.versions.get(&target.version).ok_or_else(not_ready)?.clone(),
                arm: alias.into(),
                probability,
                explore: assignment.explore_of(alias),
                temperature_max: assignment.temperature_max_of(alias),
                probability_min: assignment.probability_min_of(alias),
            });
        }
        let unknown = || RouteError::Unknown {
            model: model.into(),
            known: table.names(policy),
        };
        let name = model
            .strip_prefix(policy)
            .and_then(|rest| rest.strip_prefix('@'))
            .ok_or_else(unknown)?;
        // an alias begins with a letter, so it is never a serial
        let (serial, arm) = match name.parse() {
            Ok(serial) => (serial, format!("v{serial}")),
            Err(_) => (
                assignment.aliases.get(name).ok_or_else(unknown)?.version,
                name.to_owned(),
            ),
        };
        let version = table.versions.get(&serial).ok_or_else(|| RouteError::NotLoaded {
            model: model.into(),
            loaded: table.names(policy),
        })?;
        Ok(Route {
            version: version.clone(),
            explore: assignment.explore_of(&arm),
            temperature_max: assignment.temperature_max_of(&arm),
            probability_min: assignment.probability_min_of(&arm),
            arm,
            probability: 1.0,
        })
    }

    /// What answers a request of `champion` a second time, unseen. `draw` is uniform in [0, 1). `None`: nothing
    /// does, or this replica does not hold a version that reads the same tokens.
    pub fn shadow(&self, route: &Route, draw: f64) -> Option<Route> {
        let table = self.read();
        let assignment = table.assignment.as_ref()?;
        if route.arm != CHAMPION || draw >= assignment.shadow {
            return None;
        }
        let target = assignment.aliases.get(CANARY)?;
        let version = table.versions.get(&target.version)?;
        version.reads_like(&route.version).then(|| Route {
            version: version.clone(),
            arm: SHADOW.into(),
            probability: route.probability,
            explore: 0.0,
            // users of the canary will be users of champion
            temperature_max: route.temperature_max,
            probability_min: route.probability_min,
        })
    }

    fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn share_of(&self, serial: i64) -> f64 {
        let Some(assignment) = &self.assignment else {
            return 0.0;
        };
        let names = |alias: &str| {
            let target = assignment.aliases.get(alias);
            target.is_some_and(|target| target.version == serial)
        };
        if assignment.arms.is_empty() {
            return if names(CHAMPION) { 1.0 } else { 0.0 };
        }
        let arms = assignment.arms.iter().filter(|arm| names(&arm.alias));
        arms.map(|arm| arm.weight).sum()
    }

    fn aliases_of(&self, serial: i64) -> Vec<String> {
        let aliases = self.assignment.iter().flat_map(|assignment| &assignment.aliases);
        aliases
            .filter(|(_, target)| target.version == serial)
            .map(|(alias, _)| alias.clone())
            .collect()
    }

    /// Every model name that is answered now.
    fn names(&self, policy: &str) -> Vec<String> {
        let mut names = vec![policy.to_string()];
        for &serial in self.versions.keys() {
            names.extend(self.aliases_of(serial).iter().map(|alias| format!("{policy}@{alias}")));
            names.push(format!("{policy}@{serial}"));
        }
        names
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use artifact::assignment::{Arm, Target};
    use artifact::digest::Digest;
    use text::chat::{self, Templates};
    use time::macros::datetime;

    pub(crate) fn no_templates() -> Result<Arc<Templates>, Arc<chat::Error>> {
        let templates = Templates::from_checkpoint(&artifact::checkpoint::Checkpoint::default());
        templates.map(Arc::new).map_err(Arc::new)
    }

    pub(crate) fn version(serial: i64) -> Arc<LoadedVersion> {
        Arc::new(LoadedVersion {
            serial,
            root: Digest([serial as u8; 32]),
            line: "realtime".into(),
            adapts: None,
            context: 32,
            vocab: 50,
            stop_ids: vec![49],
            experts: None,
            decline_id: Some(48),
            tokenizer: None,
            reference: None,
            templates: no_templates(),
        })
    }

    pub(crate) fn assignment(epoch: i64, aliases: &[(&str, i64)], arms: &[(&str, f64)]) -> Assignment {
        Assignment {
            policy: "demo".into(),
            epoch,
            aliases: aliases
                .iter()
                .map(|(alias, version)| {
                    let target = Target {
                        version: *version,
                        root: Digest([*version as u8; 32]),
                    };
                    (alias.to_string(), target)
                })
                .collect(),
            arms: arms
                .iter()
                .map(|(alias, weight)| Arm {
                    alias: alias.to_string(),
                    weight: *weight,
                    explore: 0.0,
                    temperature_max: None,
                    probability_min: None,
                })
                .collect(),
            cluster_arms: BTreeMap::new(),
            shadow: 0.0,
            salt: String::new(),
            created_at: datetime!(2026-11-21 10:00 UTC),
        }
    }

    fn routes() -> RouteTable {
        let routes = RouteTable::default();
        routes.apply(
            assignment(
                3,
                &[("champion", 7), ("base", 1), ("candidate", 9)],
                &[("champion", 0.6), ("base", 0.4)],
            ),
            [1, 5, 7].into_iter().map(|serial| (serial, version(serial))).collect(),
        );
        routes
    }

    #[test]
    fn before_the_first_assignment_no_request_has_a_route() {
        let routes = RouteTable::default();
        assert!(!routes.ready());
        assert_eq!(
            routes.route("demo", "demo", "u").unwrap_err(),
            RouteError::NotReady("demo".into())
        );
    }

    #[test]
    fn users_stay_in_their_arm_and_arms_get_their_shares() {
        let routes = routes();
        let mut champions = 0;
        for user in 0..1000 {
            let key = format!("user-{user}");
            let route = routes.route("demo", "demo", &key).unwrap();
            assert_eq!(routes.route("demo", "demo", &key).unwrap().arm, route.arm);
            match route.arm.as_str() {
                "champion" => {
                    champions += 1;
                    assert_eq!((route.version.serial, route.probability), (7, 0.6));
                }
                "base" => assert_eq!((route.version.serial, route.probability), (1, 0.4)),
                other => panic!("arm {other}"),
            }
        }
        assert!((540..660).contains(&champions), "{champions} of 1000");
    }

    /// Over 10⁵ users under each of three salts, arms get what their logged probabilities say.
    #[test]
    fn logged_probabilities_are_the_shares_of_users() {
        let routes = RouteTable::default();
        let mut chi_square = 0.0;
        for salt in ["", "spring", "summer"] {
            let mut document = assignment(
                3,
                &[("learner", 7), ("champion", 5), ("base", 1)],
                &[("learner", 0.2), ("champion", 0.7), ("base", 0.1)],
            );
            document.salt = salt.into();
            routes.apply(
                document,
                [1, 5, 7].into_iter().map(|serial| (serial, version(serial))).collect(),
            );
            let mut users: BTreeMap<String, (f64, f64)> = BTreeMap::new();
            for user in 0..100_000 {
                let route = routes.route("demo", "demo", &format!("user-{user}")).unwrap();
                users.entry(route.arm).or_insert((0.0, route.probability)).0 += 1.0;
            }
            assert_eq!(users.len(), 3);
            let differ = |(count, probability): &(f64, f64)| {
                let expected = 100_000.0 * probability;
                (count - expected).powi(2) / expected
            };
            chi_square += users.values().map(differ).sum::<f64>();
        }
        println!("chi-square of 3 x 100000 users, 6 degrees of freedom: {chi_square:.2}");
        // exceeded once in 1000 draws; the users are fixed
        assert!(chi_square < 22.5, "{chi_square}");
    }

    #[test]
    fn a_share_of_champions_requests_is_answered_a_second_time() {
        let mut shadowed = assignment(
            4,
            &[("champion", 7), ("base", 1), ("canary", 5)],
            &[("champion", 0.6), ("base", 0.4)],
        );
        shadowed.shadow = 0.1;
        let routes = RouteTable::default();
        // all of one tokenizer and template
        let templates = no_templates();
        let of_line = |serial| {
            let mut version = Arc::into_inner(version(serial)).unwrap();
            version.templates = templates.clone();
            (serial, Arc::new(version))
        };
        routes.apply(shadowed.clone(), [1, 5, 7].map(of_line).into());
        let of = |model: &str, draw| {
            let route = routes.route("demo", model, "u").unwrap();
            routes
                .shadow(&route, draw)
                .map(|route| (route.version.serial, route.arm))
        };
        assert_eq!(of("demo@champion", 0.05), Some((5, "shadow".into())));
        assert_eq!(of("demo@champion", 0.1), None);
        assert_eq!(of("demo@base", 0.05), None);
        assert_eq!(of("demo@7", 0.05), None, "asked for by number");
        routes.apply(shadowed, [1, 5, 7].map(|serial| (serial, version(serial))).into());
        let route = routes.route("demo", "demo@champion", "u").unwrap();
        assert!(routes.shadow(&route, 0.05).is_none(), "it reads other tokens");
    }

    #[test]
    fn a_version_has_the_share_of_its_arms() {
        let routes = routes();
        assert_eq!(routes.shares(), [(1, 0.4), (5, 0.0), (7, 0.6)]);
        routes.apply(assignment(4, &[("champion", 7)], &[]), [(7, version(7))].into());
        assert_eq!(routes.shares(), [(7, 1.0)]);
    }

    #[test]
    fn an_alias_or_a_version_is_served_when_requested_by_name() {
        let routes = routes();
        let route = |model: &str| {
            routes
                .route("demo", model, "u")
                .map(|r| (r.version.serial, r.arm, r.probability))
        };
        assert_eq!(route("demo@base"), Ok((1, "base".into(), 1.0)));
        assert_eq!(route("demo@5"), Ok((5, "v5".into(), 1.0)));
        assert_eq!(route("demo@7"), Ok((7, "v7".into(), 1.0)));
    }

    #[test]
    fn an_arm_explores_however_it_is_requested_but_a_version_by_serial_never_does() {
        let routes = RouteTable::default();
        let mut assignment = assignment(3, &[("champion", 7), ("base", 1)], &[("champion", 1.0), ("base", 0.0)]);
        assignment.arms[0].explore = 0.02;
        routes.apply(
            assignment,
            [1, 7].into_iter().map(|serial| (serial, version(serial))).collect(),
        );
        let explore = |model: &str| routes.route("demo", model, "u").unwrap().explore;
        assert_eq!((explore("demo"), explore("demo@champion")), (0.02, 0.02));
        assert_eq!((explore("demo@base"), explore("demo@7")), (0.0, 0.0));
    }

    #[test]
    fn an_arm_has_its_bounds_however_it_is_requested_but_a_version_by_serial_has_none() {
        let routes = RouteTable::default();
        let mut assignment = assignment(
            3,
            &[("champion", 7), ("base", 1), ("canary", 5)],
            &[("champion", 1.0), ("base", 0.0)],
        );
        assignment.arms[0].temperature_max = Some(0.3);
        assignment.arms[0].probability_min = Some(0.25);
        assignment.shadow = 1.0;
        let templates = no_templates();
        let of_line = |serial| {
            let mut version = Arc::into_inner(version(serial)).unwrap();
            version.templates = templates.clone();
            (serial, Arc::new(version))
        };
        routes.apply(assignment, [1, 5, 7].map(of_line).into());
        let route = |model: &str| routes.route("demo", model, "u").unwrap();
        let bounds = |route: &Route| (route.temperature_max, route.probability_min);
        let both = (Some(0.3), Some(0.25));
        for (model, expected) in [
            ("demo", both),
            ("demo@champion", both),
            ("demo@base", (None, None)),
            ("demo@7", (None, None)),
        ] {
            assert_eq!(bounds(&route(model)), expected, "{model}");
        }
        let unseen = routes.shadow(&route("demo"), 0.5).unwrap();
        assert_eq!((unseen.version.serial, bounds(&unseen)), (5, both));
    }

    #[test]
    fn an_unknown_model_is_refused_with_the_names_that_are_served() {
        let routes = routes();
        let refused = |model: &str| routes.route("demo", model, "u").unwrap_err();
        assert!(matches!(refused("gpt-4"), RouteError::Unknown { .. }));
        assert!(matches!(refused("demo@ghost"), RouteError::Unknown { .. }));
        assert!(matches!(refused("demolition"), RouteError::Unknown { .. }));
        assert!(matches!(refused("demo@candidate"), RouteError::NotLoaded { .. }));
        let message = refused("demo@4").to_string();
        assert!(message.contains("demo@champion, demo@7"), "{message}");
    }

    #[test]
    fn a_version_without_alias_lives_as_long_as_its_last_route() {
        let routes = routes();
        let route = routes.route("demo", "demo@5", "u").unwrap();
        let weak = Arc::downgrade(&route.version);
        routes.apply(assignment(4, &[("champion", 7)], &[]), [(7, version(7))].into());
        assert_eq!(routes.epoch(), 4);
        assert!(weak.upgrade().is_some());
        drop(route);
        assert!(weak.upgrade().is_none());
    }
}
