//! Squashed deltas: which are due, what they save, and how false ones are refused.

use super::*;
use artifact::squash::SquashedDelta;

impl Fixture {
    async fn squash(&self, versions: &[(Manifest, Arc<Checkpoint>)], from: usize, to: usize) -> SquashedDelta {
        let (from, to) = (&versions[from - 1].0, &versions[to - 1].0);
        let steps = u32::try_from(to.version - from.version).unwrap();
        let squashed = self
            .store
            .squash(POLICY, (from, to), steps, u64::MAX, &self.key, &self.trusted())
            .await
            .unwrap();
        match squashed {
            SquashOutcome::Created(squashed) => squashed,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_follower_far_behind_uses_squashed_deltas_that_save_bytes() {
    let f = fixture();
    let versions = f.chain(40, 100).await;
    let held = [(2, versions[1].1.clone())];
    let before = f.materialize(40, &held).await.unwrap();
    assert_eq!(before.path.len(), 39);
    for from in [1, 9, 17, 25] {
        f.squash(&versions, from, from + 8).await;
    }
    f.squash(&versions, 9, 33).await;
    let after = f.materialize(40, &held).await.unwrap();
    assert_eq!(after.path, [2, 3, 4, 5, 6, 7, 8, 9, 33, 34, 35, 36, 37, 38, 39, 40]);
    assert_eq!(after.checkpoint, versions[39].1);
    assert!(after.bytes_fetched < before.bytes_fetched / 2);
    // Without a held version: the first checkpoint and a squashed delta from there.
    let cold = f.materialize(40, &[]).await.unwrap();
    assert_eq!(cold.path[..3], [1, 9, 33]);
    let path = f.store.path(POLICY, 40, &f.trusted()).await.unwrap();
    assert_eq!((path.start, path.steps.len(), path.bytes), (1, 9, cold.bytes_fetched));
}

#[tokio::test]
async fn a_missing_broken_or_false_squashed_delta_is_bypassed() {
    let f = fixture();
    let versions = f.chain(20, 100).await;
    let squashed = f.squash(&versions, 3, 19).await;
    assert_eq!(f.materialize(20, &[]).await.unwrap().path, [1, 2, 3, 19, 20]);
    let object = f.object_path(&squashed.delta);
    let good = std::fs::read(&object).unwrap();
    std::fs::write(&object, [&good[..good.len() - 1], &[!good[good.len() - 1]]].concat()).unwrap();
    // Single steps from where the squashed delta would have started.
    let around: Vec<i64> = (3..=20).collect();
    assert_eq!(f.materialize(20, &[]).await.unwrap().path, around);
    std::fs::remove_file(&object).unwrap();
    assert_eq!(f.materialize(20, &[]).await.unwrap().path, around);
    std::fs::write(&object, &good).unwrap();
    // A valid delta whose document names another result.
    for (from, to) in [(3, 18), (4, 19)] {
        let at = |serial: usize| Parent {
            version: serial as i64,
            root: versions[serial - 1].0.root,
        };
        let mut false_squash = squashed.clone();
        (false_squash.from, false_squash.to) = (at(from), at(to));
        false_squash.steps = (to - from) as u32;
        f.store.create_or_get(&false_squash, &f.key).await.unwrap();
    }
    let target = f.materialize(18, &[(3, versions[2].1.clone())]).await.unwrap();
    assert_eq!(target.checkpoint, versions[17].1);
    // With another content hash than the version.
    let mut other = squashed.clone();
    other.from = Parent {
        version: 2,
        root: Digest::of(b"another"),
    };
    other.steps = 17;
    f.store.create_or_get(&other, &f.key).await.unwrap();
    assert_eq!(f.materialize(20, &[]).await.unwrap().checkpoint, versions[19].1);
    // Signed by an unknown key.
    let place = f.path(&format!("policy/{POLICY}/fold/{:010}-{:010}.json", 19, 3));
    std::fs::remove_file(&place).unwrap();
    f.store
        .create_or_get(&squashed, &SigningKey::from_seed(&[9; 32]))
        .await
        .unwrap();
    let rebuilt = f.materialize(20, &[]).await.unwrap();
    assert!(
        rebuilt.checkpoint == versions[19].1 && !rebuilt.path.windows(2).any(|step| step == [3, 19]),
        "{:?}",
        rebuilt.path
    );
}

#[tokio::test]
async fn squashed_deltas_lie_end_to_end_and_useless_ones_are_not_written() {
    let f = fixture();
    let versions = f.chain(30, 100).await;
    let path = f.store.ancestry(POLICY, 30, 1_000, &f.trusted()).await.unwrap();
    assert_eq!(path.len(), 30);
    let serials = |due: Vec<(usize, usize)>| -> Vec<(i64, i64)> {
        due.into_iter()
            .map(|(from, to)| (path[from].version, path[to].version))
            .collect()
    };
    let none = std::collections::BTreeMap::new();
    assert_eq!(serials(due_squashes(&path, &none, 8)), [(1, 9), (9, 17), (17, 25)]);
    assert_eq!(serials(due_squashes(&path, &none, 64)), []);
    let there = std::collections::BTreeMap::from([(9, vec![1]), (20, vec![3])]);
    assert_eq!(serials(due_squashes(&path, &there, 8)), [(9, 17), (17, 25)]);
    let (from, to) = (&versions[0].0, &versions[8].0);
    let squashed = f
        .store
        .squash(POLICY, (from, to), 8, 10, &f.key, &f.trusted())
        .await
        .unwrap();
    assert!(
        matches!(squashed, SquashOutcome::NotSmaller { steps_bytes: 10, .. }),
        "{squashed:?}"
    );
    assert!(f.store.list_squashed_deltas(POLICY).await.unwrap().is_empty());
    let squashed = f.squash(&versions, 1, 9).await;
    let again = f
        .store
        .squash(POLICY, (from, to), 8, 10, &f.key, &f.trusted())
        .await
        .unwrap();
    assert_eq!(again, SquashOutcome::Exists(squashed));
}

/// SPRINGTIDE_FOLD_VERSIONS for how far behind.
#[tokio::test]
async fn a_follower_very_far_behind_needs_few_steps_and_a_fraction_of_the_bytes() {
    let count = std::env::var("SPRINGTIDE_FOLD_VERSIONS").map_or(150, |count| count.parse().unwrap());
    let f = fixture();
    let versions = f.chain(count, i64::MAX).await;
    let held = [(1, versions[0].1.clone())];
    let began = std::time::Instant::now();
    let plain = f.materialize(count, &held).await.unwrap();
    let plain_seconds = began.elapsed().as_secs_f64();
    let path = f.store.ancestry(POLICY, count, usize::MAX, &f.trusted()).await.unwrap();
    for span in SQUASH_SPANS {
        let there = f.store.list_squashed_deltas(POLICY).await.unwrap();
        for (from, to) in due_squashes(&path, &there, span) {
            f.squash(&versions, path[from].version as usize, path[to].version as usize)
                .await;
        }
    }
    let began = std::time::Instant::now();
    let squashed = f.materialize(count, &held).await.unwrap();
    println!(
        "{} behind: {} bytes in {} steps and {plain_seconds:.2} s, with squashed deltas {} bytes in {} steps and {:.2} s",
        count - 1,
        plain.bytes_fetched,
        plain.path.len() - 1,
        squashed.bytes_fetched,
        squashed.path.len() - 1,
        began.elapsed().as_secs_f64()
    );
    assert_eq!(squashed.checkpoint, versions[count as usize - 1].1);
    assert!(squashed.bytes_fetched * 2 < plain.bytes_fetched && squashed.path.len() * 4 < plain.path.len());
}
