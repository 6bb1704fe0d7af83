//! How much one user may weigh in what a policy is trained on. A caller who sends twenty times as
//! much as others, or a load test, must not choose the direction of the steps.
//!
//! Over the newest [`Caps::window`] trained trajectories, the cohort that fills included, a user
//! has at most `user_share_max`, or twice an equal share if that is more. Tenants and surfaces have
//! caps of the same form. What is above a cap is dropped with a code, so it waits for nothing.
//! A user is a pair of tenant and user key.
//!
//! Pure. [`super::next`] drops what users at their cap have sent before it is read;
//! [`Recent::admit`] decides one by one about the rest.

use serde::{Deserialize, Serialize};
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// `[trainer.realtime.caps]`: the largest shares of the newest trained trajectories.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Caps {
    /// Trained trajectories that shares are computed over; default 2000.
    pub window: u32,
    /// Of one user, or twice an equal share if that is more; default 0.005. 1: no cap.
    pub user_share_max: f64,
    /// Of one tenant, or twice an equal share if that is more; default 0.5. 1: no cap.
    pub tenant_share_max: f64,
    /// Of one surface, or twice an equal share if that is more; default 0.5. 1: no cap.
    pub surface_share_max: f64,
}

impl Default for Caps {
    fn default() -> Self {
        Caps {
            window: 2000,
            user_share_max: 0.005,
            tenant_share_max: 0.5,
            surface_share_max: 0.5,
        }
    }
}

impl Caps {
    /// Refuses values that cannot work. The text begins with the field.
    pub fn check(&self) -> Result<(), &'static str> {
        let share = |share: f64| share > 0.0 && share <= 1.0;
        let rules = [
            (self.window >= 1, "window must be at least 1"),
            (
                share(self.user_share_max),
                "user_share_max must be above 0 and at most 1",
            ),
            (
                share(self.tenant_share_max),
                "tenant_share_max must be above 0 and at most 1",
            ),
            (
                share(self.surface_share_max),
                "surface_share_max must be above 0 and at most 1",
            ),
        ];
        rules
            .iter()
            .find(|(holds, _)| !holds)
            .map_or(Ok(()), |(_, why)| Err(*why))
    }
}

/// Where a trajectory comes from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Contributor {
    pub tenant: String,
    pub user: String,
    pub surface: String,
}

impl Contributor {
    fn user(&self) -> (String, String) {
        (self.tenant.clone(), self.user.clone())
    }
}

/// Who has reached a cap.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Exhausted {
    /// Tenants of `users`, in their order.
    pub user_tenants: Vec<String>,
    pub users: Vec<String>,
    pub tenants: Vec<String>,
    pub surfaces: Vec<String>,
}

/// The newest trained trajectories, and those that have joined the coming cohort.
#[derive(Debug)]
pub struct Recent {
    caps: Caps,
    /// Newest first.
    window: VecDeque<Contributor>,
    users: Counts<(String, String)>,
    tenants: Counts<String>,
    surfaces: Counts<String>,
}

impl Recent {
    /// `newest_first`: what has been trained on.
    pub fn new(caps: Caps, newest_first: impl IntoIterator<Item = Contributor>) -> Self {
        let mut recent = Recent {
            caps,
            window: VecDeque::new(),
            users: Counts::default(),
            tenants: Counts::default(),
            surfaces: Counts::default(),
        };
        for one in newest_first.into_iter().take(caps.window as usize) {
            recent.count(&one);
            recent.window.push_back(one);
        }
        recent
    }

    /// Adds a trajectory to the cohort. An error is the code of the cap that it would exceed.
    pub fn admit(&mut self, one: Contributor) -> Result<(), &'static str> {
        let leaving = self.leaving();
        let Caps {
            user_share_max,
            tenant_share_max,
            surface_share_max,
            ..
        } = self.caps;
        let size = self.size_after();
        let leaves = leaving.map(Contributor::user);
        if !self.users.has_room(&one.user(), leaves.as_ref(), size, user_share_max) {
            return Err("capped_user");
        }
        let leaves = leaving.map(|leaving| &leaving.tenant);
        if !self.tenants.has_room(&one.tenant, leaves, size, tenant_share_max) {
            return Err("capped_tenant");
        }
        let leaves = leaving.map(|leaving| &leaving.surface);
        if !self.surfaces.has_room(&one.surface, leaves, size, surface_share_max) {
            return Err("capped_surface");
        }
        if self.leaving().is_some()
            && let Some(leaving) = self.window.pop_back()
        {
            self.users.remove(&leaving.user());
            self.tenants.remove(&leaving.tenant);
            self.surfaces.remove(&leaving.surface);
        }
        self.count(&one);
        self.window.push_front(one);
        Ok(())
    }

    /// Who has no room for another trajectory now.
    pub fn exhausted(&self) -> Exhausted {
        let (leaving, size) = (self.leaving(), self.size_after());
        let leaves = leaving.map(Contributor::user);
        let users = self.users.without_room(leaves.as_ref(), size, self.caps.user_share_max);
        let (user_tenants, users) = users.into_iter().unzip();
        let leaves = leaving.map(|leaving| &leaving.tenant);
        let tenants = self.tenants.without_room(leaves, size, self.caps.tenant_share_max);
        let leaves = leaving.map(|leaving| &leaving.surface);
        Exhausted {
            user_tenants,
            users,
            tenants,
            surfaces: self.surfaces.without_room(leaves, size, self.caps.surface_share_max),
        }
    }

    /// The share of the heaviest user.
    pub fn largest_user_share(&self) -> f64 {
        let largest = self.users.0.values().copied().max().unwrap_or(0);
        largest as f64 / self.window.len().max(1) as f64
    }

    /// How many users there are.
    pub fn users(&self) -> usize {
        self.users.0.len()
    }

    fn count(&mut self, one: &Contributor) {
        self.users.add(one.user());
        self.tenants.add(one.tenant.clone());
        self.surfaces.add(one.surface.clone());
    }

    /// What leaves the window if one more joins.
    fn leaving(&self) -> Option<&Contributor> {
        self.window
            .back()
            .filter(|_| self.window.len() >= self.caps.window as usize)
    }

    fn size_after(&self) -> usize {
        (self.window.len() + 1).min(self.caps.window as usize)
    }
}

/// Trajectories by key.
#[derive(Debug)]
struct Counts<K>(HashMap<K, usize>);

impl<K> Default for Counts<K> {
    fn default() -> Self {
        Counts(HashMap::new())
    }
}

impl<K: Hash + Eq + Clone> Counts<K> {
    fn add(&mut self, key: K) {
        *self.0.entry(key).or_default() += 1;
    }

    fn remove(&mut self, key: &K) {
        if let Some(count) = self.0.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(key);
            }
        }
    }

    /// Whether `key` stays within its cap with one more, when `leaving` leaves and the window then
    /// has `size` trajectories. One trajectory is always allowed, or nothing could begin.
    fn has_room(&self, key: &K, leaving: Option<&K>, size: usize, share_max: f64) -> bool {
        let count = |key: &K| self.0.get(key).copied().unwrap_or(0);
        let mut keys = self.0.len() + usize::from(count(key) == 0);
        let mut after = count(key) + 1;
        if let Some(leaving) = leaving {
            match leaving == key {
                true => after -= 1,
                false => keys -= usize::from(count(leaving) == 1),
            }
        }
        let share = share_max.max(2.0 / keys as f64);
        after <= 1 || after as f64 <= share * size as f64 + 1e-9
    }

    fn without_room(&self, leaving: Option<&K>, size: usize, share_max: f64) -> Vec<K> {
        let keys = self.0.keys();
        keys.filter(|key| !self.has_room(key, leaving, size, share_max))
            .cloned()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(user: &str) -> Contributor {
        Contributor {
            tenant: "default".into(),
            user: user.into(),
            surface: "completion".into(),
        }
    }

    fn admitted(recent: &mut Recent, users: impl Iterator<Item = String>) -> HashMap<String, usize> {
        let mut admitted = HashMap::new();
        for user in users {
            if recent.admit(from(&user)).is_ok() {
                *admitted.entry(user).or_default() += 1;
            }
        }
        admitted
    }

    #[test]
    fn one_or_two_users_have_no_cap_and_a_third_makes_one() {
        let mut recent = Recent::new(Caps::default(), []);
        for _ in 0..50 {
            recent.admit(from("a")).unwrap();
            recent.admit(from("b")).unwrap();
        }
        assert_eq!(recent.exhausted(), Exhausted::default());
        recent.admit(from("c")).unwrap();
        // two thirds of 102 are 68
        for _ in 0..18 {
            recent.admit(from("a")).ok();
        }
        for _ in 0..200 {
            recent.admit(from("a")).ok();
        }
        let share = recent.users.0[&from("a").user()] as f64 / recent.window.len() as f64;
        assert!(share <= 2.0 / 3.0 + 1e-9, "{share}");
    }

    #[test]
    fn a_user_who_sends_much_more_than_others_weighs_no_more_than_the_cap() {
        // 300 users in turn; the first 3, 6 or 15 (1, 2, 5%) send as much as the others or 20 times
        // as much
        for (attackers, factor) in [(3, 1), (3, 20), (6, 1), (6, 20), (15, 1), (15, 20)] {
            let mut recent = Recent::new(Caps::default(), []);
            let users = (0..40).flat_map(|_| {
                (0..300).flat_map(move |n| {
                    let times = if n < attackers { factor } else { 1 };
                    (0..times).map(move |_| format!("user-{n}"))
                })
            });
            let admitted = admitted(&mut recent, users);
            let allowed = 2000.0 * f64::max(0.005, 2.0 / recent.users() as f64);
            for (user, count) in &recent.users.0 {
                assert!(*count as f64 <= allowed + 1e-9, "{user:?}: {count} above {allowed}");
            }
            // the honest ones are all trained on, as often as they ask
            let honest = (attackers..300).map(|n| admitted[&format!("user-{n}")]).min();
            assert!(honest >= Some(38), "{honest:?}");
            let weight: usize = (0..attackers)
                .filter_map(|n| recent.users.0.get(&from(&format!("user-{n}")).user()))
                .sum();
            assert!(
                weight as f64 / 2000.0 <= 2.0 * attackers as f64 / 300.0 + 1e-9,
                "{weight}"
            );
        }
    }

    #[test]
    fn a_tenant_and_a_surface_among_several_have_caps_too() {
        let mut recent = Recent::new(Caps::default(), []);
        let mut refused = HashMap::new();
        for n in 0..4000 {
            let one = Contributor {
                tenant: if n % 10 < 6 {
                    "large".into()
                } else {
                    format!("small-{}", n % 10)
                },
                user: format!("user-{}", n % 1000),
                surface: if n % 10 < 8 {
                    "chat".into()
                } else {
                    format!("other-{}", n % 4)
                },
            };
            if let Err(code) = recent.admit(one) {
                *refused.entry(code).or_insert(0) += 1;
            }
        }
        assert!(
            refused["capped_tenant"] > 0 || refused["capped_surface"] > 0,
            "{refused:?}"
        );
        for (name, counts) in [("tenant", &recent.tenants), ("surface", &recent.surfaces)] {
            let largest = counts.0.values().max().copied().unwrap_or(0) as f64;
            let share = f64::max(0.5, 2.0 / counts.0.len() as f64);
            assert!(largest <= share * recent.window.len() as f64 + 1.0, "{name}: {largest}");
        }
    }

    #[test]
    fn who_has_left_the_window_has_room_again() {
        let caps = Caps {
            window: 10,
            user_share_max: 0.2,
            ..Caps::default()
        };
        let others = (0..8).map(|n| from(&format!("other-{n}")));
        let mut recent = Recent::new(caps, others.chain([from("a"), from("a")]));
        // nine users: 2/9 of 10 are 2; the oldest, which leaves, is one of a's own
        recent.admit(from("a")).unwrap();
        recent.admit(from("a")).unwrap();
        assert_eq!(recent.admit(from("a")), Err("capped_user"));
        assert_eq!(recent.exhausted().users, ["a"]);
        for n in 0..10 {
            recent.admit(from(&format!("new-{n}"))).unwrap();
        }
        assert_eq!(recent.exhausted().users, [""; 0]);
        recent.admit(from("a")).unwrap();
    }
}
