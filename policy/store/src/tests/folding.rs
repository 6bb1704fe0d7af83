//! Folds: which are due, what they save, and what happens when they are not what they say.

use super::*;
use artifact::squash::SquashedDelta;

impl Fixture {
    async fn fold(&self, versions: &[(Manifest, Arc<Checkpoint>)], from: usize, to: usize) -> SquashedDelta {
        let (from, to) = (&versions[from - 1].0, &versions[to - 1].0);
        let steps = u32::try_from(to.version - from.version).unwrap();
        let folded = self
            .store
            .fold(POLICY, (from, to), steps, u64::MAX, &self.key, &self.trusted())
            .await
            .unwrap();
        match folded {
            Folded::Made(fold) => fold,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn who_is_far_behind_takes_the_folds_that_save_bytes() {
    let f = fixture();
    let versions = f.chain(40, 100).await;
    let held = [(2, versions[1].1.clone())];
    let before = f.materialise(40, &held).await.unwrap();
    assert_eq!(before.path.len(), 39);
    for from in [1, 9, 17, 25] {
        f.fold(&versions, from, from + 8).await;
    }
    f.fold(&versions, 9, 33).await;
    let after = f.materialise(40, &held).await.unwrap();
    assert_eq!(after.path, [2, 3, 4, 5, 6, 7, 8, 9, 33, 34, 35, 36, 37, 38, 39, 40]);
    assert_eq!(after.image, versions[39].1);
    assert!(after.bytes_fetched < before.bytes_fetched / 2);
    // from nothing: the image of the first, and a fold from there
    let cold = f.materialise(40, &[]).await.unwrap();
    assert_eq!(cold.path[..3], [1, 9, 33]);
    let path = f.store.path(POLICY, 40, &f.trusted()).await.unwrap();
    assert_eq!((path.start, path.steps.len(), path.bytes), (1, 9, cold.bytes_fetched));
}

#[tokio::test]
async fn a_fold_that_is_gone_broken_or_false_is_gone_around() {
    let f = fixture();
    let versions = f.chain(20, 100).await;
    let fold = f.fold(&versions, 3, 19).await;
    assert_eq!(f.materialise(20, &[]).await.unwrap().path, [1, 2, 3, 19, 20]);
    let object = f.object_path(&fold.delta);
    let good = std::fs::read(&object).unwrap();
    std::fs::write(&object, [&good[..good.len() - 1], &[!good[good.len() - 1]]].concat()).unwrap();
    // on from where the fold would have begun
    let around: Vec<i64> = (3..=20).collect();
    assert_eq!(f.materialise(20, &[]).await.unwrap().path, around);
    std::fs::remove_file(&object).unwrap();
    assert_eq!(f.materialise(20, &[]).await.unwrap().path, around);
    std::fs::write(&object, &good).unwrap();
    // a sound delta under a document that says it leads elsewhere
    for (from, to) in [(3, 18), (4, 19)] {
        let at = |serial: usize| Parent {
            version: serial as i64,
            root: versions[serial - 1].0.root,
        };
        let mut false_fold = fold.clone();
        (false_fold.from, false_fold.to) = (at(from), at(to));
        false_fold.steps = (to - from) as u32;
        f.store.put_fold(&false_fold, &f.key).await.unwrap();
    }
    let target = f.materialise(18, &[(3, versions[2].1.clone())]).await.unwrap();
    assert_eq!(target.image, versions[17].1);
    // of another root than the version has
    let mut other = fold.clone();
    other.from = Parent {
        version: 2,
        root: Digest::of(b"another"),
    };
    other.steps = 17;
    f.store.put_fold(&other, &f.key).await.unwrap();
    assert_eq!(f.materialise(20, &[]).await.unwrap().image, versions[19].1);
    // by a stranger
    let place = f.path(&format!("policy/{POLICY}/fold/{:010}-{:010}.json", 19, 3));
    std::fs::remove_file(&place).unwrap();
    f.store.put_fold(&fold, &SigningKey::from_seed(&[9; 32])).await.unwrap();
    let made = f.materialise(20, &[]).await.unwrap();
    assert!(
        made.image == versions[19].1 && !made.path.windows(2).any(|step| step == [3, 19]),
        "{:?}",
        made.path
    );
}

#[tokio::test]
async fn folds_lie_end_to_end_and_one_that_saves_nothing_is_not_kept() {
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
    assert_eq!(serials(due(&path, &none, 8)), [(1, 9), (9, 17), (17, 25)]);
    assert_eq!(serials(due(&path, &none, 64)), []);
    let there = std::collections::BTreeMap::from([(9, vec![1]), (20, vec![3])]);
    assert_eq!(serials(due(&path, &there, 8)), [(9, 17), (17, 25)]);
    let (from, to) = (&versions[0].0, &versions[8].0);
    let folded = f
        .store
        .fold(POLICY, (from, to), 8, 10, &f.key, &f.trusted())
        .await
        .unwrap();
    assert!(matches!(folded, Folded::NotWorth { steps_bytes: 10, .. }), "{folded:?}");
    assert!(f.store.fold_names(POLICY).await.unwrap().is_empty());
    let made = f.fold(&versions, 1, 9).await;
    let again = f
        .store
        .fold(POLICY, (from, to), 8, 10, &f.key, &f.trusted())
        .await
        .unwrap();
    assert_eq!(again, Folded::There(made));
}

/// SPRINGTIDE_FOLD_VERSIONS for how far behind.
#[tokio::test]
async fn who_is_very_far_behind_reads_a_part_of_the_bytes_in_a_few_steps() {
    let count = std::env::var("SPRINGTIDE_FOLD_VERSIONS").map_or(150, |count| count.parse().unwrap());
    let f = fixture();
    let versions = f.chain(count, i64::MAX).await;
    let held = [(1, versions[0].1.clone())];
    let began = std::time::Instant::now();
    let plain = f.materialise(count, &held).await.unwrap();
    let plain_seconds = began.elapsed().as_secs_f64();
    let path = f.store.ancestry(POLICY, count, usize::MAX, &f.trusted()).await.unwrap();
    for span in SPANS {
        let there = f.store.fold_names(POLICY).await.unwrap();
        for (from, to) in due(&path, &there, span) {
            f.fold(&versions, path[from].version as usize, path[to].version as usize)
                .await;
        }
    }
    let began = std::time::Instant::now();
    let folded = f.materialise(count, &held).await.unwrap();
    println!(
        "{} behind: {} bytes in {} steps and {plain_seconds:.2} s, with folds {} bytes in {} steps and {:.2} s",
        count - 1,
        plain.bytes_fetched,
        plain.path.len() - 1,
        folded.bytes_fetched,
        folded.path.len() - 1,
        began.elapsed().as_secs_f64()
    );
    assert_eq!(folded.image, versions[count as usize - 1].1);
    assert!(folded.bytes_fetched * 2 < plain.bytes_fetched && folded.path.len() * 4 < plain.path.len());
}
