//! Which version answers a request: the assignment in force and the versions that are resident. The follower writes it,
//! the API reads it; a flip is one pointer under a short lock. Holding a route keeps its version resident.

use crate::engine::Version;
use policy::assignment::Assignment;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

/// The routing of one replica.
#[derive(Debug, Default)]
pub struct Routing(RwLock<Table>);

#[derive(Debug, Default)]
struct Table {
    /// None until the first assignment is applied.
    assignment: Option<Assignment>,
    versions: BTreeMap<i64, Arc<Version>>,
}

/// Where a request goes.
#[derive(Debug, Clone)]
pub struct Route {
    pub version: Arc<Version>,
    /// The alias that answers; `v<serial>` where a version was asked for that no alias names.
    pub arm: String,
    /// With which this user was put in that arm, (0, 1].
    pub probability: f64,
    /// Share of the arm's requests that explore.
    pub explore: f64,
}

/// Why a request goes nowhere. Each says what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoRoute {
    #[error("no version of {0} serves yet; ask again shortly")]
    NotReady(String),
    #[error("model {model:?} is not served here; ask for one of: {}", known.join(", "))]
    Unknown { model: String, known: Vec<String> },
    #[error("{model} is not resident on this replica; resident are: {}", resident.join(", "))]
    NotResident { model: String, resident: Vec<String> },
}

/// One resident version, as shown to people.
#[derive(Debug, Clone)]
pub struct Resident {
    pub version: Arc<Version>,
    /// Aliases that name it.
    pub aliases: Vec<String>,
}

impl Routing {
    /// Puts an assignment in force. Versions that it leaves out leave with their last request.
    pub fn apply(&self, assignment: Assignment, versions: BTreeMap<i64, Arc<Version>>) {
        let fresh = Table {
            assignment: Some(assignment),
            versions,
        };
        let old = {
            let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *table, fresh)
        };
        drop(old);
    }

    /// Epoch of the assignment in force; 0: none yet.
    pub fn epoch(&self) -> i64 {
        self.read().assignment.as_ref().map_or(0, |a| a.epoch)
    }

    /// Whether users can be answered.
    pub fn ready(&self) -> bool {
        self.read().assignment.is_some()
    }

    /// Every resident version that requests are routed to.
    pub fn residents(&self) -> Vec<Resident> {
        let table = self.read();
        table
            .versions
            .values()
            .map(|version| Resident {
                version: version.clone(),
                aliases: table.aliases_of(version.serial),
            })
            .collect()
    }

    /// `policy`: the experiment decides, by the user's key. `policy@alias`, `policy@serial`: that one.
    pub fn route(&self, policy: &str, model: &str, user_key: &str) -> Result<Route, NoRoute> {
        let table = self.read();
        let Some(assignment) = &table.assignment else {
            return Err(NoRoute::NotReady(policy.into()));
        };
        if model == policy {
            let (alias, probability) = assignment.arm_for(user_key);
            let target = assignment.aliases.get(alias);
            let version = target.and_then(|target| table.versions.get(&target.version));
            return match version {
                Some(version) => Ok(Route {
                    version: version.clone(),
                    arm: alias.into(),
                    probability,
                    explore: assignment.explore_of(alias),
                }),
                None => Err(NoRoute::NotReady(policy.into())),
            };
        }
        let name = model
            .strip_prefix(policy)
            .and_then(|rest| rest.strip_prefix('@'))
            .ok_or_else(|| NoRoute::Unknown {
                model: model.into(),
                known: table.names(policy),
            })?;
        let serial = match name.parse::<i64>() {
            Ok(serial) => serial,
            Err(_) => {
                let target = assignment.aliases.get(name).ok_or_else(|| NoRoute::Unknown {
                    model: model.into(),
                    known: table.names(policy),
                })?;
                target.version
            }
        };
        let version = table.versions.get(&serial).ok_or_else(|| NoRoute::NotResident {
            model: model.into(),
            resident: table.names(policy),
        })?;
        let arm = if assignment.aliases.contains_key(name) {
            name.to_string()
        } else {
            format!("v{serial}")
        };
        Ok(Route {
            version: version.clone(),
            explore: assignment.explore_of(&arm),
            arm,
            probability: 1.0,
        })
    }

    /// Every model name that is answered now.
    pub fn names(&self, policy: &str) -> Vec<String> {
        self.read().names(policy)
    }

    fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn aliases_of(&self, serial: i64) -> Vec<String> {
        self.assignment
            .iter()
            .flat_map(|assignment| &assignment.aliases)
            .filter(|(_, target)| target.version == serial)
            .map(|(alias, _)| alias.clone())
            .collect()
    }

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
    use policy::assignment::{Arm, Target};
    use policy::digest::Digest;
    use time::macros::datetime;

    pub(crate) fn version(serial: i64) -> Arc<Version> {
        Arc::new(Version {
            serial,
            root: Digest([serial as u8; 32]),
            line: "realtime".into(),
            context: 32,
            vocab: 50,
            stop_ids: vec![49],
            experts: None,
            decline_id: Some(48),
            tokenizer: None,
            templates: crate::engine::templates::Rendering::from_image(&policy::image::Image::default()),
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
                })
                .collect(),
            created_at: datetime!(2026-11-21 10:00 UTC),
        }
    }

    fn routing() -> Routing {
        let routing = Routing::default();
        routing.apply(
            assignment(
                3,
                &[("champion", 7), ("base", 1), ("candidate", 9)],
                &[("champion", 0.6), ("base", 0.4)],
            ),
            [1, 5, 7].into_iter().map(|serial| (serial, version(serial))).collect(),
        );
        routing
    }

    #[test]
    fn before_the_first_assignment_nobody_is_served() {
        let routing = Routing::default();
        assert!(!routing.ready());
        assert_eq!(
            routing.route("demo", "demo", "u").unwrap_err(),
            NoRoute::NotReady("demo".into())
        );
    }

    #[test]
    fn users_stay_in_their_arm_and_the_arms_have_their_shares() {
        let routing = routing();
        let mut champions = 0;
        for user in 0..1000 {
            let key = format!("user-{user}");
            let route = routing.route("demo", "demo", &key).unwrap();
            assert_eq!(routing.route("demo", "demo", &key).unwrap().arm, route.arm);
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

    #[test]
    fn an_alias_or_a_version_is_served_when_asked_for_by_name() {
        let routing = routing();
        let route = |model: &str| {
            routing
                .route("demo", model, "u")
                .map(|r| (r.version.serial, r.arm, r.probability))
        };
        assert_eq!(route("demo@base"), Ok((1, "base".into(), 1.0)));
        assert_eq!(route("demo@5"), Ok((5, "v5".into(), 1.0)));
        assert_eq!(route("demo@7"), Ok((7, "v7".into(), 1.0)));
    }

    #[test]
    fn an_arm_explores_however_it_was_asked_for_and_a_version_by_its_serial_does_not() {
        let routing = Routing::default();
        let mut assignment = assignment(3, &[("champion", 7), ("base", 1)], &[("champion", 1.0), ("base", 0.0)]);
        assignment.arms[0].explore = 0.02;
        routing.apply(
            assignment,
            [1, 7].into_iter().map(|serial| (serial, version(serial))).collect(),
        );
        let explore = |model: &str| routing.route("demo", model, "u").unwrap().explore;
        assert_eq!((explore("demo"), explore("demo@champion")), (0.02, 0.02));
        assert_eq!((explore("demo@base"), explore("demo@7")), (0.0, 0.0));
    }

    #[test]
    fn what_is_not_here_is_refused_with_what_is() {
        let routing = routing();
        let refused = |model: &str| routing.route("demo", model, "u").unwrap_err();
        assert!(matches!(refused("gpt-4"), NoRoute::Unknown { .. }));
        assert!(matches!(refused("demo@ghost"), NoRoute::Unknown { .. }));
        assert!(matches!(refused("demolition"), NoRoute::Unknown { .. }));
        assert!(matches!(refused("demo@candidate"), NoRoute::NotResident { .. }));
        let said = refused("demo@4").to_string();
        assert!(said.contains("demo@champion, demo@7"), "{said}");
    }

    #[test]
    fn a_version_that_is_left_out_lives_as_long_as_its_last_route() {
        let routing = routing();
        let route = routing.route("demo", "demo@5", "u").unwrap();
        let weak = Arc::downgrade(&route.version);
        routing.apply(assignment(4, &[("champion", 7)], &[]), [(7, version(7))].into());
        assert_eq!(routing.epoch(), 4);
        assert!(weak.upgrade().is_some());
        drop(route);
        assert!(weak.upgrade().is_none());
    }
}
