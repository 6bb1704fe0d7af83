use super::*;

fn limits(key: u32, open: u32, tenant: u32) -> Arc<Limits> {
    let options = LimitOptions {
        key_requests_per_second: key,
        key_open_requests_max: open,
        tenant_requests_per_second: tenant,
        burst_seconds: 2,
    };
    options.check().unwrap();
    Limits::new(options)
}

fn key(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

const MILLISECOND: Duration = Duration::from_millis(1);

#[test]
fn a_key_sends_its_burst_at_once_and_then_its_rate() {
    let (limits, start) = (limits(10, 0, 0), Instant::now());
    let one = Some((key(1), None));
    let at = |ms: u32| limits.take(one, "t", start + ms * MILLISECOND).is_ok();
    assert_eq!((0..50).filter(|_| at(0)).count(), 20, "two seconds' worth");
    assert!(!at(99) && at(100) && !at(100) && !at(199) && at(200));
    // ten seconds in which it asks every millisecond
    let taken = (201..10_201).filter(|ms| at(*ms)).count();
    assert_eq!(taken, 100);
    // an hour of silence is worth no more than the burst
    assert_eq!((0..50).filter(|_| at(3_600_000)).count(), 20);
}

#[test]
fn a_refusal_says_how_long_to_wait_and_costs_nothing() {
    let (limits, now) = (limits(1, 0, 0), Instant::now());
    let one = Some((key(1), None));
    for _ in 0..2 {
        limits.take(one, "t", now).unwrap();
    }
    for _ in 0..100 {
        let refusal = limits.take(one, "t", now).unwrap_err();
        assert_eq!(
            refusal,
            Refusal::KeyRate {
                per_second: 1,
                wait: Duration::from_secs(1)
            }
        );
        let problem = refusal.problem();
        assert_eq!((problem.status.as_u16(), problem.retry_after_seconds), (429, Some(1)));
        assert_eq!(problem.extensions["limit"], "key_rate");
    }
    limits.take(one, "t", now + Duration::from_secs(1)).unwrap();
}

#[test]
fn one_keys_flood_takes_nothing_from_another_key_or_tenant() {
    let (limits, now) = (limits(10, 0, 100), Instant::now());
    let take = |number, tenant| limits.take(Some((key(number), None)), tenant, now);
    assert_eq!((0..10_000).filter(|_| take(1, "a").is_ok()).count(), 20);
    for _ in 0..20 {
        take(2, "a").unwrap();
        take(3, "b").unwrap();
    }
    // the tenant's limit holds over all its keys, and a refused request does not use up its key's
    let taken = (10..100).map(|number| (0..20).filter(|_| take(number, "a").is_ok()).count());
    assert_eq!(taken.sum::<usize>(), 200 - 40);
    take(4, "b").unwrap();
    let later = now + 200 * MILLISECOND;
    assert!((0..20).all(|_| limits.take(Some((key(99), None)), "a", later).is_ok()));
}

#[test]
fn a_keys_own_limit_replaces_the_configured_one() {
    let (limits, now) = (limits(10, 0, 0), Instant::now());
    let taken = |number, own| {
        let key = Some((key(number), NonZeroU32::new(own)));
        (0..1000).filter(|_| limits.take(key, "t", now).is_ok()).count()
    };
    assert_eq!((taken(1, 0), taken(2, 1), taken(3, 100)), (20, 2, 200));
    let unlimited = super::tests::limits(0, 0, 0);
    assert!((0..1000).all(|_| unlimited.take(Some((key(1), None)), "t", now).is_ok()));
}

fn holder(number: u128) -> Principal {
    Principal {
        key: Some(super::super::KeyId {
            id: key(number),
            lineage: key(number),
        }),
        ..Principal::caller()
    }
}

#[test]
fn a_key_has_only_so_many_requests_open_at_a_time() {
    let limits = limits(0, 2, 0);
    let first = limits.admit(&holder(1)).unwrap();
    let _second = limits.admit(&holder(1)).unwrap();
    let problem = limits.admit(&holder(1)).unwrap_err();
    assert_eq!(problem.extensions["limit"], "key_open_requests");
    limits.admit(&holder(2)).unwrap();
    drop(first);
    limits.admit(&holder(1)).unwrap();
}

#[test]
fn callers_without_a_key_of_the_table_share_the_tenants_limit() {
    let limits = Limits::new(LimitOptions::of_all_callers(1));
    let taken = (0..100).filter(|_| limits.admit(&Principal::caller()).is_ok()).count();
    assert!((5..100).contains(&taken), "{taken}");
}

#[test]
fn quiet_keys_are_forgotten_and_busy_ones_are_not() {
    let (limits, start) = (limits(1, 2, 0), Instant::now());
    let _open = limits.admit(&holder(1)).unwrap();
    for number in 0..100_000 {
        let now = start + number * 10 * MILLISECOND;
        let key = Uuid::from_u128(u128::from(number) + 2);
        limits.take(Some((key, None)), "t", now).unwrap();
        limits.lock().keys.of.get_mut(&key).unwrap().open = 0;
    }
    let entries = limits.lock().keys.of.len();
    assert!(entries <= ENTRIES_MIN + 1, "{entries}");
    assert!(limits.lock().keys.of.contains_key(&key(1)), "its request is open");
}

#[test]
fn contradictions_are_refused() {
    let refusal = |options: LimitOptions| options.check().unwrap_err().to_string();
    let fields = LimitOptions::default();
    LimitOptions::default().check().unwrap();
    let why = refusal(LimitOptions {
        tenant_requests_per_second: 10,
        ..fields
    });
    assert!(why.contains("tenant_requests_per_second"), "{why}");
    let why = refusal(LimitOptions {
        burst_seconds: 0,
        ..fields
    });
    assert!(why.contains("burst_seconds"), "{why}");
}
