//! Traffic of attackers and of honest users, at full size.

use super::*;

const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;

fn from(user: &str) -> Contributor {
    Contributor {
        tenant: "default".into(),
        user: user.into(),
        surface: "completion".into(),
        replica: "r".into(),
    }
}

/// A trajectory that differs from the others at one level alone; users are all different else.
fn at(level: usize, name: &str, n: usize) -> Contributor {
    let mut one = from(&format!("user-{n}"));
    match level {
        USER => one.user = name.into(),
        TENANT => one.tenant = name.into(),
        SURFACE => one.surface = name.into(),
        _ => one.replica = name.into(),
    }
    one
}

/// A trajectory of one generation of one token.
fn member(from: Contributor) -> Member {
    Member {
        from,
        generations: 1,
        tokens: 1,
    }
}

fn trained(newest_first: impl IntoIterator<Item = Contributor>) -> Recent {
    let trained = newest_first.into_iter().map(|one| (member(one), NOW));
    Recent::new(Caps::default(), trained)
}

/// Trajectories of a cohort.
const COHORT: usize = 32;

impl Recent {
    /// Adds a generation of one token if it fits.
    fn admit(&mut self, one: Contributor) -> Result<(), &'static str> {
        if let (_, Some(code)) = self.fitting(&one, &[1]) {
            return Err(code);
        }
        self.add(member(one));
        Ok(())
    }
}

/// Admits one, and trains on every full cohort.
fn admit(recent: &mut Recent, one: Contributor) -> Result<(), &'static str> {
    recent.admit(one)?;
    step(recent);
    Ok(())
}

fn step(recent: &mut Recent) {
    if recent.joined.len() == COHORT {
        recent.use_up(NOW);
    }
}

/// Admits what fits of a session whose turns have these tokens. Returns how many turns fit.
fn admit_session(recent: &mut Recent, from: Contributor, turns: &[usize]) -> usize {
    let (generations, _) = recent.fitting(&from, turns);
    if generations > 0 {
        let tokens = turns[..generations].iter().sum();
        recent.add(Member {
            from,
            generations,
            tokens,
        });
        step(recent);
    }
    generations
}

fn count(recent: &Recent, level: usize, name: &str) -> usize {
    let keys = recent.counts[level].by_key.iter();
    let named = keys.filter(|((first, second), _)| if level == USER { second == name } else { first == name });
    named.map(|(_, amounts)| amounts[TRAJECTORIES]).sum()
}

/// Names in proportion to their rates, evenly mixed.
fn mixed(rates: &[(&'static str, f64)], times: usize) -> Vec<&'static str> {
    let all: f64 = rates.iter().map(|(_, rate)| rate).sum();
    let mut due = vec![0.0; rates.len()];
    (0..times)
        .map(|_| {
            due.iter_mut()
                .zip(rates)
                .for_each(|(due, (_, rate))| *due += rate / all);
            let next = (0..due.len()).max_by(|&a, &b| due[a].total_cmp(&due[b])).unwrap();
            due[next] -= 1.0;
            rates[next].0
        })
        .collect()
}

/// How many of each name are refused.
fn refused(recent: &mut Recent, level: usize, names: impl IntoIterator<Item = &'static str>) -> BTreeMap<&str, usize> {
    let mut refused = BTreeMap::new();
    for (n, name) in names.into_iter().enumerate() {
        if let Err(code) = admit(recent, at(level, name, n)) {
            assert_eq!(code, LEVELS[level].code);
            *refused.entry(name).or_default() += 1;
        }
    }
    refused
}

#[test]
fn an_episode_is_of_whom_most_of_its_turns_are() {
    let turn = |replica: &str| Sample {
        replica: replica.into(),
        ..Sample::example()
    };
    let turns = [turn("r2"), turn("r1"), turn("r2"), turn("r3")];
    let turns: Vec<&Sample> = turns.iter().collect();
    assert_eq!(Contributor::of(&turns).replica, "r2");
    assert_eq!(Contributor::of(&turns[..2]).replica, "r1", "the first by name");
    assert_eq!(Contributor::of(&turns[..1]).user, "u");
}

#[test]
fn a_new_or_small_key_caps_nobody() {
    for level in [USER, TENANT, SURFACE, REPLICA] {
        // one alone, then a second and a third that send one each
        let mut recent = trained((0..1998).map(|n| at(level, "a", n)));
        assert_eq!(refused(&mut recent, level, ["b", "c"]), BTreeMap::new());
        assert_eq!(recent.exhausted(), Exhausted::default(), "{level}");
        assert_eq!(refused(&mut recent, level, ["a"; 4000]), BTreeMap::new());
        // two, then a third of a very different rate
        for rates in [[50.0, 49.0, 1.0], [60.0, 39.0, 1.0], [90.0, 9.0, 1.0]] {
            let mut recent = trained([]);
            let two = mixed(&[("a", rates[0]), ("b", rates[1])], 3000);
            assert_eq!(refused(&mut recent, level, two), BTreeMap::new(), "{rates:?}");
            let three = mixed(&[("a", rates[0]), ("b", rates[1]), ("c", rates[2])], 6000);
            assert_eq!(refused(&mut recent, level, three), BTreeMap::new(), "{rates:?}");
        }
    }
}

#[test]
fn among_several_tenants_surfaces_or_replicas_none_has_much_more_than_half() {
    for level in [TENANT, SURFACE, REPLICA] {
        let others = [("b", 1.0), ("c", 1.0), ("d", 1.0), ("e", 1.0)];
        let mut recent = trained([]);
        let traffic = mixed(&[&[("a", 6.0)][..], &others[..]].concat(), 8000);
        let refused = refused(&mut recent, level, traffic);
        assert_eq!(refused.keys().copied().collect::<Vec<_>>(), ["a"]);
        let count = count(&recent, level, "a");
        assert!((990..=1000).contains(&count), "half of the window: {count}");
    }
}

#[test]
fn who_floods_later_has_a_cap_however_much_it_sends() {
    for level in [USER, TENANT, SURFACE, REPLICA] {
        let names: Vec<String> = (0..10).map(|n| format!("name-{n}")).collect();
        let mut recent = trained((0..2000).map(|n| at(level, &names[n % 10], n)));
        for n in 0..10_000 {
            admit(&mut recent, at(level, "flood", n)).ok();
        }
        // a user: twice one of the ten others, a sixth. The others: half
        let limit = if level == USER { 330..=340 } else { 1000..=1000 };
        let count = count(&recent, level, "flood");
        assert!(limit.contains(&count), "{level}: {count}");
    }
}

#[test]
fn a_user_who_sends_much_more_than_others_weighs_twice_a_typical_user() {
    // 300 users in turn; the first 3, 6 or 15 (1, 2, 5%) send as much as the others or 20 times
    // as much, from the beginning
    for (attackers, factor) in [(3, 1), (3, 20), (6, 1), (6, 20), (15, 1), (15, 20)] {
        let mut recent = trained([]);
        let users = (0..40).flat_map(|_| {
            (0..300).flat_map(move |n| {
                let times = if n < attackers { factor } else { 1 };
                (0..times).map(move |_| n)
            })
        });
        let mut admitted = vec![0; 300];
        for user in users {
            admitted[user] += usize::from(admit(&mut recent, from(&format!("user-{user}"))).is_ok());
        }
        let typical = recent.counts[USER].typical(TRAJECTORIES);
        assert!((6..=7).contains(&typical), "{typical}");
        for (user, amounts) in &recent.counts[USER].by_key {
            assert!(amounts[TRAJECTORIES] <= 14, "{user:?}: {amounts:?}");
        }
        // the honest ones are trained on as often as they ask
        assert_eq!(admitted[attackers..].iter().min(), Some(&40));
        let weight: usize = (0..attackers).map(|n| count(&recent, USER, &format!("user-{n}"))).sum();
        let fair = 2000.0 * attackers as f64 / 300.0;
        assert!(weight as f64 <= 2.1 * fair, "{weight} is more than twice {fair}");
    }
}

/// Weight of the invented users, and how many honest trajectories were refused.
fn inventing(keys: usize, share: f64) -> (f64, usize) {
    let mut recent = trained((0..2000).map(|n| from(&format!("honest-{}", n % 50))));
    let (mut refused, mut honest, mut invented) = (0, 0, 0);
    for who in mixed(&[("honest", 1.0 - share), ("invented", share)], 12_000) {
        if who == "invented" {
            invented += 1;
            admit(&mut recent, from(&format!("invented-{}", invented % keys))).ok();
        } else {
            honest += 1;
            refused += usize::from(admit(&mut recent, from(&format!("honest-{}", honest % 50))).is_err());
        }
    }
    let invented = recent.counts[USER].by_key.iter();
    let invented = invented.filter(|((_, user), _)| user.starts_with("invented"));
    let weight = invented.map(|(_, amounts)| amounts[TRAJECTORIES]).sum::<usize>() as f64 / 2000.0;
    (weight, refused)
}

#[test]
fn invented_users_take_nothing_from_honest_ones() {
    for keys in [350, 20_000] {
        for share in [0.05, 0.3] {
            let (weight, refused) = inventing(keys, share);
            assert_eq!(refused, 0, "{keys} keys with {share} of the traffic");
            assert!((weight - share).abs() < 0.02, "{keys} keys with {share} weigh {weight}");
        }
    }
    // beyond: docs/security.md says so
    let (weight, refused) = inventing(2000, 0.5);
    assert!(weight > 0.5 && refused > 0, "{weight}, {refused}");
}

#[test]
fn requests_without_a_user_are_one_user() {
    let mut recent = trained((0..2000).map(|n| from(&format!("user-{}", n % 200))));
    let anonymous = |n: usize| from(&format!("{ANONYMOUS_USER_PREFIX}{n}"));
    let admitted = (0..1000).filter(|&n| recent.admit(anonymous(n)).is_ok()).count();
    assert_eq!(admitted, 20, "twice a typical user");
    assert_eq!(recent.exhausted().users, [ANONYMOUS_USER_PREFIX]);
    // who is alone has no cap, without a user too
    let mut recent = trained((0..2000).map(anonymous));
    assert_eq!((0..1000).filter(|&n| recent.admit(anonymous(n)).is_err()).count(), 0);
}

#[test]
fn who_is_left_is_held_back_for_a_week_at_most() {
    let hour = Duration::HOUR;
    let names = ["a", "b", "c"];
    let trained = (0..2000).map(|n| {
        (
            member(at(SURFACE, names[n % 3], n)),
            NOW - i32::try_from(n).unwrap() * hour / 100,
        )
    });
    let mut recent = Recent::new(Caps::default(), trained);
    let refused = refused(&mut recent, SURFACE, ["a"; 4000]);
    assert!(refused["a"] > 2000, "{refused:?}");
    assert_eq!(recent.exhausted().surfaces, ["a"]);
    recent.forget_before(NOW + 7 * 24 * hour - MEMORY);
    assert_eq!(recent.exhausted().surfaces, [""; 0]);
    // the others send one from time to time
    for n in 0..1000 {
        let name = if n % 100 == 0 { "b" } else { "a" };
        admit(&mut recent, at(SURFACE, name, 10_000 + n)).unwrap();
    }
}

#[test]
fn a_quarantined_trajectory_gives_its_place_back() {
    let mut recent = trained((0..2000).map(|n| from(&format!("user-{}", n % 200))));
    recent.admit(from("honest")).unwrap();
    let before = recent.clone();
    let named = from("victim");
    let admitted = (0..1000).filter(|_| recent.admit(named.clone()).is_ok()).count();
    assert_eq!(recent.admit(named.clone()), Err("capped_user"));
    for _ in 0..admitted {
        recent.withdraw(&member(named.clone()));
    }
    assert_eq!(recent, before);
    recent.withdraw(&member(named.clone()));
    assert_eq!(recent, before, "it is not in the cohort");
    recent.admit(named).unwrap();
}

#[test]
fn a_refused_cohort_uses_up_its_places() {
    let mut recent = trained((0..2000).map(|n| from(&format!("user-{}", n % 200))));
    for _ in 0..20 {
        recent.admit(from("a")).unwrap();
    }
    recent.use_up(NOW + Duration::HOUR);
    assert_eq!(
        (recent.joined.len(), recent.trained.len(), recent.size()),
        (0, 2000, 2000)
    );
    assert_eq!(recent.admit(from("a")), Err("capped_user"));
    // and leaves the window as if it had been trained on
    for n in 0..1990 {
        recent.admit(from(&format!("new-{n}"))).unwrap();
    }
    recent.admit(from("a")).unwrap();
    assert_eq!(recent.size(), 2000);
}

#[test]
fn few_trajectories_have_no_caps() {
    let mut recent = trained([]);
    for n in 0..199 {
        recent.admit(from(&format!("user-{n}"))).unwrap();
        recent.admit(from("a")).unwrap();
    }
    recent.admit(from("user-199")).unwrap();
    assert_eq!(
        recent.admit(from("a")),
        Err("capped_user"),
        "the others have a tenth of the window"
    );
}

#[test]
fn a_window_smaller_than_a_cohort_works() {
    let caps = Caps {
        window: 2,
        ..Caps::default()
    };
    let mut recent = Recent::new(caps, ["a", "b", "c"].map(|user| (member(from(user)), NOW)));
    for n in 0..5 {
        recent.admit(from(&format!("user-{n}"))).unwrap();
    }
    assert_eq!((recent.size(), recent.users()), (5, 5));
    recent.withdraw(&member(from("user-1")));
    recent.use_up(NOW);
    assert_eq!((recent.size(), recent.users()), (4, 4));
    recent.forget_before(NOW + Duration::HOUR);
    assert_eq!((recent.size(), recent.users()), (0, 0));
}

#[test]
fn shares_must_be_above_0_and_at_most_1() {
    Caps::default().check_ranges("").unwrap();
    for bad in [0.0, -0.1, 1.1, f64::NAN] {
        let caps = Caps {
            replica_share_max: bad,
            ..Caps::default()
        };
        assert!(
            caps.check_ranges("")
                .unwrap_err()
                .to_string()
                .starts_with("replica_share_max"),
            "{bad}"
        );
    }
    let caps = Caps {
        window: 0,
        ..Caps::default()
    };
    assert!(caps.check_ranges("").unwrap_err().to_string().starts_with("window"));
}

/// The share of the window's trained tokens.
fn token_share(recent: &Recent, user: &str) -> f64 {
    let counts = &recent.counts[USER];
    let tokens = counts.of(&("default".into(), user.into()))[TOKENS];
    tokens as f64 / counts.all[TOKENS] as f64
}

#[test]
fn one_user_with_few_huge_sessions_weighs_no_more_than_the_cap() {
    const TURN: usize = 30;
    for (others_turns, typical) in [(1, 10), (10, 10), (50, 50)] {
        // 200 users in turn; one of them has 8 sessions of 4,096 turns among 2,000
        let mut recent = trained([]);
        for n in 0..4000 {
            let user = format!("user-{}", n % 200);
            let turns = match n % 250 {
                249 => admit_session(&mut recent, from("long"), &[TURN; 4096]),
                _ => admit_session(&mut recent, from(&user), &vec![TURN; others_turns]),
            };
            assert!(
                n % 250 == 249 || turns == others_turns,
                "{user}: {turns} of {others_turns}"
            );
        }
        // 0.5%, or twice what a typical user has: ten sessions
        let share = token_share(&recent, "long");
        assert!(share <= 0.0101, "{share} with {others_turns} turns, typical {typical}");
        assert!(share > 0.004, "they are trained on, within the cap: {share}");
        assert!((recent.largest_user_share() - share).abs() < 0.003);
    }
}

#[test]
fn a_new_kind_of_long_session_is_let_in_by_and_by() {
    // a surface of single short answers gets sessions of 50 turns, of many users
    let mut recent = trained((0..2000).map(|n| from(&format!("user-{}", n % 200))));
    let mut fit = Vec::new();
    for n in 0..1000 {
        fit.push(admit_session(&mut recent, from(&format!("session-{n}")), &[20; 50]));
        admit(&mut recent, from(&format!("user-{}", n % 200))).ok();
    }
    assert_eq!(fit[0], 1, "one generation of a new user is always allowed");
    assert!(fit[500] > 1 && fit[500] < 50, "{}", fit[500]);
    assert_eq!(fit[999], 50, "sessions are what is typical now");
}

#[test]
fn many_tiny_answers_of_one_user_are_capped_as_trajectories() {
    let mut recent = trained([]);
    for n in 0..2000 {
        admit_session(&mut recent, from(&format!("user-{}", n % 200)), &[100]);
    }
    let tiny = (0..1000).filter(|_| recent.admit(from("tiny")).is_ok()).count();
    assert_eq!(tiny, 20, "twice a typical user");
}

#[test]
fn the_window_ends_at_a_number_of_generations() {
    let caps = Caps {
        window: 10,
        ..Caps::default()
    };
    let long = |user: &str| Member {
        from: from(user),
        generations: 200,
        tokens: 4000,
    };
    let mut recent = Recent::new(caps, (0..10).map(|n| (long(&format!("user-{n}")), NOW)));
    assert_eq!((recent.size(), recent.generations), (3, 600), "of at most 640");
    recent.add(long("a"));
    assert_eq!((recent.size(), recent.generations, recent.in_window), (3, 600, 2));
    recent.withdraw(&long("a"));
    assert_eq!((recent.size(), recent.in_window), (3, 3));
    recent.add(member(from("b")));
    assert_eq!((recent.size(), recent.generations), (4, 601));
    // what is in the cohort counts however much it is
    recent.add(long("a"));
    recent.add(Member {
        generations: 1000,
        ..long("c")
    });
    assert_eq!((recent.in_window, recent.joined.len()), (0, 3));
    recent.use_up(NOW);
    assert_eq!((recent.size(), recent.users()), (3, 3));
}
