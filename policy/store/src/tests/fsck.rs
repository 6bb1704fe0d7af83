//! What `fsck` reports and what it ignores.

use super::*;
use std::collections::BTreeSet;

impl Fixture {
    async fn kinds(&self, deep: bool) -> BTreeSet<(Severity, &'static str)> {
        let keep = Retention {
            grace: time::Duration::days(1),
            assignments: 10,
            versions: BTreeSet::new(),
        };
        let report = self.store.fsck(POLICY, &self.trusted(), &keep, deep).await.unwrap();
        report.findings.iter().map(|f| (f.severity, f.kind)).collect()
    }
}

#[tokio::test]
async fn versions_that_are_published_meanwhile_are_no_findings() {
    let (f, made) = (fixture(), fixture().chain(100, 1).await);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let publish = async {
        for (mut manifest, checkpoint) in made {
            manifest.delta = None;
            f.store
                .put_object(POLICY, &checkpoint.to_bytes().unwrap())
                .await
                .unwrap();
            f.store.put_manifest(&manifest, &f.key).await.unwrap();
            f.assign(manifest.version, &[("champion", &manifest)]).await;
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    };
    let check = async {
        while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
            let kinds = f.kinds(false).await;
            let is_error = |(severity, _): &(Severity, _)| *severity == Severity::Error;
            assert!(!kinds.iter().any(is_error), "{kinds:?}");
            tokio::task::yield_now().await;
        }
    };
    tokio::join!(publish, check);
}

#[tokio::test]
async fn a_healthy_store_has_no_findings_and_each_fault_is_reported() {
    let f = fixture();
    let versions = f.chain(9, 4).await;
    assert!(f.kinds(true).await.is_empty());

    // An object that no document names is reported once it is old.
    let orphan = f
        .store
        .put_object(POLICY, &Bytes::from_static(b"nobody's"))
        .await
        .unwrap();
    assert!(f.kinds(true).await.is_empty(), "its publication may still be running");
    f.age();
    assert_eq!(f.kinds(true).await, [(Severity::Warning, "orphans")].into());
    std::fs::remove_file(f.object_path(&orphan)).unwrap();

    // The checkpoint that the newest version needs: a path from the older one is left.
    let checkpoint = f.object_path(&versions[7].0.checkpoint.unwrap());
    let intact = std::fs::read(&checkpoint).unwrap();
    let mut flipped = intact.clone();
    flipped[intact.len() - 1] ^= 1;
    std::fs::write(&checkpoint, &flipped).unwrap();
    assert!(f.kinds(false).await.is_empty(), "sizes are as they should be");
    assert!(f.kinds(true).await.contains(&(Severity::Error, "digest")));
    std::fs::write(&checkpoint, &intact).unwrap();

    // A delta of the newest version, which is needed.
    let delta = f.object_path(&versions[8].0.delta.unwrap());
    let intact = std::fs::read(&delta).unwrap();
    std::fs::remove_file(&delta).unwrap();
    assert_eq!(f.kinds(false).await, [(Severity::Error, "no-path")].into());
    std::fs::write(&delta, &intact).unwrap();

    // A delta in the middle: versions that are not needed are lost.
    let delta = f.object_path(&versions[1].0.delta.unwrap());
    std::fs::remove_file(&delta).unwrap();
    assert!(f.kinds(false).await.contains(&(Severity::Note, "gone")));

    // Documents.
    let place = |serial: i64| f.path(&format!("policy/{POLICY}/version/{serial:010}.json"));
    let manifest = std::fs::read(place(5)).unwrap();
    std::fs::write(place(5), "{}").unwrap();
    assert!(f.kinds(false).await.contains(&(Severity::Error, "manifest")));
    std::fs::write(place(5), manifest).unwrap();
    std::fs::write(f.path(&format!("policy/{POLICY}/object/readme")), "hello").unwrap();
    assert!(f.kinds(false).await.contains(&(Severity::Warning, "name")));
}

#[tokio::test]
async fn a_replaced_executor_that_continued_is_reported() {
    let f = fixture();
    let versions = f.chain(1, 1).await;
    let run = uuid::Uuid::from_u128(7);
    let mut manifest = versions[0].0.clone();
    for (version, fence) in [(2, 5), (3, 4)] {
        manifest.parent = Some(Parent {
            version: version - 1,
            root: manifest.root,
        });
        manifest.version = version;
        manifest.fence = fence;
        manifest.run = Some(artifact::manifest::RunStep {
            run,
            step: version,
            cohort_digest: Digest::of(b""),
        });
        f.store.put_manifest(&manifest, &f.key).await.unwrap();
    }
    assert!(f.kinds(false).await.contains(&(Severity::Error, "fence")));
}

#[tokio::test]
async fn an_assignment_with_wrong_targets_is_reported() {
    let f = fixture();
    f.chain(8, 4).await;
    let mut assignment = sample_assignment();
    f.store.put_assignment(&assignment, &f.key).await.unwrap();
    assert!(
        f.kinds(false).await.contains(&(Severity::Error, "assignment")),
        "another root"
    );
    assignment.epoch += 1;
    assignment.aliases.values_mut().for_each(|target| target.version = 77);
    f.store.put_assignment(&assignment, &f.key).await.unwrap();
    let kinds = f.kinds(false).await;
    assert!(kinds.contains(&(Severity::Error, "assignment")) && kinds.contains(&(Severity::Error, "manifest")));
}

#[tokio::test]
async fn an_adapter_of_other_weights_than_its_base_has_is_reported() {
    let f = fixture();
    let versions = f.chain(3, 1).await;
    let (base, _) = &versions[1];
    for (serial, root, expected) in [
        (4, base.root, BTreeSet::new()),
        (5, Digest::of(b"others"), [(Severity::Error, "root")].into()),
    ] {
        let manifest = Manifest {
            version: serial,
            line: format!("tuned-{serial}"),
            adapts: Some(Parent {
                version: base.version,
                root,
            }),
            ..versions[2].0.clone()
        };
        f.store.put_manifest(&manifest, &f.key).await.unwrap();
        assert_eq!(f.kinds(false).await, expected, "{serial}");
    }
}
