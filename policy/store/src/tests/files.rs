//! Files of a version, read without its tensors.

use super::*;

#[tokio::test]
async fn files_are_those_of_the_checkpoint_that_the_path_begins_with() {
    let f = fixture();
    f.chain(5, 3).await;
    for version in 1..=5 {
        let files = f
            .store
            .files(POLICY, version, &f.trusted(), &["config.json", "tokenizer.json"])
            .await
            .unwrap();
        assert_eq!(files.files.len(), 1, "{version}");
        assert_eq!(files.files["config.json"], "{}");
        assert!(files.tensors.is_empty());
    }
    let none = f
        .store
        .files(POLICY, 5, &f.trusted(), &["tokenizer.json"])
        .await
        .unwrap();
    assert_eq!(none, Checkpoint::default());
    let missing = f.store.files(POLICY, 9, &f.trusted(), &[]).await;
    assert!(matches!(missing, Err(Error::NotFound(_))), "{missing:?}");
}

#[tokio::test]
async fn a_file_that_was_changed_is_refused() {
    let f = fixture();
    let (manifest, _) = f.chain(1, 1).await.remove(0);
    let path = f.object_path(&manifest.checkpoint.unwrap());
    let whole = std::fs::read(&path).unwrap();
    // the last bytes are those of the only file
    for changed in [0, 20, whole.len() - 1] {
        let mut broken = whole.clone();
        broken[changed] ^= 1;
        std::fs::write(&path, broken).unwrap();
        let read = f.store.files(POLICY, 1, &f.trusted(), &["config.json"]).await;
        assert!(matches!(read, Err(Error::Corrupt { .. })), "{changed}: {read:?}");
    }
}
