//! Whose requests they are, and how many each caller has. Places in the queue and slots are shared
//! between tenants, and within a tenant between its keys, so a tenant gains nothing from more keys.
//! Rollouts and evaluations of a run share as the run, whatever keys ask for them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use uuid::Uuid;

/// Ordered by tenant, so that the callers of a tenant are neighbors.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Caller {
    tenant: Arc<str>,
    /// `None`: all callers of the tenant, where no key is needed.
    key: Option<Uuid>,
    work: Work,
}

/// What a sequence is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    #[default]
    Production,
    /// Of this run, if any.
    Rollout(Option<Uuid>),
    Evaluation(Option<Uuid>),
}

impl Work {
    pub fn run(self) -> Option<Uuid> {
        match self {
            Work::Production => None,
            Work::Rollout(run) | Work::Evaluation(run) => run,
        }
    }

    pub fn without_run(self) -> Self {
        match self {
            Work::Production => Work::Production,
            Work::Rollout(_) => Work::Rollout(None),
            Work::Evaluation(_) => Work::Evaluation(None),
        }
    }
}

impl Caller {
    pub fn new(tenant: &str, key: Option<Uuid>) -> Self {
        let tenant = tenant.into();
        let work = Work::Production;
        Self { tenant, key, work }
    }

    /// For rollouts and evaluations: what a run asks for is the run's, not a key's.
    pub fn working_on(self, work: Work) -> Self {
        let key = self.key.filter(|_| work.run().is_none());
        Self { key, work, ..self }
    }

    pub fn work(&self) -> Work {
        self.work
    }

    pub fn tenant(&self) -> &Arc<str> {
        &self.tenant
    }
}

/// How many of something each caller has, and each tenant. Who has none is absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    callers: BTreeMap<Caller, usize>,
    tenants: BTreeMap<Arc<str>, usize>,
}

impl Tally {
    pub fn add(&mut self, caller: &Caller) {
        *self.callers.entry(caller.clone()).or_default() += 1;
        *self.tenants.entry(caller.tenant.clone()).or_default() += 1;
    }

    pub fn remove(&mut self, caller: &Caller) {
        decrement(&mut self.callers, caller);
        decrement(&mut self.tenants, &caller.tenant);
    }

    pub fn all(&self) -> usize {
        self.tenants.values().sum()
    }

    /// What the caller's tenant has, and what the caller has.
    pub fn of(&self, caller: &Caller) -> (usize, usize) {
        let tenant = self.tenants.get(&caller.tenant).copied().unwrap_or(0);
        (tenant, self.callers.get(caller).copied().unwrap_or(0))
    }

    /// The tenant that has most, and of its callers the one that has most.
    pub fn greediest(&self) -> Option<&Caller> {
        let (tenant, _) = self.tenants.iter().max_by_key(|(_, count)| **count)?;
        self.greediest_of(tenant)
    }

    /// From whom one goes to `newcomer`, so that shares become more equal. `None`: nobody has two
    /// more than it. Compares tenants first, then the callers of its own tenant.
    pub fn gives_to(&self, newcomer: &Caller) -> Option<&Caller> {
        let (own_tenant, own) = self.of(newcomer);
        let greediest = self.greediest()?;
        if self.of(greediest).0 >= own_tenant + 2 {
            return Some(greediest);
        }
        self.greediest_of(&newcomer.tenant)
            .filter(|greediest| self.of(greediest).1 >= own + 2)
    }

    fn greediest_of(&self, tenant: &Arc<str>) -> Option<&Caller> {
        // `None` is the smallest key
        let first = Caller {
            tenant: tenant.clone(),
            key: None,
            work: Work::Production,
        };
        let callers = self.callers.range(first..);
        let callers = callers.take_while(|(caller, _)| caller.tenant == *tenant);
        callers.max_by_key(|(_, count)| **count).map(|(caller, _)| caller)
    }
}

/// When callers, and tenants, last had their turn. Whoever had none, or a long time ago, is absent.
#[derive(Debug, Default)]
pub struct Turns {
    count: u64,
    callers: BTreeMap<Caller, u64>,
    tenants: BTreeMap<Arc<str>, u64>,
}

impl Turns {
    pub fn note(&mut self, caller: &Caller) {
        self.count += 1;
        self.callers.insert(caller.clone(), self.count);
        self.tenants.insert(caller.tenant.clone(), self.count);
    }

    /// How many callers are remembered.
    pub fn remembered(&self) -> usize {
        self.callers.len()
    }

    /// Forgets the others, and tenants without a caller that is kept.
    pub fn keep_only(&mut self, mut kept: impl FnMut(&Caller) -> bool) {
        self.callers.retain(|caller, _| kept(caller));
        let tenants: BTreeSet<&Arc<str>> = self.callers.keys().map(|caller| &caller.tenant).collect();
        self.tenants.retain(|tenant, _| tenants.contains(tenant));
    }

    /// Of the caller's tenant, and of the caller; 0: none.
    pub fn of(&self, caller: &Caller) -> (u64, u64) {
        let tenant = self.tenants.get(&caller.tenant).copied().unwrap_or(0);
        (tenant, self.callers.get(caller).copied().unwrap_or(0))
    }
}

fn decrement<K: Ord>(counts: &mut BTreeMap<K, usize>, of: &K) {
    if let Some(count) = counts.get_mut(of) {
        *count -= 1;
        if *count == 0 {
            counts.remove(of);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(tenant: &str, key: u128) -> Caller {
        Caller::new(tenant, Some(Uuid::from_u128(key)))
    }

    fn tally(counts: &[(&str, u128, usize)]) -> Tally {
        let mut tally = Tally::default();
        for (tenant, key, count) in counts {
            for _ in 0..*count {
                tally.add(&caller(tenant, *key));
            }
        }
        tally
    }

    #[test]
    fn the_tenant_that_has_most_gives_and_there_the_key_that_has_most() {
        // a tenant with one key, and one that has more over three keys
        let tally = tally(&[("a", 1, 5), ("b", 1, 2), ("b", 2, 4), ("b", 3, 1)]);
        assert_eq!(tally.greediest(), Some(&caller("b", 2)));
        assert_eq!(tally.gives_to(&caller("c", 1)), Some(&caller("b", 2)));
        assert_eq!(tally.gives_to(&caller("a", 1)), Some(&caller("b", 2)), "7 to 5");
        assert_eq!(
            tally.gives_to(&caller("b", 3)),
            Some(&caller("b", 2)),
            "within the tenant"
        );
        assert_eq!(tally.gives_to(&caller("b", 2)), None);
    }

    #[test]
    fn shares_that_differ_by_one_stay() {
        let tally = tally(&[("a", 1, 2), ("b", 1, 1)]);
        assert_eq!(tally.gives_to(&caller("b", 1)), None);
        assert_eq!(tally.gives_to(&caller("a", 2)), Some(&caller("a", 1)));
        assert_eq!(Tally::default().gives_to(&caller("a", 1)), None);
    }

    #[test]
    fn what_was_added_and_removed_leaves_nothing() {
        let mut tally = tally(&[("a", 1, 2), ("b", 1, 1)]);
        for one in [caller("a", 1), caller("b", 1), caller("a", 1)] {
            tally.remove(&one);
        }
        assert_eq!(tally, Tally::default());
    }
}
