//! Files of a version, read without its tensors.

use super::*;

#[tokio::test]
async fn files_are_read_without_tensors() {
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
async fn files_are_those_of_the_version_where_deltas_changed_them() {
    let f = fixture();
    let (parent, base) = f.chain(2, 3).await.remove(1);
    let mut next = Checkpoint::clone(&base);
    let new = bytes::Bytes::from_static(b"{\"new\": 1}");
    next.files.insert("tokenizer.json".into(), new.clone());
    next.files.remove("config.json");
    let delta = delta::encode(&base, &next, &Threads::ONE).unwrap();
    let manifest = Manifest {
        version: 3,
        root: next.root(),
        parent: Some(Parent {
            version: 2,
            root: parent.root,
        }),
        checkpoint: None,
        delta: Some(f.store.put_object(POLICY, &delta.into()).await.unwrap()),
        ..parent
    };
    f.store.put_manifest(&manifest, &f.key).await.unwrap();
    let names = ["config.json", "tokenizer.json"];
    let files = f.store.files(POLICY, 3, &f.trusted(), &names).await.unwrap().files;
    assert_eq!(files, [("tokenizer.json".to_string(), new)].into());
    let before = f.store.files(POLICY, 2, &f.trusted(), &names).await.unwrap().files;
    assert_eq!(before.keys().collect::<Vec<_>>(), ["config.json"]);
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
