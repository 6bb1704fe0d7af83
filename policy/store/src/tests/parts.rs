//! Lists of parts: garbage collection keeps those of live objects, and what is lost is found and made
//! again. A hostile list does not fill the memory.

use super::gc::retention;
use super::*;
use artifact::parts::PART_BYTES;
use std::collections::BTreeSet;

fn large(seed: u8) -> Pieces {
    let bytes: Vec<u8> = (0..PART_BYTES as usize + 1_000)
        .map(|i| (i / 7 % 251) as u8 ^ seed)
        .collect();
    Pieces::new(vec![bytes.into()])
}

fn list_path(f: &Fixture, object: &ObjectRef) -> PathBuf {
    f.path(&format!("policy/{POLICY}/parts/{}", object.digest))
}

/// A chain whose last version has a checkpoint of several parts.
async fn large_version(f: &Fixture) -> (Manifest, Pieces) {
    let (mut manifest, _) = f.chain(1, 1).await.remove(0);
    let pieces = large(1);
    manifest.version = 2;
    manifest.checkpoint = Some(f.store.put_pieces(POLICY, &pieces).await.unwrap());
    f.store.put_manifest(&manifest, &f.key).await.unwrap();
    (manifest, pieces)
}

#[tokio::test]
async fn an_object_that_is_put_again_while_it_is_collected_keeps_its_list_of_parts() {
    let f = fixture();
    f.chain(1, 1).await;
    let pieces = large(1);
    let object = f.store.put_pieces(POLICY, &pieces).await.unwrap();
    f.age();
    // It runs when the objects are in the trash.
    let put_again = || async {
        f.store.put_pieces(POLICY, &pieces).await?;
        Ok(BTreeSet::new())
    };
    f.store
        .collect_garbage(POLICY, &f.trusted(), &retention(1), false, put_again)
        .await
        .unwrap();
    f.store.check_object(POLICY, &object).await.unwrap();
    f.store.get_parts(POLICY, &object).await.unwrap();
}

#[tokio::test]
async fn a_publisher_writes_a_lost_list_of_parts_again() {
    let f = fixture();
    let (manifest, pieces) = large_version(&f).await;
    let object = manifest.checkpoint.unwrap();
    assert_eq!(f.store.reupload_missing(POLICY, &[&pieces]).await.unwrap(), 0);
    std::fs::remove_file(list_path(&f, &object)).unwrap();
    assert_eq!(f.store.reupload_missing(POLICY, &[&pieces]).await.unwrap(), 1);
    f.store.get_parts(POLICY, &object).await.unwrap();
}

#[tokio::test]
async fn fsck_reports_a_lost_list_of_parts_and_gc_makes_it_again() {
    let f = fixture();
    let (manifest, _) = large_version(&f).await;
    let object = manifest.checkpoint.unwrap();
    let kinds = async |deep| {
        let report = f.store.fsck(POLICY, &f.trusted(), &retention(1), deep).await.unwrap();
        let errors = report
            .findings
            .into_iter()
            .filter(|found| found.severity == Severity::Error);
        errors.map(|found| found.kind).collect::<Vec<_>>()
    };
    let list = std::fs::read(list_path(&f, &object)).unwrap();
    assert!(kinds(true).await.is_empty());
    std::fs::remove_file(list_path(&f, &object)).unwrap();
    assert_eq!(kinds(false).await, ["parts"]);
    let done = f.collect(&f.store, false).await.unwrap();
    assert_eq!(done.rebuilt_parts, [object.digest].into());
    assert_eq!(std::fs::read(list_path(&f, &object)).unwrap(), list);
    assert!(kinds(false).await.is_empty());
    // A list of other bytes.
    std::fs::write(list_path(&f, &object), vec![7; list.len()]).unwrap();
    assert_eq!(kinds(true).await, ["parts"]);
}

#[tokio::test]
async fn a_list_of_parts_that_is_longer_than_the_object_needs_is_not_read() {
    let f = fixture();
    let object = f.store.put_pieces(POLICY, &large(1)).await.unwrap();
    std::fs::write(list_path(&f, &object), vec![0; 65]).unwrap();
    let error = f.store.get_parts(POLICY, &object).await.unwrap_err().to_string();
    assert!(error.contains("at most 64 are allowed"), "{error}");
}
