//! How much one user may weigh in what a policy is trained on. A caller who sends twenty times as
//! much as others, or a load test, must not choose the direction of the steps.
//!
//! Over the newest [`Caps::window`] trajectories that were trained on in the last week, the cohort
//! that fills included, a user has at most the share `user_share_max` of the trajectories and of their
//! trained tokens, or twice as many as a typical user if that is more. Tokens are what the loss sums
//! up, and trajectories are what it divides by. Tenants, surfaces and replicas have caps of the same
//! form. What is above a cap is dropped with a code, so it waits for nothing. A user is a pair of
//! tenant and user key.
//!
//! An episode is one trajectory, however many turns it has. If only some of its turns fit, those are
//! trained on.
//!
//! A cap must not stop learning, and must not serve whoever invents keys:
//! - The *typical* user is found by weight: the lightest users who together have two fifths of the
//!   window are light, and the heaviest of them is typical. So users who are new or send little lower
//!   nobody's cap, however many they are, until they have two fifths together. Heavy users raise it
//!   only if they have more than three fifths.
//! - Somebody whose share leaves less than that to the others is the main source, and has no cap. It
//!   can only come to that share before there are others, because it has a cap later.
//! - There is no cap while others have less than a tenth of a window. So when they are gone, the one
//!   who is left is held back for a week at most.
//! - Requests without a user are one user together.
//! - One generation of a key that has nothing in the window is always allowed.
//!
//! Pure. [`super::next`] drops what users at their cap have sent before it is read;
//! [`Recent::fitting`] decides one by one about the rest.

use crate::sample::Sample;
use edge::options::above_to;
use event_log::event::ANONYMOUS_USER_PREFIX;
use std::collections::{BTreeMap, HashMap};
use time::{Duration, OffsetDateTime};

/// What was trained on longer ago does not count.
pub const MEMORY: Duration = Duration::days(7);
/// Generations that the trajectories of a window have on average at most; else the window is shorter.
/// So its rows are read in bounded time.
const GENERATIONS_PER_TRAJECTORY_MAX: usize = 64;
/// Share of the window that the light keys have together.
const LIGHT_SHARE: f64 = 0.4;
/// How many times as heavy as a typical key another may be.
const TIMES_TYPICAL: f64 = 2.0;
/// Part of the window that others must have before a key has a cap.
const OTHERS_MIN: f64 = 0.1;

edge::options! {
    /// `[trainer.realtime.caps]`: the largest shares of the newest trained trajectories, and of their
    /// trained tokens.
    #[derive(Copy)]
    pub struct Caps {
        /// Trained trajectories that shares are computed over.
        pub window: u32 = 2000 => 1..,
        /// Of one user, or twice a typical user's share if that is more. Trajectories, or turns of
        /// them, above it are dropped. 1: no cap.
        pub user_share_max: f64 = 0.005 => above_to(0.0, 1.0),
        /// Of one tenant, or twice a typical tenant's share if that is more. 1: no cap.
        pub tenant_share_max: f64 = 0.5 => above_to(0.0, 1.0),
        /// Of one surface, or twice a typical surface's share if that is more. 1: no cap.
        pub surface_share_max: f64 = 0.5 => above_to(0.0, 1.0),
        /// Of one replica, or twice a typical replica's share if that is more. 1: no cap.
        pub replica_share_max: f64 = 0.5 => above_to(0.0, 1.0),
    }
}

impl Caps {
    /// The largest number of generations that a window has.
    pub fn generations_max(&self) -> usize {
        GENERATIONS_PER_TRAJECTORY_MAX * self.window as usize
    }
}

/// Where a trajectory comes from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Contributor {
    pub tenant: String,
    pub user: String,
    pub surface: String,
    pub replica: String,
}

impl Contributor {
    /// Of a trajectory's generations: each name is the one that most of them have (as `trained.sql`
    /// says).
    pub fn of(turns: &[&Sample]) -> Self {
        let most = |name: fn(&Sample) -> &String| {
            let mut counts: BTreeMap<&String, usize> = BTreeMap::new();
            for turn in turns {
                *counts.entry(name(turn)).or_default() += 1;
            }
            // of those with equal counts the first by name
            let most = counts.into_iter().rev().max_by_key(|(_, count)| *count);
            most.map_or_else(String::new, |(name, _)| name.clone())
        };
        Contributor {
            tenant: most(|sample| &sample.tenant),
            user: most(|sample| &sample.user),
            surface: most(|sample| &sample.class),
            replica: most(|sample| &sample.replica),
        }
    }
}

/// A trajectory in the window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub from: Contributor,
    /// How many of its generations are trained on.
    pub generations: usize,
    /// Their trained tokens. A generation without any counts as one token.
    pub tokens: usize,
}

impl Member {
    fn amounts(&self) -> Amounts {
        [1, self.tokens]
    }
}

/// What a generation counts for.
pub fn tokens(turn: &Sample) -> usize {
    turn.trained_tokens().max(1)
}

/// Trajectories, and trained tokens.
type Amounts = [usize; MEASURES];
const TRAJECTORIES: usize = 0;
const TOKENS: usize = 1;
const MEASURES: usize = 2;

/// Who counts as one: a user has two names, the others one.
type Key = (String, String);

/// One kind of key that has a cap.
struct Level {
    code: &'static str,
    share_max: fn(&Caps) -> f64,
    key: fn(&Contributor) -> Key,
}

const USER: usize = 0;
const TENANT: usize = 1;
const SURFACE: usize = 2;
const REPLICA: usize = 3;
const LEVEL_COUNT: usize = 4;

/// In the order in which they are checked.
static LEVELS: [Level; LEVEL_COUNT] = [
    Level {
        code: "capped_user",
        share_max: |caps| caps.user_share_max,
        key: |one| {
            // each of their keys is used once
            let user = match one.user.starts_with(ANONYMOUS_USER_PREFIX) {
                true => ANONYMOUS_USER_PREFIX,
                false => &one.user,
            };
            (one.tenant.clone(), user.to_owned())
        },
    },
    Level {
        code: "capped_tenant",
        share_max: |caps| caps.tenant_share_max,
        key: |one| (one.tenant.clone(), String::new()),
    },
    Level {
        code: "capped_surface",
        share_max: |caps| caps.surface_share_max,
        key: |one| (one.surface.clone(), String::new()),
    },
    Level {
        code: "capped_replica",
        share_max: |caps| caps.replica_share_max,
        key: |one| (one.replica.clone(), String::new()),
    },
];

/// Whether the code is that of a cap.
pub fn is_code(code: &str) -> bool {
    LEVELS.iter().any(|level| level.code == code)
}

/// Who has reached a cap.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Exhausted {
    /// Tenants of `users`, in their order.
    pub user_tenants: Vec<String>,
    /// User keys. [`ANONYMOUS_USER_PREFIX`]: all that begin with it.
    pub users: Vec<String>,
    pub tenants: Vec<String>,
    pub surfaces: Vec<String>,
    pub replicas: Vec<String>,
}

/// The newest trained trajectories, and those that have joined the coming cohort.
#[derive(Debug, Clone, PartialEq)]
pub struct Recent {
    caps: Caps,
    /// Newest first, with the time. The first `in_window` of them count. The others are kept for
    /// when a member leaves the cohort.
    trained: Vec<(Member, OffsetDateTime)>,
    in_window: usize,
    /// Members of the coming cohort.
    joined: Vec<Member>,
    /// In the window.
    generations: usize,
    /// By level.
    counts: [Counts; LEVEL_COUNT],
}

impl Recent {
    /// `newest_first`: what has been trained on, and when.
    pub fn new(caps: Caps, newest_first: impl IntoIterator<Item = (Member, OffsetDateTime)>) -> Self {
        let mut recent = Recent {
            caps,
            trained: newest_first.into_iter().take(caps.window as usize).collect(),
            in_window: 0,
            joined: vec![],
            generations: 0,
            counts: Default::default(),
        };
        recent.fill();
        recent
    }

    /// How many of the first of these generations, given by their tokens, may join as one trajectory,
    /// and the code of the cap that one more would exceed.
    pub fn fitting(&self, from: &Contributor, tokens: &[usize]) -> (usize, Option<&'static str>) {
        let mut sum = 0;
        let sums = tokens.iter().zip(1..).map(|(tokens, count)| {
            sum += tokens;
            (count, sum)
        });
        let mut fitting: Vec<(usize, usize)> = sums.collect();
        let mut code = None;
        for (level, room) in LEVELS.iter().zip(self.rooms()) {
            let key = (level.key)(from);
            let fits = fitting.iter().take_while(|(count, sum)| room.has(&key, *count, *sum));
            let fit = fits.count();
            if fit < fitting.len() {
                code = Some(level.code);
                fitting.truncate(fit);
            }
        }
        (fitting.len(), code)
    }

    /// Adds a trajectory to the cohort.
    pub fn add(&mut self, one: Member) {
        self.count_up(&one);
        self.joined.push(one);
        while self.in_window > 0 && self.is_over() {
            self.leave();
        }
    }

    /// Takes a trajectory out of the cohort again: it was quarantined, and its place is free.
    pub fn withdraw(&mut self, one: &Member) {
        if let Some(position) = self.joined.iter().rposition(|joined| joined == one) {
            let one = self.joined.remove(position);
            self.count_down(&one);
            self.fill();
        }
    }

    /// The cohort has been trained on, or has used up its places without that.
    pub fn use_up(&mut self, now: OffsetDateTime) {
        let used = std::mem::take(&mut self.joined).into_iter().map(|one| (one, now));
        self.in_window += used.len();
        self.trained.splice(0..0, used);
        self.trained.truncate(self.in_window);
    }

    /// Forgets what was trained on before that time.
    pub fn forget_before(&mut self, time: OffsetDateTime) {
        let kept = self.trained.partition_point(|(_, at)| *at >= time);
        while self.in_window > kept {
            self.leave();
        }
        self.trained.truncate(kept);
    }

    /// Who has no room for another token now.
    pub fn exhausted(&self) -> Exhausted {
        let rooms = self.rooms();
        let (user_tenants, users) = rooms[USER].exhausted().into_iter().unzip();
        let names = |level: usize| rooms[level].exhausted().into_iter().map(|(name, _)| name).collect();
        Exhausted {
            user_tenants,
            users,
            tenants: names(TENANT),
            surfaces: names(SURFACE),
            replicas: names(REPLICA),
        }
    }

    /// The largest share of one user, of the trajectories or of the trained tokens.
    pub fn largest_user_share(&self) -> f64 {
        let users = &self.counts[USER];
        let shares = (0..MEASURES).map(|measure| users.largest(measure) as f64 / users.all[measure].max(1) as f64);
        shares.fold(0.0, f64::max)
    }

    /// How many users there are.
    pub fn users(&self) -> usize {
        self.counts[USER].by_key.len()
    }

    fn size(&self) -> usize {
        self.in_window + self.joined.len()
    }

    fn is_over(&self) -> bool {
        self.size() > self.caps.window as usize || self.generations > self.caps.generations_max()
    }

    /// Lets the newest trained trajectories into the window while it has place.
    fn fill(&mut self) {
        while let Some((next, _)) = self.trained.get(self.in_window).cloned() {
            self.count_up(&next);
            self.in_window += 1;
            if self.is_over() {
                return self.leave();
            }
        }
    }

    /// The oldest trajectory leaves the window.
    fn leave(&mut self) {
        self.in_window -= 1;
        self.count_down(&self.trained[self.in_window].0.clone());
    }

    fn count_up(&mut self, one: &Member) {
        self.generations += one.generations;
        for (level, counts) in LEVELS.iter().zip(&mut self.counts) {
            counts.add((level.key)(&one.from), one.amounts());
        }
    }

    fn count_down(&mut self, one: &Member) {
        self.generations -= one.generations;
        for (level, counts) in LEVELS.iter().zip(&mut self.counts) {
            counts.remove((level.key)(&one.from), one.amounts());
        }
    }

    /// What each level allows if one more joins.
    fn rooms(&self) -> [Room<'_>; LEVEL_COUNT] {
        let leaving = match self.size() >= self.caps.window as usize && self.in_window > 0 {
            true => Some(&self.trained[self.in_window - 1].0),
            false => None,
        };
        std::array::from_fn(|index| {
            let (level, counts) = (&LEVELS[index], &self.counts[index]);
            Room {
                counts,
                leaving: leaving.map(|one| ((level.key)(&one.from), one.amounts())),
                share_max: (level.share_max)(&self.caps),
                typical: std::array::from_fn(|measure| counts.typical(measure)),
                others_min: OTHERS_MIN * f64::from(self.caps.window),
            }
        })
    }
}

/// The room that the keys of a level have if one more trajectory joins the window.
struct Room<'a> {
    counts: &'a Counts,
    /// What leaves the window then.
    leaving: Option<(Key, Amounts)>,
    share_max: f64,
    /// What a typical key has.
    typical: Amounts,
    /// How many trajectories the others must have.
    others_min: f64,
}

impl Room<'_> {
    /// Whether a trajectory of `key` with so many generations and tokens may join.
    fn has(&self, key: &Key, generations: usize, tokens: usize) -> bool {
        let (had, joining) = (self.counts.of(key), [1, tokens]);
        // of all keys, and of this one
        let (mut left, mut own_left) = ([0; MEASURES], [0; MEASURES]);
        if let Some((of, amounts)) = &self.leaving {
            left = *amounts;
            own_left = if of == key { *amounts } else { own_left };
        }
        let after = |measure: usize| had[measure] + joining[measure] - own_left[measure];
        let all = |measure: usize| self.counts.all[measure] + joining[measure] - left[measure];
        let alone = after(TRAJECTORIES) == 1;
        if alone && generations == 1 || ((all(TRAJECTORIES) - after(TRAJECTORIES)) as f64) < self.others_min {
            return true;
        }
        let fits = |measure: usize| {
            let typical = TIMES_TYPICAL * self.typical[measure] as f64;
            after(measure) as f64 <= f64::max(self.share_max * all(measure) as f64, typical) + 1e-9
        };
        (alone || fits(TRAJECTORIES)) && fits(TOKENS)
    }

    fn exhausted(&self) -> Vec<Key> {
        let keys = self.counts.by_key.keys();
        keys.filter(|key| !self.has(key, 1, 1)).cloned().collect()
    }
}

/// What keys have.
#[derive(Debug, Clone, PartialEq, Default)]
struct Counts {
    by_key: HashMap<Key, Amounts>,
    /// How many keys have how much, by measure.
    keys_with: [BTreeMap<usize, usize>; MEASURES],
    all: Amounts,
}

impl Counts {
    fn of(&self, key: &Key) -> Amounts {
        self.by_key.get(key).copied().unwrap_or_default()
    }

    fn add(&mut self, key: Key, amounts: Amounts) {
        self.change(key, |measure, had| had + amounts[measure]);
    }

    fn remove(&mut self, key: Key, amounts: Amounts) {
        self.change(key, |measure, had| had.saturating_sub(amounts[measure]));
    }

    fn change(&mut self, key: Key, now: impl Fn(usize, usize) -> usize) {
        let before = self.of(&key);
        let now: Amounts = std::array::from_fn(|measure| now(measure, before[measure]));
        for (measure, keys_with) in self.keys_with.iter_mut().enumerate() {
            if let Some(keys) = keys_with.get_mut(&before[measure]) {
                *keys -= 1;
                if *keys == 0 {
                    keys_with.remove(&before[measure]);
                }
            }
            if now[measure] > 0 {
                *keys_with.entry(now[measure]).or_default() += 1;
            }
            self.all[measure] = self.all[measure] + now[measure] - before[measure];
        }
        match now[TRAJECTORIES] {
            0 => self.by_key.remove(&key),
            _ => self.by_key.insert(key, now),
        };
    }

    /// How much the heaviest key has.
    fn largest(&self, measure: usize) -> usize {
        self.keys_with[measure]
            .last_key_value()
            .map_or(0, |(amount, _)| *amount)
    }

    /// How much the heaviest of the light keys has.
    fn typical(&self, measure: usize) -> usize {
        let mut lighter = 0;
        for (amount, keys) in &self.keys_with[measure] {
            lighter += amount * keys;
            if lighter as f64 >= LIGHT_SHARE * self.all[measure] as f64 - 1e-9 {
                return *amount;
            }
        }
        0
    }
}

#[cfg(test)]
mod tests;
